"""Machines of an event scaler for real: the reference provisioner for local processes, asked by jobs or webhooks."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engines import Server, migrated_database

from kici.testing.ports import free_port
from kici.testing.programs import CoordinatorProgram, environment, until

pytestmark = pytest.mark.timeout(180)
PROVISIONERS = Path(__file__).parents[2] / "provisioners"
MACHINES = PROVISIONERS / "local_processes" / "machines.py"
SCALERS = PROVISIONERS / "local_processes" / "scalers.yaml"
WORKFLOW = PROVISIONERS / "local_processes" / "workflow.yaml"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Host:
    """`machines.py serve`."""

    def __init__(self, state: Path, *extra: str) -> None:
        self.state = state
        self._log = state.with_suffix(".log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, MACHINES, "serve", "--state", state, *extra, "--agent", f"{sys.executable} -m kici agent"],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def machines(self) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, MACHINES, "list", "--state", self.state],
            env=environment(),
            capture_output=True,
            check=True,
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


@contextmanager
def serving(*extra: str) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="km-") as folder:  # the path of a socket is short
        host = Host(Path(folder) / "m", *extra)
        try:
            yield host
        finally:
            host.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.engine("postgres"))])
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CoordinatorProgram]:
    if request.param == "sqlite":
        with CoordinatorProgram(tmp_path / "data", extra=["--scalers", str(SCALERS)]) as program:
            yield program
        return
    server: Server = request.getfixturevalue("server")
    with (
        migrated_database(server) as url,
        CoordinatorProgram(tmp_path / "data", extra=["--scalers", str(SCALERS), "--database-url", url]) as program,
    ):
        yield program


def apply_workflow(program: CoordinatorProgram, state: Path) -> None:
    variables = (f"PROVISIONERS={PROVISIONERS}", f"PYTHON={sys.executable}", f"MACHINES_STATE={state}")
    done = program.run("workflow", "apply", str(WORKFLOW), *(word for each in variables for word in ("--set", each)))
    assert done.returncode == 0, done.stderr


def statuses(program: CoordinatorProgram, jobs: list[str]) -> set[str]:
    known = program.jobs(200)
    return {known[job]["status"] for job in jobs}


def test_jobs_run_on_machines_that_a_workflow_makes(program: CoordinatorProgram) -> None:
    with serving() as host:
        apply_workflow(program, host.state)
        jobs = [program.submit("env | grep -c CLAIM; echo made", "-l", "machine") for _ in range(10)]
        until(lambda: statuses(program, jobs) == {"success"}, seconds=90, what="all jobs succeed")
        assert program.output(jobs[0]) == "0\nmade\n"
        assert {program.job(job)["scaler"] for job in jobs} == {"machines"}
        until(lambda: host.machines() == [], seconds=60, what="all machines are given back")
        until(program.is_clean, seconds=60, what="nothing is left of the provisioning agents")
        until(
            lambda: {each["state"] for each in program.admin("events", "list", "-n", "500")} == {"processed"},
            seconds=60,
            what="all events are handled",
        )
        events = program.admin("events", "list", "-n", "500")
        ups = [each for each in events if each["name"] == "kici.scaler.scale-up"]
        assert len(ups) == 10
        assert {each["payload"]["claimCode"] for each in ups} == {"[redacted]"}


def test_a_signed_webhook_makes_machines_too_and_a_crash_loses_none(
    program: CoordinatorProgram, tmp_path: Path
) -> None:
    port = free_port()
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    assert program.run("admin", "secrets", "set", "hooks:machines", given=SECRET).returncode == 0
    document = {
        "ref": "kici/local-machines",
        "on": ["kici.scaler.scale-up", "kici.scaler.scale-down"],
        "webhook": {"url": f"http://127.0.0.1:{port}/", "secret": "hooks:machines"},
    }
    assert program.run("workflow", "apply", "-", given=json.dumps(document)).returncode == 0
    with serving("--port", str(port), "--secret-file", str(secret)) as host:
        jobs = [program.submit("sleep 3", "-l", "machine") for _ in range(3)]
        until(lambda: "running" in statuses(program, jobs), seconds=60, what="a job runs")
        program.stop(signal.SIGKILL)
        assert host.machines()
        program.start()
        until(lambda: statuses(program, jobs) == {"success"}, seconds=90, what="all jobs succeed after the crash")
        until(lambda: host.machines() == [], seconds=90, what="all machines are given back")


def test_a_missing_subscriber_is_told_to_the_job_within_seconds(program: CoordinatorProgram) -> None:
    job = program.submit("true", "-l", "machine")
    until(lambda: "nobody subscribes" in program.run("explain", job).stdout, seconds=30, what="the job says why")
    with serving() as host:
        apply_workflow(program, host.state)
        until(lambda: program.job(job)["status"] == "success", seconds=90, what="recovery is automatic")


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[CoordinatorProgram]:
    """A coordinator whose pauses after failures are short."""
    env = {"KICI_SCALER_PROVISION_BACKOFF_BASE_MS": "2000"}
    with CoordinatorProgram(tmp_path / "data", extra=["--scalers", str(SCALERS)], env=env) as program:
        yield program


def test_a_workflow_that_fails_is_told_to_the_job_within_seconds(hasty: CoordinatorProgram) -> None:
    jobs = {"runsOn": ["provisioner"], "run": "echo the cloud has no quota left; exit 1"}
    document = {"ref": "kici/local-machines", "on": {"kici.scaler.scale-up": {"jobs": {"provision": jobs}}}}
    assert hasty.run("workflow", "apply", "-", given=json.dumps(document)).returncode == 0
    job = hasty.submit("true", "-l", "machine")
    until(lambda: "no quota left" in hasty.run("explain", job).stdout, seconds=30, what="the job says why")
    with serving() as host:
        apply_workflow(hasty, host.state)
        until(lambda: hasty.job(job)["status"] == "success", seconds=60, what="recovery is automatic")


def test_a_webhook_that_is_down_is_told_to_the_job_within_seconds(hasty: CoordinatorProgram, tmp_path: Path) -> None:
    port = free_port()
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    assert hasty.run("admin", "secrets", "set", "hooks:machines", given=SECRET).returncode == 0
    document = {
        "ref": "kici/local-machines",
        "on": ["kici.scaler.scale-up", "kici.scaler.scale-down"],
        "webhook": {"url": f"http://127.0.0.1:{port}/", "secret": "hooks:machines"},
    }
    assert hasty.run("workflow", "apply", "-", given=json.dumps(document)).returncode == 0
    job = hasty.submit("true", "-l", "machine")
    until(lambda: "cannot be reached" in hasty.run("explain", job).stdout, seconds=30, what="the job says why")
    with serving("--port", str(port), "--secret-file", str(secret)) as host:
        until(lambda: hasty.job(job)["status"] == "success", seconds=90, what="recovery is automatic")
        until(lambda: host.machines() == [], seconds=60, what="the machine is given back")
