"""Jobs that were refused an agent are offered again: when capacity is freed, and by the clock.

A pass goes over demand classes, the one with the oldest job first: up to ten jobs of each, and a class that is
refused once is skipped for the rest of the pass.  So neither a long backlog nor one class that cannot be served
delays the others.  One pass at a time; a call during a pass starts nothing.

Where a refusal says until when, a pass comes at exactly that moment.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Never

from kici.domain.errors import KiciError, StoreDown
from kici.domain.job import Demand, WaitingClass
from kici.domain.scale import AtCapacity, Failed, ScaleAnswer, Skipped, Spawning
from kici.domain.verdict import AtCap
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.store import JobStore
from kici.services.demand_index import DemandIndex
from kici.services.dispatcher import Dispatcher
from kici.services.drain_state import DrainState
from kici.services.registry import AgentRegistry
from kici.services.scaler_manager import ScalerManager
from kici.services.store_outages import sits_out_outages

DEBOUNCE_SECONDS: Final = 0.25
JOBS_PER_CLASS: Final = 10
PATIENCE_SECONDS: Final = 0.1
RETRY_SECONDS_MIN: Final = 0.05


class PendingScaleSweeper:
    def __init__(
        self,
        *,
        store: JobStore,
        demands: DemandIndex,
        dispatcher: Dispatcher,
        registry: AgentRegistry,
        manager: ScalerManager,
        drain: DrainState,
        clock: Clock,
        interval_seconds: float,
        on_redispatch: Callable[[str], None],
    ) -> None:
        self._store = store
        self._demands = demands
        self._dispatcher = dispatcher
        self._registry = registry
        self._manager = manager
        self._drain = drain
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._ticker = Ticker(interval_seconds)
        self._on_redispatch = on_redispatch
        self._is_running = False
        self._freed = False
        self._swept_at = clock.monotonic()
        self._retry_at: float | None = None
        """Monotonic seconds of the earliest moment at which a refused request may be made again."""
        self.has_idle_elsewhere: Callable[[Demand], bool] = lambda demand: False
        """Whether another coordinator has an agent that waits for such a job."""
        self.crowded: Callable[[WaitingClass, AtCap], Awaitable[None]] = _nobody_gives_way
        """Told of each class that a limit refused."""

    def look(self) -> None:
        """Another coordinator says that jobs wait."""
        self.retry_in(0)

    def capacity_freed(self) -> None:
        """Something was released: a pass follows a quarter second after the first of such calls."""
        self._freed = True
        self._ticker.nudge()

    def retry_in(self, after_ms: int) -> None:
        """A request was refused for so long."""
        retry_at = self._clock.monotonic() + max(RETRY_SECONDS_MIN, after_ms / 1000)
        if self._retry_at is None or retry_at < self._retry_at:
            self._retry_at = retry_at
            self._ticker.nudge()

    async def run(self) -> Never:
        """Sweep for ever.  Leave by cancellation."""
        while True:
            self._ticker.seconds = max(0.0, self._due_at() - self._clock.monotonic())
            if await self._ticker.next() and not self._freed:
                continue  # the pass before served what was freed, or the time to wake has changed
            trigger = "hook" if self._freed else "sweep"
            if self._freed:
                await self._clock.sleep(DEBOUNCE_SECONDS)
            self._freed = False
            with sits_out_outages("re-drive"):
                await self.tick(trigger)

    def _due_at(self) -> float:
        sweep_at = self._swept_at + self._interval_seconds
        return sweep_at if self._retry_at is None else min(sweep_at, self._retry_at)

    async def tick(self, trigger: str) -> int:
        """One pass over all waiting classes.  How many agents were started."""
        if self._is_running:
            return 0
        self._swept_at, self._retry_at = self._clock.monotonic(), None
        if self._drain.closed:
            return 0
        self._is_running = True
        try:
            self._manager.ask_again()
            await self._demands.refresh()
            started = 0
            for waiting in sorted(self._demands, key=lambda waiting: waiting.oldest_seq):
                try:
                    started += await self._class(waiting)
                except StoreDown:
                    raise
                except KiciError as error:  # of one class: the others are not to wait for it
                    emit(Event.SCALE_REFUSED, level=logging.WARNING, wanted_for=waiting.oldest_job, error=str(error))
            for _ in range(started):
                self._on_redispatch(trigger)
            return started
        finally:
            self._is_running = False

    async def _class(self, waiting: WaitingClass) -> int:
        """Offer up to ten jobs of one class: to idle agents first, then to the scalers."""
        if not self._registry.has_idle(waiting.demand):
            refused = self._manager.judge(waiting.demand)
            if refused is not None:
                await self._refused(waiting, refused)
                return 0
        if not self._registry.has_idle(waiting.demand) and self.has_idle_elsewhere(waiting.demand):
            await self._clock.sleep(PATIENCE_SECONDS)  # it may be claiming the job right now
        jobs = await self._store.queued_of_class(waiting.class_id, limit=JOBS_PER_CLASS, unserved=True)
        started = 0
        for job in jobs:
            if self._registry.has_idle(job.demand):
                await self._dispatcher.offer(job)
                continue
            answer = await self._manager.request(job)
            if not isinstance(answer, Spawning):
                if isinstance(answer, AtCapacity):
                    await self._refused(waiting, answer)
                return started
            started += 1
        if len(jobs) == JOBS_PER_CLASS:
            self._freed = True
            self._ticker.nudge()  # there are more, and none was refused
        return started

    async def _refused(self, waiting: WaitingClass, answer: ScaleAnswer) -> None:
        """Come back when the refusal is over, or tell the job what only a person can change."""
        if isinstance(answer, Skipped) and answer.retry_after_ms is not None:
            self.retry_in(answer.retry_after_ms)
        if isinstance(answer, AtCapacity) and isinstance(answer.verdict, AtCap):
            await self.crowded(waiting, answer.verdict)
        if isinstance(answer, Failed):
            await self._store.set_provisioning_error(waiting.oldest_job, answer.error)


async def _nobody_gives_way(waiting: WaitingClass, limit: AtCap) -> None:
    pass
