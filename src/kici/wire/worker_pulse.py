"""Signs of life on a worker link, the same on both sides: say something often, notice when nothing comes."""

from typing import Final

BEAT_SECONDS: Final = 10.0
SILENCE_SECONDS: Final = 30.0
"""A link on which nothing came for so long is dead, whatever the sockets say."""


class Pulse:
    """One side of one connection.  Times are seconds of a monotonic clock."""

    __slots__ = ("_heard_at", "_said_at")

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._said_at = now

    def heard(self, now: float) -> None:
        self._heard_at = max(self._heard_at, now)

    def said(self, now: float) -> None:
        self._said_at = max(self._said_at, now)

    def silence(self, now: float) -> float | None:
        """Seconds of a silence that is too long; None: it is alive."""
        seconds = now - self._heard_at
        return seconds if seconds >= SILENCE_SECONDS else None

    def is_beat_due(self, now: float) -> bool:
        return now - self._said_at >= BEAT_SECONDS

    def next_deadline(self) -> float:
        return min(self._heard_at + SILENCE_SECONDS, self._said_at + BEAT_SECONDS)
