"""A coordinator is killed or stopped while jobs run; agents are killed.  Nothing is lost, run twice or left."""

import os
import signal
import time
from contextlib import suppress

import pytest

from kici.testing.programs import CoordinatorProgram, until

pytestmark = pytest.mark.timeout(180)
TICKS = "while [ ! -e {gate} ]; do sleep 0.05; done; for k in 1 2 3 4 5 6 7 8; do echo {name}-$k; sleep 0.4; done"


def over(kici: CoordinatorProgram, jobs: list[str]) -> bool:
    found = kici.jobs()
    return all(found[job]["finishedAt"] for job in jobs)


def whole(name: str) -> str:
    return "".join(f"{name}-{k}\n" for k in range(1, 9))


def start_ten(kici: CoordinatorProgram) -> list[str]:
    """Ten jobs that have just begun, however long it took to submit them."""
    gate = kici.data_dir.with_name("gate")
    jobs = [kici.submit(TICKS.format(name=n, gate=gate)) for n in range(10)]
    until(
        lambda: all(job["status"] == "running" for job in kici.jobs().values()),
        seconds=60,
        what="all ten jobs run",
    )
    gate.touch()
    return jobs


def check_all_ended_well(kici: CoordinatorProgram, jobs: list[str]) -> None:
    until(lambda: over(kici, jobs), seconds=60, what="all jobs end")
    for n, job in enumerate(jobs):
        found = kici.job(job)
        assert found["status"] == "success", found
        assert kici.output(job) == whole(str(n))
        assert found["attempts"] <= 1
    until(kici.is_clean, seconds=60, what="nothing is left of the agents")


def test_kill_9_of_the_coordinator_costs_no_running_job(kici: CoordinatorProgram) -> None:
    jobs = start_ten(kici)
    kici.stop(signal.SIGKILL)
    time.sleep(1)
    kici.start()
    check_all_ended_well(kici, jobs)


def test_stop_and_keep_agents_costs_no_running_job(kici: CoordinatorProgram) -> None:
    jobs = start_ten(kici)
    assert kici.run("admin", "stop", "--keep-agents").returncode == 0
    assert kici.process is not None
    assert kici.process.wait(60) == 0
    assert len(kici.agent_processes()) >= 10
    kici.start()
    check_all_ended_well(kici, jobs)


def test_agents_that_died_meanwhile_end_their_jobs_once_with_the_reason(kici: CoordinatorProgram) -> None:
    jobs = start_ten(kici)
    kici.stop(signal.SIGKILL)
    for pid in kici.agent_processes():
        with suppress(ProcessLookupError):  # what the coordinator had prepared ends with it
            os.kill(pid, signal.SIGKILL)
    kici.start()
    until(lambda: over(kici, jobs), seconds=60, what="all jobs end")
    for job in jobs:
        found = kici.job(job)
        assert found["status"] == "failed"
        assert "lost" in found["reason"]
    until(kici.is_clean, seconds=60, what="nothing is left of the agents")


@pytest.mark.spec("T7.2")
def test_term_ends_everything_in_bounded_time(kici: CoordinatorProgram) -> None:
    jobs = start_ten(kici)
    assert kici.stop(signal.SIGTERM) < 20
    assert kici.process is not None
    assert kici.process.returncode == 0
    assert kici.is_clean()
    assert not (kici.data_dir / "endpoint").exists()
    kici.start()
    for job in jobs:
        found = kici.job(job)
        assert found["status"] == "failed"
        assert "stopped" in found["reason"]


@pytest.mark.spec("T7.8")
def test_kill_9_of_an_agent_settles_its_job_and_frees_everything(kici: CoordinatorProgram) -> None:
    job = kici.submit("sleep 60 & sleep 61")
    until(lambda: kici.job(job)["status"] == "running", seconds=60, what="the job runs")
    agent = kici.job(job)["agentId"]
    pid = next(pid for pid in kici.agent_processes())
    os.kill(pid, signal.SIGKILL)
    until(lambda: kici.job(job)["status"] == "failed", seconds=60, what="the job is settled")
    assert agent in kici.job(job)["reason"]
    until(kici.is_clean, seconds=60, what="its process group is gone")
    until(lambda: kici.admin("agents") == [], seconds=60, what="nobody looks after any agent")


def test_a_spawn_that_was_booting_serves_its_job_after_a_restart(kici: CoordinatorProgram) -> None:
    job = kici.submit("echo served")
    kici.stop(signal.SIGKILL)
    kici.start()
    until(lambda: over(kici, [job]), seconds=60, what="the job ends")
    assert kici.job(job)["status"] == "success"
    assert kici.output(job) == "served\n"
    until(kici.is_clean, seconds=60, what="nothing is left of the agents")
