"""PostgreSQL through a pool of connections: one statement for each query, one round trip for most units.

The isolation level is READ COMMITTED, whatever the server's default: a statement that waited for a row goes on
with the row as it is then, which the queries rely on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import asyncpg

from kici.domain.errors import StoreDown
from kici.stores.database import Params, Rows, Step
from kici.stores.migrations import bootstrap, migrations
from kici.stores.postgres.connection import WatchedConnection
from kici.stores.postgres.faults import DRIVER_ERRORS, is_undone_by_others, translated
from kici.stores.postgres.together import Together, Unit
from kici.stores.query import Numbered, Query, load, numbered

T = TypeVar("T")
if TYPE_CHECKING:  # the driver's classes are generic for type checkers only
    Connection = asyncpg.pool.PoolConnectionProxy[asyncpg.Record]

HERE: Final = Path(__file__).parent
TRIES_MAX: Final = 5
CONNECT_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 5.0
ANSWER_MARGIN_SECONDS: Final = 5.0
"""Longer than the server's statement timeout, the driver waits for the answer; then the connection is given up."""
STATEMENTS_CACHED_MAX: Final = 1000
PLAN_SECONDS: Final = 60
"""How long a connection keeps a plan, so that one made for empty tables does not last."""
QUERIES_PER_CONNECTION_MAX: Final = 10_000_000


class _Refused(Exception):
    """No error: undoes the transaction of a unit whose guard saw no row."""


class Pool:
    """A database of PostgreSQL.  The pool is made at first use and connects as needed."""

    def __init__(
        self, url: str, *, pool_max: int, acquire_timeout_seconds: float, statement_timeout_seconds: float
    ) -> None:
        self._url = url
        self._pool_max = pool_max
        self._acquire_seconds = acquire_timeout_seconds
        self._statement_seconds = statement_timeout_seconds
        self._statements: dict[Query, Numbered] = {
            query: numbered(sql) for query, sql in load(HERE / "queries").items()
        }
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._together = Together(alone=self._unit, as_one=self._units)

    async def read(self, query: Query, params: Params, *, told_apart_by: str | None = None) -> Rows:
        if told_apart_by is None:
            return await self._read(query, params)
        results = await self._together.unit((Step(query, params, told_apart_by=told_apart_by),))
        assert results is not None, query
        return results[0]

    async def unit(self, steps: Sequence[Step]) -> list[Rows] | None:
        if steps[-1].told_apart_by is not None:
            return await self._together.unit(steps)
        return await self._unit(steps)

    async def _read(self, query: Query, params: Params) -> Rows:
        return await self._with_connection(lambda connection: self._run(connection, query, params))

    async def _unit(self, steps: Sequence[Step]) -> list[Rows] | None:
        if len(steps) == 1:
            (step,) = steps
            rows = await self._read(step.query, step.params)
            return None if step.guard and not rows else [rows]
        return await self._with_connection(lambda connection: self._run_steps(connection, steps))

    async def _units(self, units: Sequence[Unit]) -> list[list[Rows] | None]:
        """Several units that have all but their last step in common, in one transaction."""
        return await self._with_connection(lambda connection: self._run_units(connection, units))

    async def migrate(self) -> list[int]:
        return await self._with_connection(self._migrate)

    async def close(self) -> None:
        """Wait a little for what is under way, then cut it off."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await pool.close()
            except DRIVER_ERRORS:
                pool.terminate()

    async def _with_connection(self, work: "Callable[[Connection], Awaitable[T]]") -> T:
        """Run `work` on a connection, again when others at the same time made the server undo it."""
        for tries_left in reversed(range(TRIES_MAX)):
            try:
                pool = self._pool or await self._open()
                async with pool.acquire(timeout=self._acquire_seconds) as connection:
                    try:
                        return await work(connection)
                    except asyncpg.InternalClientError:
                        connection.terminate()  # nobody knows what it is in the middle of
                        raise
            except DRIVER_ERRORS as error:
                if _is_cancelled():  # giving back a connection that is cut in silence fails, and would hide it
                    raise asyncio.CancelledError from error
                if not (tries_left and is_undone_by_others(error)):
                    raise translated(error) from error
        raise AssertionError("the last try returns or raises")

    async def _open(self) -> "asyncpg.Pool[asyncpg.Record]":
        async with self._opening:
            if self._closed:
                raise StoreDown("the store is closed")
            if self._pool is None:
                self._pool = await asyncpg.create_pool(
                    self._url,
                    min_size=0,
                    max_size=self._pool_max,
                    connection_class=WatchedConnection,
                    max_queries=QUERIES_PER_CONNECTION_MAX,
                    timeout=CONNECT_SECONDS,
                    command_timeout=self._statement_seconds + ANSWER_MARGIN_SECONDS,
                    statement_cache_size=STATEMENTS_CACHED_MAX,
                    max_cached_statement_lifetime=PLAN_SECONDS,
                    reset=_leave_as_it_is,
                    server_settings=session_settings(self._statement_seconds),
                )
            return self._pool

    async def _run_steps(self, connection: "Connection", steps: Sequence[Step]) -> list[Rows] | None:
        results: list[Rows] = []
        try:
            async with connection.transaction():
                for query, several in groupby(steps, key=lambda step: step.query):
                    alike = list(several)
                    if len(alike) > 1 and self._statements[query].answers_nothing:
                        results += await self._run_silently(connection, query, [step.params for step in alike])
                        continue
                    for step in alike:
                        rows = await self._run(connection, query, step.params)
                        if step.guard and not rows:
                            raise _Refused
                        results.append(rows)
        except _Refused:
            return None
        return results

    async def _run_units(self, connection: "Connection", units: Sequence[Unit]) -> list[list[Rows] | None]:
        if len(units[0]) == 1:
            return [[rows] for rows in await self._run_many(connection, [unit[0] for unit in units])]
        results: list[list[Rows] | None] = [[] for _ in units]
        async with connection.transaction():
            for place in range(len(units[0])):
                going = [number for number, result in enumerate(results) if result is not None]
                rows = await self._run_many(connection, [units[number][place] for number in going])
                for number, found in zip(going, rows, strict=True):
                    results[number] = _with_step(results[number], units[number][place], found)
        return results

    async def _run_many(self, connection: "Connection", steps: Sequence[Step]) -> Sequence[Rows]:
        """Rows of each of these steps, which run one query one after the other, in one round trip."""
        if not steps:
            return ()
        query, column = steps[0].query, steps[0].told_apart_by
        if column is None:
            return [await self._run(connection, query, steps[0].params)] * len(steps)
        statement = self._statements[query]
        values = [[step.params[name] for name in statement.parameters] for step in steps]
        found: dict[object, list[asyncpg.Record]] = {step.params[column]: [] for step in steps}
        for row in await connection.fetchmany(statement.text, values):
            found[row[column]].append(row)
        return [found[step.params[column]] for step in steps]

    async def _run_silently(self, connection: "Connection", query: Query, each: Sequence[Params]) -> list[Rows]:
        """Run a query that answers nothing several times, in one round trip."""
        statement = self._statements[query]
        await connection.executemany(
            statement.text, [[params[name] for name in statement.parameters] for params in each]
        )
        return [[] for _ in each]

    async def _run(self, connection: "Connection", query: Query, params: Params) -> Rows:
        statement = self._statements[query]
        return await connection.fetch(statement.text, *(params[name] for name in statement.parameters))

    async def _migrate(self, connection: "Connection") -> list[int]:
        """Apply what is missing.  Another migrator waits for the lock, and then finds nothing missing."""
        applied = []
        async with connection.transaction():
            await connection.execute(bootstrap(HERE / "migrations"))
            known = {row["number"] for row in await self._run(connection, Query.MIGRATIONS_APPLIED, {})}
            for migration in migrations(HERE / "migrations"):
                if migration.number not in known:
                    await connection.execute(migration.script)
                    params: Params = {"number": migration.number, "name": migration.name}
                    await self._run(connection, Query.RECORD_MIGRATION, params)
                    applied.append(migration.number)
        return applied


def _with_step(results: list[Rows] | None, step: Step, rows: Rows) -> list[Rows] | None:
    """The results of a unit after one more step; None: a guard ended it."""
    if results is None or (step.guard and not rows):
        assert not results, f"{step.query} is a guard, but not the first step: it cannot be undone alone"
        return None
    return [*results, rows]


async def _leave_as_it_is(connection: object) -> None:
    """Nothing in a session changes, so that giving a connection back costs no round trip."""


def session_settings(statement_seconds: float) -> dict[str, str]:
    """What a connection asks of the server."""
    timeout_ms = str(int(statement_seconds * 1000))
    return {
        "application_name": "kici",
        "default_transaction_isolation": "read committed",
        "statement_timeout": timeout_ms,
        "idle_in_transaction_session_timeout": timeout_ms,
        # Statistics lag behind a queue that grows: no plan may rest on them (see `queries/jobs.sql`).
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
        "jit": "off",
    }


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
