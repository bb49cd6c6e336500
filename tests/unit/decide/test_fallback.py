"""Which refusal speaks for all."""

from kici.decide.fallback import is_refusal, spokesman, verdict_of
from kici.domain.ids import AgentId, Instant, ScalerName
from kici.domain.scale import AtCapacity, Failed, NoBackend, Skipped, Spawning
from kici.domain.verdict import AtCap, CapName, Dimension, InBackoff, NoScalerMatches, SpawnFailed

A, B = ScalerName("a"), ScalerName("b")


def at_cap(requested: float = 1) -> AtCapacity:
    cap = AtCap(cap=CapName.MAX_AGENTS, dimension=Dimension.AGENTS, used=4, requested=requested, limit=4, scaler=A)
    return AtCapacity(verdict=cap)


def deferred(until: int, retry_after_ms: int) -> Skipped:
    return Skipped(verdict=InBackoff(scaler=B, failures=1, until=Instant(until)), retry_after_ms=retry_after_ms)


def test_the_refusal_nearest_to_a_yes_speaks() -> None:
    assert spokesman([deferred(9, 5), at_cap()]) == at_cap()
    assert spokesman([at_cap(requested=9), deferred(9, 5)]) == deferred(9, 5)  # hopeless is far


def test_it_waits_no_longer_than_any_of_them() -> None:
    assert spokesman([deferred(1, 900), deferred(5, 50)]) == deferred(1, 50)


def test_what_is_a_refusal() -> None:
    spawning = Spawning(agent_id=AgentId("x"), backend_type="event")
    no_match = NoBackend(verdict=NoScalerMatches())
    assert [is_refusal(each) for each in (at_cap(), deferred(1, 1), Failed(error="x"), spawning, no_match)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert verdict_of(Failed(error="x")) == SpawnFailed(text="x")
    assert verdict_of(spawning) is None
