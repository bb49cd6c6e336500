"""Agents that go from one coordinator to another: with their jobs, and nobody ends them for it."""

import pytest

from kici.decide.hand_over import Watchfulness, elsewhere, for_agent
from kici.domain.ids import InstanceId
from kici.domain.job import Job, JobStatus
from kici.domain.peer import Capacity
from kici.domain.spawn import SpawnState
from kici.testing.cloud_bench import CloudAgent, CloudBench, clouded
from kici.testing.coordinator_bench import a_scaler
from kici.wire.messages import CloseCode, CoordinatorsChanged, Heartbeat, JobVerdict, RegisterAck


async def at_work(bench: CloudBench) -> tuple[Job, CloudAgent]:
    """A job that runs on the first coordinator's host, in a cluster whose coordinators know each other."""
    await bench.passes(5)
    job = await bench.submits("linux")
    agent = await bench.made_by(0)
    assert await agent.starts() == job.id
    return job, agent


async def passes(bench: CloudBench, agent: CloudAgent, seconds: int) -> None:
    """Time in which the agent shows that it lives."""
    for _ in range(seconds // 10):
        await bench.passes(10)
        agent.says(Heartbeat(active_jobs=1))


@pytest.mark.spec("D9", "T4.8")
@clouded(a_scaler(), nodes=2)
async def test_an_agent_whose_coordinator_died_goes_on_with_another_that_did_not_make_it(bench: CloudBench) -> None:
    job, agent = await at_work(bench)
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


@pytest.mark.spec("D4")
@clouded(a_scaler(), nodes=2)
async def test_agents_of_a_coordinator_that_lost_the_database_are_with_the_other_within_a_minute(
    bench: CloudBench,
) -> None:
    first, second = bench.nodes
    job, agent = await at_work(bench)
    first.faults.is_down = True
    lost_at = bench.clock.monotonic()
    assert await agent.is_closed() == CloseCode.HANDOVER
    bench.moves(agent, 1)
    await agent.registers((job.id, "running"))
    assert bench.clock.monotonic() - lost_at < 45
    assert (await bench.job(job)).owner_instance_id == second.id
    assert list(first.machines.alive) == [agent.agent_id], "the one that made it keeps it"

    first.faults.is_down = False
    await passes(bench, agent, 200)
    assert (await bench.job(job)).status is JobStatus.RUNNING
    assert list(first.machines.alive) == [agent.agent_id]
    assert [name for name, fields in bench.events if name == "agent.moved"] == ["agent.moved"]
    agent.ends(job.id)
    await bench.passes()
    agent.leaves()
    assert (await bench.job(job)).status is JobStatus.SUCCESS
    await bench.all_gone()
    assert not first.machines.alive
    assert await bench.store.sessions(instance_id=None, limit=9) == []


@pytest.mark.spec("D4")
@clouded(a_scaler(), nodes=2)
async def test_a_coordinator_that_loses_the_database_at_once_knows_from_its_start_where_the_other_is(
    bench: CloudBench,
) -> None:
    first, second = bench.nodes
    await bench.passes(5)
    await first.is_killed()
    await first.starts()
    first.faults.is_down = True  # before any of its services looked around
    await bench.passes(5)
    assert first.coordinator.cluster.hand_over.addresses() == [first.url, second.url]
    first.faults.is_down = False


@pytest.mark.spec("D4")
@clouded(a_scaler(), nodes=2)
async def test_an_agent_that_was_handed_over_and_came_back_goes_on(bench: CloudBench) -> None:
    first = bench.nodes[0]
    job, agent = await at_work(bench)
    first.faults.is_down = True
    assert await agent.is_closed() == CloseCode.HANDOVER
    await bench.passes(100)
    first.faults.is_down = False
    await bench.passes(30)
    assert (await bench.job(job)).status is JobStatus.RECOVERING
    await agent.registers((job.id, "running"))
    assert (await bench.job(job)).status is JobStatus.RUNNING
    assert len(await bench.store.sessions(instance_id=first.id, limit=9)) == 1


@pytest.mark.spec("D4")
@clouded(a_scaler(), nodes=2)
async def test_an_agent_that_was_handed_over_and_went_nowhere_is_given_up_after_its_grace(bench: CloudBench) -> None:
    first = bench.nodes[0]
    job, agent = await at_work(bench)
    first.faults.is_down = True
    assert await agent.is_closed() == CloseCode.HANDOVER
    await bench.passes(30)
    assert (await bench.job(job)).status is JobStatus.RUNNING, "graces stand still while nobody can look"
    first.faults.is_down = False
    await bench.passes(50)
    assert (await bench.job(job)).status is JobStatus.RECOVERING
    await bench.passes(30)
    assert (await bench.job(job)).status is JobStatus.FAILED
    await bench.all_gone()
    assert await bench.store.sessions(instance_id=None, limit=9) == []


@pytest.mark.spec("D4", "D6")
@clouded(a_scaler(), nodes=2)
async def test_rows_of_agents_that_went_on_elsewhere_outlast_a_long_silence_of_their_maker(bench: CloudBench) -> None:
    first = bench.nodes[0]
    job, agent = await at_work(bench)
    first.faults.is_down = True
    assert await agent.is_closed() == CloseCode.HANDOVER
    bench.moves(agent, 1)
    await agent.registers((job.id, "running"))
    await passes(bench, agent, 300)
    assert await bench.row(agent.agent_id) is not None
    agent.cut()
    await bench.passes(1)
    ack = await agent.registers((job.id, "running"))
    assert ack.jobs == [JobVerdict(job_id=job.id, action="resume")]
    first.faults.is_down = False
    await passes(bench, agent, 60)
    agent.ends(job.id)
    await bench.passes()
    agent.leaves()
    await bench.all_gone()
    assert (await bench.job(job)).status is JobStatus.SUCCESS
    assert not first.machines.alive


@pytest.mark.spec("D4")
@clouded(a_scaler(), nodes=2)
async def test_when_the_database_is_away_for_all_everybody_keeps_what_they_have(bench: CloudBench) -> None:
    job, agent = await at_work(bench)
    for node in bench.nodes:
        node.faults.is_down = True
    await passes(bench, agent, 400)
    for node in bench.nodes:
        node.faults.is_down = False
    await passes(bench, agent, 90)
    assert (await bench.job(job)).status is JobStatus.RUNNING
    assert len(agent.wires) == 1, "it never had to connect again"


@clouded(a_scaler(), nodes=1)
async def test_alone_a_coordinator_keeps_its_agents_whatever_the_database_does(bench: CloudBench) -> None:
    job, agent = await at_work(bench)
    bench.node.faults.is_down = True
    await passes(bench, agent, 400)
    bench.node.faults.is_down = False
    await passes(bench, agent, 90)
    assert (await bench.job(job)).status is JobStatus.RUNNING
    assert len(agent.wires) == 1


@pytest.mark.spec("D4")
@clouded(a_scaler(), nodes=2)
async def test_agents_are_told_of_coordinators_that_come_and_go(bench: CloudBench) -> None:
    _, agent = await at_work(bench)
    assert agent.all(RegisterAck)[-1].coordinators == ["ws://node-0/ws", "ws://node-1/ws"]
    await bench.nodes[1].stops()
    gone = await agent.hears(CoordinatorsChanged)
    assert gone.coordinators == ["ws://node-0/ws"]
    await bench.nodes[1].starts()
    back = await agent.hears(CoordinatorsChanged)
    assert back.coordinators == ["ws://node-0/ws", "ws://node-1/ws"]


@pytest.mark.spec("D9", "D4")
@clouded(nodes=2)
async def test_a_machine_of_the_cloud_is_adopted_by_the_other_within_a_minute(bench: CloudBench) -> None:
    first, second = bench.nodes
    job = await bench.submits()
    agent = await bench.made()
    await agent.starts()
    await bench.passes(9)
    first.faults.is_down = True
    lost_at = bench.clock.monotonic()
    assert await agent.is_closed() == CloseCode.HANDOVER
    bench.moves(agent, 1)
    while True:
        await agent.tries_to_register((job.id, "running"))
        await bench.passes(3)
        if second.coordinator.registry.get(agent.agent_id) is not None:
            break
    assert bench.clock.monotonic() - lost_at < 60
    first.faults.is_down = False
    await passes(bench, agent, 400)
    row = await bench.row(agent.agent_id)
    assert row is not None
    assert row.adopted_by == second.id
    assert (await bench.job(job)).status is JobStatus.RUNNING
    assert bench.cloud.told("kici.scaler.scale-down") == []


def test_a_pause_of_the_process_is_no_outage() -> None:
    watch = Watchfulness(awake_since=0, looked_at=0)
    for now in range(0, 12, 2):
        watch.looks(now)
    watch.looks(100)
    assert watch.seconds_cut_off(beat_at=10, now=100) == 0
    for now in range(102, 131, 2):
        watch.looks(now)
    assert watch.seconds_cut_off(beat_at=10, now=130) == 30
    assert watch.seconds_cut_off(beat_at=101, now=130) == 29


def test_an_address_that_is_another_program_elsewhere_is_not_told() -> None:
    assert elsewhere([Capacity(address="ws://127.0.0.1:4000/ws"), Capacity(), Capacity(address="wss://b/ws")]) == (
        "wss://b/ws",
    )
    mine = ["ws://127.0.0.1:4000/ws", "wss://b/ws"]
    assert for_agent(mine, on_worker=True) == ["wss://b/ws"]
    assert for_agent(mine, on_worker=False) == mine


@pytest.mark.spec("D9")
@clouded(a_scaler(), nodes=2)
async def test_an_idle_agent_that_went_elsewhere_while_its_maker_stood_still_is_not_ended_by_it(
    bench: CloudBench,
) -> None:
    first = bench.nodes[0]
    job, agent = await at_work(bench)
    agent.ends(job.id)
    await bench.passes(0.1)
    assert first.coordinator.registry.get(agent.agent_id) is not None
    bench.moves(agent, 1)
    await agent.registers()
    agent.wires[0].cut()  # only now the first one learns that it is gone
    await bench.passes(3)
    assert list(first.machines.alive) == [agent.agent_id]
    agent.leaves()
    await bench.all_gone()
    assert not first.machines.alive


@pytest.mark.spec("D9")
@clouded(a_scaler(), nodes=2)
async def test_whoever_lets_a_job_start_looks_after_it_from_then_on(bench: CloudBench) -> None:
    first, second = bench.nodes
    await bench.passes(5)
    job = await bench.submits("linux")
    agent = await bench.made_by(0)
    assert await agent.is_offered() == job.id
    await first.is_killed()
    bench.moves(agent, 1)
    ack = await agent.registers((job.id, "acked"))
    assert ack.jobs == [JobVerdict(job_id=job.id, action="start")]
    await bench.passes(1)
    found = await bench.job(job)
    assert (found.status, found.owner_instance_id) == (JobStatus.RUNNING, second.id)


@pytest.mark.spec("D9")
@clouded(a_scaler(), nodes=2)
async def test_a_compute_that_is_gone_ends_its_job_wherever_its_agent_was(bench: CloudBench) -> None:
    first, second = bench.nodes
    job, agent = await at_work(bench)
    await first.is_killed()
    bench.moves(agent, 1)
    await agent.registers((job.id, "running"))
    first.machines.die(agent.agent_id)
    await second.is_killed()
    await first.starts()
    await second.starts()
    await bench.passes(100)
    assert (await bench.job(job)).status is JobStatus.FAILED


@clouded(a_scaler(), nodes=2)
async def test_an_agent_that_died_while_it_registered_holds_no_place_for_ever(bench: CloudBench) -> None:
    """Its row says that it registered, its coordinator was never told, and nobody saw it end."""
    first = bench.nodes[0]
    await bench.passes(5)
    await bench.submits("linux")
    await bench.until(lambda: len(first.orders) > 0)
    order = first.orders[0]
    first.traps.fail("register_agent", done=True)
    agent = bench._agent(order.agent_id, order.labels, order.token, at=0)
    await agent.tries_to_register()
    await bench.passes(1)
    row = await bench.row(order.agent_id)
    assert row is not None
    assert row.state is SpawnState.REGISTERED
    await bench.passes(3)
    tracked = first.coordinator.spawns.get(order.agent_id)
    assert tracked is not None
    assert tracked.is_booting, "its deadline stands until it is connected somewhere"
    first.machines.alive.pop(order.agent_id)
    await bench.passes(300)
    assert await bench.row(order.agent_id) is None
