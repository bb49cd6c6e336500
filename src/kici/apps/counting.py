"""What a coordinator counts as it happens: the hooks of its services, moved to the metrics that operators know."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kici.decide.dispatch import LossCause
from kici.domain.job import Job, JobStatus
from kici.observe.metrics import AgentsNow
from kici.services.registry import ConnectedAgent
from kici.wire.messages import AgentMetrics

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
        coordinator.registration.lookup_failed = coordinator.metrics.adoption_lookup_failures.inc
        coordinator.sessions.work.figures = self._agent_did
        self._registry = coordinator.registry

    def job_over(self, job: Job) -> None:
        self._metrics.jobs_finished.labels(status=job.status).inc()
        if job.status is JobStatus.UNROUTABLE:
            self._metrics.jobs_unroutable.inc()

    def _handed_off(self, agent: ConnectedAgent, job: Job) -> None:
        self._manager.handed_off(agent.agent_id, job)
        self._pools.handed_off(agent)
        if job.dispatched_at is not None and job.queued_at is not None:
            self._metrics.dispatch_latency.observe(max(0, job.dispatched_at - job.queued_at) / 1000)

    def _lost(self, cause: LossCause) -> None:
        self._metrics.agents_lost.labels(cause=cause).inc()

    def _refused(self, close_code: int) -> None:
        self._metrics.agents_refused.labels(reason=str(close_code)).inc()

    def publish(self) -> None:
        """Show how the connected agents are now."""
        self._metrics.set_agents(agents_now(self._registry))

    def _agent_did(self, agent: ConnectedAgent, report: AgentMetrics) -> None:
        metrics, kind = self._metrics, agent.backend_type
        for state, count in report.jobs.items():
            metrics.agent_jobs.labels(kind, state).inc(count)
        metrics.agent_steps.labels(kind).inc(report.steps)
        for seconds in report.step_seconds:
            metrics.agent_step_seconds.labels(kind).observe(seconds)
        metrics.agent_log_bytes.labels(kind).inc(report.log_bytes)
        metrics.agent_dropped_lines.labels(kind).inc(report.dropped_lines)
        metrics.agent_held_back.labels(kind).inc(report.backpressure_events)


def agents_now(agents: Iterable[ConnectedAgent]) -> dict[str, AgentsNow]:
    """Added up by backend type, and by nothing that grows with scalers or agents."""
    now: dict[str, AgentsNow] = {}
    for agent in agents:
        before, report = now.get(agent.backend_type, AgentsNow()), agent.reported or AgentMetrics()
        now[agent.backend_type] = AgentsNow(
            connected=before.connected + 1,
            active_jobs=before.active_jobs + report.active_jobs,
            held_back=before.held_back + report.backpressure,
        )
    return now
