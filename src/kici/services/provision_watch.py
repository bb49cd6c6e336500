"""Event spawns between their scale-up and their agent: what only the store knows is brought to whoever waits.

An agent may register with any coordinator, a scale-up may be given up by any, a job may end on any.  The owner looks
every few seconds, one query for all; and an agent that comes is looked up in the store, which is how a coordinator
adopts one that another asked for.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Never, Protocol, assert_never

from kici.decide.prune import EVENT, counts_as_failure
from kici.decide.withdraw import Fail, Forget, Withdraw, what_to_do
from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, InstanceId
from kici.domain.spawn import ScaleDownReason, Spawn, SpawnState
from kici.domain.verdict import SpawnFailed
from kici.kit.supervise import Supervisor
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.event_store import ProvisionStore
from kici.services.launch_failures import LaunchFailures
from kici.services.scaler_manager import ScalerManager
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.shared_deferrals import SharedDeferrals
from kici.services.spawn_book import SpawnBook, TrackedSpawn
from kici.services.store_outages import sits_out_outages
from kici.services.teardown import Teardown

INTERVAL_SECONDS: Final = 5.0
ALL_SECONDS: Final = 30.0
"""Pause between looks at those whose agent came: it may be with another coordinator by now."""


class Store(ProvisionStore, Protocol):
    async def spawn(self, agent_id: AgentId) -> Spawn | None: ...


class ProvisionWatch:
    def __init__(
        self,
        *,
        store: Store,
        spawns: SpawnBook,
        manager: ScalerManager,
        teardown: Teardown,
        failures: LaunchFailures,
        deferrals: SharedDeferrals,
        supervisor: Supervisor,
        clock: Clock,
        instance_id: InstanceId,
        retired: Callable[[Spawn], ScalerRuntime | None],
    ) -> None:
        """`retired(row)` makes a scaler that is not configured here able to end its agents."""
        self._store = store
        self._spawns = spawns
        self._manager = manager
        self._teardown = teardown
        self._failures = failures
        self._deferrals = deferrals
        self._supervisor = supervisor
        self._clock = clock
        self._instance_id = instance_id
        self._retired = retired
        self._ticker = Ticker(INTERVAL_SECONDS)
        self._looked_at_all = clock.monotonic()
        self._overdue_now: set[AgentId] = set()

    def nudge(self) -> None:
        """Something became of a provision."""
        self._ticker.nudge()

    async def run(self) -> Never:
        """Look for ever.  Leave by cancellation."""
        while True:
            with sits_out_outages("provision watch"):
                await self.tick()
            await self._ticker.next()

    async def tick(self) -> int:
        """One look at all event spawns that boot, now and then at all.  How many are no longer looked after here."""
        looks_at_all = self._clock.monotonic() - self._looked_at_all >= ALL_SECONDS
        if looks_at_all:
            self._looked_at_all = self._clock.monotonic()
        asked = {
            tracked.agent_id: tracked
            for tracked in self._spawns
            if tracked.spawn.backend_type == EVENT
            and tracked.is_settled
            and (tracked.is_booting or (looks_at_all and not tracked.is_ending))
        }
        if not asked:
            return 0
        done = 0
        for news in await self._store.provision_news(sorted(asked)):
            tracked = asked[news.agent_id]
            decided = what_to_do(news, self._instance_id, is_booting=tracked.is_booting)
            if decided is None or self._spawns.get(news.agent_id) is not tracked or tracked.is_ending:
                continue
            done += 1
            match decided:
                case Forget():
                    await self._teardown.forget(tracked, ScaleDownReason.JOB_COMPLETE, error=None, ends=False)
                case Withdraw():
                    emit(Event.SPAWN_WITHDRAWN, agent_id=news.agent_id, job_id=tracked.spawn.bound_job_id)
                    self._teardown.begin(tracked, ScaleDownReason.JOB_COMPLETE)
                case Fail(why=why):
                    self._manager.provision_failed(tracked, why)
                case _:
                    assert_never(decided)
        return done

    # ------------------------------------------------------------------ agents that come

    async def record_of(self, agent_id: AgentId) -> Spawn | None:
        """The spawn of an agent that says it is a machine of an event scaler.  Raises `StoreDown`."""
        row = await self._store.spawn(agent_id)
        if row is None or row.backend_type != EVENT:
            return None
        tracked = self._spawns.get(agent_id)
        return replace(row, state=SpawnState.ENDING) if tracked is not None and tracked.is_ending else row

    def adopted(self, row: Spawn) -> None:
        """Its agent registered here: from now on this coordinator ends its machine."""
        self._deferrals.clear(row.scaler)
        tracked = self._spawns.get(row.agent_id)
        if tracked is not None:
            if not tracked.is_ending:
                tracked.spawn = replace(row, state=tracked.spawn.state)
            return
        runtime = self._manager.fleet.runtimes.get(row.scaler) or self._retired(row)
        if runtime is None or runtime.backend.type != EVENT:
            runtime = self._retired(row)
        if runtime is None:
            return  # the reaper ends it
        tracked = TrackedSpawn(spawn=row, runtime=runtime, is_settled=True, is_written=True)
        tracked.started_at = self._clock.monotonic()
        self._spawns.add(tracked)
        self._supervisor.start(f"adopt.{row.agent_id}", self._take_up(tracked))
        emit(Event.SPAWN_ADOPTED, agent_id=row.agent_id, scaler=row.scaler, owner=row.owner_instance_id)

    async def _take_up(self, tracked: TrackedSpawn) -> None:
        _ = await tracked.runtime.backend.recover(frozenset({tracked.agent_id}))
        tracked.runtime.backend.mark_registered(tracked.agent_id)

    # ------------------------------------------------------------------ agents that do not come

    def overdue(self, tracked: TrackedSpawn, text: str) -> None:
        """Its agent did not register in time."""
        if tracked.agent_id not in self._overdue_now:
            self._overdue_now.add(tracked.agent_id)
            self._supervisor.start(f"overdue.{tracked.agent_id}", self._give_up(tracked, text))

    async def _give_up(self, tracked: TrackedSpawn, text: str) -> None:
        try:
            await self._overdue(tracked, text)
        finally:
            self._overdue_now.discard(tracked.agent_id)

    async def _overdue(self, tracked: TrackedSpawn, text: str) -> None:
        """Free its job and capacity.  The row stays: it is how the reaper finds the machine and ends it."""
        job_over, adopted_by = False, None
        try:
            (news,) = await self._store.provision_news([tracked.agent_id])
            job_over = news.job_over
            adopted_by = news.adopted_by or await self._store.provision_adopter(tracked.agent_id)
        except StoreDown as error:  # if its agent came elsewhere, the store will count no failure
            emit(Event.STORE_DOWN, level=logging.WARNING, agent_id=tracked.agent_id, error=str(error))
        if not tracked.is_booting:
            return
        fails = counts_as_failure(job_ended=job_over, adopted_by=adopted_by)
        if fails:
            self._failures.seen(tracked.spawn, text, self._clock.now())
            self._failures.of_job(tracked.spawn, SpawnFailed(text=text, scaler=tracked.runtime.name))
            self._deferrals.expect(tracked.runtime.name, tracked.agent_id, text)
            await self._deferrals.count(tracked.runtime.name, tracked.agent_id, text)
        await self._teardown.forget(
            tracked,
            ScaleDownReason.JOB_COMPLETE if job_over else ScaleDownReason.SPAWN_TIMEOUT,
            error=text if fails else None,
            ends=adopted_by is None,
        )
