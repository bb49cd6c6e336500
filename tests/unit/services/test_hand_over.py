"""Agents that go from one coordinator to another: with their jobs, and nobody ends them for it."""

import pytest

from kici.domain.ids import InstanceId
from kici.domain.job import JobStatus
from kici.domain.spawn import SpawnState
from kici.testing.cloud_bench import CloudBench, clouded
from kici.testing.coordinator_bench import a_scaler
from kici.wire.messages import JobVerdict


@pytest.mark.spec("D9", "T4.8")
@clouded(a_scaler(), nodes=2)
async def test_an_agent_whose_coordinator_died_goes_on_with_another_that_did_not_make_it(bench: CloudBench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made_by(0)
    assert await agent.starts() == job.id
    await bench.nodes[0].is_killed()
    bench.moves(agent, 1)
    ack = await agent.registers((job.id, "running"))
    assert ack.jobs == [JobVerdict(job_id=job.id, action="resume")]
    await bench.passes(10)
    found = await bench.job(job)
    assert (found.status, found.owner_instance_id) == (JobStatus.RUNNING, InstanceId("node-1"))
    agent.ends(job.id)
    await bench.passes()
    assert (await bench.job(job)).status is JobStatus.SUCCESS
    agent.leaves()
    await bench.passes(1)
    row = await bench.row(agent.agent_id)
    assert row is not None, "the host that made it still has to take its compute down"
    assert row.state is SpawnState.ENDING
    await bench.nodes[0].starts()
    await bench.all_gone()
    assert not bench.nodes[0].machines.alive
