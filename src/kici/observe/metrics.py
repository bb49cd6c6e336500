"""Prometheus metrics: every number that this program counts, in one place, under the names that operators know.

Services count by `metrics.<name>.inc()`; gauges that are derived (queue depth, reservations) are set by whoever
reads the truth, every few seconds.  No series is per agent or per job: each distinct label value is paid for at
every scrape.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from kici.domain.resources import NOTHING, Amount

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
GLOBAL_ROW: Final = "__global__"
POOL_ROW: Final = "__pool__"
NO_POOLS: Final[Mapping[str, Amount]] = {}
_LATENCY_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class ReservedBy:
    """Whose reservations a row of the used-resources gauges adds up."""

    scaler: str
    scaler_type: str
    machine_pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsNow:
    """Connected agents of one backend type."""

    connected: int = 0
    active_jobs: int = 0
    held_back: int = 0


class Metrics:
    """One set of metrics and its registry.  Each program makes one; so does each test."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped there; they would double every series
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self._count_jobs()
        self._count_spawns()
        self._count_provisions()
        self._count_events()
        self._count_agents()

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(name, doc, labels, registry=self.registry)

    def _gauge(self, name: str, doc: str, *labels: str) -> Gauge:
        return Gauge(name, doc, labels, registry=self.registry)

    def _count_jobs(self) -> None:
        counter, gauge = self._counter, self._gauge
        self.agents_active = gauge("kici_orch_agents_active", "Agents connected here")
        self.draining = gauge("kici_orchestrator_draining", "1 while this coordinator drains")
        self.agents_lost = counter("kici_orch_agents_lost_total", "Agents lost, by what was noticed first", "cause")
        self.agents_refused = counter("kici_orch_agents_refused_total", "Connections refused", "reason")
        self.queue_depth = gauge("kici_orch_dispatch_queue_depth", "Jobs that are not over", "status")
        self.jobs_pruned = counter("kici_orch_dispatch_queue_rows_pruned_total", "Old jobs deleted")
        self.jobs_unroutable = counter("kici_orch_unroutable_fast_failed_total", "Jobs that nothing could serve")
        self.jobs_submitted = counter("kici_orch_jobs_submitted_total", "Jobs accepted")
        self.jobs_finished = counter("kici_orch_jobs_finished_total", "Jobs that ended, by final status", "status")
        self.jobs_requeued = counter("kici_orch_jobs_requeued_total", "Jobs returned to the queue")
        self.dispatch_latency = Histogram(
            "kici_orch_dispatch_latency_seconds",
            "From being queued to being offered to an agent",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.log_bytes = counter("kici_orch_log_bytes_total", "Bytes of job output stored")

    def _count_spawns(self) -> None:
        counter, gauge = self._counter, self._gauge
        self.config_reloads = counter("kici_orch_scaler_config_reloads_total", "Reloads of scalers.yaml", "result")
        self.spawn_refusals = counter("kici_orch_scaler_spawn_refusals_total", "Spawns refused by a cap or the host")
        self.spawn_failures = counter(
            "kici_orch_scaler_spawn_failures_total", "Agents that could not be made", "backend", "bound"
        )
        self.redispatch = counter(
            "kici_orch_scaler_redispatch_total", "Waiting jobs asked for again, by what caused it", "trigger"
        )
        self.cap_lock_failures = counter(
            "kici_orch_scaler_cap_lock_failures_total", "Spawns refused because nobody could be counted", "reason"
        )
        row = ("scaler", "scalerType", "machinePool")
        self._cpus_used = gauge("kici_orch_scaler_cpus_used", "Cpus held by agents", *row)
        self._memory_used = gauge("kici_orch_scaler_memory_bytes_used", "Memory held by agents", *row)
        self._reserved_rows: set[ReservedBy] = set()
        self._agent_kinds: set[str] = set()
        pool = ("scaler", "labelSet")
        self.warm_target = gauge("kici_orch_scaler_warm_pool_target", "Idle agents wanted", *pool)
        self.warm_ready = gauge("kici_orch_scaler_warm_pool_ready", "Idle agents ready", *pool)
        self.warm_in_flight = gauge("kici_orch_scaler_warm_pool_in_flight", "Idle agents being made", *pool)
        self.warm_spawns = counter("kici_orch_scaler_warm_pool_spawns_total", "Spawns to fill a warm pool", "scaler")
        self.adoption_lookup_failures = counter(
            "kici_orch_scaler_adoption_lookup_failures_total", "Made agents turned away because the store was down"
        )
        self.warm_reaped = counter("kici_orch_scaler_warm_pool_reaped_total", "Warm agents ended as idle", "scaler")

    def _count_provisions(self) -> None:
        counter, gauge = self._counter, self._gauge
        self.scale_up_emitted = counter("kici_orch_scaler_scale_up_emitted_total", "Machines asked for", "scaler")
        self.scale_down_emitted = counter(
            "kici_orch_scaler_scale_down_emitted_total", "Machines given back", "scaler", "reason"
        )
        self.external_timeout = counter(
            "kici_orch_scaler_external_provision_timeout_total", "Machines whose agent never registered", "scaler"
        )
        self.external_provisioning = gauge(
            "kici_orch_scaler_external_provisioning_active", "Machines asked for or at work", "scaler"
        )
        self.reap_unseen = gauge(
            "kici_orch_scaler_reap_unseen_provisions", "Provisions whose agent is out of sight for longer than a blink"
        )
        self.reap_blocked = gauge(
            "kici_orch_scaler_reap_blocked", "1 while the reaper stands down: no other coordinator is in sight"
        )

    def _count_events(self) -> None:
        counter, gauge = self._counter, self._gauge
        self.event_dispatch_success = counter("kici_orch_event_dispatch_success_total", "Events handled")
        self.event_retry = counter("kici_orch_event_retry_total", "Deliveries that are tried again")
        self.event_dlq = counter("kici_orch_event_dlq_total", "Events given up")
        self.event_dlq_depth = gauge("kici_orch_event_dlq_depth", "Events given up that wait for a person")
        self.event_lease_expirations = counter(
            "kici_orch_event_lease_expirations_total", "Events whose deliverer never said what became of them"
        )
        self.event_unmatched = counter("kici_orch_event_unmatched_total", "Events that nobody subscribed to")
        self.event_attempts = Histogram(
            "kici_orch_event_attempts",
            "Deliveries that a handled event took",
            buckets=(1, 2, 3, 5),
            registry=self.registry,
        )

    def _count_agents(self) -> None:
        """What agents report of themselves, added up by the type of backend that made them, `stateful` for none."""
        counter, gauge, by = self._counter, self._gauge, "scaler"
        self.agent_jobs = counter("kici_agent_jobs_total", "Jobs that ended on agents", by, "status")
        self.agent_steps = counter("kici_agent_steps_total", "Steps that agents ran", by)
        self.agent_step_seconds = Histogram(
            "kici_agent_step_duration_seconds",
            "How long steps ran",
            (by,),
            buckets=(0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600),
            registry=self.registry,
        )
        self.agent_log_bytes = counter("kici_agent_log_bytes_total", "Bytes that steps wrote", by)
        self.agent_dropped_lines = counter("kici_agent_log_lines_dropped_total", "Lines of output not kept", by)
        self.agent_held_back = counter(
            "kici_agent_log_backpressure_events_total", "Times that a step had to wait with its output", by
        )
        self.agent_jobs_active = gauge("kici_agent_jobs_active", "Jobs that agents have now", by)
        self.agent_backpressure = gauge("kici_agent_log_backpressure_active", "Agents whose step waits", by)
        self.agent_connections = gauge("kici_agent_connection_status", "Agents connected here", by)

    def set_agents(self, now: Mapping[str, AgentsNow]) -> None:
        """Show how the agents of each backend type are; a type that is absent is shown as 0."""
        for kind in self._agent_kinds | now.keys():
            each = now.get(kind, AgentsNow())
            self.agent_connections.labels(kind).set(each.connected)
            self.agent_jobs_active.labels(kind).set(each.active_jobs)
            self.agent_backpressure.labels(kind).set(each.held_back)
        self._agent_kinds |= now.keys()

    def set_queue_depth(self, counts: Mapping[str, int]) -> None:
        """Show how many jobs are in each status; a status that is absent is shown as 0."""
        seen = {sample.labels["status"] for metric in self.queue_depth.collect() for sample in metric.samples}
        for status in seen | set(counts):
            self.queue_depth.labels(status=status).set(counts.get(status, 0))

    def set_reserved(
        self, used: Mapping[ReservedBy, Amount], pools: Mapping[str, Amount] = NO_POOLS, *, scalers: Collection[str]
    ) -> None:
        """Show what agents hold of the caps.  The sum stands in its own row.

        `pools`: what everybody on the host holds of each machine pool, in rows of their own and in no sum.
        `scalers`: all that are configured.  Their rows fall to 0; those of others go with their last agent.
        """
        total = Amount(
            cpus=sum(amount.cpus for amount in used.values()),
            memory_bytes=sum(amount.memory_bytes for amount in used.values()),
        )
        shared = {ReservedBy(POOL_ROW, "", pool): amount for pool, amount in pools.items()}
        rows = {**used, ReservedBy(GLOBAL_ROW, ""): total, **shared}
        for by in self._reserved_rows - rows.keys():
            if by.scaler in scalers:
                rows[by] = NOTHING
            else:
                self._cpus_used.remove(by.scaler, by.scaler_type, by.machine_pool)
                self._memory_used.remove(by.scaler, by.scaler_type, by.machine_pool)
        self._reserved_rows = set(rows)
        for by, amount in rows.items():
            self._cpus_used.labels(by.scaler, by.scaler_type, by.machine_pool).set(amount.cpus)
            self._memory_used.labels(by.scaler, by.scaler_type, by.machine_pool).set(amount.memory_bytes)

    def pool(self, scaler: str, label_set: str, *, target: int, ready: int, in_flight: int) -> None:
        """Show one warm pool."""
        self.warm_target.labels(scaler, label_set).set(target)
        self.warm_ready.labels(scaler, label_set).set(ready)
        self.warm_in_flight.labels(scaler, label_set).set(in_flight)

    def pool_gone(self, scaler: str, label_set: str) -> None:
        for gauge in (self.warm_target, self.warm_ready, self.warm_in_flight):
            gauge.remove(scaler, label_set)

    def warm_spawned(self, scaler: str) -> None:
        self.warm_spawns.labels(scaler).inc()

    def warm_reaped_one(self, scaler: str) -> None:
        self.warm_reaped.labels(scaler).inc()

    def render(self) -> bytes:
        """The scrape answer, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)
