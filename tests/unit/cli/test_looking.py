import json
from pathlib import Path

import pytest

from kici.domain.ids import JobId, RunId
from kici.domain.job import JobStatus, Run, RunStatus
from kici.domain.logs import Stream
from kici.testing.fake_surface import START
from kici.testing.served_surface import Served

ID = JobId("job-1")


def test_jobs_are_listed_for_people_and_programs(served: Served) -> None:
    served.fake.jobs.add(name="build", status=JobStatus.SUCCESS, started_at=START, finished_at=START + 1500)
    result = served.kici("jobs")
    head, row = result.stdout.splitlines()
    assert head.split() == ["ID", "STATUS", "NAME", "AGENT", "TOOK", "CREATED"]
    assert row.split()[:5] == ["job-1", "success", "build", "-", "1.5s"]
    (job,) = json.loads(served.kici("jobs", "--json").stdout)
    assert (job["id"], job["status"]) == ("job-1", "success")


def test_a_long_listing_is_fetched_page_by_page(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kici.cli.jobs.PAGE", 2)
    for _ in range(5):
        served.fake.jobs.add()
    found = json.loads(served.kici("jobs", "--json", "-n", "4").stdout)
    assert [job["id"] for job in found] == ["job-5", "job-4", "job-3", "job-2"]


def test_an_empty_listing_says_what_to_do(served: Served) -> None:
    result = served.kici("jobs")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "kici run" in result.stderr


def test_one_job_is_shown_with_its_reason(served: Served) -> None:
    served.fake.jobs.add(status=JobStatus.FAILED, exit_code=3)
    shown = served.kici("job", "job-1").stdout
    assert "exit code" in shown
    assert "Ended with exit code 3." in shown
    assert json.loads(served.kici("job", "job-1", "--json").stdout)["exitCode"] == 3


def test_a_job_that_does_not_exist_is_an_error(served: Served) -> None:
    result = served.kici("job", "job-9")
    assert result.exit_code == 1
    assert "job-9" in result.stderr


def test_explain_prints_what_each_instance_says(served: Served) -> None:
    served.fake.jobs.add()
    result = served.kici("explain", "job-1")
    assert "job-1 queued: No scaler" in result.stdout
    assert "  instance-1: No scaler" in result.stdout
    assert json.loads(served.kici("explain", "job-1", "--json").stdout)["why"]


def test_cancel_takes_jobs_and_runs(served: Served) -> None:
    jobs = served.fake.jobs
    jobs.add()
    jobs.run_rows[RunId("run-7")] = Run(
        id=RunId("run-7"),
        name="r",
        org=jobs.rows[ID].org,
        status=RunStatus.RUNNING,
        submitted_by="me",
        created_at=START,
        finished_at=None,
        cancel_requested_at=None,
    )
    result = served.kici("cancel", "--force", "--reason", "wrong", "job-1", "run-7")
    assert result.stdout == "job-1 cancelled\nrun-7 cancelled\n"
    assert jobs.forced == [True]
    assert jobs.rows[ID].reason == "wrong"
    assert served.kici("cancel", "nothing").exit_code == 1
    assert "over" in served.kici("cancel", "job-1").stderr


def test_logs_are_printed_apart_and_byte_for_byte(served: Served) -> None:
    served.fake.jobs.add(status=JobStatus.SUCCESS)
    for stream, data in (
        (Stream.STDOUT, b"a\xff"),
        (Stream.SYSTEM, b"made\n"),
        (Stream.STDERR, b"e\n"),
        (Stream.STDOUT, b"b"),
    ):
        served.fake.logs.add(ID, stream, data)
    for arguments in (("logs", "job-1"), ("logs", "-f", "job-1")):
        result = served.kici(*arguments)
        assert (result.stdout_bytes, result.stderr_bytes) == (b"a\xffb", b"e\n")
    assert served.kici("logs", "--system", "job-1").stdout == "made\n"


def test_a_dashboard_link_signs_in(served: Served) -> None:
    result = served.kici("dashboard")
    assert result.stdout.startswith(f"{served.url}/login?code=")


RUN_FILE = """\
name: pipeline
jobs:
  build:
    run: make
  test:
    run: make test
    needs: [build]
"""


def test_a_run_file_is_followed_with_prefixes(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN_FILE)
    jobs, logs = served.fake.jobs, served.fake.logs

    def finish() -> None:
        logs.add(JobId("job-1"), Stream.STDOUT, b"compiled\nlinked")
        jobs.change(JobId("job-1"), status=JobStatus.SUCCESS, started_at=START, finished_at=START + 2000)
        logs.add(JobId("job-2"), Stream.STDERR, b"1 failed\n")
        jobs.change(JobId("job-2"), status=JobStatus.FAILED, exit_code=2)
        run = jobs.run_rows[RunId("run-1")]
        jobs.run_rows[run.id] = type(run)(
            **{name: getattr(run, name) for name in run.__slots__} | {"status": RunStatus.FAILED}
        )

    served.loop.call_soon_threadsafe(served.loop.call_later, 0.5, finish)
    result = served.kici("submit", str(file))
    assert result.exit_code == 1
    assert result.stdout == "[build] compiled\n[build] linked\n"
    lines = result.stderr.splitlines()
    assert "[test]  1 failed" in lines
    assert "[build] queued" in lines
    assert "[build] success after 2.0s" in lines
    assert "[test]  failed: Ended with exit code 2." in lines
    assert lines[-1] == "kici: run run-1 failed"


def test_a_detached_run_prints_its_id(served: Served) -> None:
    result = served.kici("submit", "-d", "-", stdin=RUN_FILE)
    assert (result.stdout, result.exit_code) == ("run-1\n", 0)
    assert [job.needs for job in served.fake.jobs.requests[0].jobs] == [(), ("build",)]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (RUN_FILE.replace("needs: [build]", "needs: [biuld]"), "run.yaml:7:13: $.jobs.test.needs[0]: no job 'biuld'"),
        (RUN_FILE.replace("run: make test", "rnu: x"), "run.yaml:6:5: $.jobs.test.rnu: unknown key"),
        ("jobs:\n  a: {run: x}\n  a: {run: y}\n", "run.yaml:3:3"),
        ("", "empty"),
    ],
)
def test_faults_of_a_run_file_have_their_place(served: Served, tmp_path: Path, text: str, place: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    result = served.kici("submit", str(file))
    assert result.exit_code == 1
    assert place in result.stderr
