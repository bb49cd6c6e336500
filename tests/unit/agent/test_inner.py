"""The first process of a job's container, run as a process of this machine: what it is told, how it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kici.agent.inner import ABANDONED, packed

SECONDS = 20


@contextmanager
def inner(tmp_path: Path, *command: str, **env: str) -> Iterator["subprocess.Popen[bytes]"]:
    argv = [sys.executable, "-m", "kici.agent.inner"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, "OF": "image"}) as process:
        try:
            assert process.stdin is not None
            if command:
                process.stdin.write(packed({"command": command, "env": env, "directory": str(tmp_path)}))
                process.stdin.flush()
            yield process
        finally:
            process.kill()


def run(tmp_path: Path, *command: str, **env: str) -> tuple[int, bytes, bytes]:
    """Exit code and output, its input being held open."""
    with inner(tmp_path, *command, **env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
        return process.wait(timeout=SECONDS), out, err


def test_it_runs_what_it_is_told_where_it_is_told(tmp_path: Path) -> None:
    script = "echo $OF $NAME; pwd; cat; exit 3"
    assert run(tmp_path, "/bin/sh", "-c", script, NAME="job") == (3, f"image job\n{tmp_path}\n".encode(), b"")


def test_a_job_finds_its_program_by_its_own_path(tmp_path: Path) -> None:
    program = tmp_path / "mine"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    assert run(tmp_path, "mine", PATH=f"{tmp_path}:/bin:/usr/bin")[1] == b"mine\n"


def test_a_command_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    assert run(tmp_path, "/no/such") == (127, b"", b"kici: command not found in the image: /no/such\n")
    (tmp_path / "text").write_text("")
    code, _, told = run(tmp_path, str(tmp_path / "text"))
    assert code == 126
    assert b"cannot start" in told


def test_a_job_that_a_signal_ended_is_told_by_its_exit_code(tmp_path: Path) -> None:
    told = b"kici: the job was ended by signal 9\n"
    assert run(tmp_path, "/bin/sh", "-c", "kill -KILL $$") == (128 + signal.SIGKILL, b"", told)


def test_a_signal_is_passed_on_to_the_job(tmp_path: Path) -> None:
    script = "trap 'echo asked; exit 5' TERM; echo ready; while :; do sleep 0.1; done"
    with inner(tmp_path, "/bin/sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.stdout.readline() == b"asked\n"
        assert process.wait(timeout=SECONDS) == 5


@pytest.mark.parametrize("attempt", range(5))
def test_a_signal_that_comes_at_once_is_not_lost(tmp_path: Path, attempt: int) -> None:
    del attempt
    with inner(tmp_path, "/bin/sh", "-c", "kill -TERM $PPID; sleep 60") as process:
        assert process.wait(timeout=SECONDS) == 128 + signal.SIGTERM


def test_it_ends_with_whoever_holds_its_input(tmp_path: Path) -> None:
    with inner(tmp_path, "/bin/sh", "-c", "echo ready; sleep 60") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdin.close()
        assert process.wait(timeout=SECONDS) == ABANDONED


def test_it_ends_when_it_is_told_nothing(tmp_path: Path) -> None:
    with inner(tmp_path) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=SECONDS) == ABANDONED
