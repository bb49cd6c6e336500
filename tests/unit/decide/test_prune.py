import pytest

from kici.decide.prune import BootingSpawn, Prune, counts_as_failure, prune_window_ms, stale_spawns
from kici.domain.ids import AgentId, InstanceId, Instant, JobId, ScalerName

NOW = Instant(10_000_000)
MINUTE = 60_000


def booting(
    age_ms: int | None, *, backend_type: str = "container", settled: bool = True, job: str | None = "job"
) -> BootingSpawn:
    return BootingSpawn(
        agent_id=AgentId("a"),
        scaler=ScalerName("s"),
        backend_type=backend_type,
        started_at=None if age_ms is None else Instant(NOW - age_ms),
        is_settled=settled,
        bound_job_id=None if job is None else JobId(job),
    )


def prune(spawn: BootingSpawn, *, spawn_timeout_ms: int = 5 * MINUTE) -> Prune | None:
    found = stale_spawns([spawn], now=NOW, spawn_timeout_ms=spawn_timeout_ms)
    return found[0] if found else None


@pytest.mark.spec("scaler 14.6.1")
def test_a_spawn_is_stale_after_five_minutes() -> None:
    assert prune(booting(4 * MINUTE)) is None
    assert prune(booting(5 * MINUTE - 1)) is None
    assert prune(booting(5 * MINUTE)) is not None
    assert prune(booting(6 * MINUTE)) is not None


@pytest.mark.spec("scaler 14.6.2")
def test_a_longer_spawn_deadline_extends_the_window_and_a_shorter_one_does_not_shrink_it() -> None:
    assert prune(booting(10 * MINUTE), spawn_timeout_ms=15 * MINUTE) is None
    assert prune_window_ms(1000) == 5 * MINUTE


@pytest.mark.spec("scaler 9.6.10")
def test_a_spawn_still_in_line_is_never_stale() -> None:
    assert prune(booting(None)) is None


@pytest.mark.spec("scaler 14.6.3")
def test_only_a_settled_local_spawn_is_destroyed() -> None:
    settled, under_way = prune(booting(6 * MINUTE)), prune(booting(6 * MINUTE, settled=False))
    assert settled is not None
    assert settled.destroys
    assert under_way is not None
    assert not under_way.destroys


@pytest.mark.spec("scaler 14.6.4", "scaler 14.6.9")
def test_an_event_provision_is_left_to_the_reaper_by_its_recorded_type() -> None:
    found = prune(booting(6 * MINUTE, backend_type="event"))
    assert found is not None
    assert found.is_event
    assert not found.destroys


@pytest.mark.spec("scaler 14.6.8")
def test_a_warm_spawn_gives_its_slot_back_to_the_pool() -> None:
    warm, bound = prune(booting(6 * MINUTE, job=None)), prune(booting(6 * MINUTE))
    assert warm is not None
    assert warm.frees_pool_slot
    assert bound is not None
    assert not bound.frees_pool_slot


@pytest.mark.spec("scaler 14.6.5", "scaler 14.6.6", "scaler 14.6.7")
@pytest.mark.parametrize(
    ("job_ended", "adopted_by", "expected"),
    [
        (None, None, True),
        (False, None, True),
        (True, None, False),
        (False, InstanceId("peer"), False),
        (None, InstanceId("peer"), False),
    ],
)
def test_a_provision_counts_as_failed_unless_its_job_ended_or_a_peer_has_its_agent(
    job_ended: bool | None, adopted_by: InstanceId | None, expected: bool
) -> None:
    assert counts_as_failure(job_ended=job_ended, adopted_by=adopted_by) is expected
