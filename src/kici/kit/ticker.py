"""A pace that can be hurried: loops wait for the next tick or for a nudge, whichever is first."""

import asyncio


class Ticker:
    """Waits `seconds` between passes of a loop; `nudge` ends the current wait early.

    Nudges coalesce: any number of them during a pass cause one more pass.  Losing one costs latency only.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        self._nudged.set()

    async def next(self) -> bool:
        """Return after the interval (False) or a nudge (True)."""
        try:
            async with asyncio.timeout(self.seconds):
                await self._nudged.wait()
        except TimeoutError:
            return False
        self._nudged.clear()
        return True
