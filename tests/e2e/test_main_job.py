"""The main job as a person at a terminal sees it."""

import time

import pytest

from kici.testing.programs import CoordinatorProgram, until

pytestmark = pytest.mark.timeout(120)


def test_runs_a_command_and_exits_with_its_code(kici: CoordinatorProgram) -> None:
    done = kici.run("run", "-l", "linux", "--", "sh", "-c", "echo hi; echo oh >&2; exit 3")
    assert (done.stdout, done.returncode) == ("hi\n", 3)
    assert "oh\n" in done.stderr
    until(kici.is_clean, seconds=60, what="nothing is left of the agent")
    until(lambda: kici.admin("agents") == [], seconds=60, what="nobody looks after any agent")


def test_a_label_that_nobody_has_is_named_at_once(kici: CoordinatorProgram) -> None:
    job = kici.submit("true", "-l", "linux", "-l", "gpu")
    done = kici.run("explain", job)
    assert "gpu" in done.stdout
    assert "local" in done.stdout


def test_timeout_cancel_and_unknown_program_have_their_codes(kici: CoordinatorProgram) -> None:
    assert kici.run("run", "--timeout", "1", "--", "sleep", "60").returncode == 124
    assert kici.run("run", "--", "no-such-program-anywhere").returncode == 127
    job = kici.submit("sleep 60")
    until(lambda: kici.job(job)["status"] == "running", seconds=60, what="the job runs")
    assert kici.run("cancel", job).returncode == 0
    until(lambda: kici.job(job)["status"] == "cancelled", seconds=60, what="the job is cancelled")
    until(kici.is_clean, seconds=60, what="nothing is left of the agents")


def test_a_job_killed_by_a_signal_exits_with_128_and_its_number(kici: CoordinatorProgram) -> None:
    assert kici.run("run", "--", "sh", "-c", "kill -9 $$").returncode == 137


def test_output_is_byte_exact(kici: CoordinatorProgram) -> None:
    job = kici.submit("seq 1 20000; printf 'no newline at the end'")
    until(lambda: kici.job(job)["status"] == "success", seconds=60, what="the job ends")
    assert kici.output(job) == "".join(f"{n}\n" for n in range(1, 20001)) + "no newline at the end"


@pytest.mark.spec("T3.8")
def test_a_secret_reaches_the_step_masked_in_its_output(kici: CoordinatorProgram) -> None:
    stored = kici.run("admin", "secrets", "set", "deploy:token", given="hunter2-very-secret")
    assert stored.returncode == 0, stored.stderr
    done = kici.run("run", "--secret", "TOKEN=deploy:token", "--", "sh", "-c", 'echo "${#TOKEN} $TOKEN"')
    assert done.stdout == "19 ***\n"
    assert b"hunter2" not in b"".join(path.read_bytes() for path in kici.data_dir.glob("kici.db*"))


@pytest.mark.spec("T7.5")
def test_force_kills_a_job_that_ignores_being_told_to_stop(kici: CoordinatorProgram) -> None:
    job = kici.submit("trap '' TERM; echo deaf; while :; do sleep 0.1; done")
    until(lambda: "deaf" in kici.output(job), seconds=60, what="the job runs, and is deaf")
    assert kici.run("cancel", job).returncode == 0
    time.sleep(1)
    assert kici.job(job)["status"] == "cancelling"
    assert kici.run("cancel", job, "--force").returncode == 0
    until(lambda: kici.job(job)["status"] == "cancelled", seconds=5, what="the job is killed at once")
