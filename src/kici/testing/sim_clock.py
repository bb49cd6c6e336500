"""The clock port on a virtual-time loop: one per simulated machine, each with its own skew."""

import asyncio
from typing import Final

from kici.domain.ids import Instant

SIM_START: Final = Instant(1_750_000_000_000)
"""Wall time at loop time 0: a moment in 2025, so that nothing near zero goes unnoticed."""


class SimClock:
    """Reads the time of the running loop (or of `loop`, where code outside of it asks).

    `skew_ms` is how far this machine's wall time is ahead of the true one; a fault may change it at any moment.
    Monotonic time and sleeping know no skew.
    """

    def __init__(
        self, *, start: Instant = SIM_START, skew_ms: int = 0, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._start = start
        self._loop = loop
        self.skew_ms = skew_ms

    def now(self) -> Instant:
        seconds = (self._loop or asyncio.get_running_loop()).time()  # not by `monotonic`: this is asked all the time
        return Instant(self._start + round(seconds * 1000) + self.skew_ms)

    def monotonic(self) -> float:
        return (self._loop or asyncio.get_running_loop()).time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
