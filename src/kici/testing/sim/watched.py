"""The real embedded store in memory, that tells of every row which a committed unit added, moved or deleted.

Triggers call functions of this process, so nothing can be written past the watch; what a unit undid is not told.
"""

import functools
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from kici.domain.event import EventState
from kici.domain.ids import AgentId, JobId, RunId
from kici.domain.job import JobStatus, RunStatus
from kici.domain.spawn import SpawnState
from kici.ports.store import Store
from kici.stores.database import Params, Rows, Step
from kici.stores.query import Query
from kici.stores.sqlite.core import IN_MEMORY, Core, Outcome
from kici.stores.sqlite.engine import Inline
from kici.stores.store import SqlStore
from kici.testing.sim_clock import SIM_START

WATCH: Final = Path(__file__).with_name("watch.sql")


class JobChange(NamedTuple):
    """None as a status: there was, or is, no row."""

    job_id: JobId
    run_id: RunId
    name: str
    before: JobStatus | None
    after: JobStatus | None
    agent_before: AgentId | None
    agent_after: AgentId | None
    exit_code: int | None
    signal: int | None
    reason: str | None
    attempts_before: int
    attempts: int


class RunChange(NamedTuple):
    run_id: RunId
    before: RunStatus | None
    after: RunStatus | None


class SpawnChange(NamedTuple):
    agent_id: AgentId
    scaler: str
    before: SpawnState | None
    after: SpawnState | None
    job_id: JobId | None
    reason: str | None
    by: Query | None = None
    """The statement that did it."""


class ReservationChange(NamedTuple):
    agent_id: AgentId
    is_held: bool


class LogChange(NamedTuple):
    job_id: JobId
    stream: int
    offset: int
    data: bytes


class SessionChange(NamedTuple):
    agent_id: AgentId
    before: str | None
    after: str | None


class EventChange(NamedTuple):
    id: str
    name: str
    subject: str | None
    target: str
    before: EventState | None
    after: EventState
    reason: str | None


class TokenMade(NamedTuple):
    agent_id: AgentId | None


class Adoption(NamedTuple):
    agent_id: AgentId
    before: str
    after: str
    is_held: bool
    """Whether the one before still has the agent, and is there."""


class FailureCounted(NamedTuple):
    scaler: str
    agent_id: AgentId


class LeaseChange(NamedTuple):
    holder_before: str | None
    token_before: int | None
    holder: str
    token: int


Change = (
    JobChange
    | RunChange
    | SpawnChange
    | ReservationChange
    | LogChange
    | SessionChange
    | EventChange
    | TokenMade
    | Adoption
    | FailureCounted
    | LeaseChange
)


class WatchedCore(Core):
    """Calls `on_commit(changes)` after each commit that changed a watched row."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        super().__init__(IN_MEMORY, now_ms=now_ms)
        self.on_commit: Callable[[list[Change]], None] = lambda changes: None
        self.units = 0
        self.spoils = ""
        """Statements that take something out of the schema before anything happens."""
        self._query: Query | None = None
        self._changes: list[Change] = []
        self._register(self._writer)

    def migrate(self) -> list[int]:
        """Copy a schema that was made once."""
        _schema().backup(self._writer)
        return []

    def watch(self) -> None:
        """Start; the schema must be there."""
        self._writer.executescript(_watch() + self.spoils)

    def rewrite(self, query: Query, old: str, new: str) -> None:
        """Change a statement: for showing what one of its guards is worth."""
        sql = self._queries[query]
        statements = tuple(statement.replace(old, new) for statement in sql.statements)
        assert statements != sql.statements, f"{query} has no {old!r}"
        self._queries[query] = replace(sql, statements=statements)

    def write(self, units: Sequence[Sequence[Step]]) -> list[Outcome]:
        self._changes = []
        self.units += 1
        outcomes = super().write(units)
        if self._changes and all(isinstance(outcome, list) for outcome in outcomes):
            self.on_commit(self._changes)
        return outcomes

    def _run(self, connection: sqlite3.Connection, query: Query, params: Params) -> Rows:
        self._query = query
        return super()._run(connection, query, params)

    def _register(self, connection: sqlite3.Connection) -> None:
        def job(*row: Any) -> None:
            before, after = _job_status(row[3]), _job_status(row[4])
            self._changes.append(JobChange(row[0], row[1], row[2], before, after, *row[5:]))

        def run(run_id: Any, before: Any, after: Any) -> None:
            self._changes.append(RunChange(run_id, before and RunStatus(before), after and RunStatus(after)))

        def spawn(*row: Any) -> None:
            before, after = row[2] and SpawnState(row[2]), row[3] and SpawnState(row[3])
            self._changes.append(SpawnChange(row[0], row[1], before, after, row[4], row[5], self._query))

        def reservation(agent_id: Any, is_held: Any) -> None:
            self._changes.append(ReservationChange(agent_id, bool(is_held)))

        def event(*row: Any) -> None:
            before = row[4] and EventState(row[4])
            self._changes.append(EventChange(row[0], row[1], row[2], row[3], before, EventState(row[5]), row[6]))

        def plain(kind: Callable[..., Change]) -> Callable[..., None]:
            return lambda *row: self._changes.append(kind(*row))

        connection.create_function("watch_event", 7, event)
        connection.create_function("watch_token", 1, plain(TokenMade))
        connection.create_function("watch_failure", 2, plain(FailureCounted))
        connection.create_function("watch_adoption", 4, plain(Adoption))
        connection.create_function("watch_lease", 4, plain(LeaseChange))
        connection.create_function("watch_job", 12, job)
        connection.create_function("watch_run", 3, run)
        connection.create_function("watch_spawn", 6, spawn)
        connection.create_function("watch_reservation", 2, reservation)
        connection.create_function("watch_log", 4, plain(LogChange))
        connection.create_function("watch_session", 3, plain(SessionChange))


@functools.cache
def _schema() -> sqlite3.Connection:
    """A database that was migrated, for the worlds of this process."""
    core = Core(IN_MEMORY, now_ms=lambda: SIM_START)
    _ = core.migrate()
    return core._writer


@functools.cache
def _watch() -> str:
    return WATCH.read_text()


def watched_store(core: WatchedCore) -> Store:
    return SqlStore(Inline(core))


def _job_status(text: str | None) -> JobStatus | None:
    return None if text is None else JobStatus(text)
