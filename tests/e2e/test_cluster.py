"""Several coordinators on one PostgreSQL: they share the work, and one that dies costs none of it."""

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import pytest
from tests.engines import Server, migrated_database

from kici.testing.programs import CoordinatorProgram, until

pytestmark = [pytest.mark.timeout(240), pytest.mark.engine("postgres")]

SCALERS = """
version: 1
scalers:
  - name: {name}
    type: bare-metal
    maxAgents: 8
    labelSets:
      - labels: [linux, {name}]
        binaryPath: kici-agent
"""
KEY = "0" * 64


@pytest.fixture
def pair(server: Server, tmp_path: Path) -> Iterator[tuple[CoordinatorProgram, CoordinatorProgram]]:
    with migrated_database(server) as url, ExitStack() as stack:
        programs = []
        for name in ("a", "b"):
            scalers = tmp_path / f"{name}.yaml"
            scalers.write_text(SCALERS.format(name=name))
            extra = ["--scalers", str(scalers), "--database-url", url]
            env = {"KICI_SECRET_KEY": KEY}
            programs.append(stack.enter_context(CoordinatorProgram(tmp_path / name, extra=extra, env=env)))
        until(lambda: len(programs[0].admin("peers")) == 2, seconds=60, what="they know each other")
        yield programs[0], programs[1]


def over(kici: CoordinatorProgram, job: str) -> bool:
    return kici.job(job)["finishedAt"] is not None


@pytest.mark.spec("T4.10", "D2")
def test_a_job_that_only_the_other_can_serve_runs_there(pair: tuple[CoordinatorProgram, CoordinatorProgram]) -> None:
    first, second = pair
    done = first.run("run", "-l", "b", "--", "echo", "over there")
    assert (done.stdout, done.returncode) == ("over there\n", 0)
    until(second.is_clean, seconds=60, what="nothing is left of its agent")


@pytest.mark.spec("D2")
def test_a_running_job_is_cancelled_through_either(pair: tuple[CoordinatorProgram, CoordinatorProgram]) -> None:
    first, second = pair
    job = first.submit("sleep 60", "-l", "b")
    until(lambda: first.job(job)["status"] == "running", seconds=60, what="the job runs at the other")
    assert first.run("cancel", job).returncode == 0
    until(lambda: first.job(job)["status"] == "cancelled", seconds=60, what="its agent was told")
    until(second.is_clean, seconds=60, what="nothing is left of its agent")


@pytest.mark.spec("T1.1")
def test_fifty_jobs_through_both_run_once_each(pair: tuple[CoordinatorProgram, CoordinatorProgram]) -> None:
    first, second = pair
    jobs = [(first, second)[n % 2].submit(f"echo {n}", "-l", "linux") for n in range(50)]
    until(lambda: all(job["finishedAt"] for job in first.jobs().values()), seconds=90, what="all jobs end")
    for n, job in enumerate(jobs):
        found = first.job(job)
        assert (found["status"], found["attempts"]) == ("success", 0), found
        assert second.output(job) == f"{n}\n"
    until(lambda: first.is_clean() and second.is_clean(), seconds=60, what="nothing is left")


@pytest.mark.spec("T1.12", "T4.8", "D28")
def test_one_that_is_killed_and_restarted_takes_up_its_own_and_leaves_the_other_alone(
    pair: tuple[CoordinatorProgram, CoordinatorProgram], tmp_path: Path
) -> None:
    first, second = pair
    go_on = tmp_path / "go-on"
    script = f"echo 1; while ! [ -e {go_on} ]; do sleep 0.1; done; for k in 2 3 4 5 6 7 8; do echo $k; sleep 0.1; done"
    jobs = [first.submit(script, "-l", name) for name in ("a", "b") for _ in range(4)]
    until(lambda: all(job["status"] == "running" for job in first.jobs().values()), seconds=60, what="all run")
    first.stop(signal.SIGKILL)
    first.start()
    go_on.touch()
    until(lambda: all(over(second, job) for job in jobs), seconds=60, what="all jobs end")
    for job in jobs:
        assert second.job(job)["status"] == "success"
        assert second.output(job) == "1\n2\n3\n4\n5\n6\n7\n8\n"
    until(lambda: first.is_clean() and second.is_clean(), seconds=60, what="nothing is left")


def test_a_job_that_neither_serves_is_explained_and_one_is_enough(
    pair: tuple[CoordinatorProgram, CoordinatorProgram],
) -> None:
    first, _ = pair
    job = first.submit("true", "-l", "moon")
    assert "moon" in first.run("explain", job).stdout


def leader(asked: CoordinatorProgram) -> str | None:
    """The id of the coordinator that leads, as one of them says."""
    return next((each["id"] for each in asked.admin("peers") if each["leads"]), None)


def id_of(program: CoordinatorProgram) -> str:
    return (program.data_dir / "instance-id").read_text().strip()


def events(program: CoordinatorProgram) -> list[str]:
    """Names of what it logged."""
    return re.findall(r'"event":"([a-z_.]+)"', program.log.read_text())


def won_at(program: CoordinatorProgram) -> float:
    """When it began to lead, in seconds since the epoch."""
    (line,) = [line for line in program.log.read_text().splitlines() if '"event":"term.won"' in line]
    return datetime.fromisoformat(json.loads(line)["time"]).timestamp()


def by_rank(pair: tuple[CoordinatorProgram, CoordinatorProgram]) -> tuple[CoordinatorProgram, CoordinatorProgram]:
    """The one that leads, and the other."""
    until(lambda: leader(pair[0]) is not None, seconds=60, what="one of them leads")
    return pair if leader(pair[0]) == id_of(pair[0]) else (pair[1], pair[0])


@pytest.mark.spec("D1")
def test_when_the_leader_is_killed_the_other_leads_within_five_seconds(
    pair: tuple[CoordinatorProgram, CoordinatorProgram],
) -> None:
    first, second = by_rank(pair)
    killed_at = time.time()
    first.stop(signal.SIGKILL)
    until(lambda: leader(second) == id_of(second), seconds=60, what="the other leads")
    assert won_at(second) - killed_at < 5, "by its own log: asking takes time too"


@pytest.mark.spec("D1", "D6")
def test_a_leader_that_is_paused_beyond_its_term_does_nothing_more_as_leader(
    pair: tuple[CoordinatorProgram, CoordinatorProgram],
) -> None:
    first, second = by_rank(pair)
    assert first.process is not None
    before = events(first)
    first.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: leader(second) == id_of(second), seconds=60, what="the other leads")
        time.sleep(8)  # a beat and several chores are overdue when it goes on
    finally:
        first.process.send_signal(signal.SIGCONT)
    until(lambda: "term.lost" in events(first)[len(before) :], seconds=60, what="it knows that its term is over")
    for _ in range(5):
        assert leader(first) == id_of(second) == leader(second)
    assert "term.won" not in events(first)[len(before) :]
    assert first.run("run", "-l", "a", "--", "true").returncode == 0, "it works on, as one of several"
