from dataclasses import replace

import pytest

from kici.decide.backoff import COUNTED_MAX, UNTROUBLED, BackoffSettings, Deferral, record_failure, refusal, stumbled
from kici.domain.ids import AgentId, Instant, ScalerName
from kici.domain.verdict import InBackoff

NOW = Instant(1_000_000)
SETTINGS = BackoffSettings()


def after(failures: int, *, deferral: Deferral = UNTROUBLED, now: Instant = NOW) -> Deferral:
    for number in range(failures):
        deferral = record_failure(deferral, AgentId(f"agent-{number}"), error="no space", settings=SETTINGS, now=now)
    return deferral


def refused(deferral: Deferral, *, now: int) -> InBackoff | None:
    return refusal(deferral, scaler=ScalerName("s"), is_external=False, settings=SETTINGS, now=Instant(now))


@pytest.mark.spec("scaler 13.9.1")
@pytest.mark.parametrize(("failures", "seconds"), [(1, 30), (2, 60), (3, 120), (10, 900), (5000, 900)])
def test_the_window_doubles_up_to_the_maximum(failures: int, seconds: int) -> None:
    assert after(failures).until == NOW + seconds * 1000


@pytest.mark.spec("scaler 13.9.3")
def test_one_dead_agent_counts_once_whoever_reports_it() -> None:
    once = after(1)
    again = record_failure(once, AgentId("agent-0"), error="reaper", settings=SETTINGS, now=Instant(NOW + 5))
    assert again == once
    assert again.failures == 1


@pytest.mark.spec("scaler 13.9.4")
def test_two_failures_at_the_same_moment_count_two() -> None:
    assert after(2).failures == 2


@pytest.mark.spec("scaler 13.9.10")
def test_a_bounded_number_of_counted_agents_is_remembered_and_the_oldest_go_first() -> None:
    deferral = after(100)
    assert len(deferral.counted) == COUNTED_MAX
    assert deferral.counted[-1] == "agent-99"
    assert deferral.failures == 100


@pytest.mark.spec("scaler 9.6.3", "scaler 13.4")
def test_a_scaler_is_refused_inside_its_window_and_not_at_its_end() -> None:
    deferral = after(1)
    verdict = refused(deferral, now=NOW + 26_000)
    assert verdict is not None
    assert verdict.until - (NOW + 26_000) == 4000
    assert (verdict.failures, verdict.last_error) == (1, "no space")
    assert refused(deferral, now=NOW + 30_000) is None


def test_a_scaler_without_failures_is_never_refused() -> None:
    assert refused(UNTROUBLED, now=0) is None
    assert refused(replace(UNTROUBLED, until=Instant(NOW + 1)), now=NOW) is None


def test_from_the_limit_on_the_refusal_says_that_it_repeats() -> None:
    verdicts = [refused(after(failures), now=NOW) for failures in (4, 5)]
    assert [verdict.is_repeated for verdict in verdicts if verdict] == [False, True]


def test_changed_settings_do_not_move_a_window_that_is_open() -> None:
    deferral = after(1)
    shorter = BackoffSettings(base_ms=1000)
    assert refusal(deferral, scaler=ScalerName("s"), is_external=True, settings=shorter, now=Instant(NOW + 20_000))


@pytest.mark.spec("scaler 13.9.8")
def test_settings_that_contradict_each_other_are_named() -> None:
    assert SETTINGS.problems() == ()
    (problem,) = BackoffSettings(base_ms=60_000, max_ms=30_000).problems()
    assert "scaler_provision_backoff_max_ms is 30000" in problem
    assert len(BackoffSettings(base_ms=10, max_ms=5, failures_max=0).problems()) == 3


def test_a_clock_that_is_set_back_does_not_prolong_a_window() -> None:
    deferral = after(1)
    assert refused(deferral, now=NOW) is not None
    assert refused(deferral, now=NOW - 1) is None
    assert refused(deferral, now=NOW - 3_600_000) is None


# --- launches that fail by chance


def stumbles(*moments: tuple[int, int]) -> Deferral:
    """After launches that began and failed at these moments."""
    record = UNTROUBLED
    for started_at, failed_at in moments:
        record = stumbled(record, error="it did not work", started_at=Instant(started_at), now=Instant(failed_at))
    return record


def test_after_one_chance_failure_the_next_launch_follows_at_once() -> None:
    assert refused(stumbles((1_000, 2_000)), now=2_000) is None


def test_launches_that_go_on_failing_by_chance_follow_at_growing_pauses_up_to_half_a_minute() -> None:
    pauses = []
    for count in range(1, 9):
        record = stumbles(*((number * 100_000, number * 100_000 + 1) for number in range(1, count + 1)))
        pauses.append(record.until - record.since)
    assert pauses == [0, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]
    assert stumbles(*((number, number + 1) for number in range(10, 9_000, 2))).until - 9_000 <= 30_000


def test_launches_that_were_under_way_at_the_last_failure_count_once_with_it() -> None:
    assert stumbles((1_000, 2_000), (1_500, 2_100), (2_000, 2_200)).failures == 1
    assert stumbles((1_000, 2_000), (2_001, 2_200)).failures == 2
