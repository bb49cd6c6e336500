"""Answers of creations, kept for a while, so that a request sent again with its idempotency key makes nothing new.

For what the store itself does not make idempotent (jobs and runs are): tokens, whose plain text is only in the
answer.  In this process only, for `KEPT_MS`, and bounded.  A key belongs to one caller, one route and one body.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kici.domain.errors import Conflict
from kici.domain.ids import Instant
from kici.domain.strict import Fault, Faulty
from kici.ports.clock import Clock

KEPT_MS: Final = 10 * 60 * 1000
KEPT_MAX: Final = 500
IDEMPOTENCY_HEADER: Final = "Idempotency-Key"


@dataclass(slots=True)
class _Kept:
    body: object
    until: Instant
    answer: object = None
    is_made: bool = False


class Replays:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[str, ...], _Kept] = OrderedDict()

    def begin(self, key: tuple[str, ...], body: object) -> object | None:
        """The answer that the same request had; None: make one, then say `done` or `failed`.

        Raises `Conflict` while the first request is still at work, `Faulty` for another body under the same key.
        """
        now = self._clock.now()
        kept = self._kept.get(key)
        if kept is None or kept.until <= now:
            self._kept[key] = _Kept(body, Instant(now + KEPT_MS))
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
            return None
        if kept.body != body:
            raise Faulty([Fault(IDEMPOTENCY_HEADER, "this key came with another body before; choose a new one")])
        if not kept.is_made:
            raise Conflict("the first request with this idempotency key is still at work; try again later")
        return kept.answer

    def done(self, key: tuple[str, ...], answer: object) -> None:
        if key in self._kept:
            self._kept[key].answer, self._kept[key].is_made = answer, True

    def failed(self, key: tuple[str, ...]) -> None:
        self._kept.pop(key, None)
