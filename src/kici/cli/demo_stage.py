"""Where `kici demo` plays: a coordinator of its own in a directory of its own, and what is left when it has gone."""

import os
import shutil
import signal
import subprocess  # noqa: TID251  # a person's hand: the demo starts the program as a person would
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kici.adapters.data_dir import ENDPOINT, OWNER_TOKEN
from kici.cli.client import Client
from kici.cli.errors import CliError
from kici.cli.pausing import monotonic, pause

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 30.0
PASS_SECONDS: Final = 0.05
UNROUTABLE_GRACE_MS: Final = 3000
LOG: Final = "coordinator.log"
LOG_LINES: Final = 15


class Stage:
    """Entering starts the coordinator; leaving ends it whatever happened, and removes the directory."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.folder = Path(tempfile.mkdtemp(prefix="kici-demo-"))
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def client(self) -> Client:
        return Client(self._line(ENDPOINT), self._line(OWNER_TOKEN))

    def stop(self) -> int:
        """Stop the coordinator as an operator would; its exit code."""
        assert self._child is not None
        self.client.post("/api/v1/admin/stop")
        return self._child.wait(STOP_SECONDS)

    def log_tail(self) -> str:
        """The last lines that the coordinator logged."""
        lines = (self.folder / LOG).read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def left_behind(self) -> list[str]:
        """What should not be there any more once the coordinator has stopped: processes and files of jobs."""
        files = [path for name in ("agents", "work") for path in sorted((self.folder / name).rglob("*"))]
        found = [f"file {path}" for path in files if not path.is_dir()]
        return [*found, *(f"process {pid}: {command}" for pid, command in self._processes())]

    def _processes(self) -> list[tuple[int, str]]:
        """Processes that have our directory in command line or environment, or work in it (Linux only)."""
        mark = os.fsencode(str(self.folder))
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
                where = os.fsencode((entry / "cwd").readlink())
            except OSError:
                continue  # it ended, or is somebody else's
            if mark in command or mark in environment or mark in where:
                found.append((int(entry.name), command.replace(b"\0", b" ").decode(errors="replace").strip()))
        return found

    def _start(self) -> None:
        environ = {
            **{name: value for name, value in self._environ.items() if not name.startswith("KICI_")},
            "KICI_UNROUTABLE_GRACE_MS": str(UNROUTABLE_GRACE_MS),
        }
        command = [sys.executable, "-m", "kici", "up", "--port", "0", "--data-dir", str(self.folder)]
        with (self.folder / LOG).open("wb") as log:
            self._child = subprocess.Popen(  # noqa: S603  # this very program
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
            )
        until = monotonic() + START_SECONDS
        while not (self.folder / ENDPOINT).exists():
            if self._child.poll() is not None:
                raise CliError(f"the coordinator did not start:\n{self.log_tail()}")
            if monotonic() > until:
                raise CliError(f"the coordinator was not ready after {START_SECONDS:g} s:\n{self.log_tail()}")
            pause(PASS_SECONDS)

    def _end(self) -> None:
        child = self._child
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:  # as above
                child.kill()
                child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _line(self, name: str) -> str:
        return (self.folder / name).read_text().strip()
