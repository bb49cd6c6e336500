"""Old runs and old records of who did what go: hourly, in batches that leave the store free for others in between.

Safe on every coordinator; one is enough, so only the leader acts.
"""

from collections.abc import Callable
from typing import Final, Never, Protocol

from kici.domain.errors import StoreDown
from kici.domain.ids import Instant
from kici.domain.knobs import ACCESS_LOG_RETENTION_DAYS, RUN_RETENTION_DAYS, Knob
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.observe.metrics import Metrics
from kici.ports.clock import Clock
from kici.ports.retention import Prunable
from kici.services.settings import LiveSettings

TICK_SECONDS: Final = 3600.0
BATCH: Final = 5000
BATCHES_MAX: Final = 200
PAUSE_SECONDS: Final = 0.1
_DAY_MS: Final = 24 * 3600 * 1000


class Prune(Protocol):
    async def __call__(self, *, older_than: Instant, limit: int) -> int: ...


class Retention:
    def __init__(
        self,
        *,
        store: Prunable,
        clock: Clock,
        settings: LiveSettings,
        metrics: Metrics,
        is_leader: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._is_leader = is_leader
        self._ticker = Ticker(TICK_SECONDS)

    async def run(self) -> Never:
        while True:
            await self.tick()
            await self._ticker.next()

    async def tick(self) -> int:
        """Delete runs that ended longer ago than the retention time, what only they needed, and old access records.

        How many jobs went.
        """
        if not self._is_leader():
            return 0
        jobs = await self._prune(RUN_RETENTION_DAYS, self._store.prune_jobs)
        self._metrics.jobs_pruned.inc(jobs)
        if jobs:
            emit(Event.JOBS_PRUNED, jobs=jobs)
        _ = await self._prune(RUN_RETENTION_DAYS, self._store.prune_classes)
        _ = await self._prune(ACCESS_LOG_RETENTION_DAYS, self._store.prune_access_log)
        return jobs

    async def _prune(self, retention: Knob, prune: Prune) -> int:
        total = 0
        try:
            # Strict: remembered values might be older than an operator's wish to keep more.
            days = (await self._settings.strict())[retention]
            if days == 0:
                return 0
            older_than = Instant(self._clock.now() - days * _DAY_MS)
            for _ in range(BATCHES_MAX):
                pruned = await prune(older_than=older_than, limit=BATCH)
                total += pruned
                if pruned < BATCH or not self._is_leader():
                    break
                await self._clock.sleep(PAUSE_SECONDS)
        except StoreDown:
            pass  # an hour later is soon enough
        return total
