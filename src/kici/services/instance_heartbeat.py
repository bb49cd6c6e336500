"""This coordinator's row in the cluster: refreshed every ten seconds, removed by a clean stop.

Others take a coordinator for absent when its beat is old, so a beat that cannot be written matters:
`seconds_since_beat` tells for how long none could be.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Never

from kici.domain.errors import StoreDown
from kici.domain.instance import Instance
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.store import InstanceStore

BEAT_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 2.0
"""While the store fails: whoever is back late is taken for cut off."""


class InstanceHeartbeat:
    """`me` is what the row says, apart from its times and whether it drains."""

    def __init__(
        self, *, store: InstanceStore, clock: Clock, me: Instance, is_draining: Callable[[], bool] = lambda: False
    ) -> None:
        self._store = store
        self._clock = clock
        self._me = me
        self._is_draining = is_draining
        self._ticker = Ticker(BEAT_SECONDS)
        self._beat_at = clock.monotonic()
        self._failing = False
        self._has_left = False
        self._writing = asyncio.Lock()

    @property
    def seconds_since_beat(self) -> float:
        """Since the last beat that was written, or since the start."""
        return self._clock.monotonic() - self._beat_at

    def nudge(self) -> None:
        """Something that the row says has changed: write it now."""
        self._ticker.nudge()

    async def run(self) -> Never:
        while True:
            self._ticker.seconds = BEAT_SECONDS if await self.tick() else AGAIN_SECONDS
            await self._ticker.next()

    async def tick(self) -> bool:
        """Write one beat.  Whether the store took it."""
        async with self._writing:
            return not self._has_left and await self._beat()

    async def _beat(self) -> bool:
        begun = self._clock.monotonic()
        row = replace(self._me, last_beat_at=self._clock.now(), draining=self._is_draining())
        try:
            await self._store.beat(row)
        except StoreDown as error:
            if not self._failing:
                emit(Event.BEAT_FAILED, level=logging.WARNING, instance_id=self._me.id, error=str(error))
            self._failing = True
            return False
        self._beat_at = begun
        self._failing = False
        return True

    async def leave(self) -> None:
        """A clean stop: the row goes, and no beat brings it back."""
        async with self._writing:  # one that is under way would write the row again
            self._has_left = True
            try:
                await self._store.remove_instance(self._me.id)
            except StoreDown as error:
                emit(Event.BEAT_FAILED, level=logging.WARNING, instance_id=self._me.id, error=str(error))
