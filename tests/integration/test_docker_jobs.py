"""Jobs in containers of a real engine, from the command line: every kind of image, failures that explain themselves."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docker_engine import Lab, lab
from tests.integration.docker_lab import (
    BUSYBOX,
    DEBIAN,
    DIES,
    EMPTY,
    TELLS,
    USER,
    LabCoordinator,
    a_pool,
    coordinator,
    import_images,
    until_no_rules,
)

from kici.testing.programs import KICI, environment, until

pytestmark = [pytest.mark.engine("docker"), pytest.mark.xdist_group("docker-jobs"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Lab]:
    with lab() as running:
        import_images(running)
        yield running


@pytest.fixture(scope="module")
def kici(engine: Lab) -> Iterator[LabCoordinator]:
    scalers = (
        a_pool(engine),
        a_pool(engine, "dies", DIES),
        a_pool(engine, "tells", TELLS),
        a_pool(engine, "volumes", set={"volumes": [f"{engine.folder}/shared:/shared"], "env": {"LANG": "C.UTF-8"}}),
    )
    (engine.folder / "shared").mkdir()
    with coordinator(engine, "jobs", *scalers) as running:
        yield running


def test_a_job_runs_in_a_container_of_its_pool_and_nothing_is_left(kici: LabCoordinator) -> None:
    done = kici.run("run", "-l", "pool", "--", "/bin/sh", "-c", "echo from $(pwd); exit 4")
    assert done.returncode == 4, done.stderr
    assert done.stdout.startswith("from /.kici/scaler-container-")
    kici.settle()
    until_no_rules(kici.lab)


@pytest.mark.parametrize("image", [BUSYBOX, DEBIAN, USER])
def test_a_job_runs_in_its_own_image(kici: LabCoordinator, image: str) -> None:
    """Static, dynamically linked, of another user: the agent comes along, and the job sees its image only."""
    done = kici.run("run", "-l", "pool", "--image", image, "--", "/bin/sh", "-c", "id -u; touch here; echo $GREETING")
    assert done.returncode == 0, done.stderr
    expected = {BUSYBOX: ["0", ""], DEBIAN: ["0", "hello"], USER: ["1234", ""]}[image]
    assert done.stdout.split("\n")[:2] == expected


def test_a_job_runs_in_an_image_that_holds_nothing(kici: LabCoordinator) -> None:
    done = kici.run("run", "-l", "pool", "--image", EMPTY, "--", "/opt/kici/lib/ld.so", "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_an_image_that_is_nowhere_ends_its_job_with_the_reason(kici: LabCoordinator) -> None:
    done = kici.run("run", "-l", "pool", "--image", "127.0.0.1:1/nobody/has:this", "--", "true")
    assert done.returncode == 125, done.stderr
    assert "image 127.0.0.1:1/nobody/has:this could not be pulled" in done.stderr
    kici.settle()


def test_an_agent_that_dies_at_start_is_explained_and_its_scaler_deferred(kici: LabCoordinator) -> None:
    job = kici.submit("true", "-l", "dies")
    until(lambda: "keys" in kici.run("explain", job).stdout, seconds=60, what="the failure is explained")
    told = kici.run("explain", job).stdout
    assert "exit code 9" in told
    diagnosed = kici.run("admin", "diagnose").stdout
    assert "dies" in diagnosed
    assert "exit code 9" in diagnosed
    assert kici.run("cancel", job).returncode == 0
    kici.settle()


def test_secrets_are_nowhere_to_be_read(kici: LabCoordinator) -> None:
    """Neither the agent's token nor the job's secret: not by inspecting, not in any process's environment but the
    step's own, not in a file, not in a log."""
    assert kici.run("admin", "secrets", "set", "deploy:token", given="open-sesame-42\n").returncode == 0
    script = "test ${#TOKEN} = 14 && echo it is; grep -rl kat_ /.kici /proc/1/fd/0 2>&1; echo looked; sleep 100"
    job = kici.submit(script, "-l", "pool", "--secret", "TOKEN=deploy:token")
    until(lambda: "it is" in kici.output(job), seconds=60, what="the step has its secret")
    until(lambda: "looked" in kici.output(job), seconds=60, what="the step has looked for the token")
    assert "/.kici/" not in kici.output(job)
    (one,) = kici.containers()
    inspected = json.dumps(kici.lab.ask("GET", f"/containers/{one['Id']}/json"))
    processes = json.dumps(kici.lab.ask("GET", f"/containers/{one['Id']}/top?ps_args=-eo%20pid,args"))
    for secret in ("KICI_AGENT_TOKEN=", "kat_", "sesame"):
        assert secret not in inspected
        assert secret not in processes
    agent = (Path("/proc") / str(kici.lab.ask("GET", f"/containers/{one['Id']}/json")["State"]["Pid"])).resolve()
    assert b"kat_" not in (agent / "environ").read_bytes()
    assert kici.run("cancel", job).returncode == 0
    kici.settle()
    assert "sesame" not in kici.log.read_text()
    assert "kat_" not in kici.log.read_text()
    everything = b"".join(path.read_bytes() for path in kici.data_dir.glob("kici.db*"))
    assert b"sesame-42" not in everything


def test_an_agent_that_tells_everything_it_knows_betrays_no_token(kici: LabCoordinator) -> None:
    """Not in the reason of its failure, not in events of the job, not in the log, not in any column."""
    job = kici.submit("true", "-l", "tells")
    until(lambda: "exit code 9" in kici.run("explain", job).stdout, seconds=60, what="the failure is explained")
    until(lambda: '"logs_source":"container"' in kici.log.read_text(), seconds=60, what="its output is in the log")
    told = [
        kici.run("explain", job).stdout,
        json.dumps(kici.job(job)),
        kici.run("logs", job).stdout,
        kici.run("admin", "diagnose", "--json").stdout,
        kici.log.read_text(),
        *(path.read_bytes().decode(errors="replace") for path in kici.data_dir.glob("kici.db*")),
    ]
    assert "kat_***" in "".join(told)  # it was told, and taken out
    assert not [text for text in told if re.search(r"kat_[0-9a-f]{13}", text)]
    assert kici.run("cancel", job).returncode == 0
    kici.settle()


def test_limits_are_the_engines(kici: LabCoordinator) -> None:
    job = kici.submit("while true; do sleep 0.1; done", "-l", "pool", "--cpus", "0.5", "--memory", "96m")
    until(lambda: kici.job(job)["status"] == "running", seconds=60, what="it runs")
    (one,) = kici.containers()
    host = kici.lab.ask("GET", f"/containers/{one['Id']}/json")["HostConfig"]
    assert (host["NanoCpus"], host["Memory"], host["PidsLimit"]) == (500_000_000, 96 * 2**20, 4096)
    assert not host["AutoRemove"]
    labels = one["Labels"]
    assert labels["kici-bound-job-id"] == job
    assert labels["kici-scaler-name"] == "pool"
    assert labels["kici-run-id"]
    assert kici.run("cancel", job).returncode == 0
    kici.settle()


def test_volumes_and_variables_of_a_label_set(kici: LabCoordinator) -> None:
    done = kici.run("run", "-l", "volumes", "--", "/bin/sh", "-c", "echo $LANG > /shared/said")
    assert done.returncode == 0, done.stderr
    assert (kici.lab.folder / "shared" / "said").read_text() == "C.UTF-8\n"


def test_a_job_that_uses_more_memory_than_it_may_is_told_so(kici: LabCoordinator) -> None:
    """The kernel takes the step, or the agent with it: either way the job ends and says why."""
    script = "x=0123456789abcdef; while true; do x=$x$x; done"
    done = kici.run("run", "-l", "pool", "--memory", "48m", "--", "/bin/sh", "-c", script)
    assert done.returncode != 0
    kici.settle()


def test_a_dockerfile_is_refused_in_words_where_agents_have_no_engine(kici: LabCoordinator) -> None:
    file = kici.lab.folder / "run.json"
    container = {"dockerfile": "D", "context": {"D": f"FROM {BUSYBOX}\n"}}
    file.write_text(
        json.dumps({"name": "b", "jobs": {"a": {"runsOn": ["pool"], "run": "true", "container": container}}})
    )
    done = kici.run("submit", str(file))
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert "the agent's host has neither docker nor podman; name labels of process agents" in told
    assert "a container scaler does not" in told


def test_the_doctor_looks_at_engine_disk_images_and_filter(engine: Lab) -> None:
    file = engine.folder / "doctor.json"
    absent = {"labels": ["absent"], "image": "ci/absent:1", "imagePullPolicy": "IfNotPresent"}
    never = {"labels": ["never"], "image": "ci/absent:1", "imagePullPolicy": "Never"}
    pool = a_pool(engine)
    pool["labelSets"] += [absent, never]
    file.write_text(json.dumps({"version": 1, "scalers": [pool]}))
    told = engine.command(*KICI, "doctor", "--json", "--scalers", file, "--host", "0.0.0.0", "--port", "0")
    done = subprocess.run(told, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1, done.stderr  # because of the image that nobody may pull
    found = [(each["status"], each["message"]) for each in json.loads(done.stdout) if each["check"] == "scaler pool"]
    assert any(status == "ok" and f"answers at unix://{engine.socket}" in text for status, text in found)
    assert any(status == "ok" and f"free for the engine in {engine.folder}/root" in text for status, text in found)
    assert ("ok", "agents can be isolated by the packet filter") in found
    assert ("note", "image ci/absent:1 is not on the engine; its first agent waits for the pull") in found
    assert ("fail", "image ci/absent:1 is not on the engine, and imagePullPolicy is Never") in found
