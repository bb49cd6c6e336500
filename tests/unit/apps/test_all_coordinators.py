"""What one coordinator tells of all: explanations, agents, draining one that is connected elsewhere."""

import pytest

from kici.apps.surface import surface_of
from kici.config.model import ScalerEntry
from kici.domain.errors import NotFound
from kici.domain.ids import AgentId, InstanceId
from kici.testing.cloud_bench import CloudBench, a_cloud_scaler, clouded
from kici.testing.coordinator_bench import a_scaler
from kici.web.surface import Surface
from kici.wire.messages import AgentExit


def surface(bench: CloudBench, number: int) -> Surface:
    return surface_of(bench.nodes[number].coordinator, version="test", stop=lambda keep: None)


def only_on(bench: CloudBench, number: int, entry: ScalerEntry) -> None:
    """From the next start on, this coordinator alone has the scaler."""
    bench.own_scalers[number] = (entry,)


@pytest.mark.spec("D2", "D16")
@clouded(a_scaler(), nodes=2)
async def test_a_job_is_explained_by_all_and_the_nearest_comes_first(bench: CloudBench) -> None:
    only_on(bench, 1, a_scaler("gpus", ("linux", "gpu"), max_agents=1))
    await bench.nodes[1].stops()
    await bench.nodes[1].starts()
    await bench.passes(5)
    await bench.submits("linux", "gpu", by=1)
    waiting = await bench.submits("linux", "gpu", by=0)
    await bench.passes(3)
    explained = await surface(bench, 0).jobs.explain(waiting.id)
    kinds = [(one.instance_id, type(one.verdict).__name__) for one in explained.findings]
    assert kinds[0] == (InstanceId("node-1"), "AtCap"), kinds
    assert (InstanceId("node-0"), "NoScalerMatches") in kinds
    listed = await surface(bench, 0).jobs.verdicts([await bench.job(waiting)])
    assert listed == {}, "that nobody here could serve it says nothing"
    assert list(await surface(bench, 1).jobs.verdicts([await bench.job(waiting)])) == [waiting.id]


@pytest.mark.spec("D2")
@clouded(a_scaler(), nodes=2)
async def test_a_coordinator_that_does_not_answer_is_left_out(bench: CloudBench) -> None:
    await bench.passes(5)
    job = await bench.submits("moon")
    bench.nodes[1].faults.is_down = True
    before = bench.clock.monotonic()
    explained = await surface(bench, 0).jobs.explain(job.id)
    assert [one.instance_id for one in explained.findings] == ["node-0"]
    assert bench.clock.monotonic() - before < 3
    bench.nodes[1].faults.is_down = False


@pytest.mark.spec("D4")
@clouded(a_scaler(), nodes=2)
async def test_agents_of_all_coordinators_are_listed_and_drained_by_any(bench: CloudBench) -> None:
    await bench.passes(5)
    await bench.submits("linux")
    job = await bench.submits("linux", by=1)
    here, there = await bench.made_by(0), await bench.made_by(1)
    assert await there.starts() == job.id
    rows = {row.agent_id: row for row in await surface(bench, 0).agents.agents()}
    assert {agent_id: row.instance_id for agent_id, row in rows.items()} == {
        here.agent_id: "node-0",
        there.agent_id: "node-1",
    }
    assert (rows[there.agent_id].state, rows[there.agent_id].job_ids) == ("busy", (job.id,))
    assert rows[there.agent_id].scaler == "local"
    drained = await surface(bench, 0).agents.drain(there.agent_id)
    assert drained.instance_id == "node-1"
    await there.hears(AgentExit, within=10)
    with pytest.raises(NotFound):
        await surface(bench, 0).agents.drain(AgentId("nobody"))


@clouded(a_scaler(), nodes=2)
async def test_an_agent_that_moved_is_listed_once_where_it_is(bench: CloudBench) -> None:
    await bench.passes(5)
    job = await bench.submits("linux")
    agent = await bench.made_by(0)
    await agent.starts()
    agent.cut()
    bench.moves(agent, 1)
    await agent.registers((job.id, "running"))
    await bench.passes(5)
    for number in (0, 1):
        (row,) = await surface(bench, number).agents.agents()
        assert (row.instance_id, row.state) == ("node-1", "busy")


@pytest.mark.spec("T4.12")
@clouded(a_scaler(), nodes=3)
async def test_a_reload_reaches_all_and_names_who_rejects_it(bench: CloudBench) -> None:
    await bench.passes(5)
    bench.own_scalers[0] = (a_scaler(), a_scaler("more", ("linux", "more")))
    bench.own_scalers[1] = (a_cloud_scaler("local"),)  # a name cannot change its type
    outcomes = {one.instance_id: one for one in await surface(bench, 0).scalers.reload()}
    assert {one: outcome.outcome for one, outcome in outcomes.items()} == {
        "node-0": "applied",
        "node-1": "rejected",
        "node-2": "unchanged",
    }
    assert outcomes[InstanceId("node-0")].added == ("more",)
    assert outcomes[InstanceId("node-1")].problems
    job = await bench.submits("linux", by=1)
    agent = await bench.made_by(1)
    assert await agent.starts() == job.id, "its configuration is what it was"


@clouded(a_scaler(), nodes=2)
async def test_a_reload_says_who_does_not_answer(bench: CloudBench) -> None:
    await bench.passes(5)
    bench.nodes[1].faults.is_down = True
    outcomes = {one.instance_id: one.outcome for one in await surface(bench, 0).scalers.reload()}
    assert outcomes == {"node-0": "unchanged", "node-1": "unanswered"}
    bench.nodes[1].faults.is_down = False


@pytest.mark.spec("D2")
@clouded(a_scaler(), nodes=2)
async def test_scalers_of_all_coordinators_are_shown_and_who_is_silent_is_left_out(bench: CloudBench) -> None:
    first, _ = surface(bench, 0), surface(bench, 1)
    await bench.passes(5)
    await bench.submits("linux", by=1)
    await bench.made_by(1)
    rows = {row.instance_id: row for row in await first.scalers.status()}
    assert {one: (row.name, row.active) for one, row in rows.items()} == {
        "node-0": ("local", 0),
        "node-1": ("local", 1),
    }
    assert rows[InstanceId("node-1")].label_sets == (("linux", "x64"),)
    bench.nodes[1].faults.is_down = True
    assert [row.instance_id for row in await first.scalers.status()] == ["node-0"]
    bench.nodes[1].faults.is_down = False
