"""Agents of a worker's host: made, ended, taken up again after a restart; within the host's own caps.

An agent is recorded before it is made, and the record goes when nothing is left of it.  What a backend cannot look
at after a restart counts as alive until it can.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Never

import msgspec

from kici.decide.admit import Active, Book, admit
from kici.decide.ledger import Kind, kind_of
from kici.domain.errors import KiciError, NoCapacity, Permanent, Retryable
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.domain.labels import set_key
from kici.domain.resources import Shape
from kici.domain.say import say
from kici.domain.spawn import Reservation, ScaleDownReason
from kici.domain.verdict import AtCap
from kici.kit.finish import finish
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.ports.backend import Compute, SpawnEvent, SpawnEventType, SpawnOrder
from kici.ports.clock import Clock
from kici.ports.live_vms import BootDataBackend
from kici.ports.workers import WorkerFull
from kici.services.machine_pools import MachinePools
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.services.worker_faults import fault_of
from kici.services.worker_holdings import Holding, Holdings
from kici.services.worker_records import HostRecord, HostRecords

RELEASE_SECONDS: Final = 30.0
LOOK_AGAIN_SECONDS: Final = 10.0

Retired = Callable[[HostRecord], ScalerRuntime | None]
"""A scaler that left the file, able to look after its agents; None: it cannot here."""


class HostAgents:
    def __init__(
        self,
        *,
        host_id: InstanceId,
        fleet: Fleet,
        pools: MachinePools,
        records: HostRecords,
        supervisor: Supervisor,
        clock: Clock,
        url_for: Callable[[ScalerRuntime, AgentId], str],
        retired: Retired,
    ) -> None:
        """`url_for(scaler, agent)`: where the agent finds coordinators."""
        self.local = fleet
        self.holdings = Holdings()
        self.book = Book()
        self._host_id = host_id
        self._pools = pools
        self._records = records
        self._supervisor = supervisor
        self._clock = clock
        self._url_for = url_for
        self._retired = retired
        self._blind: dict[ScalerName, ScalerRuntime] = {}
        """Scalers whose host could not be looked at yet."""
        self.is_leaving = False
        self.progressed: Callable[[Holding, SpawnEvent], None] = lambda holding, event: None
        """Set by the composition root: told of the progress of spawns."""
        self.gone: Callable[[AgentId, str], None] = lambda agent_id, how: None
        """Set by the composition root: told of computes that ended by themselves."""
        self.changed: Callable[[], None] = lambda: None
        """Set by the composition root: told when more or less is in use."""

    @property
    def host_id(self) -> InstanceId:
        return self._host_id

    @property
    def fleet(self) -> Fleet:
        """Of the scalers file that is in force; scalers that left it stay until their last agent is gone."""
        return self.local

    # ------------------------------------------------------------------ start and end

    async def recover(self) -> None:
        """Take up what the program before left.  Before any coordinator is told anything."""
        by_scaler: dict[ScalerName, list[HostRecord]] = {name: [] for name in self.fleet.runtimes}
        for record in self._records.all():
            by_scaler.setdefault(record.scaler, []).append(record)
            self.book.reserve(record.reservation(self._host_id))
        await self._pools.restore(self._reserved(by_scaler))
        for name, records in by_scaler.items():
            runtime = self.fleet.runtimes.get(name) or self._retired(records[0])
            for record in records:
                if runtime is None:
                    self._lost(record, "its scaler is no longer configured")
                else:
                    self._take_up(record, runtime)
            if runtime is not None:
                await self._look(name, runtime)

    async def run(self) -> Never:
        """Look again at what could not be looked at.  Leave by cancellation."""
        while True:
            await self._clock.sleep(LOOK_AGAIN_SECONDS)
            for name, runtime in list(self._blind.items()):
                await self._look(name, runtime)

    async def leave(self, *, keep_agents: bool) -> None:
        """The program ends.  `keep_agents`: what runs lives on, and the next start takes it up."""
        self.is_leaving = True
        if keep_agents:
            for runtime in self._runtimes():
                await runtime.backend.release_all()
            return
        async with asyncio.TaskGroup() as group:
            for holding in self.holdings:
                group.create_task(self._end(holding), name=f"end {holding.agent_id}")
        await self._pools.leave(self.holdings.ids())
        async with asyncio.TaskGroup() as group:
            for runtime in self._runtimes():
                group.create_task(self._shut_down(runtime), name=f"stop {runtime.name}")

    async def _shut_down(self, runtime: ScalerRuntime) -> None:
        """What it keeps beside its agents goes too."""
        try:
            await runtime.backend.shutdown_all()
        except KiciError as error:
            emit(Event.BACKEND_STUCK, level=logging.ERROR, scaler=runtime.name, error=str(error))

    async def _end(self, holding: Holding) -> None:
        try:
            await self.abort(holding.agent_id)
        except KiciError as error:
            emit(Event.SPAWN_LEFT, level=logging.ERROR, agent_id=holding.agent_id, error=str(error))
        else:
            self.gone(holding.agent_id, "its worker was stopped")

    def _runtimes(self) -> Iterator[ScalerRuntime]:
        seen = {holding.runtime.name: holding.runtime for holding in self.holdings}
        yield from {**seen, **self.fleet.runtimes}.values()

    # ------------------------------------------------------------------ one agent

    def begin(self, order: SpawnOrder, *, scaler: ScalerName, owner: InstanceId) -> Holding:
        """Start to make an agent, or the one that was begun before.  Await its `settled`, then see its `fault`.

        Raises a `KiciError` when it is not begun.
        """
        known = self.holdings.get(order.agent_id)
        if known is not None:
            return known
        runtime = self._may_begin(order.agent_id, scaler)
        shape = Shape(requests=order.requests, limits=order.limits)
        self._admit(runtime, shape)
        record = HostRecord(
            agent_id=order.agent_id,
            scaler=scaler,
            backend_type=runtime.backend.type,
            label_set=order.label_set,
            shape=shape,
            machine_pool=runtime.machine_pool,
            owner=owner,
            reserved_at=self._clock.now(),
            runs_job_image=self._runs_job_image(scaler, order.label_set),
        )
        self._records.write(record)
        holding = Holding(record=record, runtime=runtime)
        self.holdings.add(holding)
        self.book.reserve(record.reservation(self._host_id))
        self.changed()
        holding.task = self._supervisor.spawn(f"spawn.{order.agent_id}", self._make(holding, order))
        return holding

    async def abort(self, agent_id: AgentId) -> None:
        """Call its spawn off, or end it.  Nothing of it is left when this returns; raises `Retryable` else."""
        await self.destroy(agent_id, ScaleDownReason.SHUTDOWN)

    async def _call_off(self, holding: Holding) -> None:
        """Whoever ordered it, and would have called it off in time, may be gone."""
        task = holding.task
        if task is not None and not holding.settled.is_set():
            over = asyncio.Event()
            task.add_done_callback(lambda _: over.set())
            task.cancel()
            await over.wait()
            if not holding.settled.is_set():  # cancelled before its first step
                await self._fail(holding, Retryable("the start was called off"))
        await holding.settled.wait()

    async def destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        """End it, if it is there, or call its spawn off.  Raises `Retryable` when that could not be confirmed."""
        holding = self.holdings.get(agent_id)
        if holding is None:
            self._bar(agent_id, "it was to end before it was begun")
            return
        await self._call_off(holding)
        if self.holdings.get(agent_id) is not holding:
            return
        self._sees(holding.record.scaler)
        await holding.runtime.backend.destroy(agent_id, reason)
        await self._release(holding)
        self._bar(agent_id, f"it was ended ({reason})")

    def _bar(self, agent_id: AgentId, how: str) -> None:
        """An order for it that comes only now, from a coordinator that had it before, makes it no more."""
        if self.holdings.get(agent_id) is None and agent_id not in self.holdings.gone():
            self.holdings.ended(agent_id, how)

    def mark_registered(self, agent_id: AgentId) -> None:
        """Its coordinator has seen it come."""
        holding = self.holdings.get(agent_id)
        if holding is not None:
            holding.registered = True
            holding.runtime.backend.mark_registered(agent_id)

    async def clear_boot_data(self, agent_id: AgentId) -> None:
        """Nobody but its agent can read what it was told at its boot when this returns.

        Raises a `KiciError` when that may not be so.
        """
        holding = self.holdings.get(agent_id)
        if holding is None:
            raise Permanent(f"this worker holds no agent {agent_id}")
        self._sees(holding.record.scaler)
        if isinstance(holding.runtime.backend, BootDataBackend):
            await holding.runtime.backend.boot_data_read(agent_id)

    def computes(self) -> dict[AgentId, Compute]:
        """What backends have of the agents."""
        return {one.agent_id: one for runtime in self._runtimes() for one in runtime.backend.computes()}

    def tail(self, agent_id: AgentId, lines: int) -> list[str]:
        holding = self.holdings.get(agent_id)
        runtimes = self._runtimes() if holding is None else (holding.runtime,)
        return next((found for runtime in runtimes if (found := runtime.backend.tail(agent_id, lines))), [])

    # ------------------------------------------------------------------ many agents

    def take_over(self, scaler: ScalerName, known: frozenset[AgentId], *, owner: InstanceId) -> list[Holding]:
        """Those of these that there are; they are this coordinator's now.  None of the others is made any more."""
        found = [one for one in self.holdings if one.agent_id in known and one.record.scaler == scaler]
        for agent_id in known:
            self._bar(agent_id, "it was looked for before it was begun")
        for holding in found:
            if holding.owner != owner:
                holding.record = replace_owner(holding.record, owner)
                self._records.write(holding.record)
        self.changed()
        return found

    async def reap(self, agent_id: AgentId) -> bool:
        """Nobody owns it: end whatever is there of it."""
        if self.holdings.get(agent_id) is not None:
            await self.abort(agent_id)
            return True
        for runtime in self._runtimes():
            if await runtime.backend.reap_unowned(agent_id):
                return True
        return False

    async def sweep(self, scaler: ScalerName, *, owner: InstanceId, owned: frozenset[AgentId]) -> int:
        """End what this coordinator once ordered of a scaler and does not own any more, and what nobody knows."""
        count = 0
        for holding in self.holdings:
            is_stray = holding.owner == owner and holding.agent_id not in owned
            if is_stray and holding.record.scaler == scaler:
                await self.abort(holding.agent_id)
                count += 1
        runtime = self.fleet.runtimes.get(scaler)
        if runtime is None or scaler in self._blind:
            return count
        return count + await runtime.backend.cleanup_orphans(self.holdings.ids())

    # ------------------------------------------------------------------ what backends tell

    def ended(self, agent_id: AgentId, how: str) -> None:
        """The compute of an agent ended by itself."""
        holding = self.holdings.get(agent_id)
        if holding is not None:
            self._over(holding, how)
            self.gone(agent_id, how)

    def _heard(self, holding: Holding, event: SpawnEvent) -> None:
        if event.type is SpawnEventType.FAILED and holding.settled.is_set():
            self._over(holding, event.detail)
        self.progressed(holding, event)

    def _over(self, holding: Holding, how: str) -> None:
        self.holdings.ended(holding.agent_id, how)
        if self._forget(holding):
            work = self._pools.release(holding.record.machine_pool, holding.agent_id)
            self._supervisor.start(f"release.{holding.agent_id}", work)

    # ------------------------------------------------------------------ how

    def _runs_job_image(self, scaler: ScalerName, label_set: tuple[str, ...]) -> bool:
        key = set_key(label_set)
        entries = self.fleet.router.entries
        return any(each.runs_job_image for each in entries if each.scaler == scaler and set_key(each.label_set) == key)

    def _may_begin(self, agent_id: AgentId, scaler: ScalerName) -> ScalerRuntime:
        how = self.holdings.gone().get(agent_id)
        if how is not None:
            raise Retryable(f"agent {agent_id} has ended already: {how}")
        runtime = self.fleet.runtimes.get(scaler)
        if runtime is None or all(entry.scaler != scaler for entry in self.fleet.router.entries):
            raise Permanent(f"this worker has no scaler {scaler} any more")
        if self.is_leaving:
            raise NoCapacity("this worker is stopping")
        self._sees(scaler)
        return runtime

    def _sees(self, scaler: ScalerName) -> None:
        """Raises `Retryable` while the agents of a scaler could not be looked at."""
        if scaler in self._blind:
            raise Retryable(f"this worker cannot look at the agents of scaler {scaler} yet")

    def _admit(self, runtime: ScalerRuntime, shape: Shape) -> None:
        refused = admit(
            shape.requests,
            scaler=runtime.caps,
            host=self.fleet.caps,
            here=self.book.of(runtime.name),
            total=self.book.total,
            active=Active(here=runtime.backend.active_count(), total=self.fleet.active_total()),
        )
        if refused is not None:
            raise self._full(refused)

    def _full(self, refused: AtCap) -> WorkerFull:
        return WorkerFull(say(refused, now=self._clock.now()), refused)

    async def _make(self, holding: Holding, order: SpawnOrder) -> None:
        record, runtime = holding.record, holding.runtime
        try:
            refused = await self._pools.reserve(record.reservation(self._host_id), _kind(record))
            if refused is not None:
                raise self._full(refused)
            async with runtime.gateway:
                mine = replace(
                    order,
                    orchestrator_url=self._url_for(runtime, order.agent_id),
                    proof=self._pools.descriptor(order.agent_id),
                )
                await runtime.backend.spawn(mine, lambda event: self._heard(holding, event))
        except BaseException as error:
            await finish(
                self._fail(holding, error), seconds=RELEASE_SECONDS, what=f"giving back what {order.agent_id} held"
            )
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, KiciError):
                emit(Event.SPAWN_CRASHED, level=logging.ERROR, agent_id=order.agent_id, error=repr(error))
        else:
            holding.settled.set()

    async def _fail(self, holding: Holding, error: BaseException) -> None:
        holding.fault = fault_of(error)
        await self._release(holding)
        holding.settled.set()

    async def _release(self, holding: Holding) -> None:
        if self._forget(holding):
            await self._pools.release(holding.record.machine_pool, holding.agent_id)

    def _forget(self, holding: Holding) -> bool:
        """False: it was forgotten before."""
        if not self.holdings.remove(holding):
            return False
        self.book.release(holding.agent_id)
        self._unrecord(holding.agent_id)
        self.changed()
        return True

    def _unrecord(self, agent_id: AgentId) -> None:
        try:
            self._records.remove(agent_id)
        except Retryable as error:  # the next start finds that there is no such agent
            emit(Event.WORKER_RECORD_LEFT, level=logging.WARNING, agent_id=agent_id, error=str(error))

    def _reserved(self, by_scaler: dict[ScalerName, list[HostRecord]]) -> Iterator[tuple[Reservation, Kind]]:
        for records in by_scaler.values():
            for record in records:
                yield record.reservation(self._host_id), _kind(record)

    def _take_up(self, record: HostRecord, runtime: ScalerRuntime) -> None:
        holding = Holding(record=record, runtime=runtime)
        holding.settled.set()
        self.holdings.add(holding)

    async def _look(self, name: ScalerName, runtime: ScalerRuntime) -> None:
        """Which of the recorded agents of a scaler live, and what else is there."""
        mine = {holding.agent_id: holding for holding in self.holdings if holding.runtime is runtime}
        try:
            await runtime.backend.recover(frozenset(mine))
            alive = {one.agent_id for one in runtime.backend.computes()}
            orphans = await runtime.backend.cleanup_orphans(frozenset(mine))
        except KiciError as error:
            emit(Event.BACKEND_STUCK, level=logging.ERROR, scaler=name, error=str(error))
            self._blind[name] = runtime
            return
        self._blind.pop(name, None)
        if orphans:
            emit(Event.ORPHANS_REMOVED, level=logging.WARNING, scaler=name, count=orphans)
        for agent_id, holding in mine.items():
            if agent_id in alive:
                emit(Event.SPAWN_RECOVERED, agent_id=agent_id, scaler=name)
            else:
                self._over(holding, "its compute is gone since the worker's restart")
                self.gone(agent_id, "its compute is gone since the worker's restart")

    def _lost(self, record: HostRecord, why: str) -> None:
        emit(Event.SPAWN_LOST, level=logging.WARNING, agent_id=record.agent_id, scaler=record.scaler, reason=why)
        self.holdings.ended(record.agent_id, why)
        self.book.release(record.agent_id)
        self._unrecord(record.agent_id)


def replace_owner(record: HostRecord, owner: InstanceId) -> HostRecord:
    return msgspec.structs.replace(record, owner=owner)


def _kind(record: HostRecord) -> Kind:
    return kind_of(record.backend_type, runs_job_image=record.runs_job_image)
