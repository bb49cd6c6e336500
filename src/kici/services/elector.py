"""Holds the leader's lease while it can, and says whether this coordinator may act as leader right now.

A leader-only service asks `term()` before each pass and passes the term's token to guarded writes; nothing else
starts or stops it.  A leader that cannot renew stops by itself when its trust runs out, whatever the database says
later; one that was paused finds its trust gone on its own clock.
"""

import logging
from typing import Final, Never

from kici.decide.elect import Term, pause_seconds, term_of
from kici.domain.errors import StoreDown
from kici.domain.ids import InstanceId
from kici.domain.instance import Lease
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.store import InstanceStore
from kici.services.store_outages import sits_out_outages

LEASE: Final = "leader"
TTL_SECONDS: Final = 3.0
MARGIN: Final = 0.2
"""Part of the term that is given away for the time an effect may still take."""


class Elector:
    def __init__(
        self,
        *,
        store: InstanceStore,
        clock: Clock,
        entropy: Entropy,
        instance_id: InstanceId,
        ttl_seconds: float = TTL_SECONDS,
    ) -> None:
        self._store = store
        self._clock = clock
        self._entropy = entropy
        self._instance_id = instance_id
        self._ttl_seconds = ttl_seconds
        self._term: Term | None = None
        self._has_resigned = False

    def term(self) -> Term | None:
        """The term in which this coordinator leads; None: it does not, or can no longer be sure."""
        term = self._term
        return term if term is not None and term.is_trusted(self._clock.monotonic()) else None

    @property
    def is_leader(self) -> bool:
        return self.term() is not None

    async def run(self) -> Never:
        """Take part for ever.  Leave by cancellation, then `resign`."""
        while True:
            await self.tick()
            jitter = self._entropy.uniform(0, 1)
            await self._clock.sleep(pause_seconds(self._ttl_seconds, is_leader=self.is_leader, jitter=jitter))

    async def tick(self) -> bool:
        """One attempt to take or renew the lease.  Whether this coordinator leads."""
        if self._has_resigned:
            return False
        asked_at = self._clock.monotonic()
        before = self._term
        try:
            lease = await self._store.acquire_lease(LEASE, self._instance_id, ttl_ms=round(self._ttl_seconds * 1000))
        except StoreDown as error:
            emit(Event.STORE_DOWN, level=logging.WARNING, during="election", error=str(error))
            return self.is_leader
        if lease is None:
            self._lost(before)
            return False
        if self._has_resigned:  # while the store was asked
            await self._release(lease)
            return False
        self._term = term_of(
            lease, asked_at=asked_at, ttl_seconds=self._ttl_seconds, margin_seconds=self._ttl_seconds * MARGIN
        )
        if before is None or before.token != lease.token:
            emit(Event.TERM_WON, instance_id=self._instance_id, term=lease.token)
        return True

    async def resign(self) -> None:
        """A clean stop: another may lead at once, and this one never again."""
        self._has_resigned = True
        term, self._term = self._term, None
        if term is not None:
            await self._release(term.lease)

    async def _release(self, lease: Lease) -> None:
        with sits_out_outages("resignation"):
            await self._store.release_lease(lease)

    def _lost(self, before: Term | None) -> None:
        self._term = None
        if before is not None:
            emit(Event.TERM_LOST, level=logging.WARNING, instance_id=self._instance_id, term=before.token)
