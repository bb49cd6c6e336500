"""Keeps idle agents ready for each label set that asks for them.

A pass looks, decides (`decide.pool`) and acts: first it lets surplus agents go, then it starts what is missing.
What is in flight is read off the spawns under way, so no counter can be forgotten on any path.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Never, Protocol

from kici.decide.admit import Book
from kici.decide.pool import IdleAgent, Pool, PoolState, fill, gives_way, shares, surplus
from kici.domain.ids import AgentId, ClassId, ScalerName
from kici.domain.job import WaitingClass
from kici.domain.labels import set_key
from kici.domain.scale import Spawning
from kici.domain.spawn import ScaleDownReason
from kici.domain.verdict import AtCap
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.store import JobStore
from kici.services.drain_state import DrainState
from kici.services.registry import AgentRegistry, ConnectedAgent
from kici.services.scaler_manager import ScalerManager
from kici.services.spawn_book import SpawnBook
from kici.services.workers_caps import used_here

TICK_SECONDS: Final = 30.0
REFILL_SECONDS: Final = 1.0
"""How soon after a hand-off the pool is looked at again."""
SHORT_SECONDS: Final = 15.0
"""How long a job that was refused keeps pools from its room: longer than the pause between two re-drives."""


class PoolGauges(Protocol):
    """Where the state of pools is shown."""

    def pool(self, scaler: str, label_set: str, *, target: int, ready: int, in_flight: int) -> None: ...

    def pool_gone(self, scaler: str, label_set: str) -> None: ...

    def warm_spawned(self, scaler: str) -> None: ...

    def warm_reaped_one(self, scaler: str) -> None: ...


class WarmPoolManager:
    def __init__(
        self,
        *,
        pools: Sequence[Pool],
        store: JobStore,
        registry: AgentRegistry,
        spawns: SpawnBook,
        book: Book,
        manager: ScalerManager,
        drain: DrainState,
        clock: Clock,
        gauges: PoolGauges,
    ) -> None:
        self._here = list(pools)
        self._elsewhere: list[Pool] = []
        """On hosts of workers whose pools this coordinator fills."""
        self._store = store
        self._short: dict[ClassId, tuple[AtCap, float]] = {}
        """Limits that refused waiting jobs, and when (monotonic)."""
        self._registry = registry
        self._spawns = spawns
        self._book = book
        self._manager = manager
        self._drain = drain
        self._clock = clock
        self._gauges = gauges
        self._ticker = Ticker(TICK_SECONDS)
        self._is_running = False

    @property
    def _pools(self) -> list[Pool]:
        return [*self._here, *self._elsewhere]

    async def run(self) -> Never:
        """Keep the pools for ever; the first pass at once.  Leave by cancellation."""
        while True:
            await self.tick()
            if await self._ticker.next():
                await self._clock.sleep(REFILL_SECONDS)

    def handed_off(self, agent: ConnectedAgent) -> None:
        """An agent was given a job: its pool may need another."""
        if agent.spawn is not None and agent.spawn.bound_job_id is None:
            self._ticker.nudge()

    def of_scaler(self, name: ScalerName) -> tuple[int, int]:
        """Ready and wanted agents over all pools of a scaler."""
        states = [state for state in self._states() if state.pool.scaler == name]
        return sum(min(state.ready, state.pool.size) for state in states), sum(state.pool.size for state in states)

    def configure(self, pools: Sequence[Pool]) -> None:
        """Take over the pools of a reload: what is above a new size, or of no pool any more, goes at once."""
        self._forget_gauges(self._here, pools)
        self._here = list(pools)
        self._let_go(at_once=True)
        self._show()
        self._ticker.nudge()

    def elsewhere(self, pools: Sequence[Pool]) -> None:
        """Pools of workers that this coordinator fills now.  Agents of one that it fills no more are left alone."""
        pools = [pool for pool in pools if pool.scaler in self._manager.fleet.remote]
        if pools == self._elsewhere:
            return
        self._forget_gauges(self._elsewhere, pools)
        self._elsewhere = pools
        self._ticker.nudge()

    def _forget_gauges(self, before: Sequence[Pool], after: Sequence[Pool]) -> None:
        kept = {(pool.scaler, pool.key) for pool in after}
        for pool in before:
            if (pool.scaler, pool.key) not in kept:
                self._gauges.pool_gone(pool.scaler, pool.key)

    async def tick(self) -> int:
        """One pass over all pools.  How many agents were started."""
        if self._is_running or self._drain.closed:
            return 0
        self._is_running = True
        try:
            self._let_go(at_once=False)
            started = 0
            held_back = self._held_back()
            for states, room in self._by_host():
                for pool, count in fill(states, self._budgets(), total=room, held_back=held_back):
                    started += await self._start(pool, count)
            self._show()
            return started
        finally:
            self._is_running = False

    async def crowded(self, waiting: WaitingClass, limit: AtCap) -> None:
        """A re-drive found no room for jobs of this class: give way.  Raises `StoreDown`."""
        places = self._places(limit.scaler)
        if not any(pool.scaler in places and shares(limit, pool.scaler, places) for pool in self._pools):
            return
        if not self._manager.could_make_room(waiting.demand, limit.scaler):
            return
        if not await self._store.queued_of_class(waiting.class_id, limit=1, unserved=True):
            self._short.pop(waiting.class_id, None)  # agents for all of them are on their way
            return
        self._short[waiting.class_id] = limit, self._clock.monotonic()
        ending = (tracked.spawn.scaler for tracked in self._spawns if tracked.is_ending)
        if any(scaler in places and shares(limit, scaler, places) for scaler in ending):
            return  # room is on its way
        idle: dict[ScalerName, list[IdleAgent]] = {}
        for (scaler, _), agents in self._idle().items():
            if scaler in places:
                idle.setdefault(scaler, []).extend(agents)
        going = gives_way(limit, idle, places)
        if going is not None:
            scaler, agent_id = going
            emit(Event.POOL_GIVES_WAY, scaler=scaler, agent_id=agent_id, wanted_for=waiting.oldest_job)
            self._reap(agent_id, scaler)

    def _held_back(self) -> set[ScalerName]:
        """Scalers whose room waiting jobs need."""
        since = self._clock.monotonic() - SHORT_SECONDS
        self._short = {of: (limit, at) for of, (limit, at) in self._short.items() if at > since}
        held: set[ScalerName] = set()
        for limit, _ in self._short.values():
            places = self._places(limit.scaler)
            held |= {scaler for scaler in places if shares(limit, scaler, places)}
        return held

    def _places(self, scaler: ScalerName) -> dict[ScalerName, str | None]:
        """The scalers of the same host as this one, with their machine pools."""
        fleet = self._manager.fleet
        runtime = fleet.runtimes.get(scaler)
        if runtime is not None and runtime.elsewhere is not None:
            return dict.fromkeys(runtime.elsewhere.names)
        return {name: each.machine_pool for name, each in fleet.runtimes.items() if name not in fleet.remote}

    def _by_host(self) -> list[tuple[list[PoolState], int]]:
        """Pools that share the room of a host, and that room; what others have on the host of a worker, it knows."""
        hosts: dict[str | None, list[PoolState]] = {}
        rooms: dict[str | None, int] = {None: self._room()}
        for state in self._states():
            runtime = self._manager.fleet.runtimes.get(state.pool.scaler)
            host = None if runtime is None else runtime.elsewhere
            worker_id = None if host is None else host.worker_id
            hosts.setdefault(worker_id, []).append(state)
            if host is not None:
                rooms[worker_id] = host.caps.agents_max
        return [(states, rooms[worker_id]) for worker_id, states in hosts.items()]

    async def _start(self, pool: Pool, count: int) -> int:
        for number in range(count):
            answer = await self._manager.warm(pool.routable)
            if not isinstance(answer, Spawning):
                emit(
                    Event.POOL_SHORT,
                    level=logging.DEBUG,
                    scaler=pool.scaler,
                    label_set=pool.key,
                    missing=count - number,
                )
                return number
            self._gauges.warm_spawned(pool.scaler)
        return count

    def _let_go(self, *, at_once: bool) -> None:
        """Let surplus agents go, and all of those that belong to no pool any more."""
        pools = {(pool.scaler, pool.key): pool for pool in self._pools}
        for place, idle in self._idle().items():
            pool = pools.get(place)
            if pool is None and place[0] in self._manager.fleet.remote:
                continue  # whoever fills the pools of that worker judges
            if pool is None:
                going = [agent.agent_id for agent in idle]
            else:
                going = surplus(pool, idle, now=self._clock.now(), at_once=at_once)
            for agent_id in going:
                self._reap(agent_id, place[0])

    def _idle(self) -> dict[tuple[ScalerName, str], list[IdleAgent]]:
        """Warm agents without a job, by the pool that they were made for."""
        idle: dict[tuple[ScalerName, str], list[IdleAgent]] = {}
        for agent in self._registry:
            spawn = agent.spawn
            if spawn is not None and spawn.bound_job_id is None and agent.is_free:
                here = IdleAgent(agent_id=agent.agent_id, registered_at=agent.registered_at)
                idle.setdefault((spawn.scaler, _key(spawn.label_set)), []).append(here)
        return idle

    def _reap(self, agent_id: AgentId, scaler: ScalerName) -> None:
        """Closed to jobs first; one that got a job meanwhile stays."""
        agent = self._registry.get(agent_id)
        if agent is None or agent.draining:
            return
        agent.draining = True
        self._registry.refresh(agent)
        if agent.jobs:
            agent.draining = False
            self._registry.refresh(agent)
            return
        self._gauges.warm_reaped_one(scaler)
        self._manager.agent_gone(agent_id, ScaleDownReason.IDLE)

    def _states(self) -> list[PoolState]:
        in_flight = self._in_flight()
        return [
            PoolState(
                pool=pool,
                ready=self._registry.ready(pool.demand),
                in_flight=in_flight[(pool.scaler, pool.key)],
            )
            for pool in self._pools
        ]

    def _in_flight(self) -> Counter[tuple[ScalerName, str]]:
        """Warm spawns that are not connected, by pool: booting, or expected back after a restart."""
        return Counter(
            (tracked.spawn.scaler, _key(tracked.spawn.label_set))
            for tracked in self._spawns
            if tracked.spawn.bound_job_id is None
            and not tracked.is_ending
            and self._registry.get(tracked.agent_id) is None
        )

    def _budgets(self) -> dict[ScalerName, int]:
        """Room under `maxAgents` of each scaler with a pool."""
        budgets = {}
        for name in {pool.scaler for pool in self._pools}:
            runtime = self._manager.fleet.runtimes[name]
            used = max(runtime.backend.active_count(), self._book.of(name).agents)
            budgets[name] = max(0, runtime.caps.agents_max - used)
        return budgets

    def _room(self) -> int:
        fleet = self._manager.fleet
        used = max(fleet.active_total(), used_here(fleet, self._book).agents)
        return max(0, fleet.caps.agents_max - used)

    def _show(self) -> None:
        for state in self._states():
            self._gauges.pool(
                state.pool.scaler,
                state.pool.key,
                target=state.pool.size,
                ready=state.ready,
                in_flight=state.in_flight,
            )


@lru_cache(maxsize=10_000)
def _key(label_set: tuple[str, ...]) -> str:
    return set_key(label_set)
