import pytest

from kici.domain.errors import Conflict
from kici.domain.ids import Instant
from kici.domain.strict import Faulty
from kici.testing.fake_surface import START
from kici.web.replays import KEPT_MAX, KEPT_MS, Replays

KEY = ("owner", "/tokens", "once")


class Clock:
    at = START

    def now(self) -> Instant:
        return Instant(self.at)

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


def test_a_repetition_gets_the_first_answer_for_a_while() -> None:
    clock = Clock()
    replays = Replays(clock)
    assert replays.begin(KEY, "body") is None
    replays.done(KEY, "answer")
    assert replays.begin(KEY, "body") == "answer"
    clock.at = Instant(START + KEPT_MS)
    assert replays.begin(KEY, "body") is None


def test_a_repetition_during_the_first_is_a_conflict() -> None:
    replays = Replays(Clock())
    replays.begin(KEY, "body")
    with pytest.raises(Conflict):
        replays.begin(KEY, "body")


def test_a_failed_request_may_be_sent_again() -> None:
    replays = Replays(Clock())
    replays.begin(KEY, "body")
    replays.failed(KEY)
    assert replays.begin(KEY, "body") is None


def test_another_body_under_the_same_key_is_refused() -> None:
    replays = Replays(Clock())
    replays.begin(KEY, "body")
    with pytest.raises(Faulty):
        replays.begin(KEY, "other")


def test_what_is_kept_is_bounded() -> None:
    replays = Replays(Clock())
    for number in range(KEPT_MAX + 1):
        replays.begin((str(number),), "body")
        replays.done((str(number),), number + 1)
    assert replays.begin(("0",), "body") is None
    assert replays.begin((str(KEPT_MAX),), "body") == KEPT_MAX + 1
