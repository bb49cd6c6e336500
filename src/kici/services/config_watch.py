"""When to reload: at a signal, and when the scalers files change, for those who ask for it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Never

from kici.ports.clock import Clock

LOOK_SECONDS: Final = 2.0
SIGNALS_SECONDS: Final = 0.25
"""Signals that come within it are one."""


class ConfigWatch:
    """Looks every two seconds, and acts on a change only when the next look finds the same: an editor or a copy that
    is half done is left to finish.
    """

    def __init__(
        self, *, fingerprint: Callable[[], object], reload: Callable[[], Awaitable[object]], clock: Clock
    ) -> None:
        """`fingerprint()` is equal for equal files: names, sizes and times."""
        self._fingerprint = fingerprint
        self._reload = reload
        self._clock = clock
        self._taken = self._seen = fingerprint()

    async def run(self) -> Never:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            await self.tick()

    async def tick(self) -> bool:
        """One look.  Whether it led to a reload."""
        now = self._fingerprint()
        is_settled = now == self._seen
        self._seen = now
        if now == self._taken or not is_settled:
            return False
        self._taken = now
        await self._reload()
        return True


class ReloadSignals:
    """Reloads a moment after the first of several signals; one that comes meanwhile is not lost."""

    def __init__(self, *, reload: Callable[[], Awaitable[object]], clock: Clock) -> None:
        self._reload = reload
        self._clock = clock
        self._asked = asyncio.Event()

    def signal(self) -> None:
        self._asked.set()

    async def run(self) -> Never:
        while True:
            await self._asked.wait()
            await self._clock.sleep(SIGNALS_SECONDS)
            self._asked.clear()
            await self._reload()
