from dataclasses import replace
from typing import Any

import pytest

from kici.decide.withdraw import Fail, Forget, Withdraw, what_to_do
from kici.domain.ids import AgentId, InstanceId
from kici.domain.provision import ProvisionNews
from kici.domain.spawn import SpawnState

ME, OTHER = InstanceId("me"), InstanceId("other")


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
