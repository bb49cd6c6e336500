"""Agents that were asked for and never came: found by the clock, so that their capacity is not lost for ever."""

import logging
from collections.abc import Callable
from typing import Final, Never

from kici.decide.prune import stale_spawns
from kici.domain.ids import Instant
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.services.scaler_manager import ScalerManager
from kici.services.spawn_book import SpawnBook, TrackedSpawn

INTERVAL_SECONDS: Final = 5.0


class StaleSpawnSweeper:
    def __init__(
        self,
        *,
        spawns: SpawnBook,
        manager: ScalerManager,
        clock: Clock,
        spawn_timeout_ms: Callable[[], int],
    ) -> None:
        self._spawns = spawns
        self._manager = manager
        self._clock = clock
        self._spawn_timeout_ms = spawn_timeout_ms

    async def run(self) -> Never:
        """Look for ever.  Leave by cancellation."""
        while True:
            await self._clock.sleep(INTERVAL_SECONDS)
            self.tick()

    def tick(self) -> int:
        """End what is stale.  How many."""
        booting = {tracked.agent_id: tracked for tracked in self._spawns if tracked.is_booting}
        stale = stale_spawns(
            {agent_id: _started_at(tracked) for agent_id, tracked in booting.items()},
            now=Instant(round(self._clock.monotonic() * 1000)),
            spawn_timeout_ms=self._spawn_timeout_ms(),
        )
        for agent_id, age_ms in stale.items():
            emit(Event.SPAWN_PRUNED, level=logging.WARNING, agent_id=agent_id, age_ms=age_ms)
            self._manager.never_came(booting[agent_id], f"its agent did not register within {age_ms} ms")
        return len(stale)


def _started_at(tracked: TrackedSpawn) -> Instant | None:
    """On the monotonic clock, so that a jump of the wall clock prunes nobody."""
    return None if tracked.started_at is None else Instant(round(tracked.started_at * 1000))
