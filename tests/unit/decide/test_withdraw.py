import pytest

from kici.decide.prune import BootingSpawn
from kici.decide.withdraw import Teardown, teardown_of, withdrawable, withdrawals
from kici.domain.ids import AgentId, InstanceId, Instant, JobId, ScalerName


def booting(agent: str, *, backend_type: str = "event", settled: bool = True, job: str | None = "job") -> BootingSpawn:
    return BootingSpawn(
        agent_id=AgentId(agent),
        scaler=ScalerName("s"),
        backend_type=backend_type,
        started_at=Instant(0),
        is_settled=settled,
        bound_job_id=None if job is None else JobId(job),
    )


@pytest.mark.spec("scaler 15.5.1", "scaler 15.5.2")
def test_provisions_of_ended_jobs_are_withdrawn() -> None:
    spawns = [booting("over", job="over"), booting("live", job="live")]
    assert withdrawals(spawns, {JobId("over")}) == ["over"]


@pytest.mark.spec("scaler 15.5.3")
def test_a_provision_whose_scale_up_may_not_be_out_is_left() -> None:
    assert withdrawals([booting("a", settled=False)], {JobId("job")}) == []


def test_only_bound_event_provisions_are_asked_after() -> None:
    spawns = [booting("local", backend_type="container"), booting("warm", job=None), booting("event")]
    assert [spawn.agent_id for spawn in withdrawable(spawns)] == ["event"]
    assert withdrawals(spawns, {JobId("job")}) == ["event"]


@pytest.mark.spec("scaler 15.5.4")
def test_who_tears_the_machine_down() -> None:
    peer = InstanceId("peer")
    assert teardown_of(adopter_known=True, adopted_by=None) is Teardown.OURS
    assert teardown_of(adopter_known=True, adopted_by=peer) is Teardown.ADOPTERS
    assert teardown_of(adopter_known=False, adopted_by=None) is Teardown.REAPERS
