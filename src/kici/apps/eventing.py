"""The event half of a coordinator: events out and in, workflows, claim codes, provisions and their reaper."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kici.decide.prune import EVENT
from kici.decide.route import Router
from kici.domain import knobs
from kici.domain.errors import KiciError, Permanent
from kici.domain.event import SCALE_UP, StoredEvent
from kici.domain.ids import JobId, RunId
from kici.domain.job import Demand
from kici.domain.spawn import Spawn
from kici.ports.peers import Topic
from kici.ports.webhook import WebhookCall
from kici.services.event_emitter import EventEmitter
from kici.services.event_provision_reaper import EventProvisionReaper
from kici.services.event_router import EventRetention, EventRouter
from kici.services.provision_watch import ProvisionWatch
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.workflows import Workflows

if TYPE_CHECKING:
    from kici.apps.assembly import Coordinator

LOCK_WAIT_MS: Final = 5_000


class NoWebhooks:
    """For coordinators that call nobody."""

    async def send(self, call: WebhookCall) -> None:
        raise Permanent("this coordinator makes no calls to webhooks")

    async def close(self) -> None:
        pass


class Eventing:
    def __init__(
        self,
        coordinator: "Coordinator",
        *,
        retired: Callable[[Spawn], ScalerRuntime | None],
        note: Callable[[JobId, str], None],
    ) -> None:
        given = coordinator.given
        self._coordinator = coordinator
        self.emitter = EventEmitter(
            store=given.store,
            sealer=given.sealer,
            entropy=given.entropy,
            metrics=coordinator.metrics,
            instance_id=coordinator.instance_id,
            rate_max=lambda: coordinator.settings.peek(knobs.EVENT_ROUTER_RATE_LIMIT_PER_WORKFLOW_PER_MINUTE),
            cancel_run=self._cancel_run,
        )
        self.workflows = Workflows(
            store=given.store, runs=coordinator.jobs, clock=given.clock, served_by=self._served_by
        )
        self.router = EventRouter(
            store=given.store,
            workflows=self.workflows,
            webhooks=given.webhooks or NoWebhooks(),
            secrets=coordinator.event_secrets,
            settings=coordinator.settings,
            metrics=coordinator.metrics,
            clock=given.clock,
            entropy=given.entropy,
            instance_id=coordinator.instance_id,
        )
        self.watch = ProvisionWatch(
            store=given.store,
            spawns=coordinator.spawns,
            manager=coordinator.manager,
            teardown=coordinator.teardown,
            failures=coordinator.failures,
            deferrals=coordinator.deferrals,
            supervisor=given.supervisor,
            clock=given.clock,
            instance_id=coordinator.instance_id,
            retired=retired,
        )
        self.emitter.emitted = self._emitted
        given.notifier.listen(Topic.EVENTS, self._look)
        self.router.given_up = self._given_up
        self.router.freed = coordinator.pending.capacity_freed
        self.router.note = note
        coordinator.manager.provision_overdue = self.watch.overdue
        coordinator.manager.adopted = self.watch.adopted

    def lead(self) -> None:
        """Once the elector is there."""
        coordinator = self._coordinator
        given = coordinator.given
        self.reaper = EventProvisionReaper(
            store=given.store,
            emitter=self.emitter,
            deferrals=coordinator.deferrals,
            leadership=coordinator.elector,
            settings=coordinator.settings,
            metrics=coordinator.metrics,
            clock=given.clock,
            instance_id=coordinator.instance_id,
        )
        self._retention = EventRetention(
            store=given.store,
            settings=coordinator.settings,
            metrics=coordinator.metrics,
            clock=given.clock,
            is_leader=lambda: coordinator.elector.is_leader,
        )

    def start(self) -> None:
        supervisor = self._coordinator.given.supervisor
        supervisor.service("deferrals", self._coordinator.deferrals.run)
        supervisor.service("event-router", self.router.run)
        supervisor.service("event-retention", self._retention.run)
        supervisor.service("provision-watch", self.watch.run)
        supervisor.service("event-provision-reaper", self.reaper.run)

    def has_event_scalers(self) -> bool:
        coordinator = self._coordinator
        return any(runtime.backend.type == EVENT for runtime in coordinator.manager.fleet.runtimes.values())

    def publish(self) -> None:
        """Gauges that are read at a scrape."""
        for runtime in self._coordinator.manager.fleet.runtimes.values():
            if runtime.backend.type == EVENT:
                gauge = self._coordinator.metrics.external_provisioning.labels(scaler=runtime.name)
                gauge.set(runtime.backend.active_count())

    def _emitted(self) -> None:
        self.router.nudge()
        self._coordinator.given.notifier.hint(Topic.EVENTS)

    def _look(self) -> None:
        self.router.nudge()
        self.watch.nudge()

    def _given_up(self, event: StoredEvent) -> None:
        if event.name == SCALE_UP:
            self.watch.nudge()
            self._coordinator.given.notifier.hint(Topic.EVENTS)

    async def _cancel_run(self, run_id: RunId, why: str) -> None:
        with contextlib.suppress(KiciError):  # it is over, or never began
            _ = await self._coordinator.jobs.cancel_run(run_id, force=False, reason=why)

    def _served_by(self, demand: Demand, ref: str) -> str | None:
        """The event scaler that would serve a demand, if it asks the workflow `ref` for machines."""
        coordinator = self._coordinator
        router: Router = coordinator.manager.fleet.router
        best = router.match(demand)
        if best is None or coordinator.registry.serving(demand):
            return None
        runtime = coordinator.manager.fleet.runtimes[best.scaler]
        return best.scaler if runtime.backend.type == EVENT and ref in runtime.provisioning_targets else None
