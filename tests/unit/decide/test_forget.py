"""When a coordinator that seems gone for good may be forgotten."""

from dataclasses import replace

import pytest

from kici.decide.forget import ForgetCase, ForgetOutcome, judge
from kici.domain.ids import InstanceId, Instant
from kici.testing.builders import an_instance

ME, GONE, THIRD = InstanceId("me"), InstanceId("gone"), InstanceId("third")
NOW = Instant(10_000_000)


def a_case(silent_ms: int = 3_600_000, **fields: object) -> ForgetCase:
    known = (
        an_instance(id=ME, last_beat_at=NOW),
        an_instance(id=GONE, last_beat_at=Instant(NOW - silent_ms)),
        an_instance(id=THIRD, last_beat_at=NOW),
    )
    case = ForgetCase(
        peer=GONE, me=ME, known=known, now=NOW, has_adopted=False, jobs=0, grace_ms=120_000, is_acknowledged=False
    )
    return replace(case, **fields)  # type: ignore[arg-type]  # fields of a test


@pytest.mark.spec("scaler 44")
@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        (a_case(), ForgetOutcome.FORGOTTEN),
        (a_case(peer=InstanceId("nobody")), ForgetOutcome.NOT_FOUND),
        (a_case(peer=ME), ForgetOutcome.CONNECTED),
        (a_case(59_999), ForgetOutcome.CONNECTED),
        (a_case(60_000), ForgetOutcome.RECENT),
        (a_case(89_999), ForgetOutcome.RECENT),
        (a_case(90_000), ForgetOutcome.FORGOTTEN),
        (a_case(119_999, has_adopted=True), ForgetOutcome.RECENT),
        (a_case(120_000, has_adopted=True), ForgetOutcome.FORGOTTEN),
        (a_case(299_999, has_adopted=True, grace_ms=300_000), ForgetOutcome.RECENT),
        (a_case(jobs=1), ForgetOutcome.RECENT),
    ],
)
def test_it_is_forgotten_only_when_it_is_silent_for_long_and_left_nothing(
    case: ForgetCase, outcome: ForgetOutcome
) -> None:
    assert judge(case).outcome is outcome


@pytest.mark.spec("scaler 44")
def test_the_last_other_coordinator_is_forgotten_only_by_who_says_that_it_is_meant() -> None:
    two = a_case().known[:2]
    refused = judge(a_case(known=two))
    assert refused.outcome is ForgetOutcome.ACKNOWLEDGEMENT_REQUIRED
    assert "torn down" in refused.detail
    assert judge(a_case(known=two, is_acknowledged=True)).outcome is ForgetOutcome.FORGOTTEN
    assert judge(a_case(known=a_case(70_000).known[:2], is_acknowledged=True)).outcome is ForgetOutcome.RECENT


def test_a_refusal_says_for_how_long() -> None:
    assert judge(a_case(70_000)).detail == "gone was heard of 70 s ago; it can be forgotten in 20 s"
