"""How much one connection may say: token buckets that run into debt.

A frame over the limit is still handled (dropping a status would leave both sides of different opinion);
what is punished is an overrun that lasts.
"""

from dataclasses import dataclass
from typing import Final

MESSAGE_BURST: Final = 200
MESSAGES_PER_SECOND: Final = 100
BYTE_BURST: Final = 2 * 1024 * 1024
BYTES_PER_SECOND: Final = 500 * 1024
OVERRUN_SECONDS_MAX: Final = 5.0


class Bucket:
    """Refills at `per_second` up to `burst`; spending may take it below zero, but not below `-burst`."""

    __slots__ = ("_at", "_burst", "_level", "_per_second")

    def __init__(self, *, burst: float, per_second: float, now: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._level = burst
        self._at = now

    def spend(self, amount: float, now: float) -> float:
        """Take `amount`; the seconds until the debt is paid (0: there is none)."""
        level = min(self._burst, self._level + max(0.0, now - self._at) * self._per_second)
        self._at = max(self._at, now)
        self._level = max(-self._burst, level - amount)
        return max(0.0, -self._level / self._per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun:
    """A connection over its limits."""

    is_new: bool
    """The first frame of this overrun: the peer should be told."""
    wait_seconds: float
    """Silence after which it is within its limits again."""
    lasted_seconds: float

    @property
    def is_too_long(self) -> bool:
        return self.lasted_seconds >= OVERRUN_SECONDS_MAX


class Pace:
    """The limits of one connection."""

    __slots__ = ("_bytes", "_messages", "_overrun_since")

    def __init__(self, now: float) -> None:
        self._messages = Bucket(burst=MESSAGE_BURST, per_second=MESSAGES_PER_SECOND, now=now)
        self._bytes = Bucket(burst=BYTE_BURST, per_second=BYTES_PER_SECOND, now=now)
        self._overrun_since: float | None = None

    def count(self, size: int, now: float) -> Overrun | None:
        """Count one frame of `size` bytes.  None: within the limits."""
        wait_seconds = max(self._messages.spend(1, now), self._bytes.spend(size, now))
        if wait_seconds == 0.0:
            self._overrun_since = None
            return None
        is_new = self._overrun_since is None
        since = now if self._overrun_since is None else self._overrun_since
        self._overrun_since = since
        return Overrun(is_new=is_new, wait_seconds=wait_seconds, lasted_seconds=now - since)
