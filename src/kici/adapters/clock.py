"""The real clock."""

import asyncio
import time

from kici.domain.ids import Instant


class RealClock:
    """Wall time for people, the loop's monotonic time for durations."""

    def now(self) -> Instant:
        return Instant(time.time_ns() // 1_000_000)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))
