"""The agent's environment: what is read, what is refused, what steps may see."""

from typing import Any

import pytest
from msgspec.structs import replace

from kici.agent.environment import COMPUTE_MARK, OURS, WITHOUT_EFFECT, HostFacts, ProgramSettings, read_settings
from kici.decide.agent_env import contract
from kici.domain.errors import Misconfigured
from kici.ports.processes import MARK

HOST = HostFacts(
    system="linux",
    machine="x86_64",
    hostname="build-7",
    cpu_count=4,
    memory_mb=8000,
    user="ci",
    uid=1000,
    random_hex8="0123abcd",
)
MINIMUM = {"KICI_ORCHESTRATOR_URL": "ws://127.0.0.1:4000/ws"}


def read(**environ: str) -> ProgramSettings:
    return read_settings({**MINIMUM, **environ}, HOST, version="1.2.3")


def problems(**environ: str) -> list[str]:
    with pytest.raises(Misconfigured) as caught:
        read(**environ)
    return str(caught.value).splitlines()


def test_a_url_is_all_that_it_needs() -> None:
    settings = read()
    register = settings.half.register
    assert settings.half.url == "ws://127.0.0.1:4000/ws"
    assert register.agent_id == "build-7-0123abcd"
    assert (register.platform, register.arch, register.version) == ("linux", "x64", "1.2.3")
    assert (register.cpu_count, register.total_memory_mb) == (4, 8000)
    assert (register.running_as_user, register.running_as_uid) == ("ci", 1000)
    assert not register.scaler_managed
    assert settings.half.token is None
    assert settings.health_port is None
    assert settings.warnings == ()


def test_it_says_what_machine_it_is() -> None:
    labels = read(KICI_LABELS="Linux, GPU ,,").half.register.labels
    assert labels[:2] == ["linux", "gpu"]
    assert {"kici:os:linux", "kici:arch:x64", "kici:arch:amd64", "kici:host:build-7"} <= set(labels)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"kici:role:builder", "kici:role:init-runner"}),
        ({"KICI_ROLES": "builder"}, {"kici:role:builder"}),
        ({"KICI_ROLES": ""}, set()),
        ({"KICI_SCALER_MANAGED": "1"}, set()),
    ],
)
def test_roles_are_labels_unless_a_scaler_gave_them_already(environ: dict[str, str], expected: set[str]) -> None:
    labels = read(**environ).half.register.labels
    assert {label for label in labels if label.startswith("kici:role:")} == expected


@pytest.mark.spec("T3.9")
def test_a_typing_error_is_refused_with_what_was_probably_meant() -> None:
    assert problems(KICI_LABEL="x") == ["KICI_LABEL is not a setting of the agent: did you mean KICI_LABELS?"]
    assert problems(KICI_XYZZY="x") == ["KICI_XYZZY is not a setting of the agent"]


def test_a_developer_is_only_warned() -> None:
    assert read(KICI_LABEL="x", KICI_DEV="true").warnings == (
        "KICI_LABEL is not a setting of the agent: did you mean KICI_LABELS?",
    )


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_a_documented_name_without_effect_is_a_warning(name: str) -> None:
    assert read(**{name: "1"}).warnings == (f"{name} has no effect here",)


@pytest.mark.parametrize("name", ["KICI_URL", "KICI_TOKEN", "KICI_DATA_DIR", "KICI_CASES"])
def test_a_shell_made_for_our_other_programs_does_no_harm(name: str) -> None:
    assert read(**{name: "x"}).warnings == ()


def test_an_isolation_that_is_asked_for_is_not_ignored() -> None:
    assert "KICI_SANDBOX" in problems(KICI_SANDBOX="true")[0]
    assert read(KICI_SANDBOX="false").warnings == ()


def test_every_problem_is_reported_at_once() -> None:
    found = problems(
        KICI_ORCHESTRATOR_URL="http://x",
        KICI_LABELS="kici:os:linux",
        KICI_PORT="70000",
        KICI_SCALER_IDLE_TIMEOUT="5s",
        KICI_BACKPRESSURE_MODE="stop",
        KICI_SCALER_MANAGED="yes",
        KICI_DEFAULT_STEP_TIMEOUT_MS="0",
        KICI_EXECUTION_MODE="cloud",
    )
    names = [line.split()[0] for line in found]
    assert sorted(names) == [
        "KICI_BACKPRESSURE_MODE",
        "KICI_DEFAULT_STEP_TIMEOUT_MS",
        "KICI_EXECUTION_MODE",
        "KICI_LABELS",
        "KICI_ORCHESTRATOR_URL",
        "KICI_PORT",
        "KICI_SCALER_IDLE_TIMEOUT",
        "KICI_SCALER_MANAGED",
    ]


def test_a_missing_url_is_named() -> None:
    with pytest.raises(Misconfigured, match="KICI_ORCHESTRATOR_URL is missing"):
        read_settings({}, HOST, version="")


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        ("ws://h:1/ws", True),
        ("wss://h/ws?x=1", True),
        ("ws://h", True),
        ("ws://[::1]:4000/ws", True),
        ("http://h/ws", False),
        ("ws://", False),
        ("ws://user:pw@h/ws", False),
        ("ws://h/ws x", False),
    ],
)
def test_urls(url: str, is_good: bool) -> None:
    if is_good:
        assert read(KICI_ORCHESTRATOR_URL=url).half.url == url
    else:
        assert len(problems(KICI_ORCHESTRATOR_URL=url)) == 1


def test_reserved_labels_are_for_scaler_made_agents() -> None:
    assert "reserved" in problems(KICI_LABELS="linux,KICI:Scaler:x")[0]
    assert "kici:scaler:x" in read(KICI_LABELS="kici:scaler:x", KICI_SCALER_MANAGED="1").half.register.labels


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"KICI_SCALER_MANAGED": "1"}, 600.0),
        ({"KICI_AGENT_ORPHAN_TIMEOUT_MS": "1500"}, 1.5),
        ({"KICI_AGENT_ORPHAN_TIMEOUT_MS": "0", "KICI_SCALER_MANAGED": "1"}, None),
    ],
)
def test_only_scaler_made_agents_give_up_unless_told_so(environ: dict[str, str], expected: float | None) -> None:
    assert read(**environ).half.orphan_seconds == expected


def test_settings_of_a_scaler() -> None:
    settings = read(
        KICI_AGENT_ID="scaler-x-00000000",
        KICI_AGENT_TOKEN="kat_1",
        KICI_SCALER_CLAIM_CODE="code",
        KICI_SCALER_MANAGED="1",
        KICI_SCALER_IDLE_TIMEOUT="100",
        KICI_SCALER_PENDING_DISPATCH_TIMEOUT="200",
        KICI_MAX_LOG_SIZE_BYTES="300",
        KICI_DEFAULT_STEP_TIMEOUT_MS="400",
        KICI_BACKPRESSURE_MODE="drop",
        KICI_EXECUTION_MODE="firecracker",
        KICI_RUNNER_USER="ci",
        KICI_PORT="8080",
        TMPDIR="/scratch",
    )
    half = settings.half
    assert half.register.agent_id == "scaler-x-00000000"
    assert half.register.scaler_managed
    assert (half.token, half.claim_code) == ("kat_1", "code")
    assert (half.patience.idle_seconds, half.patience.pending_dispatch_seconds) == (0.1, 0.2)
    assert (half.log_bytes_max, half.step_timeout_ms, half.drops_output) == (300, 400, True)
    assert (settings.inside_vm, settings.runner_user, settings.health_port, settings.tmp) == (
        True,
        "ci",
        8080,
        "/scratch",
    )
    assert "kat_1" not in repr(settings)


AMBIENT = {"PATH": "/bin", "HOME": "/root", "JAVA_HOME": "/java", "NOTIFY_SOCKET": "/run/x", COMPUTE_MARK: "a-1"}


@pytest.mark.spec("T3.10")
@pytest.mark.parametrize(
    ("environ", "extra"),
    [({}, set()), ({"KICI_TRUSTED_ENV": "true"}, {"JAVA_HOME"}), ({"KICI_JOB_IMAGE_AGENT": "1"}, {"JAVA_HOME"})],
)
def test_steps_see_the_system_and_nothing_of_ours(environ: dict[str, str], extra: set[str]) -> None:
    settings = read(**AMBIENT, **environ, KICI_AGENT_TOKEN="kat_1", KICI_URL="http://x")
    assert set(settings.step_env) == {"PATH", "HOME", COMPUTE_MARK} | extra


def test_everything_that_backends_tell_an_agent_is_known_to_it() -> None:
    told: dict[str, Any] = contract(
        agent_id="a", labels=["x"], url="ws://h", token="t", image="debian", backpressure="pause"
    )
    assert set(told) <= OURS | WITHOUT_EFFECT


def test_the_mark_of_the_backend_is_the_one_that_steps_keep() -> None:
    assert COMPUTE_MARK == MARK


def test_containers_of_jobs_are_as_closed_as_the_environment_says() -> None:
    usual = read().sandbox
    assert (usual.hardened, usual.pids_max, usual.memory_bytes, usual.cpus) == (True, 512, 2 * 1024**3, 2.0)
    assert (usual.isolated, usual.root_read_only, usual.user) == (None, False, None)
    told = read(
        KICI_SANDBOX_HARDENED="false",
        KICI_SANDBOX_PIDS_LIMIT="100",
        KICI_SANDBOX_MEMORY_BYTES="67108864",
        KICI_SANDBOX_NANO_CPUS="1500000000",
        KICI_SANDBOX_NETWORK_ISOLATION="true",
        KICI_SANDBOX_READONLY_ROOTFS="1",
        KICI_SANDBOX_USER="build",
    ).sandbox
    assert (told.hardened, told.pids_max, told.memory_bytes, told.cpus) == (False, 100, 67108864, 1.5)
    assert (told.isolated, told.root_read_only, told.user) == (True, True, "build")
    assert problems(KICI_SANDBOX_MEMORY_BYTES="5", KICI_SANDBOX_HARDENED="maybe")


def test_an_agent_with_an_engine_says_so() -> None:
    with_engine = replace(HOST, engine=("podman", "unix:///run/podman/podman.sock"))
    settings = read_settings(MINIMUM, with_engine, version="1.2.3")
    assert settings.engine == "unix:///run/podman/podman.sock"
    assert {"kici:runtime:podman", "kici:runtime:container-build"} <= set(settings.half.register.labels)
    assert read().engine is None
    assert not [label for label in read().half.register.labels if label.startswith("kici:runtime:")]
