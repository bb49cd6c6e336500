"""One coordinator's place in the world: its machine, clock, way to the store, and the program that runs there."""

import asyncio
from dataclasses import dataclass
from typing import Self

from kici.ports.store import Store
from kici.testing.fake_ledger import PooledHost
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.agent import AgentPlace
from kici.testing.sim.cloud import SimCloud
from kici.testing.sim.coordinator import Files, Machine, SimCoordinator
from kici.testing.sim.hints import Hints
from kici.testing.sim.hosts import SimHost
from kici.testing.sim.plan import Plan
from kici.testing.sim.seam import Weather
from kici.testing.sim.trace import WORLD, Trace
from kici.testing.sim_clock import SimClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What all sites share."""

    plan: Plan
    trace: Trace
    store: Store
    place: AgentPlace
    files: Files
    hints: Hints
    cloud: SimCloud
    pooled: PooledHost | None
    """The machine that all coordinators are on, if they share machine pools."""


@dataclass(slots=True, kw_only=True)
class Site:
    name: str
    clock: SimClock
    weather: Weather
    host: SimHost
    coordinator: SimCoordinator

    @classmethod
    def make(cls, name: str, common: Common, *, clock: SimClock, entropy: SeededEntropy) -> Self:
        weather = Weather(plan=common.plan, entropy=entropy.fork("weather"))
        host = SimHost(name, common.plan, entropy.fork("host"), common.place, pooled=common.pooled)
        machine = Machine(
            plan=common.plan,
            entropy=entropy.fork("coordinator"),
            trace=common.trace,
            ledger=common.place.ledger,
            store=common.store,
            weather=weather,
            host=host,
            network=common.place.network,
            clock=clock,
            files=common.files,
            hints=common.hints,
            cloud=common.cloud,
        )
        return cls(name=name, clock=clock, weather=weather, host=host, coordinator=SimCoordinator(name, machine))

    @property
    def is_well(self) -> bool:
        """Whether agents could come to it."""
        return self.coordinator.is_ready

    def doom(self, why: str) -> None:
        """Somebody ends everything that its scalers made."""
        for agent_id in self.host.alive:
            self.host.ledger.agents[agent_id].doomed = why

    def become_fair(self) -> None:
        """Faults have stopped."""
        self.weather.is_fair = self.host.is_kind = True
        if self.coordinator.program is not None:
            self.coordinator.program.drain.draining = False

    async def lose_store(self, seconds: float, trace: Trace) -> None:
        """The store does not answer it for a while."""
        trace.tell(f"{self.name}: the store is down for {seconds:.1f} s", WORLD)
        trace.count("store outage")
        self.weather.is_down = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self.weather.is_down = False
            trace.tell(f"{self.name}: the store is up", WORLD)
