"""Where an agent connects next, and after what pause."""

from collections.abc import Callable, Iterable
from typing import Final

from kici.kit.backoff import exponential
from kici.wire.messages import CloseCode

FIRST_SECONDS: Final = 1.0
FACTOR: Final = 1.5
HURRY_SECONDS_MAX: Final = 5.0
ADDRESSES_MAX: Final = 16

_ELSEWHERE: Final = frozenset({CloseCode.GOING_AWAY, CloseCode.HANDOVER})


class Route:
    """Tries the known addresses in turn, with growing pauses; the one that worked last is tried first."""

    def __init__(self, url: str, *, jitter: Callable[[], float]) -> None:
        self._first_url = url
        self._urls = [url]
        self._failures = 0
        self._jitter = jitter

    @property
    def url(self) -> str:
        return self._urls[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """All that are known, in the order in which they are tried."""
        return tuple(self._urls)

    def learn(self, urls: Iterable[str]) -> None:
        """Remember other coordinators.  An encrypted route is never left for one in the clear."""
        scheme = "wss://" if self._first_url.startswith("wss://") else ("ws://", "wss://")
        for url in urls:
            if url.startswith(scheme) and url not in self._urls and len(self._urls) < ADDRESSES_MAX:
                self._urls.append(url)

    def registered(self, urls: Iterable[str]) -> None:
        """The present address works, and these are the coordinators there are now."""
        self._failures = 0
        self._urls = list(dict.fromkeys([self.url, self._first_url]))
        self.learn(urls)

    def lost(self, code: int, *, was_registered: bool, delay_ms_max: int, in_hurry: bool) -> float:
        """The connection is gone or was not made; the seconds to wait before the next try.

        A registered connection that broke is tried again where it was: only a coordinator that sends its agents
        away, or that cannot be reached, is left for the next one.
        """
        if code in _ELSEWHERE or not was_registered:
            self._urls.append(self._urls.pop(0))
        if code == CloseCode.SUPERSEDED:  # somebody else uses this id: do not play ping-pong with it
            self._failures = 10
        self._failures += 1
        maximum = max(FIRST_SECONDS, delay_ms_max / 1000)
        if in_hurry:
            maximum = min(maximum, HURRY_SECONDS_MAX)
        delay = exponential(self._failures, base=FIRST_SECONDS, factor=FACTOR, maximum=maximum)
        return delay * (0.5 + 0.5 * self._jitter())
