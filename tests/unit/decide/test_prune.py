import pytest

from kici.decide.prune import counts_as_failure, prune_window_ms, stale_spawns
from kici.domain.ids import AgentId, InstanceId, Instant

NOW = Instant(10_000_000)
MINUTE = 60_000
A = AgentId("a")


def pruned(age_ms: int | None, *, spawn_timeout_ms: int = 5 * MINUTE) -> dict[AgentId, int]:
    started = None if age_ms is None else Instant(NOW - age_ms)
    return stale_spawns({A: started}, now=NOW, spawn_timeout_ms=spawn_timeout_ms)


@pytest.mark.spec("scaler 14.6.1")
def test_a_spawn_is_stale_after_five_minutes() -> None:
    assert pruned(4 * MINUTE) == pruned(5 * MINUTE - 1) == {}
    assert pruned(5 * MINUTE) == {A: 5 * MINUTE}
    assert pruned(6 * MINUTE) == {A: 6 * MINUTE}


@pytest.mark.spec("scaler 14.6.2")
def test_a_longer_spawn_deadline_extends_the_window_and_a_shorter_one_does_not_shrink_it() -> None:
    assert pruned(10 * MINUTE, spawn_timeout_ms=15 * MINUTE) == {}
    assert prune_window_ms(1000) == 5 * MINUTE


@pytest.mark.spec("scaler 9.6.10")
def test_a_spawn_still_in_line_is_never_stale() -> None:
    assert pruned(None) == {}


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
