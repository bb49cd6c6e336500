from dataclasses import replace
from typing import Any

import pytest

from kici.decide.prune import BootingSpawn
from kici.decide.withdraw import Fail, Forget, Teardown, Withdraw, teardown_of, what_to_do, withdrawable, withdrawals
from kici.domain.ids import AgentId, InstanceId, Instant, JobId, ScalerName
from kici.domain.provision import ProvisionNews
from kici.domain.spawn import SpawnState

ME, OTHER = InstanceId("me"), InstanceId("other")


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


def news(**fields: Any) -> ProvisionNews:
    return replace(ProvisionNews(agent_id=AgentId("scaler-event-00000001"), state=SpawnState.BOOTING), **fields)


@pytest.mark.spec("scaler 15.5.2", "scaler 15.5.4")
def test_what_its_owner_does_about_a_spawn_that_boots() -> None:
    assert what_to_do(news(), ME) is None
    assert what_to_do(news(state=None), ME) == Forget()
    assert what_to_do(news(adopted_by=OTHER, job_over=True), ME) == Forget()
    assert what_to_do(news(adopted_by=ME, state=SpawnState.REGISTERED), ME) is None
    assert what_to_do(news(job_over=True), ME) == Withdraw()
    assert what_to_do(news(failure="no quota"), ME) == Fail("no quota")
    assert what_to_do(news(failure="no quota", job_over=True), ME) == Withdraw()
    assert what_to_do(news(state=SpawnState.ENDING, failure="x"), ME) == Forget()
