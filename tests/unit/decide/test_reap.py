"""The reaper's verdicts, row by row and for any candidate."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.decide.reap import PRESENT_MS, Condemn, Drop, ReapWindows, verdict, view_suffices
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.provision import ReapCandidate
from kici.domain.spawn import ScaleDownReason, SpawnState
from kici.testing.builders import HERE, an_instance

NOW = Instant(10_000_000)
THERE = InstanceId("there")
WINDOWS = ReapWindows(
    interval_ms=60_000,
    spawn_timeout_ms=300_000,
    stranded_ms=1_800_000,
    flap_grace_ms=120_000,
    reattempt_ms=600_000,
    claim_retention_ms=3_600_000,
)
BOOTING = ReapCandidate(
    agent_id=AgentId("scaler-event-00000001"),
    scaler=ScalerName("cloud"),
    state=SpawnState.BOOTING,
    owner_instance_id=THERE,
    adopted_by=None,
    spawned_at=Instant(NOW - 360_000),
    was_sent=True,
    is_ending_sent=False,
)
ADOPTED = replace(BOOTING, state=SpawnState.REGISTERED, adopted_by=THERE)
ENDING = replace(BOOTING, state=SpawnState.ENDING)
SPAWN_TIMEOUT = Condemn(ScaleDownReason.SPAWN_TIMEOUT)
HEARTBEAT = Condemn(ScaleDownReason.HEARTBEAT_TIMEOUT)


def judged(candidate: ReapCandidate, absent_ms: int, windows: ReapWindows = WINDOWS) -> Condemn | Drop | None:
    return verdict(candidate, me=HERE, absent_ms=absent_ms, now=NOW, windows=windows)


@pytest.mark.spec("scaler 26.9.1")
def test_an_old_provision_needs_a_whole_grace_out_of_sight() -> None:
    assert judged(BOOTING, 0) is None
    assert judged(BOOTING, 119_999) is None
    assert judged(BOOTING, 120_000) == SPAWN_TIMEOUT


def test_a_young_provision_is_left_alone_however_long_it_is_absent() -> None:
    assert judged(replace(BOOTING, spawned_at=Instant(NOW - 299_999)), 10**9) is None


@pytest.mark.spec("scaler 26.9.3", "scaler 26.9.13")
def test_an_adopted_one_goes_after_the_grace_of_a_dead_adopter_or_when_stranded() -> None:
    assert judged(ADOPTED, 120_000) == HEARTBEAT
    alive = replace(ADOPTED, adopter_beat_at=Instant(NOW - 1))
    assert judged(alive, 1_799_999) is None
    assert judged(alive, 1_800_000) == HEARTBEAT
    mine = replace(ADOPTED, adopted_by=HERE)
    assert judged(mine, 1_799_999) is None


@pytest.mark.spec("scaler 26.9.4")
def test_an_adopter_that_beat_within_the_grace_counts_as_alive() -> None:
    assert judged(replace(ADOPTED, adopter_beat_at=Instant(NOW - 30_000)), 300_000) is None
    assert judged(replace(ADOPTED, adopter_beat_at=Instant(NOW - 120_000)), 300_000) == HEARTBEAT


@pytest.mark.spec("scaler 26.9.10")
def test_one_that_nobody_owns_is_never_condemned() -> None:
    assert judged(replace(BOOTING, owner_instance_id=InstanceId("")), 10**9) is None


@pytest.mark.spec("scaler 26.9.11", "T8.6")
def test_the_grace_has_a_floor() -> None:
    assert replace(WINDOWS, flap_grace_ms=1000).grace_ms == 120_000 == 2 * PRESENT_MS
    assert replace(WINDOWS, flap_grace_ms=500_000).grace_ms == 500_000


@pytest.mark.spec("scaler 26.9.14")
def test_outcomes_outlive_the_slowest_cloud() -> None:
    assert WINDOWS.outcome_retention_ms == 86_400_000
    assert replace(WINDOWS, spawn_timeout_ms=2 * 86_400_000).outcome_retention_ms == 4 * 86_400_000


@pytest.mark.spec("scaler 22.5.6")
def test_a_provision_whose_job_is_over_is_withdrawn() -> None:
    assert judged(replace(BOOTING, job_over=True), 120_000) == Condemn(ScaleDownReason.JOB_COMPLETE)


def test_one_that_was_never_asked_for_is_dropped() -> None:
    assert judged(replace(BOOTING, was_sent=False), 120_000) == Drop()
    assert judged(replace(ENDING, was_sent=False), 0) == Drop()


@pytest.mark.spec("scaler 26.9.7")
def test_an_ending_one_is_sent_its_end_until_it_is_delivered() -> None:
    assert judged(replace(ENDING, end_reason="idle"), 0) == Condemn(ScaleDownReason.IDLE)
    assert judged(replace(ENDING, end_reason="the cloud said no"), 0) == SPAWN_TIMEOUT
    assert judged(replace(ENDING, is_ending_sent=True), 10**9) is None
    assert judged(replace(ENDING, undelivered_at=Instant(NOW - 599_999)), 10**9) is None
    assert judged(replace(ENDING, undelivered_at=Instant(NOW - 600_000)), 0) == SPAWN_TIMEOUT


@given(
    absent_ms=st.integers(0, 10_000_000),
    age_ms=st.integers(0, 9_000_000),
    adopted=st.sampled_from([None, HERE, THERE]),
    beat_age_ms=st.none() | st.integers(0, 1_000_000),
    job_over=st.booleans(),
)
def test_doubt_means_none(
    absent_ms: int, age_ms: int, adopted: InstanceId | None, beat_age_ms: int | None, job_over: bool
) -> None:
    candidate = replace(
        BOOTING,
        adopted_by=adopted,
        spawned_at=Instant(NOW - age_ms),
        adopter_beat_at=None if beat_age_ms is None else Instant(NOW - beat_age_ms),
        job_over=job_over,
    )
    decided = judged(candidate, absent_ms)
    if absent_ms < WINDOWS.grace_ms:
        assert decided is None
    if adopted is None and age_ms < WINDOWS.spawn_timeout_ms:
        assert decided is None
    if adopted is not None and decided is not None:
        assert decided == HEARTBEAT


@pytest.mark.spec("scaler 26.9.5")
def test_a_leader_that_sees_none_of_the_others_does_not_act_for_them() -> None:
    fresh, old = Instant(NOW - 59_999), Instant(NOW - PRESENT_MS)
    me = an_instance(id=HERE, last_beat_at=NOW)
    other, third = an_instance(id=THERE, last_beat_at=old), an_instance(id=InstanceId("third"), last_beat_at=fresh)
    assert view_suffices([me], HERE, NOW)
    assert not view_suffices([me, other], HERE, NOW)
    assert view_suffices([me, other, third], HERE, NOW)
    assert view_suffices([me, replace(other, role="worker")], HERE, NOW)
