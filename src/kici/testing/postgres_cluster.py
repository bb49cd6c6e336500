"""A PostgreSQL of our own, made of what is installed: below a folder, started, stopped, killed, thrown away."""

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kici.testing import engines
from kici.testing.ports import free_port

START_SECONDS: Final = 30.0


class Cluster:
    """Files and a server below a folder.  Runs as user postgres when we are root, which the server refuses."""

    def __init__(self, folder: Path, *, address: str = "127.0.0.1", port: int = 0, within: Sequence[str] = ()) -> None:
        """`within`: a command that runs another one somewhere else, in its own process (in a network namespace)."""
        self.folder = folder
        self._data = folder / "data"
        self._within = tuple(within)
        found = engines.postgres_bin()
        assert found is not None, engines.absence("postgres")
        self._bin = found
        self._port = port or free_port()
        self.url = f"postgresql://postgres@{address}:{self._port}/postgres"
        self.local_url = f"postgresql://postgres@/postgres?host={folder}&port={self._port}"
        """By a Unix socket: from any network namespace."""

    def make(self, settings: Mapping[str, str]) -> None:
        if os.getuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        self._run("initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "-N", "-E", "UTF8", "--no-instructions")
        lines = {**settings, "port": str(self._port), "unix_socket_directories": str(self.folder)}
        with (self._data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in lines.items())

    def lets_in(self, network: str) -> None:
        """Whoever connects from there; before the start."""
        with (self._data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {network} trust\n")

    def start(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-l", self.folder / "log", "-w", "start")

    def start_after_kill(self) -> None:
        """Start as soon as the processes of the server that was killed let it."""
        ends_at = time.monotonic() + START_SECONDS
        while True:
            try:
                self.start()
            except AssertionError:
                assert time.monotonic() < ends_at, "PostgreSQL does not start again"
                time.sleep(0.2)
            else:
                return

    def stop(self) -> None:
        if (self._data / "postmaster.pid").exists():
            self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def kill(self) -> None:
        """As kill -9 of the server's first process."""
        pid = int((self._data / "postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, signal.SIGKILL)

    def _run(self, program: str, *arguments: str | Path) -> None:
        command: Sequence[str | Path] = (self._bin / program, *arguments)
        if os.getuid() == 0:
            command = ("setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups", *command)
        done = subprocess.run(
            (*self._within, *command),
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            # Not pipes: the server inherits them and would hold them open.
            stdout=(output := (self.folder / "output").open("w+")),
            stderr=subprocess.STDOUT,
            check=False,
        )
        with output:
            output.seek(0)
            assert done.returncode == 0, f"{program} failed: {output.read()}"
