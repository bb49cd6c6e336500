"""Looking for computes on this host that nobody owns: every quarter hour, and whenever it is asked for.

Recovery looks once at start.  What a failed clean-up left behind since then, or an engine that was away, is found
here.  Backends judge by their own marks; what a spawn row of this instance explains is never touched.
"""

import logging
from typing import Final, Never

from kici.domain.errors import KiciError
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.services.scaler_manager import ScalerManager
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.spawn_book import SpawnBook

SWEEP_SECONDS: Final = 900.0
SWEPT: Final = frozenset({"container", "bare-metal"})
"""Types whose sweep is cheap and safe beside running spawns; others have their own."""


class OrphanSweeper:
    def __init__(self, *, manager: ScalerManager, spawns: SpawnBook, seconds: float = SWEEP_SECONDS) -> None:
        self._manager = manager
        self._spawns = spawns
        self._ticker = Ticker(seconds)

    def nudge(self) -> None:
        """Look now."""
        self._ticker.nudge()

    async def run(self) -> Never:
        """Sweep for ever.  Leave by cancellation."""
        while True:
            await self._ticker.next()
            await self.tick()

    async def tick(self) -> int:
        """One look at every scaler of this host.  How many computes were removed."""
        return sum([await self._sweep(runtime) for runtime in list(self._manager.fleet.runtimes.values())])

    async def _sweep(self, runtime: ScalerRuntime) -> int:
        if runtime.backend.type not in SWEPT:
            return 0
        try:
            count = await runtime.backend.cleanup_orphans(frozenset(tracked.agent_id for tracked in self._spawns))
        except KiciError as error:
            emit(Event.ORPHANS_LEFT, level=logging.WARNING, scaler=runtime.name, error=str(error))
            return 0
        if count:
            emit(Event.ORPHANS_REMOVED, level=logging.WARNING, scaler=runtime.name, count=count)
        return count
