"""Private registries: the right password, a wrong one, none, and a secret that nobody stored."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
from tests.docker_engine import Lab, lab
from tests.integration.docker_lab import BUSYBOX, LabCoordinator, a_pool, coordinator, import_images

pytestmark = [
    pytest.mark.engine("docker"),
    pytest.mark.engine("registry"),
    pytest.mark.xdist_group("docker-registry"),
    pytest.mark.timeout(180),
]

REGISTRY: Final = "127.0.0.1:5000"
PRIVATE: Final = f"{REGISTRY}/priv/tool:1"
WRONG: Final = "not-the-password-17"


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab() as running:
        import_images(running)
        _serve_registry(running)
        yield running


@pytest.fixture(scope="module")
def kici(engine: Lab) -> Iterator[LabCoordinator]:
    environment = {"DOCKER_HOST": f"unix://{engine.socket}", "TMPDIR": str(engine.folder)}
    processes = {
        "name": "host",
        "type": "bare-metal",
        "maxAgents": 4,
        "labelSets": [{"labels": ["linux", "host"], "binaryPath": "kici-agent", "env": environment}],
    }
    with coordinator(engine, "private", a_pool(engine), processes) as running:
        for name, value in {"user": "ci", "right": "s3cret", "wrong": WRONG}.items():
            assert running.run("admin", "secrets", "set", f"registry:{name}", given=f"{value}\n").returncode == 0
        yield running


def _serve_registry(lab: Lab) -> None:
    """A registry that wants a log-in, with one image, which the engine itself does not have any more."""
    folder = lab.folder / "registry"
    (folder / "data").mkdir(parents=True)
    made = subprocess.run(("htpasswd", "-Bbn", "ci", "s3cret"), capture_output=True, text=True, check=True)
    (folder / "htpasswd").write_text(made.stdout)
    (folder / "config.yml").write_text(
        f"""version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "{REGISTRY}"}}
auth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}
"""
    )
    lab.spawn("docker-registry", "serve", folder / "config.yml", output=folder / "log")
    deadline = time.monotonic() + 20
    while not _answers(lab):
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.1)
    docker = ("docker", "--config", folder / "docker", "-H", f"unix://{lab.socket}")
    lab.run(*docker, "login", "-u", "ci", "--password-stdin", REGISTRY, stdin="s3cret")
    lab.run(*docker, "tag", BUSYBOX, PRIVATE)
    lab.run(*docker, "push", PRIVATE)
    lab.run(*docker, "rmi", PRIVATE)


def _answers(lab: Lab) -> bool:
    with lab.enter(), socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 5000)) == 0


def run(kici: LabCoordinator, image: str, **credentials: str) -> dict[str, Any]:
    """Run a job in this image to its end; the job, with all that people could read of it."""
    container = {"image": image, **({"credentials": credentials} if credentials else {})}
    return run_in(kici, container, label="pool")


def run_in(kici: LabCoordinator, container: dict[str, Any], *, label: str) -> dict[str, Any]:
    file = kici.lab.folder / "run.json"
    job = {"runsOn": [label], "run": "echo it runs", "container": container}
    file.write_text(json.dumps({"name": "pull", "jobs": {"one": job}}))
    done = kici.run("submit", str(file))
    found = kici.job(next(iter(kici.jobs(limit=1))))
    return {**found, "said": done.stdout + done.stderr, "explained": kici.run("explain", found["id"]).stdout}


def test_a_wrong_password_is_explained_without_the_password(kici: LabCoordinator) -> None:
    job = run(kici, PRIVATE, username="registry:user", password="registry:wrong")
    assert job["status"] == "failed"
    assert f"image {PRIVATE} may not be pulled as ci" in job["reason"]
    assert "check the credentials" in job["reason"]
    everything = json.dumps(job) + kici.log.read_text() + kici.run("admin", "diagnose", "--json").stdout
    assert WRONG not in everything
    database = b"".join(path.read_bytes() for path in kici.data_dir.glob("kici.db*"))
    assert WRONG.encode() not in database


def test_no_log_in_at_a_registry_that_wants_one(kici: LabCoordinator) -> None:
    job = run(kici, PRIVATE)
    assert job["status"] == "failed"
    assert "credentials" in job["reason"]


def test_a_secret_that_nobody_stored_is_named(kici: LabCoordinator) -> None:
    job = run(kici, PRIVATE, password="registry:nowhere")
    assert job["status"] == "failed"
    assert "registry:nowhere" in job["reason"]


def test_an_image_that_the_registry_does_not_have(kici: LabCoordinator) -> None:
    image = f"{REGISTRY}/priv/none:1"
    job = run(kici, image, username="ci", password="registry:right")
    assert job["status"] == "failed"
    assert f"image {image} is not in registry {REGISTRY}" in job["reason"]


def test_the_right_password_runs_the_job(kici: LabCoordinator) -> None:
    job = run(kici, PRIVATE, username="registry:user", password="registry:right")
    assert job["status"] == "success", job
    assert "it runs" in job["said"]
    kici.settle()


def forget(kici: LabCoordinator) -> None:
    """Whatever was pulled goes: an image that is there is used without a log-in."""
    kici.lab.ask("DELETE", f"/images/{PRIVATE}?force=1")


def test_a_process_agent_pulls_with_the_jobs_log_in(kici: LabCoordinator) -> None:
    forget(kici)
    job = run_in(
        kici, {"image": PRIVATE, "credentials": {"username": "ci", "password": "registry:wrong"}}, label="host"
    )
    assert job["status"] == "failed"
    assert f"image {PRIVATE} may not be pulled as ci" in job["reason"]
    assert WRONG not in json.dumps(job) + kici.log.read_text()
    job = run_in(
        kici, {"image": PRIVATE, "credentials": {"username": "ci", "password": "registry:right"}}, label="host"
    )
    assert job["status"] == "success", job
    assert "it runs" in job["said"]


def test_a_dockerfile_may_begin_with_a_private_image(kici: LabCoordinator) -> None:
    forget(kici)
    built = {"dockerfile": "Dockerfile", "context": {"Dockerfile": f"FROM {PRIVATE}\nRUN echo built\n"}}
    log_in = {"username": "registry:user", "password": "registry:right", "registry": REGISTRY}
    job = run_in(kici, {**built, "credentials": {**log_in, "password": "registry:wrong"}}, label="host")
    assert job["status"] == "failed"
    assert f"step 1, FROM {PRIVATE}: " in job["reason"]
    assert WRONG not in json.dumps(job) + kici.log.read_text()
    job = run_in(kici, {**built, "credentials": log_in}, label="host")
    assert job["status"] == "success", job
    assert "it runs" in job["said"]
