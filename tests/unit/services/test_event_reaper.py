"""Machines that nobody else ends: what the leader does about them, and when it does nothing."""

import pytest

from kici.domain.event import SCALE_DOWN
from kici.domain.ids import ScalerName
from kici.domain.knobs import SCALER_REAP_INTERVAL_MS
from kici.domain.spawn import SpawnState
from kici.testing.cloud_bench import CloudBench, Node, clouded


def leader_or_none(bench: CloudBench) -> Node | None:
    return next((node for node in bench.nodes if not node.traps.is_dead and node.coordinator.elector.is_leader), None)


def leader(bench: CloudBench) -> Node:
    found = leader_or_none(bench)
    assert found is not None
    return found


async def leads(bench: CloudBench) -> Node:
    await bench.until(lambda: leader_or_none(bench) is not None, within=30)
    return leader(bench)


@pytest.mark.spec("scaler 26.9.3", "scaler 22.5.7", "scaler 51.2", "T4.5")
@clouded(nodes=3)
async def test_the_machine_of_a_dead_adopter_goes_after_the_grace(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made(at=1)
    await agent.starts()
    await bench.nodes[1].is_killed()
    await bench.passes(110)
    assert bench.cloud.told(SCALE_DOWN) == []
    await bench.until(lambda: bench.cloud.told(SCALE_DOWN), within=200)
    assert bench.cloud.told(SCALE_DOWN)[0]["reason"] == "heartbeat-timeout"
    await bench.all_gone(within=60)
    assert len(bench.cloud.told(SCALE_DOWN)) == 1
    assert await bench.store.provision_adopter(agent.agent_id) == "node-1"
    assert await bench.store.deferrals(limit=9) == []
    assert job.id


@pytest.mark.spec("scaler 26.9.5", "scaler 26.9.6", "T9.3", "T4.6", "H7")
@clouded(nodes=2)
async def test_a_leader_that_sees_nobody_stands_down_until_it_does(bench: CloudBench) -> None:
    await bench.submits()
    agent = await bench.made(at=1)
    await agent.starts()
    await bench.nodes[1].is_killed()
    await leads(bench)
    await bench.passes(1800)
    assert bench.cloud.told(SCALE_DOWN) == []
    assert bench.nodes[0].metric("kici_orch_scaler_reap_blocked") == 1
    assert len([name for name, _ in bench.events if name == "reap.blocked"]) == 1
    await bench.nodes[1].starts()
    await bench.passes(65)
    assert bench.nodes[0].metric("kici_orch_scaler_reap_blocked") == 0
    assert bench.cloud.told(SCALE_DOWN) == [] or bench.cloud.told(SCALE_DOWN)[0]["reason"] != "heartbeat-timeout"


@pytest.mark.spec("scaler 26.9.1", "scaler 51.3")
@clouded(nodes=3)
async def test_a_machine_whose_owner_died_before_its_agent_came_goes(bench: CloudBench) -> None:
    await bench.submits()
    up = await bench.machine()
    await bench.nodes[0].is_killed()
    await bench.passes(290)
    assert up["agentId"] in bench.cloud.machines
    await bench.until(lambda: up["agentId"] not in bench.cloud.machines, within=240)
    assert bench.cloud.told(SCALE_DOWN)[0]["reason"] == "spawn-timeout"
    (deferral,) = await bench.store.deferrals(limit=9)
    assert deferral.deferral.failures == 1


@pytest.mark.spec("scaler 26.9.2", "T9.4")
@clouded(nodes=3)
async def test_an_agent_that_blinks_is_never_touched(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made(at=1)
    await agent.starts()
    for _ in range(20):
        await bench.passes(70)
        agent.cut()
        await bench.passes(1)
        assert (await leads(bench)).metric("kici_orch_scaler_reap_unseen_provisions") == 0
        await agent.registers((job.id, "running"))
    assert bench.cloud.told(SCALE_DOWN) == []


@pytest.mark.spec("scaler 26.9.9", "T8.1")
@clouded()
async def test_a_changed_pace_is_taken_over(bench: CloudBench) -> None:
    node = await leads(bench)
    reaper = node.coordinator.events.reaper
    assert reaper._ticker.seconds == 60
    await node.coordinator.settings.patch(None, {SCALER_REAP_INTERVAL_MS.name: 10_000})
    await bench.passes(75)
    assert reaper._ticker.seconds == 10


@pytest.mark.spec("scaler 26.9.8", "scaler 26.9.12")
@clouded(nodes=2, scaler_reap_interval_ms=5_000)
async def test_one_that_leads_no_longer_sends_nothing(bench: CloudBench) -> None:
    await bench.submits()
    up = await bench.machine()
    node = await leads(bench)
    reaper = node.coordinator.events.reaper
    await bench.passes(200)
    await node.coordinator.elector.resign()
    await bench.passes(10)
    assert not reaper._absent_since
    assert await reaper.tick() == 0
    assert up["agentId"] in bench.cloud.machines


@pytest.mark.spec("scaler 50.11")
@clouded(nodes=3)
async def test_a_new_leader_counts_absence_anew_and_still_ends_the_machine(bench: CloudBench) -> None:
    await bench.submits()
    agent = await bench.made(at=1)
    await agent.starts()
    await bench.nodes[1].is_killed()
    await bench.passes(100)
    first = await leads(bench)
    await first.coordinator.elector.resign()
    await bench.until(lambda: leader_or_none(bench) not in (None, first), within=60)
    await bench.passes(100)
    assert bench.cloud.told(SCALE_DOWN) == [], "200 s in all, and neither has seen a whole grace"
    await bench.until(lambda: bench.cloud.told(SCALE_DOWN), within=200)


@pytest.mark.spec("scaler 50.19")
@clouded(scaler_reap_interval_ms=5_000)
async def test_a_pass_that_outlasts_the_interval_is_not_overtaken(bench: CloudBench) -> None:
    await bench.submits()
    await bench.machine()
    reaper = (await leads(bench)).coordinator.events.reaper
    held = bench.node.traps.hold("reap_candidates", done=True)
    await held.reached()
    second = bench.node.traps.hold("reap_candidates", done=False)
    second.open()
    assert await reaper.tick() == 0
    await bench.passes(20)
    assert bench.node.traps.next("reap_candidates") is second, "nobody looked again"
    held.open()
    third = bench.node.traps.hold("reap_candidates", done=True)
    await third.reached()
    third.open()


@pytest.mark.spec("scaler 13.9.5", "scaler 21.6.11")
@clouded(nodes=2)
async def test_a_registration_anywhere_clears_the_backoff(bench: CloudBench) -> None:
    await bench.submits()
    await bench.machine()
    deferrals = bench.nodes[0].coordinator.deferrals
    await deferrals.count(ScalerName("cloud"), (await bench.spawns())[0].agent_id, "x")
    assert await bench.store.deferrals(limit=9)
    await bench.made(at=1)
    assert await bench.store.deferrals(limit=9) == []
    await bench.passes(6)
    assert deferrals.refusal(ScalerName("cloud")) is None


@clouded(scaler_reap_interval_ms=5_000)
async def test_claims_and_outcomes_are_forgotten_in_time(bench: CloudBench) -> None:
    await bench.submits()
    up = await bench.machine()
    await bench.until(lambda: bench.cloud.told(SCALE_DOWN), within=600)
    await bench.passes(5)
    assert await bench.store.provision_adopter(up["agentId"]) is None
    rows = [row for row in await bench.spawns() if row.state is SpawnState.ENDING]
    assert rows == []
