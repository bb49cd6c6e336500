"""Private registries: the right password, a wrong one, none, and a secret that nobody stored."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
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
RIGHT: Final = "the-password-23"
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
        for name, value in {"user": "ci", "right": RIGHT, "wrong": WRONG}.items():
            assert running.run("admin", "secrets", "set", f"registry:{name}", given=f"{value}\n").returncode == 0
        yield running


def _serve_registry(lab: Lab) -> None:
    """A registry that wants a log-in, with one image, which the engine itself does not have any more."""
    folder = lab.folder / "registry"
    (folder / "data").mkdir(parents=True)
    made = subprocess.run(("htpasswd", "-Bbn", "ci", RIGHT), capture_output=True, text=True, check=True)
    (folder / "htpasswd").write_text(made.stdout)
    (folder / "config.yml").write_text(
        f"""version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "{REGISTRY}"}}
auth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}
"""
    )
    lab.spawn("docker-registry", "serve", folder / "config.yml", output=folder / "log")
    deadline = time.monotonic() + 60
    while not _answers(lab):
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.1)
    docker = ("docker", "--config", folder / "docker", "-H", f"unix://{lab.socket}")
    lab.run(*docker, "login", "-u", "ci", "--password-stdin", REGISTRY, stdin=RIGHT)
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


class Looks(threading.Thread):
    """Reads, all the time, what every process of this machine shows of itself to others."""

    def __init__(self, word: str) -> None:
        super().__init__(daemon=True)
        self._word = word.encode()
        self._ended = threading.Event()
        self.shown_by: set[str] = set()
        self.looks = 0

    def run(self) -> None:
        while not self._ended.is_set():
            self.look()
            self.looks += 1

    def look(self) -> None:
        for shown in ("cmdline", "environ"):
            for path in Path("/proc").glob(f"[0-9]*/{shown}"):
                try:
                    if self._word in path.read_bytes():
                        self.shown_by.add(f"{path}: {(path.parent / 'comm').read_text().strip()}")
                except OSError:
                    continue

    def __enter__(self) -> "Looks":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def test_a_look_at_all_processes_finds_a_word() -> None:
    looks = Looks("a-word-that-" + "stands-here")
    with subprocess.Popen(("sleep", "60"), env={"A": "a-word-that-stands-here"}) as process:
        try:
            looks.look()
            assert {shown.partition(":")[0] for shown in looks.shown_by} >= {f"/proc/{process.pid}/environ"}
        finally:
            process.kill()


@pytest.mark.spec("T6.8")
@pytest.mark.parametrize("label", ["pool", "host"])
def test_the_password_is_in_no_container_process_or_log(kici: LabCoordinator, label: str) -> None:
    forget(kici)
    file = kici.lab.folder / "run.json"
    script = "env; cat /proc/*/cmdline /proc/*/environ 2>/dev/null || true; sleep 1; echo it runs"
    log_in = {"username": "registry:user", "password": "registry:right"}
    job = {"runsOn": [label], "run": script, "container": {"image": PRIVATE, "credentials": log_in}}
    file.write_text(json.dumps({"name": "pull", "jobs": {"one": job}}))
    inspected: dict[str, str] = {}
    with Looks(RIGHT) as looks:
        following = kici.background("submit", str(file))
        while following.poll() is None:
            for container in kici.lab.containers():
                found = kici.lab.ask("GET", f"/containers/{container['Id']}/json")
                if found is not None:  # it may be gone by now; then what it last showed counts
                    inspected[container["Id"]] = json.dumps(found)
            time.sleep(0.05)
    said, errors = following.communicate()
    assert following.returncode == 0, errors
    assert b"it runs" in said
    assert any(PRIVATE in each for each in inspected.values())
    assert not [each for each in inspected.values() if RIGHT in each]
    assert looks.looks > 2
    assert looks.shown_by == set()
    job_id = next(iter(kici.jobs(limit=1)))
    assert RIGHT.encode() not in said + errors
    logs = [kici.log, kici.lab.log]
    everything = "".join(path.read_text(errors="replace") for path in logs) + json.dumps(kici.job(job_id))
    for path in (kici.data_dir / "agents").glob("*.log"):
        with suppress(FileNotFoundError):  # it goes with its agent
            everything += path.read_text(errors="replace")
    assert RIGHT not in everything + kici.run("explain", job_id).stdout
