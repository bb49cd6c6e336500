"""One SQLite database, blocking: units on the one writing connection, queries on reading ones.

WAL with synchronous=FULL: what was committed survives a power cut, and readers never wait for the writer.
Several units share one commit (group commit): each is a savepoint, so that one that fails takes no other with it,
and none of their results is given out before the commit has succeeded.
"""

import functools
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kici.domain.errors import Bug, KiciError
from kici.stores.database import Params, Rows, Step
from kici.stores.migrations import bootstrap, migrations
from kici.stores.query import Query, Sql, load, split_statements
from kici.stores.sqlite.faults import UNIT_ERRORS, down, translated

HERE: Final = Path(__file__).parent
IN_MEMORY: Final = ":memory:"
BUSY_TIMEOUT_SECONDS: Final = 5.0
STATEMENTS_CACHED_MAX: Final = 512
WAL_AUTOCHECKPOINT_PAGES: Final = 4000

Outcome = list[Rows] | None | KiciError | Bug
"""Rows of each step; None when a guard undid the unit; or why it failed."""

NowMs = Callable[[], int]


def wall_now_ms() -> int:
    return time.time_ns() // 1_000_000


@functools.cache
def _queries() -> Mapping[Query, Sql]:
    return load(HERE / "queries")


class Core:
    """`now_ms` is what `now_ms()` means in a statement: the clock of this database."""

    def __init__(self, path: str, *, now_ms: NowMs = wall_now_ms) -> None:
        self._path = path
        self._now_ms = now_ms
        self._queries: dict[Query, Sql] = dict(_queries())
        self._writer = self.connect()

    def connect(self, *, read_only: bool = False) -> sqlite3.Connection:
        """A connection for one thread at a time.  Raises `StoreDown`."""
        try:
            connection = sqlite3.connect(
                self._path,
                timeout=BUSY_TIMEOUT_SECONDS,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=STATEMENTS_CACHED_MAX,
            )
            connection.row_factory = sqlite3.Row
            connection.create_function("now_ms", 0, self._now_ms)
            if not read_only:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_AUTOCHECKPOINT_PAGES}")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA query_only = {int(read_only)}")
        except sqlite3.Error as error:
            raise down(error) from error
        return connection

    def write(self, units: Sequence[Sequence[Step]]) -> list[Outcome]:
        """Run units in order and commit once.  When that fails, every one of them is told so."""
        outcomes: list[Outcome] = []
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            outcomes.extend(self._run_unit(unit) for unit in units)
            self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            self._abandon()
            return [down(error) for _ in units]
        return outcomes

    def read(self, query: Query, params: Params, connection: sqlite3.Connection | None = None) -> Rows:
        """Rows of a query; on the writing connection unless another is given."""
        try:
            return self._run(connection or self._writer, query, params)
        except UNIT_ERRORS as error:
            raise translated(error) from error

    def migrate(self) -> list[int]:
        """Apply what is missing.  Another process that does the same waits, and then finds nothing missing."""
        try:
            self._writer.execute("BEGIN EXCLUSIVE")
            applied = self._migrate_locked()
            self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            self._abandon()
            raise down(error) from error
        return applied

    def close(self) -> None:
        self._writer.close()

    def _migrate_locked(self) -> list[int]:
        self._run_script(bootstrap(HERE / "migrations"))
        known = {row["number"] for row in self._run(self._writer, Query.MIGRATIONS_APPLIED, {})}
        applied = []
        for migration in migrations(HERE / "migrations"):
            if migration.number not in known:
                self._run_script(migration.script)
                params: Params = {"number": migration.number, "name": migration.name}
                self._run(self._writer, Query.RECORD_MIGRATION, params)
                applied.append(migration.number)
        return applied

    def _run_script(self, script: str) -> None:
        for statement in split_statements(script):
            self._writer.execute(statement)

    def _run_unit(self, unit: Sequence[Step]) -> Outcome:
        self._writer.execute("SAVEPOINT unit")
        try:
            results: list[Rows] = []
            for step in unit:
                rows = self._run(self._writer, step.query, step.params)
                if step.guard and not rows:
                    self._undo_unit()
                    return None
                results.append(rows)
        except UNIT_ERRORS as error:
            if not self._writer.in_transaction:
                raise  # SQLite itself gave up the whole transaction: nobody's writes are left
            self._undo_unit()
            return translated(error)
        self._writer.execute("RELEASE unit")
        return results

    def _run(self, connection: sqlite3.Connection, query: Query, params: Params) -> Rows:
        """Rows of all statements of a query.  When the first returns none, the rest is left out."""
        first, *rest = self._queries[query].statements
        rows: list[sqlite3.Row] = connection.execute(first, params).fetchall()
        if rest and rows:
            for statement in rest:
                rows += connection.execute(statement, params).fetchall()
        return rows

    def _undo_unit(self) -> None:
        self._writer.execute("ROLLBACK TO unit")
        self._writer.execute("RELEASE unit")

    def _abandon(self) -> None:
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")
