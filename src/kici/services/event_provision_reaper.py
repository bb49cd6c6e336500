"""The backstop for provisioned machines that nobody else ends: never registered, or their coordinators died.

Leader only, in its own term.  What to do with each is `decide.reap`'s; here are the clocks of absence, which start
anew whenever this coordinator's view was interrupted, and the pace.  A pass never fails.
"""

import asyncio
import logging
from typing import Final, Never, Protocol

from kici.decide.elect import Term
from kici.decide.reap import PRESENT_MS, Condemn, Drop, ReapWindows, verdict, view_suffices
from kici.domain import knobs
from kici.domain.errors import KiciError, StoreDown
from kici.domain.event import SCALE_DOWN
from kici.domain.ids import AgentId, InstanceId, Instant, JobId, ScalerName
from kici.domain.instance import Instance
from kici.domain.provision import ReapCandidate
from kici.domain.spawn import ScaleDownReason
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.observe.metrics import Metrics
from kici.ports.clock import Clock
from kici.ports.event_store import ClaimRows, ProvisionStore
from kici.services.event_emitter import EventEmitter
from kici.services.settings import LiveSettings
from kici.services.shared_deferrals import SharedDeferrals
from kici.services.store_outages import sits_out_outages

PAGE: Final = 5_000
AT_ONCE: Final = 128
"""Ends under way: the store writes those that wait together as one.  Between them, leadership is looked at again."""
INSTANCES_MAX: Final = 1_000
PURGED_MAX: Final = 10_000
NEVER_CAME: Final = (
    "no agent registered from the machine that was asked for; "
    "`kici-admin events list --name kici.scaler.scale-up` shows what became of the request"
)


class Store(ProvisionStore, ClaimRows, Protocol):
    async def instances(self, *, limit: int) -> list[Instance]: ...

    async def database_now(self) -> Instant: ...

    async def delete_spawn(self, agent_id: AgentId) -> bool: ...

    async def set_provisioning_error(self, job_id: JobId, text: str) -> bool: ...


class Leadership(Protocol):
    def term(self) -> Term | None: ...


class EventProvisionReaper:
    def __init__(
        self,
        *,
        store: Store,
        emitter: EventEmitter,
        deferrals: SharedDeferrals,
        leadership: Leadership,
        settings: LiveSettings,
        metrics: Metrics,
        clock: Clock,
        instance_id: InstanceId,
    ) -> None:
        self._store = store
        self._emitter = emitter
        self._deferrals = deferrals
        self._leadership = leadership
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._instance_id = instance_id
        self._ticker = Ticker(settings.peek(knobs.SCALER_REAP_INTERVAL_MS) / 1000)
        self._term: int | None = None
        """Token of the term that the clocks below belong to."""
        self._absent_since: dict[AgentId, float] = {}
        self._attempted_at: dict[AgentId, float] = {}
        self._warned: set[AgentId] = set()
        self._is_blocked = False
        self._is_running = False

    async def run(self) -> Never:
        """Reap for ever.  Leave by cancellation."""
        while True:
            await self._ticker.next()
            await self.tick()

    async def tick(self) -> int:
        """One pass.  How many scale-downs it sent."""
        if self._is_running:
            return 0
        self._is_running = True
        try:
            return await self._tick()
        finally:
            self._is_running = False

    async def _tick(self) -> int:
        term = self._leadership.term()
        if term is None:
            self._forget()
            self._publish(0)
            return 0
        if term.token != self._term:
            self._forget()
            self._term = term.token
        try:
            windows = await self._windows()
        except StoreDown:
            self._absent_since.clear()
            self._publish(0)
            return 0
        sent = await self._sweep(term, windows)
        await self._purge(windows)
        if windows.interval_ms > 0:
            self._ticker.seconds = windows.interval_ms / 1000
        return sent

    async def _windows(self) -> ReapWindows:
        view = await self._settings.strict()
        return ReapWindows(
            interval_ms=view[knobs.SCALER_REAP_INTERVAL_MS],
            spawn_timeout_ms=view[knobs.SCALER_SPAWN_TIMEOUT_MS],
            stranded_ms=view[knobs.SCALER_REAP_STRANDED_TIMEOUT_MS],
            flap_grace_ms=view[knobs.REROUTE_FLAP_GRACE_MS],
            reattempt_ms=view[knobs.SCALER_REAP_REATTEMPT_INTERVAL_MS],
            claim_retention_ms=view[knobs.SCALER_CLAIM_RETENTION_MS],
        )

    async def _sweep(self, term: Term, windows: ReapWindows) -> int:
        try:
            now = await self._store.database_now()
            instances = await self._store.instances(limit=INSTANCES_MAX)
            if not view_suffices(instances, self._instance_id, now):
                self._stand_down(len(instances) - 1)
                return 0
            self._is_blocked = False
            candidates = await self._candidates(now, windows)
            subscribed = await self._emitter.subscribers(SCALE_DOWN) if candidates else frozenset()
        except StoreDown as error:  # what was not seen cannot be judged
            emit(Event.STORE_DOWN, level=logging.WARNING, during="reaping", error=str(error))
            self._absent_since.clear()
            self._publish(0)
            return 0
        self._keep_only({candidate.agent_id for candidate in candidates})
        due = self._due(candidates, now, windows)
        sent = 0
        for place in range(0, len(due), AT_ONCE):
            current = self._leadership.term()
            if current is None or current.token != term.token:
                break
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._act(*each, term, subscribed)) for each in due[place : place + AT_ONCE]]
            sent += sum(task.result() for task in tasks)
        grace = windows.grace_ms / 1000
        since = self._clock.monotonic() - grace
        self._publish(sum(seen_at <= since for seen_at in self._absent_since.values()))
        return sent

    def _due(
        self, candidates: list[ReapCandidate], now: Instant, windows: ReapWindows
    ) -> list[tuple[ReapCandidate, Condemn | Drop]]:
        """Those that are to end now, each with the verdict."""
        due: list[tuple[ReapCandidate, Condemn | Drop]] = []
        seen_at = self._clock.monotonic()
        for candidate in candidates:
            absent_ms = self._absent_ms(candidate.agent_id, seen_at)
            decided = verdict(candidate, me=self._instance_id, absent_ms=absent_ms, now=now, windows=windows)
            if not candidate.owner_instance_id and candidate.adopted_by is None:
                self._warn_of(candidate)
            if decided is not None and not self._was_tried(candidate.agent_id, windows):
                due.append((candidate, decided))
        return due

    async def _candidates(self, now: Instant, windows: ReapWindows) -> list[ReapCandidate]:
        found: list[ReapCandidate] = []
        after: tuple[ScalerName, AgentId] | None = None
        while True:
            page = await self._store.reap_candidates(
                spawned_before=Instant(now - windows.spawn_timeout_ms), present_ms=PRESENT_MS, after=after, limit=PAGE
            )
            found += page
            if len(page) < PAGE:
                return found
            after = (page[-1].scaler, page[-1].agent_id)

    async def _act(
        self, candidate: ReapCandidate, decided: Condemn | Drop, term: Term, subscribed: frozenset[str]
    ) -> int:
        """Carry a verdict out; the attempt is noted first, so that what fails is not tried at every pass."""
        self._attempted_at[candidate.agent_id] = self._clock.monotonic()
        try:
            if isinstance(decided, Drop):
                await self._store.delete_spawn(candidate.agent_id)
                return 0
            is_sent = await self._emitter.condemn(
                candidate, decided.reason, term=term.token, present_ms=PRESENT_MS, subscribed=subscribed
            )
        except KiciError as error:
            emit(Event.REAP_FAILED, level=logging.ERROR, agent_id=candidate.agent_id, error=str(error))
            return 0
        if not is_sent:
            emit(Event.REAP_FAILED, level=logging.WARNING, agent_id=candidate.agent_id, error="it holds no longer")
            return 0
        emit(
            Event.PROVISION_REAPED,
            level=logging.WARNING,
            agent_id=candidate.agent_id,
            scaler=candidate.scaler,
            reason=decided.reason,
            adopted_by=candidate.adopted_by,
        )
        if decided.reason is ScaleDownReason.SPAWN_TIMEOUT:
            await self._report(candidate)
        return 1

    async def _report(self, candidate: ReapCandidate) -> None:
        """A provision that failed: counted once in the cluster, whoever saw it first."""
        self._metrics.external_timeout.labels(scaler=candidate.scaler).inc()
        await self._deferrals.count(candidate.scaler, candidate.agent_id, NEVER_CAME)
        if candidate.bound_job_id is not None and not candidate.job_over:
            try:
                await self._store.set_provisioning_error(candidate.bound_job_id, NEVER_CAME)
            except StoreDown as error:
                emit(Event.STORE_DOWN, job_id=candidate.bound_job_id, error=str(error))

    async def _purge(self, windows: ReapWindows) -> None:
        """Claims and outcomes that nothing can ask about any more."""
        try:
            now = await self._store.database_now()
            await self._store.purge_claims(expired_before=Instant(now - windows.claim_retention_ms))
        except StoreDown as error:
            emit(Event.STORE_DOWN, level=logging.WARNING, during="purging claims", error=str(error))
            return
        with sits_out_outages("purging outcomes"):
            await self._store.purge_outcomes(
                updated_before=Instant(now - windows.outcome_retention_ms), limit=PURGED_MAX
            )

    def _stand_down(self, others: int) -> None:
        """We may be the side of a partition that is cut off."""
        if not self._is_blocked:
            emit(Event.REAP_BLOCKED, level=logging.WARNING, others=others)
        self._is_blocked = True
        self._absent_since.clear()
        self._publish(0)

    def _absent_ms(self, agent_id: AgentId, now: float) -> int:
        """How long it was out of sight, as seen from here: the first look starts the clock, to be seen ends it."""
        return round((now - self._absent_since.setdefault(agent_id, now)) * 1000)

    def _was_tried(self, agent_id: AgentId, windows: ReapWindows) -> bool:
        tried_at = self._attempted_at.get(agent_id)
        return tried_at is not None and self._clock.monotonic() - tried_at < windows.reattempt_ms / 1000

    def _keep_only(self, agent_ids: set[AgentId]) -> None:
        """So that the memory of a long-lived leader does not grow."""
        for known in (self._absent_since, self._attempted_at):
            for agent_id in known.keys() - agent_ids:
                del known[agent_id]
        self._warned &= agent_ids

    def _warn_of(self, candidate: ReapCandidate) -> None:
        if candidate.agent_id not in self._warned:
            self._warned.add(candidate.agent_id)
            emit(Event.PROVISION_UNOWNED, level=logging.WARNING, agent_id=candidate.agent_id, scaler=candidate.scaler)

    def _forget(self) -> None:
        self._term = None
        self._absent_since.clear()
        self._attempted_at.clear()
        self._warned.clear()
        self._is_blocked = False

    def _publish(self, unseen: int) -> None:
        self._metrics.reap_unseen.set(unseen)
        self._metrics.reap_blocked.set(int(self._is_blocked))
