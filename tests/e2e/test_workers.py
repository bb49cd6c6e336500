"""A coordinator and a worker as processes: jobs run on the worker's host, whatever is killed or cut."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kici.testing.programs import CoordinatorProgram, until
from kici.testing.worker_program import TcpRelay, WorkerProgram

pytestmark = pytest.mark.timeout(240)
RESOURCES = "binaryPath: kici-agent\n        resources: {cpus: 1, memory: 64m}"
TICKS = "while [ ! -e {gate} ]; do sleep 0.05; done; for k in 1 2 3 4 5 6 7 8; do echo {name}-$k; sleep 0.4; done"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProgram]:
    scalers = tmp_path / "near.yaml"
    scalers.write_text("version: 1\nscalers: []\n")
    with CoordinatorProgram(tmp_path / "coordinator", extra=["--scalers", str(scalers)]) as program:
        yield program


@pytest.fixture
def way(coordinator: CoordinatorProgram) -> Iterator[TcpRelay]:
    """The network between them."""
    with TcpRelay(coordinator.port) as relay:
        yield relay


@pytest.fixture
def worker(coordinator: CoordinatorProgram, way: TcpRelay, tmp_path: Path) -> Iterator[WorkerProgram]:
    program = WorkerProgram(tmp_path / "worker", [f"http://127.0.0.1:{way.port}"]).takes_token(coordinator)
    with program:
        program.waits_until_linked(coordinator)
        yield program


def whole(name: int) -> str:
    return "".join(f"{name}-{k}\n" for k in range(1, 9))


def start_five(kici: CoordinatorProgram) -> list[str]:
    """Five jobs that have just begun on the worker."""
    gate = kici.data_dir.with_name("gate")
    jobs = [kici.submit(TICKS.format(name=n, gate=gate), "-l", "far") for n in range(5)]
    until(lambda: all(job["status"] == "running" for job in kici.jobs().values()), seconds=60, what="all jobs run")
    gate.touch()
    return jobs


def check_all_ended_well(kici: CoordinatorProgram, worker: WorkerProgram, jobs: list[str]) -> None:
    until(lambda: all(job["finishedAt"] for job in kici.jobs().values()), seconds=90, what="all jobs end")
    for n, job in enumerate(jobs):
        found = kici.job(job)
        assert (found["status"], found["attempts"]) == ("success", 0), found
        assert kici.output(job) == whole(n)
    until(worker.is_clean, seconds=60, what="nothing is left on the worker")
    until(lambda: kici.admin("agents") == [], seconds=60, what="nobody looks after any agent")


@pytest.mark.spec("D5")
def test_a_job_runs_on_the_worker_through_its_relay(coordinator: CoordinatorProgram, worker: WorkerProgram) -> None:
    done = coordinator.run("run", "-l", "far", "--", "sh", "-c", "echo over there; exit 3")
    assert (done.stdout, done.returncode) == ("over there\n", 3), done.stderr
    (job,) = coordinator.jobs().values()
    assert job["scaler"].endswith("/far")
    until(worker.is_clean, seconds=60, what="nothing is left on the worker")
    credential = worker.data_dir / "worker-credential"
    assert credential.stat().st_mode & 0o777 == 0o600


@pytest.mark.spec("D28")
def test_kill_9_of_the_worker_costs_no_running_job(coordinator: CoordinatorProgram, worker: WorkerProgram) -> None:
    jobs = start_five(coordinator)
    worker.stop(signal.SIGKILL)
    time.sleep(1)
    worker.start()
    worker.waits_until_linked(coordinator)
    check_all_ended_well(coordinator, worker, jobs)


@pytest.mark.spec("D28", "T4.9")
def test_kill_9_of_the_coordinator_costs_no_running_job(coordinator: CoordinatorProgram, worker: WorkerProgram) -> None:
    jobs = start_five(coordinator)
    coordinator.stop(signal.SIGKILL)
    time.sleep(1)
    coordinator.start()
    worker.waits_until_linked(coordinator)
    check_all_ended_well(coordinator, worker, jobs)


@pytest.mark.spec("D5", "T4.7")
def test_a_cut_network_costs_no_running_job_and_lets_nothing_new_begin(
    coordinator: CoordinatorProgram, way: TcpRelay, worker: WorkerProgram
) -> None:
    jobs = start_five(coordinator)
    way.refuses = True
    way.cut()
    late = coordinator.submit("echo late", "-l", "far")
    time.sleep(5)
    assert coordinator.job(late)["status"] == "queued"
    way.refuses = False
    until(lambda: coordinator.job(late)["finishedAt"], seconds=60, what="the late job runs")
    assert coordinator.output(late) == "late\n"
    check_all_ended_well(coordinator, worker, jobs)


def test_a_worker_that_stops_ends_its_agents_and_says_why(
    coordinator: CoordinatorProgram, worker: WorkerProgram
) -> None:
    jobs = start_five(coordinator)
    assert worker.stop(signal.SIGTERM) == 0
    assert worker.is_clean()
    until(lambda: all(job["finishedAt"] for job in coordinator.jobs().values()), seconds=60, what="all jobs end")
    assert {coordinator.job(job)["status"] for job in jobs} == {"failed"}
    until(lambda: coordinator.admin("agents") == [], seconds=60, what="nobody looks after any agent")


def test_a_worker_that_stops_and_keeps_its_agents_costs_no_job(
    coordinator: CoordinatorProgram, worker: WorkerProgram
) -> None:
    jobs = start_five(coordinator)
    assert worker.stop(signal.SIGUSR2) == 0
    assert len(worker.agent_processes()) >= 5
    worker.start()
    worker.waits_until_linked(coordinator)
    check_all_ended_well(coordinator, worker, jobs)


@pytest.mark.spec("D28")
def test_a_coordinator_that_stops_leaves_the_jobs_of_its_worker_running(
    coordinator: CoordinatorProgram, worker: WorkerProgram
) -> None:
    jobs = start_five(coordinator)
    assert coordinator.stop(signal.SIGTERM) < 20
    coordinator.start()
    worker.waits_until_linked(coordinator)
    check_all_ended_well(coordinator, worker, jobs)


def test_an_agent_that_is_killed_settles_its_job(coordinator: CoordinatorProgram, worker: WorkerProgram) -> None:
    job = coordinator.submit("sleep 60", "-l", "far")
    until(lambda: coordinator.job(job)["status"] == "running", seconds=60, what="the job runs")
    worker.kill_agents()
    until(lambda: coordinator.job(job)["status"] == "failed", seconds=60, what="the job is settled")
    until(worker.is_clean, seconds=60, what="nothing is left on the worker")


@pytest.mark.spec("T4.1", "T4.2")
def test_a_revoked_worker_ends_with_its_agents_and_the_token_is_spent(
    coordinator: CoordinatorProgram, worker: WorkerProgram, tmp_path: Path
) -> None:
    second = WorkerProgram(tmp_path / "second", worker.join)
    second.token_file.write_text(worker.token_file.read_text())
    second.start()
    assert second.process is not None
    assert second.process.wait(30) == 1
    assert "Invalid token" in second.log.read_text()

    job = coordinator.submit("sleep 60", "-l", "far")
    until(lambda: coordinator.job(job)["status"] == "running", seconds=60, what="the job runs")
    (peer,) = [each for each in coordinator.admin("peers") if each["role"] == "worker"]
    assert coordinator.run("admin", "worker", "revoke", peer["id"]).returncode == 0
    assert worker.process is not None
    assert worker.process.wait(40) == 1
    assert "Credential revoked" in worker.log.read_text()
    until(lambda: coordinator.job(job)["status"] == "failed", seconds=60, what="the job is settled")
    until(worker.is_clean, seconds=60, what="nothing is left on the worker")
    (peer,) = [each for each in coordinator.admin("peers") if each["role"] == "worker"]
    assert peer["state"] == "revoked"
    assert "no worker" in coordinator.run("admin", "worker", "revoke", "nobody").stderr


@pytest.mark.spec("D5", "scaler 19.1")
def test_hup_takes_over_a_changed_scalers_file_of_a_worker(
    coordinator: CoordinatorProgram, worker: WorkerProgram, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    old = coordinator.submit(f"while [ ! -e {gate} ]; do sleep 0.1; done; echo finished", "-l", "far")
    until(lambda: coordinator.job(old)["status"] == "running", seconds=60, what="a job runs")
    before = worker.scalers.read_text()
    assert worker.process is not None

    worker.scalers.write_text("version: 1\nscalers: [{name: x}]\n")
    worker.process.send_signal(signal.SIGHUP)
    until(lambda: "reload.rejected" in worker.log.read_text(), seconds=60, what="a faulty file is refused")
    assert coordinator.run("run", "-l", "far", "--", "echo", "as before").stdout == "as before\n"

    worker.scalers.write_text(before.replace("name: far", "name: near").replace("[linux, far]", "[linux, near]"))
    worker.process.send_signal(signal.SIGHUP)
    done = coordinator.run("run", "-l", "near", "--", "echo", "new")
    assert done.stdout == "new\n"
    late = coordinator.submit("true", "-l", "far")
    until(lambda: "far" in coordinator.run("explain", late).stdout, seconds=60, what="the old one is offered no more")
    assert coordinator.job(late)["status"] == "queued"
    gate.touch()
    until(lambda: coordinator.job(old)["status"] == "success", seconds=60, what="what ran there has finished")
    assert coordinator.output(old) == "finished\n"
    assert coordinator.run("cancel", late).returncode == 0
    until(worker.is_clean, seconds=60, what="nothing is left on the worker")


@pytest.mark.spec("D5")
def test_a_warm_pool_is_kept_on_the_worker(coordinator: CoordinatorProgram, worker: WorkerProgram) -> None:
    text = worker.scalers.read_text()
    pool = "warmPool: {enabled: true, size: 2}\n    labelSets:"
    text = text.replace("labelSets:", pool).replace("binaryPath: kici-agent", RESOURCES)
    worker.scalers.write_text(text)
    assert worker.process is not None
    worker.process.send_signal(signal.SIGHUP)

    def idle() -> list[str]:
        return [each["id"] for each in coordinator.admin("agents") if each["state"] == "idle"]

    until(lambda: len(idle()) == 2, seconds=60, what="two agents wait")
    before = idle()
    job = coordinator.submit("echo warm", "-l", "far")
    until(lambda: coordinator.job(job)["status"] == "success", seconds=60, what="the job runs")
    assert coordinator.job(job)["agentId"] in before, "on one that waited"
    until(lambda: len(idle()) == 2, seconds=60, what="two agents wait again")
    worker.stop(signal.SIGKILL)
    worker.start()
    worker.waits_until_linked(coordinator)
    time.sleep(5)
    until(lambda: len(idle()) == 2, seconds=60, what="two agents wait after a kill")
    assert len(coordinator.admin("agents")) == 2
