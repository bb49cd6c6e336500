"""What a coordinator counts as it happens: the hooks of its services, moved to the metrics that operators know."""

from typing import TYPE_CHECKING

from kici.decide.dispatch import LossCause
from kici.domain.job import Job, JobStatus
from kici.services.registry import ConnectedAgent

if TYPE_CHECKING:
    from kici.apps.assembly import Coordinator


class Counting:
    def __init__(self, coordinator: "Coordinator") -> None:
        self._metrics = coordinator.metrics
        self._manager = coordinator.manager
        self._pools = coordinator.pools
        coordinator.dispatcher.handed_off = self._handed_off
        coordinator.dispatcher.gave_back = coordinator.metrics.jobs_requeued.inc
        coordinator.sessions.lost = self._lost
        coordinator.sessions.refused = self._refused
        coordinator.registration.refused = self._refused

    def job_over(self, job: Job) -> None:
        self._metrics.jobs_finished.labels(status=job.status).inc()
        if job.status is JobStatus.UNROUTABLE:
            self._metrics.jobs_unroutable.inc()

    def _handed_off(self, agent: ConnectedAgent, job: Job) -> None:
        self._manager.handed_off(agent.agent_id)
        self._pools.handed_off(agent)
        if job.dispatched_at is not None and job.queued_at is not None:
            self._metrics.dispatch_latency.observe(max(0, job.dispatched_at - job.queued_at) / 1000)

    def _lost(self, cause: LossCause) -> None:
        self._metrics.agents_lost.labels(cause=cause).inc()

    def _refused(self, close_code: int) -> None:
        self._metrics.agents_refused.labels(reason=str(close_code)).inc()
