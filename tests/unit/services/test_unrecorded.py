"""Agents whose sessions others have taken away."""

from kici.domain.ids import ConnectionId, InstanceId
from kici.domain.job import JobStatus
from kici.services.unrecorded import INTERVAL_SECONDS, UNRECORDED_SECONDS
from kici.testing.builders import a_session
from kici.testing.coordinator_bench import Bench, benched

PEER = InstanceId("instance-b")
LATE = ConnectionId("late")


@benched()
async def test_an_agent_whose_session_an_older_registration_took_registers_anew_and_keeps_its_job(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    late = a_session(agent_id=agent.agent_id, instance_id=PEER, connection_id=LATE, incarnation="before")
    assert await bench.store.register_agent(late, needs_spawn=False, bound=None)
    await bench.store.release_agent(agent.agent_id, LATE)
    wire = agent.wires[-1]
    await bench.passes(UNRECORDED_SECONDS - 1)
    assert not wire.b.is_closed
    await bench.passes(2 * INTERVAL_SECONDS)
    assert wire.b.is_closed
    await agent.registers((job.id, "running"))
    await bench.passes(UNRECORDED_SECONDS + 2 * INTERVAL_SECONDS)
    assert not agent.wires[-1].b.is_closed
    assert await bench.status(job) is JobStatus.RUNNING
    session = await bench.store.session(agent.agent_id)
    assert session is not None
    assert session.instance_id == bench.coordinator.instance_id
