"""Events come in: each is claimed, delivered to its target, and tried again until it is handled or given up.

Every coordinator runs one.  A claim is a lease: what dies with its holder is delivered by another after it.  A
workflow is delivered by starting its run; of a scale event the run must also succeed.  A webhook is delivered when
it says so.  What cannot be delivered waits as a dead letter for a person; the waiting job is told at once.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Never, Protocol, assert_never

from kici.decide.events import Bury, Retry, after_failed_run, after_failure, waits_for_run
from kici.domain.errors import KiciError, NoCapacity, Retryable, StoreDown
from kici.domain.event import SCALE_DOWN, SCALE_UP, DeadReason, StoredEvent
from kici.domain.ids import InstanceId, Instant, JobId, RunId
from kici.domain.job import RunStatus
from kici.domain.knobs import EVENT_ROUTER_EVENT_TTL_SECONDS, EVENT_ROUTER_MAX_DISPATCH_ATTEMPTS
from kici.domain.strict import Faulty
from kici.domain.workflow import Registration, RegistrationKind, webhook_of
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.observe.metrics import Metrics
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.event_store import Awaited, EventStore
from kici.ports.webhook import WebhookCall, WebhookSender
from kici.services.settings import LiveSettings
from kici.services.store_outages import sits_out_outages
from kici.services.workflows import EventSecrets, Workflows

POLL_SECONDS: Final = 2.0
LEASE_MS: Final = 60_000
BATCH: Final = 50
AT_ONCE: Final = 16
SETTLED_AT_ONCE: Final = 200


class Store(EventStore, Protocol):
    async def set_provisioning_error(self, job_id: JobId, text: str) -> bool: ...


class Undeliverable(KiciError):
    """Nobody is there any more to take it."""


class EventRouter:
    def __init__(
        self,
        *,
        store: Store,
        workflows: Workflows,
        webhooks: WebhookSender,
        secrets: EventSecrets,
        settings: LiveSettings,
        metrics: Metrics,
        clock: Clock,
        entropy: Entropy,
        instance_id: InstanceId,
    ) -> None:
        self._store = store
        self._workflows = workflows
        self._webhooks = webhooks
        self._secrets = secrets
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._entropy = entropy
        self._instance_id = instance_id
        self._ticker = Ticker(POLL_SECONDS)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._runs: set[RunId] = set()
        """Runs started here whose end is awaited."""
        self.given_up: Callable[[StoredEvent], None] = lambda event: None
        """Set by the composition root: told of each event that goes to the dead letters."""
        self.freed: Callable[[], None] = lambda: None
        """Set by the composition root: a machine was given back, and its scaler may make another."""
        self.note: Callable[[JobId, str], None] = lambda job_id, text: None
        """Set by the composition root: a line for the people of a waiting job."""

    def nudge(self) -> None:
        """There may be something to deliver."""
        self._ticker.nudge()

    def run_over(self, run_id: RunId) -> None:
        """A run ended here."""
        if run_id in self._runs:
            self._runs.discard(run_id)
            self._ticker.nudge()

    async def run(self) -> Never:
        """Deliver for ever.  Leave by cancellation."""
        while True:
            with sits_out_outages("event delivery"):
                while await self.tick() >= BATCH:
                    pass
            await self._ticker.next()

    async def tick(self) -> int:
        """One pass.  How many events were taken up."""
        awaited = await self._store.awaited_events(limit=SETTLED_AT_ONCE)
        for each in awaited:
            await self._settle(each)
        claimed = await self._store.claim_events(self._instance_id, lease_ms=LEASE_MS, limit=BATCH)
        async with asyncio.TaskGroup() as group:
            for event in claimed:
                group.create_task(self._guarded(event), name=f"deliver {event.id}")
        return len(claimed)

    async def _guarded(self, event: StoredEvent) -> None:
        """One delivery.  While the store is down its lease runs out, and somebody begins again."""
        async with self._slots:
            try:
                if event.is_reclaimed:
                    self._metrics.event_lease_expirations.inc()
                await self._deliver(event)
            except StoreDown as error:
                emit(Event.STORE_DOWN, level=logging.WARNING, event_id=event.id, error=str(error))
            except Exception as error:  # noqa: BLE001 - one event that breaks us must not hold up the others
                emit(Event.EVENT_CRASHED, level=logging.ERROR, event_id=event.id, error=repr(error))

    async def _deliver(self, event: StoredEvent) -> None:
        if event.is_expired:
            await self._bury(event, DeadReason.EXPIRED, "it expired before it could be delivered")
            return
        try:
            registration = await self._subscriber(event)
            match registration.kind:
                case RegistrationKind.WORKFLOW:
                    await self._start(registration, event)
                case RegistrationKind.WEBHOOK:
                    await self._call(registration, event)
                case _:
                    assert_never(registration.kind)
        except StoreDown:
            raise
        except (KiciError, Faulty) as error:
            await self._failed(event, str(error), is_passing=isinstance(error, Retryable | NoCapacity))

    async def _subscriber(self, event: StoredEvent) -> Registration:
        registration = await self._store.registration(event.target)
        if registration is None or event.name not in registration.events:
            raise Undeliverable(f"{event.target} subscribes to {event.name} no longer")
        return registration

    async def _start(self, registration: Registration, event: StoredEvent) -> None:
        if not waits_for_run(event.name):
            _ = await self._workflows.start(registration, event, run_id=None)
            await self._done(event)
            return
        run_id = RunId(f"run-{self._entropy.hex(8)}")
        if not await self._store.await_run(event.id, self._instance_id, run_id):
            await self._store.release_event(event.id, self._instance_id)
            return  # withdrawn, or another's since
        self._runs.add(run_id)
        _ = await self._workflows.start(registration, event, run_id=run_id)
        emit(Event.EVENT_STARTED_RUN, event_id=event.id, name=event.name, run_id=run_id, agent_id=event.subject)
        await self._store.release_event(event.id, self._instance_id)

    async def _call(self, registration: Registration, event: StoredEvent) -> None:
        webhook = webhook_of(registration)
        values = await self._secrets.resolve_default(webhook.secret)
        opened = {} if event.sealed is None else self._secrets.opened(event.emission_id, event.sealed)
        await self._webhooks.send(
            WebhookCall(
                url=webhook.url,
                secret=values,
                id=event.emission_id,
                name=event.name,
                subject=event.subject,
                source=event.source or "coordinator",
                payload={**event.payload, **opened},
                created_at=event.created_at,
                timeout_seconds=webhook.timeout_seconds,
            )
        )
        await self._done(event)

    async def _settle(self, awaited: Awaited) -> None:
        """The run of an event is over, or was never made."""
        event = awaited.event
        if awaited.status is RunStatus.SUCCESS:
            await self._done(event)
            return
        if awaited.status is None or event.run_id is None:
            await self._store.retry_event(event.id, error="its run was never made", delay_ms=0)
            return
        why = await self._workflows.why_failed(event.run_id)
        decided = after_failed_run(event, attempts_max=self._attempts_max(), jitter=self._entropy.uniform(0, 1))
        await self._apply(event, decided, why)

    async def _failed(self, event: StoredEvent, error: str, *, is_passing: bool) -> None:
        decided = after_failure(
            event, is_passing=is_passing, attempts_max=self._attempts_max(), jitter=self._entropy.uniform(0, 1)
        )
        await self._apply(event, decided, error)

    async def _apply(self, event: StoredEvent, decided: Retry | Bury, error: str) -> None:
        match decided:
            case Retry(delay_ms=delay_ms, run_failed=run_failed):
                self._metrics.event_retry.inc()
                emit(
                    Event.EVENT_RETRIED,
                    level=logging.WARNING,
                    event_id=event.id,
                    name=event.name,
                    target=event.target,
                    attempt=event.attempts,
                    delay_ms=delay_ms,
                    error=error,
                )
                if not await self._store.retry_event(event.id, error=error, delay_ms=delay_ms, run_failed=run_failed):
                    await self._store.release_event(event.id, self._instance_id)
                    return
                await self._tell_job(event, f"{error}; it is tried again in {delay_ms / 1000:.0f} s")
            case Bury(reason=reason):
                await self._bury(event, reason, error)
            case _:
                assert_never(decided)

    async def _bury(self, event: StoredEvent, reason: DeadReason, error: str) -> None:
        if not await self._store.bury_event(event.id, error=error, reason=reason):
            await self._store.release_event(event.id, self._instance_id)
            return
        self._metrics.event_dlq.inc()
        emit(
            Event.EVENT_GIVEN_UP,
            level=logging.ERROR,
            event_id=event.id,
            name=event.name,
            target=event.target,
            agent_id=event.subject,
            reason=reason,
            error=error,
        )
        await self._tell_job(event, error)
        self.given_up(event)

    async def _done(self, event: StoredEvent) -> None:
        if not await self._store.process_event(event):
            await self._store.release_event(event.id, self._instance_id)
            return
        self._metrics.event_dispatch_success.inc()
        self._metrics.event_attempts.observe(event.attempts)
        emit(Event.EVENT_HANDLED, event_id=event.id, name=event.name, target=event.target, agent_id=event.subject)
        if event.subject is not None:
            self._ticker.nudge()  # the next one of its subject may go
        if event.name == SCALE_DOWN:
            self.freed()

    async def _tell_job(self, event: StoredEvent, error: str) -> None:
        """The job that waits for the machine says why it does not come."""
        job_id = event.payload.get("jobId") if event.name == SCALE_UP else None
        if isinstance(job_id, str):
            text = f"provisioning by {event.target}: {error}"
            await self._store.set_provisioning_error(JobId(job_id), text)
            self.note(JobId(job_id), text)

    def _attempts_max(self) -> int:
        return self._settings.peek(EVENT_ROUTER_MAX_DISPATCH_ATTEMPTS)


class EventRetention:
    """Handled events go after a while, secrets of expired ones at once; dead letters stay for people."""

    def __init__(
        self,
        *,
        store: EventStore,
        settings: LiveSettings,
        metrics: Metrics,
        clock: Clock,
        is_leader: Callable[[], bool],
    ) -> None:
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._is_leader = is_leader
        self._purged_at = float("-inf")

    async def run(self) -> Never:
        while True:
            await self._clock.sleep(60.0)
            await self.tick()

    async def tick(self) -> int:
        """One pass.  How many events went."""
        if not self._is_leader():
            return 0
        try:
            self._metrics.event_dlq_depth.set(await self._store.dead_events_count())
            await self._store.erase_expired_secrets()
            if self._clock.monotonic() - self._purged_at < 3600:
                return 0
            self._purged_at = self._clock.monotonic()
            ttl_ms = (await self._settings.strict())[EVENT_ROUTER_EVENT_TTL_SECONDS] * 1000
            total = 0
            while purged := await self._store.purge_events(
                created_before=Instant(self._clock.now() - ttl_ms), limit=5000
            ):
                total += purged
        except StoreDown:
            return 0  # a minute later is soon enough
        return total
