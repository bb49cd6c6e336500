"""Bare-metal scalers whose label sets have an image and no program: their agents are containers on this host."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docker_engine import Lab, lab
from tests.integration.docker_lab import BUSYBOX, DEBIAN, coordinator, import_images, rules

from kici.testing.programs import until

pytestmark = [pytest.mark.engine("docker"), pytest.mark.xdist_group("bare-metal-containers"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab() as running:
        import_images(running)
        usual = running.folder / "run" / "podman"
        usual.mkdir(parents=True)
        (usual / "podman.sock").symlink_to(running.socket)
        yield running


def usual_place(engine: Lab) -> Path:
    """A bare-metal entry names no socket: its engine is where engines are."""
    return engine.folder / "run"


def a_scaler(name: str = "host", **more: Any) -> dict[str, Any]:
    label_set = {"labels": ["linux", name], "image": BUSYBOX, "imagePullPolicy": "Never", **more}
    return {"name": name, "type": "bare-metal", "maxAgents": 8, "labelSets": [label_set]}


@pytest.mark.spec("scaler 30.8")
def test_its_agents_are_isolated_containers_within_their_limits(engine: Lab) -> None:
    with coordinator(engine, "images", a_scaler(), XDG_RUNTIME_DIR=str(usual_place(engine))) as kici:
        script = "ls -d /opt/kici; echo $GREETING; sleep 100"
        job = kici.submit(script, "-l", "host", "--image", DEBIAN, "--memory", "128m", "--cpus", "0.5")
        until(lambda: "hello" in kici.output(job), seconds=60, what="the job runs in its own image")
        (one,) = kici.containers()
        told = kici.lab.ask("GET", f"/containers/{one['Id']}/json")
        assert told["Config"]["Image"] == DEBIAN
        assert (told["HostConfig"]["Memory"], told["HostConfig"]["NanoCpus"]) == (128 * 2**20, 500_000_000)
        assert one["Labels"]["kici-scaler-name"] == "host"
        assert one["Labels"]["kici-bound-job-id"] == job
        address = one["NetworkSettings"]["Networks"]["kici-agent-net"]["IPAddress"]
        assert address in rules(engine)
        assert kici.job(job)["agentId"].startswith("scaler-bare-metal-")
        assert kici.run("cancel", job).returncode == 0
        kici.settle()
        until(lambda: address not in rules(engine), seconds=60, what="its rules are gone")
        done = kici.run("run", "-l", "host", "--", "/bin/sh", "-c", "pwd; exit 4")
        assert done.returncode == 4, done.stderr
        assert done.stdout.startswith("/.kici/scaler-bare-metal-")
        kici.settle()


@pytest.mark.spec("scaler 30.9")
def test_a_restart_finds_them_again_also_when_their_scaler_was_removed(engine: Lab) -> None:
    environ = {"XDG_RUNTIME_DIR": str(usual_place(engine))}
    waits = "echo begun; while ! test -e /stop; do sleep 0.1; done; echo told"
    with coordinator(engine, "again", a_scaler("one"), a_scaler("two"), port=4831, **environ) as kici:
        lives, loses = kici.submit(waits, "-l", "one"), kici.submit(waits, "-l", "two")
        jobs = (lives, loses)
        until(lambda: all("begun" in kici.output(job) for job in jobs), seconds=60, what="both jobs have begun")
        kici.stop(signal.SIGKILL)
        kici.configure([a_scaler("one")])
        kici.start()
        assert len(kici.containers()) == 2
        for one in kici.containers():
            kici.lab.run("docker", "-H", f"unix://{engine.socket}", "exec", one["Id"], "/bin/sh", "-c", "echo > /stop")
        until(lambda: all(kici.job(job)["status"] == "success" for job in jobs), seconds=60, what="both go on")
        kici.settle()


@pytest.mark.spec("scaler 30.10.12")
def test_without_an_engine_the_failure_names_its_label(engine: Lab) -> None:
    with coordinator(engine, "none", a_scaler(), XDG_RUNTIME_DIR="/nowhere") as kici:
        job = kici.submit("true", "-l", "host")
        told = "which need an engine on this host (label kici:runtime:docker)"
        until(lambda: told in kici.run("explain", job).stdout, seconds=60, what="the reason is told")
        assert kici.run("cancel", job).returncode == 0
        checked = kici.run("doctor", "--scalers", str(kici.scalers))
        assert checked.returncode != 0
        assert told in checked.stdout


def test_doctor_says_what_process_agents_could_do_with_containers(engine: Lab) -> None:
    sets = [
        {"labels": ["linux", "with"], "binaryPath": "kici-agent", "env": {"DOCKER_HOST": f"unix://{engine.socket}"}},
        {"labels": ["linux", "without"], "binaryPath": "kici-agent", "env": {"DOCKER_HOST": "unix:///nowhere"}},
    ]
    scaler = {"name": "host", "type": "bare-metal", "maxAgents": 8, "labelSets": sets}
    with coordinator(engine, "doctor", scaler) as kici:
        told = kici.run("doctor", "--scalers", str(kici.scalers)).stdout
    assert "they can be made: docker 20" in told
    assert "such jobs fail here: no engine that this user may use" in told
