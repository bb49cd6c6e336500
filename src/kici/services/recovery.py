"""After a restart: take up again what the previous process left on this host.

A restart costs no running job.  Rows of this instance are matched with what backends find alive; what lives is
tracked again with its caps and its job's grace, what does not is settled with the reason, and what no row explains
is reclaimed.  Ends before agents are accepted; graces are counted from when they are.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Protocol

from kici.decide.admit import Book
from kici.decide.dispatch import LossCause
from kici.decide.ledger import Kind, kind_of
from kici.decide.prune import EVENT
from kici.domain.errors import KiciError
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName, is_scaler_agent
from kici.domain.job import STARTED, Job
from kici.domain.spawn import Reservation, ScaleDownReason, Spawn, SpawnState
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.store import AgentStore, JobStore, SpawnStore
from kici.services.absences import Absences
from kici.services.machine_pools import MachinePools
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.services.spawn_book import SpawnBook, TrackedSpawn
from kici.services.teardown import Teardown

ROWS_MAX: Final = 100_000


class Store(JobStore, SpawnStore, AgentStore, Protocol):
    """What recovery reads and writes."""

    async def database_now(self) -> Instant: ...


class Recovery:
    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        book: Book,
        machine_pools: MachinePools,
        spawns: SpawnBook,
        teardown: Teardown,
        absences: Absences,
        clock: Clock,
        instance_id: InstanceId,
        grace_ms: Callable[[bool], int],
        retired: Callable[[Spawn], ScalerRuntime | None],
    ) -> None:
        """`retired(row)` makes a scaler that left the file able to look after its agents; None: it cannot here."""
        self._store = store
        self._fleet = fleet
        self._book = book
        self._machine_pools = machine_pools
        self._spawns = spawns
        self._teardown = teardown
        self._absences = absences
        self._clock = clock
        self._instance_id = instance_id
        self._grace_ms = grace_ms
        self._retired = retired
        self._began_at = Instant(0)
        """By the clock of the store, which also says when a spawn began."""
        self._dead: dict[AgentId, str] = {}
        self._waiting: set[AgentId] = set()
        self.of_workers: Callable[[list[Spawn]], None] = lambda rows: None
        """Set by the composition root: rows of agents on the hosts of workers, which will tell what lives of them."""

    async def computes(self) -> None:
        """Before agents are accepted: own spawn rows against what this host holds."""
        await self._store.delete_sessions_of(self._instance_id)
        rows = await self._store.spawns(owner=self._instance_id, limit=ROWS_MAX)
        agents = {row.agent_id for row in rows}
        for reservation in await self._store.reservations(owner=self._instance_id, limit=ROWS_MAX):
            if reservation.agent_id in agents:  # else another coordinator has adopted its machine
                self._book.reserve(reservation)
        self._began_at = await self._store.database_now()
        # Before anything is taken down: what is given back later must not come after this.
        await self._machine_pools.restore(self._held(rows))
        self.of_workers([row for row in rows if row.worker_id is not None])
        by_scaler: dict[ScalerName, list[Spawn]] = {name: [] for name in self._fleet.runtimes}
        for row in rows:
            if row.worker_id is None:
                by_scaler.setdefault(row.scaler, []).append(row)
        for name, mine in by_scaler.items():
            runtime = self._fleet.runtimes.get(name) or self._retired(mine[0])
            if runtime is not None:
                await self._scaler(runtime, mine)
                continue
            for row in mine:
                await self._forget(row, "its scaler is no longer configured")

    def _held(self, rows: list[Spawn]) -> Iterator[tuple[Reservation, Kind]]:
        for row in rows:
            reservation = self._book.reservations.get(row.agent_id)
            if reservation is not None:
                yield reservation, kind_of(row.backend_type, runs_job_image=row.job_image)

    async def _scaler(self, runtime: ScalerRuntime, rows: list[Spawn]) -> None:
        """Take up what lives of one scaler.  One that left the file while nobody looked lets its jobs finish."""
        may_live = (row.agent_id for row in rows if row.backend_type != EVENT or row.emitted_at is not None)
        alive = await self._alive(runtime, frozenset(may_live))
        for row in rows:
            if row.agent_id not in alive:
                await self._forget(row, "its compute is gone since the restart")
                continue
            take_up(row, runtime, spawns=self._spawns, teardown=self._teardown, clock=self._clock, now=self._began_at)
        try:
            orphans = await runtime.backend.cleanup_orphans(frozenset(alive))
        except KiciError as error:
            emit(Event.ORPHANS_LEFT, level=logging.WARNING, scaler=runtime.name, error=str(error))
        else:
            if orphans:
                emit(Event.ORPHANS_REMOVED, level=logging.WARNING, scaler=runtime.name, count=orphans)

    async def _alive(self, runtime: ScalerRuntime, known: frozenset[AgentId]) -> set[AgentId]:
        """Which of these live.  When the host cannot be looked at, all: their graces and deadlines will tell."""
        try:
            return {compute.agent_id for compute in await runtime.backend.recover(known)}
        except KiciError as error:
            emit(Event.BACKEND_STUCK, level=logging.ERROR, scaler=runtime.name, error=str(error))
            return set(known)

    async def _forget(self, row: Spawn, why: str) -> None:
        """No compute: the row, its reservation and its claim on the job go; the job is settled by `jobs`."""
        emit(Event.SPAWN_LOST, level=logging.WARNING, agent_id=row.agent_id, scaler=row.scaler, reason=why)
        self._dead[row.agent_id] = why
        self._book.release(row.agent_id)
        await self._machine_pools.release(row.machine_pool, row.agent_id)
        await self._store.delete_spawn(row.agent_id)

    async def jobs(self, is_connected: Callable[[AgentId], bool]) -> None:
        """Once agents are accepted: jobs of this instance wait for their agents to come back with them."""
        by_agent: dict[AgentId, list[Job]] = {}
        for job in await self._store.jobs_owned_by(self._instance_id, limit=ROWS_MAX):
            if job.agent_id is not None:
                by_agent.setdefault(job.agent_id, []).append(job)
        for agent_id, jobs in by_agent.items():
            if not is_connected(agent_id):  # one that is back, or was made since, is nobody to wait for
                await self._agent(agent_id, jobs)
        self._waiting = {
            tracked.agent_id
            for tracked in self._spawns
            if tracked.spawn.state is SpawnState.REGISTERED and tracked.agent_id not in self._absences
        }

    async def _agent(self, agent_id: AgentId, jobs: list[Job]) -> None:
        """A static agent that has only an offer is not waited for: the queue sweep watches its deadline."""
        tracked = self._spawns.get(agent_id)
        dead = self._dead.get(agent_id)
        # One that another coordinator made is as much a made one: its maker hears of its end from here.
        scaler_managed = tracked is not None or dead is not None or is_scaler_agent(agent_id)
        if scaler_managed or any(job.status in STARTED for job in jobs):
            await self._absences.begin(
                agent_id,
                scaler_managed=scaler_managed,
                cause=LossCause.CONNECTION_CLOSED if dead is None else LossCause.COMPUTE_ENDED,
                how="the coordinator restarted" if dead is None else dead,
                grace_ms=self._grace_ms(scaler_managed),
            )

    async def expire(
        self, is_connected: Callable[[AgentId], bool], is_elsewhere: Callable[[AgentId], Awaitable[bool]]
    ) -> None:
        """A grace after the restart: take down computes whose agents had no job and did not come back."""
        for agent_id in sorted(self._waiting):
            tracked = self._spawns.get(agent_id)
            if tracked is None or is_connected(agent_id) or agent_id in self._absences:
                continue  # it came, and what it lost since has a grace of its own
            if not await is_elsewhere(agent_id):
                self._teardown.begin(tracked, ScaleDownReason.SHUTDOWN)


def take_up(
    row: Spawn, runtime: ScalerRuntime, *, spawns: SpawnBook, teardown: Teardown, clock: Clock, now: Instant
) -> TrackedSpawn:
    """Look after a spawn by its row: its compute was made by a program before this one.

    `now`: by the clock of the store, which also says when the spawn began.
    """
    tracked = TrackedSpawn(spawn=row, runtime=runtime, is_settled=True, is_written=True)
    tracked.started_at = clock.monotonic() - max(0, now - row.spawned_at) / 1000
    spawns.add(tracked)
    if row.state is SpawnState.ENDING:
        teardown.begin(tracked, ScaleDownReason.SHUTDOWN)
    elif row.state is SpawnState.REGISTERED:
        runtime.backend.mark_registered(row.agent_id)
    emit(Event.SPAWN_RECOVERED, agent_id=row.agent_id, scaler=row.scaler, state=row.state)
    return tracked
