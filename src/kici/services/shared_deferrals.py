"""Backoff of event scalers, one for the whole cluster: their provider is one, whoever asks it.

The store counts (each agent once) and decides at every spawn; here is the copy that answers questions in between,
a few seconds old at most.  What is left of a window is taken from the wall clock once, when its failure is first heard
of, and runs off on the monotonic one: neither a jump nor a clock that differs from the database's makes it longer.
A fresh process may try once at once: the operator may have mended what was wrong.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Never

from kici.decide.backoff import UNTROUBLED, BackoffSettings, record_failure, refusal
from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, Instant, ScalerName
from kici.domain.verdict import InBackoff
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.event_store import ProvisionStore, SharedDeferral

REFRESH_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 1.0
PROBE_LOOK_MS: Final = 5_000
LISTED_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    shared: SharedDeferral
    ends_at: float
    """Monotonic seconds."""


class SharedDeferrals:
    def __init__(
        self,
        *,
        store: ProvisionStore,
        clock: Clock,
        settings: Callable[[], BackoffSettings],
        is_needed: Callable[[], bool],
    ) -> None:
        """`is_needed()`: whether any event scaler is configured here."""
        self._store = store
        self._clock = clock
        self._settings = settings
        self._is_needed = is_needed
        self._known: dict[ScalerName, _Known] = {}
        self._tried: set[ScalerName] = set()
        """Scalers that this process has asked since it started."""

    async def run(self) -> Never:
        """Keep the copy fresh.  Leave by cancellation."""
        while True:
            await self.tick()
            await self._clock.sleep(REFRESH_SECONDS)

    async def tick(self) -> None:
        if not self._is_needed():
            return
        try:
            found = await self._store.deferrals(limit=LISTED_MAX)
        except StoreDown as error:
            emit(Event.STORE_DOWN, level=logging.WARNING, during="deferrals", error=str(error))
            return
        self._known = {each.scaler: self._heard(each) for each in found}

    def may_probe(self, scaler: ScalerName) -> bool:
        """Whether this process may ask a deferred scaler before its time."""
        return scaler not in self._tried

    def tried(self, scaler: ScalerName) -> None:
        self._tried.add(scaler)

    def refusal(self, scaler: ScalerName) -> InBackoff | None:
        """As far as is known here, `until` by this host's wall clock; the store judges when a spawn is written."""
        known = self._known.get(scaler)
        if known is None or (self.may_probe(scaler) and not known.shared.is_probing):
            return None
        now = self._clock.now()
        left_ms = max(0, round((known.ends_at - self._clock.monotonic()) * 1000))
        if not left_ms and known.shared.is_probing:
            left_ms = PROBE_LOOK_MS
        here = replace(known.shared.deferral, since=now, until=Instant(now + left_ms))
        return refusal(here, scaler=scaler, is_external=True, settings=self._settings(), now=now)

    def _heard(self, shared: SharedDeferral) -> _Known:
        """The window of a failure that was known before goes on as it was."""
        before, deferral = self._known.get(shared.scaler), shared.deferral
        if before is not None and before.shared.deferral.since == deferral.since:
            return replace(before, shared=shared)
        left_ms = min(deferral.until - self._clock.now(), deferral.until - deferral.since)
        return _Known(shared=shared, ends_at=self._clock.monotonic() + left_ms / 1000)

    def expect(self, scaler: ScalerName, agent_id: AgentId, error: str) -> None:
        """A failure that is about to be counted: known here at once, so that nobody asks again before."""
        before = self._known.get(scaler)
        deferral = record_failure(
            before.shared.deferral if before else UNTROUBLED,
            agent_id,
            error=error,
            settings=self._settings(),
            now=self._clock.now(),
        )
        self._tried.add(scaler)
        self._known[scaler] = self._heard(SharedDeferral(scaler=scaler, deferral=deferral, is_probing=False))

    async def count(self, scaler: ScalerName, agent_id: AgentId, error: str) -> None:
        """Count a failure, however long the store takes."""
        while True:
            try:
                counted = await self._store.count_provision_failure(
                    scaler, agent_id, error=error, settings=self._settings()
                )
            except StoreDown as failure:
                emit(Event.STORE_DOWN, level=logging.WARNING, agent_id=agent_id, error=str(failure))
                await self._clock.sleep(RETRY_SECONDS)
                continue
            if counted is None:
                await self.tick()  # counted already, perhaps by another coordinator: see what holds
            else:
                self._known[scaler] = self._heard(counted)
                if counted.deferral.failures >= self._settings().failures_max:
                    emit(
                        Event.PROVISIONING_FAILS,
                        level=logging.WARNING,
                        scaler=scaler,
                        failures=counted.deferral.failures,
                        until=counted.deferral.until,
                        error=error,
                    )
            return

    def clear(self, scaler: ScalerName) -> None:
        """An agent of this scaler registered; the store knows already."""
        self._known.pop(scaler, None)
