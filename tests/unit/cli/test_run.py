import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kici.cli.following import exit_code
from kici.cli.main import kici
from kici.cli.run import document
from kici.domain.document import read_job
from kici.domain.errors import NoCapacity, StoreDown
from kici.domain.ids import JobId
from kici.domain.job import Job, JobStatus
from kici.domain.logs import Stream
from kici.testing.fake_surface import START, FakeJobs
from kici.testing.ports import free_port
from kici.testing.served_surface import Served


def ends_with(served: Served, *chunks: tuple[Stream, bytes], **fields: object) -> None:
    """Every job that is submitted has this output and this end at once."""
    jobs, logs = served.fake.jobs, served.fake.logs

    class Ending(FakeJobs):
        def add(self, **given: object) -> Job:
            job = super().add(**given)
            for stream, data in chunks:
                logs.add(job.id, stream, data)
            return self.change(job.id, **{"started_at": START, "finished_at": START, **fields})

    jobs.__class__ = Ending


def run(served: Served, *arguments: str) -> Result:
    return served.kici("run", *arguments)


def test_streams_arrive_apart_and_byte_for_byte(served: Served) -> None:
    chunks = (
        (Stream.STDOUT, b"a\xff\r\n"),
        (Stream.STDERR, b"b\n"),
        (Stream.SYSTEM, b"agent\n"),
        (Stream.STDOUT, b"c"),
    )
    ends_with(served, *chunks, status=JobStatus.SUCCESS, exit_code=0)
    result = run(served, "--", "true")
    assert result.exit_code == 0
    assert result.stdout_bytes == b"a\xff\r\nc"
    link, _, rest = result.stderr_bytes.partition(b"\n")
    assert link.startswith(b"kici: job job-1  " + served.url.encode() + b"/jobs/job-1")
    assert rest == b"b\n"


def test_the_exit_code_is_the_jobs(served: Served) -> None:
    ends_with(served, status=JobStatus.FAILED, exit_code=42)
    assert run(served, "--", "false").exit_code == 42


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ({"status": "success", "startedAt": "t", "exitCode": 0}, 0),
        ({"status": "failed", "startedAt": "t", "exitCode": 3}, 3),
        ({"status": "failed", "startedAt": "t", "signal": 9}, 137),
        ({"status": "failed", "startedAt": "t"}, 1),
        ({"status": "failed", "startedAt": None}, 125),
        ({"status": "timed_out", "startedAt": "t", "signal": 9}, 124),
        ({"status": "timed_out", "startedAt": None}, 125),
        ({"status": "cancelled", "startedAt": None}, 125),
        ({"status": "cancelled", "startedAt": "t", "signal": 15}, 143),
        ({"status": "cancelled", "startedAt": "t"}, 143),
        ({"status": "unroutable", "startedAt": None}, 125),
        ({"status": "skipped", "startedAt": None}, 125),
    ],
)
def test_every_end_has_its_code(job: dict[str, object], code: int) -> None:
    assert exit_code(job) == code


def test_an_end_that_the_code_does_not_tell_is_told(served: Served) -> None:
    ends_with(served, status=JobStatus.TIMED_OUT, reason="ran longer than 5 s", started_at=START)
    result = run(served, "--", "sleep", "9")
    assert result.exit_code == 124
    assert "ran longer than 5 s" in result.stderr


def test_detached_prints_the_id_alone(served: Served) -> None:
    result = run(served, "-d", "--", "true")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "job-1\n", "")


def test_options_become_a_document_that_is_understood(served: Served) -> None:
    arguments = (
        *("-l", "linux", "--label", "gpu", "--exclude", "slow", "--cpus", "2", "--memory", "1g", "--image", "alpine"),
        *("-e", "A=1", "-e", "B=x=y", "--secret", "T=deploy:token", "--timeout", "2m", "--name", "mine", "-d"),
    )
    result = run(served, *arguments, "--", "make", "-l", "test")
    assert result.exit_code == 0, result.stderr
    (job,) = served.fake.jobs.requests[0].jobs
    assert (job.name, job.spec.command) == ("mine", ("make", "-l", "test"))
    assert job.demand.labels == frozenset({"linux", "gpu"})
    assert job.demand.exclude == frozenset({"slow"})
    assert (job.spec.env, job.spec.secrets) == ({"A": "1", "B": "x=y"}, {"T": "deploy:token"})
    assert (job.spec.timeout_ms, job.demand.image) == (120_000, "alpine")
    assert (job.demand.resources.requests.cpus, job.demand.resources.requests.memory) == (2.0, "1g")


def test_options_after_the_command_are_the_commands(served: Served) -> None:
    run(served, "-d", "make", "--name", "x", "-d")
    assert served.fake.jobs.requests[0].jobs[0].spec.command == ("make", "--name", "x", "-d")


def test_nothing_but_a_command_is_needed() -> None:
    assert read_job(document(command=("true",))).jobs[0].demand.labels == frozenset()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--nonsense", "--", "true"),
        ("--timeout", "soon", "--", "true"),
        ("-e", "A", "--", "true"),
        ("-l", "a b", "--", "x"),
    ],
)
def test_what_never_ran_is_125(served: Served, arguments: tuple[str, ...]) -> None:
    result = run(served, *arguments)
    assert result.exit_code == 125
    assert result.stdout == ""
    assert "Error" in result.stderr


def test_a_full_queue_is_125_with_the_reason(served: Served) -> None:
    served.fake.jobs.refusal = NoCapacity("the queue is full: 5 jobs wait")
    result = run(served, "--", "true")
    assert result.exit_code == 125
    assert "the queue is full" in result.stderr


def test_without_a_coordinator_it_says_how_to_start_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(kici, ["run", "--data-dir", str(tmp_path), "--", "true"], env={"KICI_URL": None})
    assert result.exit_code == 1
    assert "kici up" in result.stderr


def test_a_coordinator_that_is_gone_is_125(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kici.cli.run.SUBMIT_SECONDS", 0.0)
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(kici, ["run", "--url", url, "--", "true"])
    assert result.exit_code == 125
    assert "kici up" in result.stderr


def test_an_outage_costs_no_byte(served: Served) -> None:
    """The stream breaks after the first chunk; the follower comes back behind it."""
    jobs, logs = served.fake.jobs, served.fake.logs
    served.do(lambda: jobs.add(status=JobStatus.RUNNING, started_at=START))
    served.do(lambda: logs.add(JobId("job-1"), Stream.STDOUT, b"first "))
    logs.failure = StoreDown("gone")

    def heal() -> None:
        logs.failure = None
        logs.add(JobId("job-1"), Stream.STDOUT, b"second")
        jobs.change(JobId("job-1"), status=JobStatus.SUCCESS)

    served.later(0.2, heal)
    result = served.kici("logs", "-f", "job-1")
    assert result.exit_code == 0
    assert result.stdout == "first second"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_cancels_the_job_and_is_130(served: Served, number: signal.Signals) -> None:
    jobs = served.fake.jobs

    class Interrupting(FakeJobs):
        def add(self, **given: object) -> Job:
            job = super().add(**given)
            served.loop.call_later(0.2, os.kill, os.getpid(), number)
            return job

    jobs.__class__ = Interrupting
    result = run(served, "--", "sleep", "100")
    assert result.exit_code == 130
    assert jobs.rows[JobId("job-1")].status is JobStatus.CANCELLED
    assert jobs.forced == [False]
