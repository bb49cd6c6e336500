"""What becomes of an event that could not be delivered."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.decide.events import (
    Bury,
    Retry,
    after_failed_run,
    after_failure,
    emission_fault,
    retry_delay_ms,
    waits_for_run,
)
from kici.domain.event import SCALE_DOWN, SCALE_UP, DeadReason, EventId, EventState, StoredEvent
from kici.domain.ids import Instant

EVENT = StoredEvent(
    seq=1,
    id=EventId("evt-1-0"),
    emission_id=EventId("evt-1"),
    name="deployed",
    subject=None,
    source="ci",
    chain_depth=0,
    target="acme/a",
    state=EventState.PENDING,
    payload={},
    sealed=None,
    created_at=Instant(0),
    expires_at=None,
    due_at=Instant(0),
    attempts=1,
)


@pytest.mark.spec("T5.2")
def test_windows_double_up_to_five_minutes() -> None:
    assert [retry_delay_ms(attempt, 1.0) for attempt in range(1, 9)] == [
        5_000,
        10_000,
        20_000,
        40_000,
        80_000,
        160_000,
        300_000,
        300_000,
    ]


@given(attempt=st.integers(1, 10_000), jitter=st.floats(0, 1))
def test_jitter_is_full(attempt: int, jitter: float) -> None:
    assert 0 <= retry_delay_ms(attempt, jitter) <= retry_delay_ms(attempt, 1.0) <= 300_000
    assert retry_delay_ms(attempt, 0.0) == 0


@pytest.mark.spec("T5.2")
def test_the_fifth_failure_is_the_last() -> None:
    for attempt in range(1, 5):
        decided = after_failure(replace(EVENT, attempts=attempt), is_passing=True, attempts_max=5, jitter=1)
        assert isinstance(decided, Retry)
    decided = after_failure(replace(EVENT, attempts=5), is_passing=True, attempts_max=5, jitter=1)
    assert decided == Bury(reason=DeadReason.EXHAUSTED)


def test_what_cannot_pass_is_given_up_at_once() -> None:
    assert after_failure(EVENT, is_passing=False, attempts_max=5, jitter=1) == Bury(reason=DeadReason.NON_RETRYABLE)


def test_a_failed_run_answers_a_scale_up_and_is_repeated_for_a_scale_down() -> None:
    up, down = replace(EVENT, name=SCALE_UP), replace(EVENT, name=SCALE_DOWN)
    assert after_failed_run(up, attempts_max=5, jitter=1) == Bury(reason=DeadReason.NON_RETRYABLE)
    assert after_failed_run(down, attempts_max=5, jitter=1) == Retry(delay_ms=5_000, run_failed=True)
    assert after_failed_run(replace(down, attempts=5), attempts_max=5, jitter=1) == Bury(reason=DeadReason.EXHAUSTED)
    assert [waits_for_run(name) for name in (SCALE_UP, SCALE_DOWN, "deployed")] == [True, True, False]


@pytest.mark.spec("T5.4")
@pytest.mark.parametrize("name", [SCALE_UP, "kici.anything", "__x", "__workflow_complete"])
def test_reserved_names_are_refused(name: str) -> None:
    assert "reserved" in str(emission_fault(name, 0))


@pytest.mark.spec("T5.7")
def test_a_chain_has_ten_links() -> None:
    assert emission_fault("deployed", 10) is None
    assert "11" in str(emission_fault("deployed", 11))


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129, ".x"])
def test_names_are_plain(name: str) -> None:
    assert "no event name" in str(emission_fault(name, 0))
