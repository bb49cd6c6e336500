"""The programs themselves, started as a person would start them, for tests from the outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from kici.ports.processes import MARK
from kici.testing.ports import free_port

KICI: Final = (sys.executable, "-m", "kici")
START_SECONDS: Final = 60.0
EXIT_SECONDS: Final = 75.0
"""An orderly end waits for a store that does not answer, twice fifteen seconds, and as long for computes to end."""
_OURS: Final = ("KICI_", "XDG_STATE_HOME")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without any setting of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**kept, **more}


def until(condition: Callable[[], object], *, seconds: float, what: str) -> None:
    """Ask again and again; fails naming `what`."""
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, f"within {seconds:g} s did not happen: {what}"
        time.sleep(0.05)


class CoordinatorProgram:
    """`kici up` on a data directory, and the command line that talks to it."""

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        extra: Sequence[str] = (),
        env: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        """`within`: a command that runs another one somewhere else, in its own process (in a network namespace)."""
        self._within = tuple(within)
        self.data_dir = data_dir
        self.port = port or free_port()  # the same after each start
        self._extra = tuple(extra)
        self._env = environment(KICI_DATA_DIR=str(data_dir), **(env or {}))
        self.process: subprocess.Popen[bytes] | None = None
        self.log = data_dir.with_suffix(".log")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop(signal.SIGTERM, seconds=EXIT_SECONDS)

    def start(self) -> None:
        """Start it, and return when it serves."""
        (self.data_dir / "endpoint").unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._within, *KICI, "up", "--port", str(self.port), *self._extra],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process = self.process
        until(
            lambda: (self.data_dir / "endpoint").exists() or process.poll() is not None,
            seconds=START_SECONDS,
            what="the coordinator serves",
        )
        assert process.poll() is None, self.log.read_text()[-4000:]
        self.port = int((self.data_dir / "endpoint").read_text().rsplit(":", 1)[1])

    def stop(self, number: signal.Signals, *, seconds: float = EXIT_SECONDS) -> float:
        """Signal it and wait for its end.  Seconds that took."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(seconds)
        return time.monotonic() - began

    def command(self, *words: str) -> list[str]:
        return [*self._within, *KICI, *words]

    def run(self, *words: str, given: str = "", seconds: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """One command of the CLI, to its end; `given` is its standard input."""
        return subprocess.run(
            self.command(*words),
            env=self._env,
            input=given,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def background(self, *words: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self.command(*words),
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def submit(self, script: str, *options: str) -> str:
        """The id of a new job that runs a shell script."""
        done = self.run("run", "-d", *options, "--", "sh", "-c", script)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, Any]:
        done = self.run("job", job_id, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def jobs(self, limit: int = 50) -> dict[str, dict[str, Any]]:
        done = self.run("jobs", "--limit", str(limit), "--json")
        assert done.returncode == 0, done.stderr
        return {job["id"]: job for job in json.loads(done.stdout)}

    def admin(self, *words: str) -> Any:
        done = self.run("admin", *words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def output(self, job_id: str) -> str:
        done = self.run("logs", job_id)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def agent_processes(self) -> list[int]:
        """Processes that carry the mark of this data directory."""
        return sorted(marked(str(self.data_dir)))

    def is_clean(self) -> bool:
        """Nothing is left of any agent: no process, record or folder."""
        leftovers = [path for folder in ("agents", "work") for path in (self.data_dir / folder).glob("*")]
        return not self.agent_processes() and not leftovers


def marked(folder: str) -> Iterator[int]:
    """Living processes (Linux) that carry the mark of an agent of this data directory."""
    needle = f"{MARK}={folder}/".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if needle in environ and state != b"Z":
            yield int(entry.name)
