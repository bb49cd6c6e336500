"""Agents of which nobody hears any more."""

import pytest

from kici.domain.ids import AgentId, InstanceId
from kici.domain.spawn import SpawnState
from kici.services.strays import STRAY_SECONDS
from kici.testing.builders import a_session, an_instance
from kici.testing.coordinator_bench import Bench, a_scaler, benched

PEER = InstanceId("instance-b")


async def went_elsewhere(bench: Bench) -> AgentId:
    """An agent that this coordinator made and that connected to another one."""
    await bench.store.beat(an_instance(id=PEER))
    await bench.submits()
    await bench.passes(1)
    (row,) = await bench.spawns()
    session = a_session(agent_id=row.agent_id, instance_id=PEER)
    registered = await bench.store.register_agent(session, needs_spawn=True, bound=None)
    assert registered is not None
    assert registered.spawn is not None
    bench.coordinator.manager.registered(registered.spawn)  # as its maker does once it reads that
    return row.agent_id


@benched(a_scaler())
async def test_an_agent_whose_end_nobody_tells_of_is_ended(bench: Bench) -> None:
    agent_id = await went_elsewhere(bench)
    await bench.store.delete_sessions_of(PEER)
    await bench.passes(STRAY_SECONDS - 10)
    assert (await bench.spawns())[0].state is SpawnState.REGISTERED
    await bench.passes(80)
    assert agent_id not in {row.agent_id for row in await bench.spawns()}
    assert bench.coordinator.spawns.get(agent_id) is None


@pytest.mark.parametrize("is_down", [False, True], ids=["it blinks", "the store is away"])
@benched(a_scaler())
async def test_one_that_was_not_seen_nowhere_without_a_break_is_left_alone(bench: Bench, *, is_down: bool) -> None:
    agent_id = await went_elsewhere(bench)
    session = await bench.store.session(agent_id)
    assert session is not None
    await bench.store.delete_sessions_of(PEER)
    await bench.passes(STRAY_SECONDS - 40)
    if is_down:
        bench.faults.is_down = True
    else:
        await bench.store.beat(an_instance(id=PEER, last_beat_at=await bench.store.database_now()))
        assert await bench.store.register_agent(session, needs_spawn=True, bound=None)
    await bench.passes(61)
    bench.faults.is_down = False
    await bench.store.delete_sessions_of(PEER)
    await bench.passes(STRAY_SECONDS - 40)
    assert agent_id in {row.agent_id for row in await bench.spawns()}
