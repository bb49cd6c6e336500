"""How long a piece of work took: by the clock, and in processor time of this process and of the database server.

On a machine that others load, the clock says how long they let us wait; processor time says what the work costs.
"""

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import asyncpg

_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Meter:
    """Seconds of one block."""

    def __init__(self, server: int | None = None) -> None:
        """`server`: process id of the PostgreSQL server, see `server_pid`."""
        self._server = server
        self.wall = self.ours = self.servers = 0.0

    def __enter__(self) -> Self:
        servers = self._of_server()  # looking at it takes a while, which must not count
        self._began = time.perf_counter(), time.process_time(), servers
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = time.perf_counter(), time.process_time(), self._of_server()
        self.wall, self.ours, self.servers = (now - before for now, before in zip(ended, self._began, strict=True))

    def _of_server(self) -> float:
        return 0.0 if self._server is None else server_seconds(self._server)


async def server_pid(url: str) -> int | None:
    """The server's first process; None: it does not run on this machine."""
    connection = await asyncpg.connect(url)
    try:
        backend = await connection.fetchval("SELECT pg_backend_pid()")
        fields = _stat(backend)
        return None if fields is None else int(fields[1])
    finally:
        await connection.close()


def server_seconds(pid: int) -> float:
    """Processor time of a server, its children and those that have ended, in steps of 10 ms."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdigit() else None
        if fields is None:
            continue
        if int(entry.name) == pid:
            ticks += sum(map(int, fields[11:15]))
        elif int(fields[1]) == pid:
            ticks += sum(map(int, fields[11:13]))
    return ticks / _TICKS


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
