"""What a coordinator does besides its work: forget what is old, count what waits, and follow up the end of a job."""

from typing import TYPE_CHECKING

from kici.domain.job import Job
from kici.services.queue_gauge import QueueGauge
from kici.services.retention import Retention
from kici.services.tokens import TokenPurge

if TYPE_CHECKING:
    from kici.apps.assembly import Coordinator


class JobEnds:
    """What follows for computes and memory when a job ends."""

    def __init__(self, coordinator: "Coordinator") -> None:
        self._coordinator = coordinator

    def job_over(self, job: Job) -> None:
        self._coordinator.manager.job_over(job.id)
        self._coordinator.events.router.run_over(job.run_id)
        self._coordinator.logs.forget(job.id)
        self._coordinator.counting.job_over(job)

    def capacity_freed(self) -> None:
        self._coordinator.pending.capacity_freed()


def keep_house(coordinator: "Coordinator") -> None:
    """Start the services that clean up and count."""
    given, supervisor = coordinator.given, coordinator.given.supervisor
    gauge = QueueGauge(
        store=given.store, clock=given.clock, gauges=coordinator.metrics, deep_jobs=given.deep_queue_jobs
    )
    supervisor.service("queue-gauge", gauge.run)
    supervisor.service("token-purge", TokenPurge(tokens=coordinator.tokens).run)
    retention = Retention(
        store=given.store,
        clock=given.clock,
        settings=coordinator.settings,
        metrics=coordinator.metrics,
        is_leader=lambda: coordinator.elector.is_leader,
    )
    supervisor.service("retention", retention.run)
