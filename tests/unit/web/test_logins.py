from dataclasses import dataclass

from kici.domain.ids import Instant
from kici.testing.fake_surface import START, FakeTokens
from kici.testing.seeded_entropy import SeededEntropy
from kici.web.logins import CODE_MS, CODES_MAX, SESSION_MS, Logins


@dataclass
class StoppedClock:
    at: int = START

    def now(self) -> Instant:
        return Instant(self.at)

    def monotonic(self) -> float:
        return self.at / 1000

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


def parts() -> tuple[Logins, StoppedClock]:
    clock = StoppedClock()
    return Logins(FakeTokens(), clock, SeededEntropy()), clock


async def test_a_code_dies_of_age() -> None:
    logins, clock = parts()
    code, until = logins.code("owner")
    assert until == START + CODE_MS
    clock.at = until
    assert logins.session_of_code(code) is None


async def test_a_session_dies_of_age() -> None:
    logins, clock = parts()
    session = logins.session("owner")
    assert await logins.actor_of_session(session) is not None
    clock.at += SESSION_MS
    assert await logins.actor_of_session(session) is None


def test_codes_are_bounded_and_the_oldest_goes_first() -> None:
    logins, _ = parts()
    codes = [logins.code("owner")[0] for _ in range(CODES_MAX + 1)]
    assert logins.session_of_code(codes[0]) is None
    assert logins.session_of_code(codes[1]) is not None
