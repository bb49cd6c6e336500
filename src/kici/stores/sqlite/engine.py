"""Where SQLite's blocking work is done: inline on the caller's loop, or in threads.

Inline runs each unit to its commit before anything else happens: deterministic, for simulation and tests.
Threads are for production: one writes, and commits together whatever has gathered meanwhile; a few read.
"""

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from kici.domain.errors import Bug, StoreDown
from kici.stores.database import Params, Rows, Step
from kici.stores.query import Query
from kici.stores.sqlite.core import Core, Outcome

T = TypeVar("T")

UNITS_PER_COMMIT_MAX: Final = 256
UNITS_WAITING_MAX: Final = 20_000
READERS: Final = 2
CLOSED: Final = "the embedded store is closed"


class Inline:
    """A database whose work is done where it is asked for."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._closed = False

    async def read(self, query: Query, params: Params, *, told_apart_by: str | None = None) -> Rows:
        del told_apart_by  # there is no way to the server to save
        self._check_open()
        return self._core.read(query, params)

    async def unit(self, steps: Sequence[Step]) -> list[Rows] | None:
        self._check_open()
        (outcome,) = self._core.write([steps])
        return _given(outcome)

    async def migrate(self) -> list[int]:
        self._check_open()
        return self._core.migrate()

    async def close(self) -> None:
        self._closed = True
        self._core.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreDown(CLOSED)


@dataclass(frozen=True, slots=True)
class _Unit:
    steps: Sequence[Step]
    told: asyncio.Future[Outcome]


@dataclass(frozen=True, slots=True)
class _Errand:
    """Something else for the writing thread to do, between two commits."""

    run: Callable[[], None]
    last: bool = False


class Threads:
    """A database with a writing thread and a few reading ones.  Belongs to the event loop that uses it first."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._inbox: queue.SimpleQueue[_Unit | _Errand] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kici-store-read")
        self._of_thread = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def read(self, query: Query, params: Params, *, told_apart_by: str | None = None) -> Rows:
        del told_apart_by
        return await self._open().run_in_executor(self._readers, self._read, query, params)

    async def unit(self, steps: Sequence[Step]) -> list[Rows] | None:
        if self._inbox.qsize() >= UNITS_WAITING_MAX:
            raise StoreDown(f"{UNITS_WAITING_MAX} writes wait for the embedded store already; try later")
        told: asyncio.Future[Outcome] = self._open().create_future()
        self._inbox.put(_Unit(steps, told))
        return _given(await told)

    async def migrate(self) -> list[int]:
        return await self._by_writer(self._open(), self._core.migrate)

    async def close(self) -> None:
        """Let what was asked for before be written, then stop the threads."""
        if self._closed:
            return
        loop = self._open()
        self._closed = True
        await self._by_writer(loop, self._core.close, last=True)
        await loop.run_in_executor(None, self._readers.shutdown)
        for connection in self._connections:
            connection.close()

    def _open(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise StoreDown(CLOSED)
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            threading.Thread(target=self._write_for_ever, args=(loop,), name="kici-store-write", daemon=True).start()
        assert loop is self._loop, "an embedded store belongs to one event loop"
        return loop

    async def _by_writer(self, loop: asyncio.AbstractEventLoop, work: Callable[[], T], *, last: bool = False) -> T:
        told: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  # handed to the caller, who raises it
                _call(loop, _fail, told, error)
            else:
                _call(loop, _tell, told, result)

        self._inbox.put(_Errand(run, last))
        return await told

    def _write_for_ever(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            batch, errand = self._gather()
            if batch:
                _call(loop, _tell_all, batch, self._write(batch))
            if errand is not None:
                errand.run()
                if errand.last:
                    return

    def _gather(self) -> tuple[list[_Unit], _Errand | None]:
        """Wait for something to do, and take along what waits behind it, up to the next errand."""
        batch: list[_Unit] = []
        item = self._inbox.get()
        while isinstance(item, _Unit):
            batch.append(item)
            if len(batch) == UNITS_PER_COMMIT_MAX or self._inbox.empty():
                return batch, None
            item = self._inbox.get()
        return batch, item

    def _write(self, batch: Sequence[_Unit]) -> list[Outcome]:
        try:
            return self._core.write([unit.steps for unit in batch])
        except Exception as error:  # noqa: BLE001  # the thread must live on; every waiting caller is told
            return [Bug(f"the embedded store's writer failed: {error!r}") for _ in batch]

    def _read(self, query: Query, params: Params) -> Rows:
        connection: sqlite3.Connection | None = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = self._of_thread.connection = self._core.connect(read_only=True)
            self._connections.append(connection)
        return self._core.read(query, params, connection)


def _given(outcome: Outcome) -> list[Rows] | None:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(function, *arguments)


def _tell_all(batch: Sequence[_Unit], outcomes: Sequence[Outcome]) -> None:
    for unit, outcome in zip(batch, outcomes, strict=True):
        _tell(unit.told, outcome)


def _tell(told: asyncio.Future[T], result: T) -> None:
    if not told.done():
        told.set_result(result)


def _fail(told: asyncio.Future[T], error: Exception) -> None:
    if not told.done():
        told.set_exception(error)
