"""Rows of agents on the hosts of workers: whose they are, as the store has it.

A spawn of a worker belongs to a coordinator that is linked to it.  One whose owner has not been for a while (it
died, stopped, or lost the link) is taken over by one that is; the one that lost it lets go.  Agents that no row
explains are ended.  A worker that was revoked is given up with everything that it holds.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kici.decide.admit import Book
from kici.domain.errors import KiciError, StoreDown
from kici.domain.ids import AgentId, InstanceId, Instant
from kici.domain.spawn import Reservation, ScaleDownReason, Spawn
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.store import InstanceStore, SpawnStore
from kici.ports.workers import WorkerStore
from kici.services.recovery import take_up
from kici.services.spawn_book import SpawnBook
from kici.services.store_outages import sits_out_outages
from kici.services.teardown import Teardown
from kici.services.workers_host import RemoteHost

FRESH_MS: Final = 60_000
"""A link that its coordinator has not confirmed for so long is gone."""
ROWS_MAX: Final = 100_000
POOLS_MS: Final = 40_000
"""How long a coordinator that is gone keeps others from filling the warm pools of a worker."""


class Store(SpawnStore, WorkerStore, InstanceStore, Protocol):
    """What this reads and writes."""

    async def database_now(self) -> Instant: ...


class WorkerRows:
    def __init__(
        self,
        *,
        store: Store,
        book: Book,
        spawns: SpawnBook,
        teardown: Teardown,
        clock: Clock,
        instance_id: InstanceId,
        compute_ended: Callable[[AgentId, str], None],
    ) -> None:
        """`compute_ended(agent id, how)`: proof of death of an agent, wherever it was made."""
        self._store = store
        self._book = book
        self._spawns = spawns
        self._teardown = teardown
        self._clock = clock
        self._instance_id = instance_id
        self._compute_ended = compute_ended
        self._in_doubt: set[str] = set()
        """Workers of which rows may have become ours without our knowledge: the store's answer was lost."""

    def expect(self, host: RemoteHost, rows: Iterable[Spawn]) -> None:
        """After a restart: rows of a worker that is not linked yet.  They stand until it tells."""
        for row in rows:
            host.backend_of(row).expect([row])
            self._track(row, host, self._clock.now())

    async def confirm(self, hosts: Iterable[RemoteHost]) -> frozenset[str]:
        """Say that these are linked, still.  Those of them that are no workers any more."""
        linked = [host.worker_id for host in hosts]
        if not linked:
            return frozenset()
        return frozenset(linked) - await self._store.link_workers(linked, self._instance_id)

    async def fillable(self, worker_ids: Iterable[str]) -> frozenset[str]:
        """Those of these workers whose warm pools are ours to fill: a lease says so, and goes on while we look."""
        found = set()
        for worker_id in worker_ids:
            lease = await self._store.acquire_lease(f"pools {worker_id}", self._instance_id, ttl_ms=POOLS_MS)
            if lease is not None:
                found.add(worker_id)
        return frozenset(found)

    async def unlink(self, worker_ids: Iterable[str]) -> None:
        """These are linked here no more: others need not wait to look after their agents."""
        with sits_out_outages("unlinking workers"):
            for worker_id in worker_ids:
                await self._store.unlink_worker(worker_id, self._instance_id)

    async def is_revoked(self, host: RemoteHost) -> bool:
        """Whether one that is not linked is no worker any more."""
        worker = await self._store.worker(host.worker_id)
        return worker is None or worker.revoked_at is not None

    async def take_over(self, host: RemoteHost) -> None:
        """Look after agents of the worker that nobody who is linked to it looks after."""
        async with host.settling:
            await self._take_over(host)

    async def _take_over(self, host: RemoteHost) -> None:
        was_in_doubt = host.worker_id in self._in_doubt
        self._in_doubt.add(host.worker_id)
        rows = await self._store.take_over_worker_spawns(host.worker_id, self._instance_id, fresh_ms=FRESH_MS)
        if was_in_doubt:
            mine = await self._store.spawns(owner=self._instance_id, limit=ROWS_MAX)
            rows = [row for row in mine if row.worker_id == host.worker_id]
        now = await self._store.database_now() if rows else Instant(0)
        for row in rows:
            if self._spawns.get(row.agent_id) is None:
                emit(Event.WORKER_TAKEN_OVER, agent_id=row.agent_id, worker_id=host.worker_id, state=row.state)
                await self._take_up(host, row, now)
        self._in_doubt.discard(host.worker_id)

    def _track(self, row: Spawn, host: RemoteHost, now: Instant) -> None:
        runtime = host.runtime_of(row)
        _ = take_up(row, runtime, spawns=self._spawns, teardown=self._teardown, clock=self._clock, now=now)

    async def _take_up(self, host: RemoteHost, row: Spawn, now: Instant) -> None:
        backend = host.backend_of(row)
        self._book.reserve(
            Reservation(
                agent_id=row.agent_id,
                scaler=row.scaler,
                shape=row.shape,
                machine_pool=row.machine_pool,
                owner_instance_id=self._instance_id,
                reserved_at=row.spawned_at,
            )
        )
        is_known = True
        try:
            is_known = bool(await backend.recover(frozenset({row.agent_id}))) or not host.channel.is_linked
        except KiciError as error:  # it is compared when it is back
            emit(Event.BACKEND_STUCK, level=logging.WARNING, scaler=row.scaler, error=str(error))
        if is_known:
            backend.expect([row])
        self._track(row, host, now)
        host.unexplained.discard(row.agent_id)
        if not is_known:
            self._compute_ended(row.agent_id, f"worker {host.name} holds it no longer")

    async def let_go(self) -> None:
        """Forget what another coordinator has taken over or ended."""
        tracked = [one for one in self._spawns if one.spawn.worker_id is not None and one.is_written]
        if not tracked:
            return
        mine = {row.agent_id for row in await self._store.spawns(owner=self._instance_id, limit=ROWS_MAX)}
        for one in tracked:
            if one.agent_id not in mine and not one.is_ending:
                row = await self._store.spawn(one.agent_id)
                if row is None:  # whoever had it before us has ended it
                    self._teardown.begin(one, ScaleDownReason.SHUTDOWN)
                elif row.owner_instance_id != self._instance_id:
                    emit(Event.SPAWN_LEFT, agent_id=one.agent_id, scaler=one.runtime.name, to=row.owner_instance_id)
                    await self._teardown.forget(one, ScaleDownReason.SHUTDOWN, error=None, ends=False)

    async def explain(self, host: RemoteHost) -> None:
        """End agents of the worker that no row explains."""
        for agent_id in sorted(host.unexplained):
            if await self._store.spawn(agent_id) is not None:
                host.unexplained.discard(agent_id)  # another coordinator's
                continue
            try:
                found = await host.reap(agent_id)
            except KiciError as error:
                emit(Event.ORPHANS_LEFT, level=logging.WARNING, worker_id=host.worker_id, error=str(error))
                return
            host.unexplained.discard(agent_id)
            if found:
                emit(Event.WORKER_STRAY, level=logging.WARNING, agent_id=agent_id, worker_id=host.worker_id)

    async def give_up(self, host: RemoteHost, why: str) -> None:
        """The worker is none any more: nothing on its host is ours."""
        host.channel.give_up(f"worker {host.name} {why}")
        try:
            await self.take_over(host)
        except StoreDown as error:
            emit(Event.STORE_DOWN, level=logging.WARNING, worker_id=host.worker_id, error=str(error))
        for tracked in self._spawns:
            if tracked.spawn.worker_id == host.worker_id:
                self._compute_ended(tracked.agent_id, f"its worker {host.name} {why}")
