"""Time: the only place from which code may learn it."""

from typing import Protocol

from kici.domain.ids import Instant


class Clock(Protocol):
    def now(self) -> Instant:
        """Wall time in ms, for people and rows."""
        ...

    def monotonic(self) -> float:
        """Seconds that never jump, for durations and deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; at once (but after letting others run) for 0 or less."""
        ...
