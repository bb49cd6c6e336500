"""How many jobs wait, shown to whoever scrapes: read every few seconds, not at every scrape.

A queue that stays deep is also logged: nobody may be looking.
"""

import logging
from typing import Final, Never, Protocol

from kici.domain.errors import StoreDown
from kici.domain.job import JobStatus
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.store import JobStore

INTERVAL_SECONDS: Final = 5.0
DEEP_JOBS: Final = 100


class DepthShown(Protocol):
    def set_queue_depth(self, counts: dict[str, int]) -> None: ...


class QueueGauge:
    def __init__(self, *, store: JobStore, clock: Clock, gauges: DepthShown, deep_jobs: int = DEEP_JOBS) -> None:
        """`deep_jobs`: so many waiting jobs, twice in a row, are worth a line in the log.  0: none are."""
        self._store = store
        self._clock = clock
        self._gauges = gauges
        self._deep_jobs = deep_jobs
        self._deep_readings = 0

    async def run(self) -> Never:
        """Read for ever.  Leave by cancellation."""
        while True:
            await self.tick()
            await self._clock.sleep(INTERVAL_SECONDS)

    async def tick(self) -> None:
        """One reading.  What an unreachable store does not tell stays as it was."""
        try:
            depth = await self._store.queued_count()
        except StoreDown as error:
            emit(Event.STORE_DOWN, during="queue gauge", error=str(error))
            return
        self._gauges.set_queue_depth({JobStatus.QUEUED: depth})
        self._deep_readings = self._deep_readings + 1 if 0 < self._deep_jobs <= depth else 0
        if self._deep_readings == 2:
            emit(Event.QUEUE_DEEP, level=logging.WARNING, depth=depth)
