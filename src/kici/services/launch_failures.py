"""Failed launches: how long each scaler is left alone, and what `diagnose` tells of the last minutes.

In memory, for this instance: the same entry on another host may be healthy.  A restart forgets, on purpose: a
fresh process tries once.  Windows are kept on the monotonic clock, so that a jump of the wall clock moves none.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from kici.decide.backoff import UNTROUBLED, BackoffSettings, Deferral, record_failure, refusal, stumbled
from kici.domain.ids import AgentId, Instant, JobId, ScalerName
from kici.domain.spawn import Spawn
from kici.domain.verdict import InBackoff, SpawnFailed
from kici.observe.events import Event, emit
from kici.ports.clock import Clock

RECORDS_MAX: Final = 256
JOBS_MAX: Final = 10_000
WINDOW_MS: Final = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailure:
    scaler: ScalerName
    backend_type: str
    is_bound: bool
    detail: str
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentFailures:
    """Failures of one scaler within the window."""

    bound: int = 0
    unbound: int = 0
    last: LaunchFailure | None = None


class LaunchFailures:
    def __init__(
        self, *, clock: Clock, settings: Callable[[], BackoffSettings], on_failure: Callable[[str, bool], None]
    ) -> None:
        """`on_failure(backend type, is bound)` counts."""
        self._clock = clock
        self._settings = settings
        self._on_failure = on_failure
        self._deferrals: dict[ScalerName, Deferral] = {}
        self._stumbles: dict[ScalerName, Deferral] = {}
        """Launches in a row that failed by chance."""
        self._records: deque[LaunchFailure] = deque(maxlen=RECORDS_MAX)
        self._of_job: dict[JobId, SpawnFailed] = {}
        self.shared_refusal: Callable[[ScalerName], InBackoff | None] = lambda scaler: None
        """Set by the composition root: the deferral of a scaler that all coordinators share."""

    def seen(self, spawn: Spawn, detail: str, at: Instant) -> None:
        """A backend reported the failure of a spawn."""
        is_bound = spawn.bound_job_id is not None
        self._on_failure(spawn.backend_type, is_bound)
        self._records.append(
            LaunchFailure(scaler=spawn.scaler, backend_type=spawn.backend_type, is_bound=is_bound, detail=detail, at=at)
        )

    def of_job(self, spawn: Spawn, failure: SpawnFailed) -> None:
        """Remember the latest failure for the job that waits."""
        if spawn.bound_job_id is not None:
            while len(self._of_job) >= JOBS_MAX:
                del self._of_job[next(iter(self._of_job))]
            self._of_job[spawn.bound_job_id] = failure

    def last_of_job(self, job_id: JobId) -> SpawnFailed | None:
        return self._of_job.get(job_id)

    def job_over(self, job_id: JobId) -> None:
        self._of_job.pop(job_id, None)

    def defer(self, scaler: ScalerName, agent_id: AgentId, error: str) -> None:
        """Count one failed launch, once for each agent."""
        before, settings = self._deferrals.get(scaler, UNTROUBLED), self._settings()
        after = record_failure(before, agent_id, error=error, settings=settings, now=self._now())
        self._deferrals[scaler] = after
        if after is not before and after.failures >= settings.failures_max:
            emit(Event.LAUNCHES_FAIL, level=logging.WARNING, scaler=scaler, failures=after.failures, error=error)

    def stumbled(self, scaler: ScalerName, error: str, *, started_at: float) -> None:
        """A launch failed that the next one need not fail of.  `started_at`: monotonic seconds."""
        self._stumbles[scaler] = stumbled(
            self._stumbles.get(scaler, UNTROUBLED),
            error=error,
            started_at=Instant(round(started_at * 1000)),
            now=self._now(),
        )

    def refusal(self, scaler: ScalerName) -> InBackoff | None:
        """Why and until when (wall time) a scaler is left alone."""
        shared = self.shared_refusal(scaler)
        if shared is not None:
            return shared
        records = [kept[scaler] for kept in (self._deferrals, self._stumbles) if scaler in kept]
        if not records:
            return None
        now = self._now()
        latest = max(records, key=lambda record: record.until)
        refused = refusal(latest, scaler=scaler, is_external=False, settings=self._settings(), now=now)
        return refused and structs.replace(refused, until=Instant(self._clock.now() + refused.until - now))

    def clear(self, scaler: ScalerName) -> None:
        """An agent of this scaler registered."""
        self._deferrals.pop(scaler, None)
        self._stumbles.pop(scaler, None)

    def _now(self) -> Instant:
        return Instant(round(self._clock.monotonic() * 1000))

    def recent(self, scaler: ScalerName, now: Instant) -> RecentFailures:
        records = [record for record in self._records if record.scaler == scaler and now - record.at <= WINDOW_MS]
        return RecentFailures(
            bound=sum(record.is_bound for record in records),
            unbound=sum(not record.is_bound for record in records),
            last=max(records, key=lambda record: record.at, default=None),
        )
