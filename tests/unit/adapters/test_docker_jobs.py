"""What the client for jobs' containers makes of an engine's words, without an engine."""

import base64
import json

from kici.adapters.docker_engine import create_request
from kici.adapters.docker_jobs import _Build, _build_params, _registries, hide
from kici.domain.container import ContainerSpec, RegistryAuth
from kici.domain.resources import Amount
from kici.ports.job_engine import BuildSpec

AUTH = RegistryAuth(username="me", password="hush-hush", server="ghcr.io")


def test_a_hardened_container_asks_for_it() -> None:
    spec = ContainerSpec(
        name="a", image="b", is_hardened=True, is_root_read_only=True, scratch=("/w",), tmpfs=("/t",), log_bytes_max=0
    )
    request = create_request(spec)
    host = request["HostConfig"]
    assert (host["CapDrop"], host["SecurityOpt"], host["ReadonlyRootfs"]) == (["ALL"], ["no-new-privileges"], True)
    assert (request["Volumes"], list(host["Tmpfs"]), host["LogConfig"]) == ({"/w": {}}, ["/t"], {"Type": "none"})


def test_an_agents_container_is_as_open_as_before() -> None:
    host = create_request(ContainerSpec(name="a", image="b"))["HostConfig"]
    assert "CapDrop" not in host
    assert not host["AutoRemove"]
    assert not host["ReadonlyRootfs"]
    assert host["LogConfig"]["Type"] == "json-file"


def follow(*lines: dict[str, object]) -> tuple[list[str], str | None]:
    told: list[str] = []
    build = _Build(told.append)
    for line in lines:
        build.take(line)
    return told, build.error


def test_a_failed_build_names_its_instruction() -> None:
    told, error = follow(
        {"stream": "Step 1/2 : FROM debian\n"},
        {"status": "Downloading", "progress": "[=>  ]", "id": "abc"},
        {"status": "Pull complete", "id": "abc"},
        {"stream": "Step 2/2 : RUN false\n"},
        {"stream": "\n"},
        {"errorDetail": {"code": 1, "message": "returned 1"}, "error": "returned 1"},
    )
    assert told == ["Step 1/2 : FROM debian", "abc Pull complete", "Step 2/2 : RUN false"]
    assert error == "the image cannot be built: step 2, RUN false: returned 1"


def test_the_other_engines_steps_are_understood_too() -> None:
    _, error = follow({"stream": "[1/2] STEP 3/4: COPY a b\n"}, {"error": "no such file"})
    assert error == "the image cannot be built: step 3, COPY a b: no such file"


def test_a_build_that_failed_before_any_instruction_says_why() -> None:
    assert follow({"errorDetail": {"message": "dockerfile parse error"}})[1] == (
        "the image cannot be built: dockerfile parse error"
    )


def test_a_password_is_in_no_failure() -> None:
    assert hide("cannot log in with hush-hush", AUTH) == "cannot log in with ***"


def test_credentials_are_for_the_registry_that_they_are_for() -> None:
    def known(auth: RegistryAuth | None) -> object:
        header = _registries(auth).get("X-Registry-Config")
        return None if header is None else json.loads(base64.urlsafe_b64decode(header))

    assert known(None) is None
    assert known(AUTH) == {"ghcr.io": {"username": "me", "password": "hush-hush"}}
    hub = RegistryAuth(username="me", password="x", server="docker.io")
    mine = {"username": "me", "password": "x"}
    assert known(hub) == {"docker.io": mine, "https://index.docker.io/v1/": mine}


def test_a_build_is_limited_as_its_job_is() -> None:
    spec = BuildSpec(tag="t", tar=b"", dockerfile="D", limits=Amount(cpus=0.5, memory_bytes=1000), target="x")
    params = _build_params(spec)
    assert (params["cpuquota"], params["cpuperiod"], params["memory"], params["memswap"], params["target"]) == (
        *("50000", "100000", "1000", "1000"),
        "x",
    )
    assert "memory" not in _build_params(BuildSpec(tag="t", tar=b"", dockerfile="D"))
