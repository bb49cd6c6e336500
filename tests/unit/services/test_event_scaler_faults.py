"""An event scaler while its store fails, its coordinator restarts, and things happen at the worst moment."""

import pytest

from kici.domain.errors import LockContended, Permanent
from kici.domain.event import SCALE_DOWN, SCALE_UP
from kici.domain.job import JobStatus
from kici.domain.provision import SlotRules
from kici.domain.spawn import Reservation, Spawn
from kici.testing.cloud_bench import CloudBench, Trouble, clouded
from kici.testing.store_traps import trapped


@pytest.mark.spec("scaler 13.9.7")
@clouded()
async def test_a_failure_that_cannot_be_counted_yet_frees_the_reservation(bench: CloudBench) -> None:
    bench.cloud.troubles.append(Trouble(Permanent("no quota")))
    bench.node.traps.fail("count_provision_failure", done=False, times=5)
    await bench.submits()
    await bench.machine()
    await bench.passes(3)
    assert bench.node.coordinator.book.total.agents == 0
    assert len(bench.cloud.told(SCALE_UP)) == 1  # known here at once, so nobody asks again
    await bench.passes(10)
    (deferral,) = await bench.store.deferrals(limit=9)
    assert deferral.deferral.failures == 1


@pytest.mark.spec("scaler 13.9.9", "D14")
@clouded()
async def test_a_fresh_process_probes_a_deferred_scaler_once(bench: CloudBench) -> None:
    bench.cloud.is_down = Permanent("no quota")
    await bench.submits()
    await bench.passes(10)
    await bench.node.stops()
    await bench.node.starts()
    await bench.passes(12)
    assert len(bench.cloud.told(SCALE_UP)) == 2
    (deferral,) = await bench.store.deferrals(limit=9)
    assert deferral.deferral.failures == 2
    await bench.passes(30)
    assert len(bench.cloud.told(SCALE_UP)) == 2


@pytest.mark.parametrize("skew_ms", [-3_600_000, 3_600_000])
@clouded()
async def test_a_clock_that_jumps_makes_no_shared_backoff_longer(bench: CloudBench, skew_ms: int) -> None:
    bench.cloud.troubles.extend(Trouble(Permanent("no quota")) for _ in range(2))
    await bench.submits()
    await bench.until(lambda: len(bench.cloud.told(SCALE_UP)) == 2, within=60)  # the second one as a probe
    bench.clock.skew_ms = skew_ms
    await bench.until(lambda: bench.cloud.machines, within=75)


@pytest.mark.spec("scaler 15.5.5")
@clouded()
async def test_a_withdrawal_that_cannot_be_written_keeps_the_row_until_it_can(bench: CloudBench) -> None:
    job = await bench.submits()
    up = await bench.machine()
    await bench.passes()
    bench.node.traps.fail("end_provision", done=False, times=4)
    await bench.node.coordinator.jobs.cancel_job(job.id, force=False, reason="no")
    await bench.passes(2)
    assert await bench.row(up["agentId"]) is not None
    assert bench.cloud.told(SCALE_DOWN) == []
    assert bench.node.coordinator.book.total.agents == 0
    await bench.all_gone(within=120)
    assert [down["reason"] for down in bench.cloud.told(SCALE_DOWN)] == ["job-complete"]


@pytest.mark.spec("scaler 15.5.6")
@clouded(nodes=2)
async def test_a_look_that_fails_withdraws_nothing(bench: CloudBench) -> None:
    job = await bench.submits()
    await bench.machine()
    await bench.passes()
    bench.nodes[0].traps.fail("provision_news", done=False)
    await bench.nodes[1].coordinator.jobs.cancel_job(job.id, force=False, reason="no")
    await bench.passes(4.5)
    assert bench.cloud.told(SCALE_DOWN) == []
    await bench.all_gone(within=60)


@pytest.mark.spec("scaler 15.5.7")
@clouded(nodes=2)
async def test_an_agent_that_registers_while_its_owner_looks_is_not_withdrawn(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.booted()
    gate = bench.nodes[0].traps.hold("provision_news", done=True)
    await gate.reached()
    await agent.registers()
    assert await agent.starts() == job.id
    gate.open()
    await bench.passes(12)
    assert bench.cloud.told(SCALE_DOWN) == []
    agent.ends(job.id)
    await bench.passes()
    agent.leaves()
    await bench.all_gone(within=60)
    assert (await bench.job(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("T9.1", "scaler 10.7.9")
@clouded()
async def test_a_count_that_cannot_be_made_refuses_and_says_which_kind(bench: CloudBench) -> None:
    real = bench.store

    class Busy:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        async def insert_cluster_spawn(self, spawn: Spawn, reservation: Reservation, rules: SlotRules) -> None:
            raise LockContended("others hold it")

    spawner = bench.node.coordinator.manager._spawner
    kept = spawner._store
    spawner._store = trapped(Busy(), bench.node.traps)  # type: ignore[assignment]  # as much of a store as is used
    await bench.submits()
    await bench.passes(2)
    name = "kici_orch_scaler_cap_lock_failures_total"
    assert bench.node.metric(name, reason="contended") >= 1
    assert bench.cloud.calls == []
    spawner._store = kept
    bench.node.traps.fail("insert_cluster_spawn", done=False)
    await bench.until(lambda: bench.node.metric(name, reason="unreachable") == 1, within=30)
    await bench.until(lambda: bench.cloud.machines, within=60)


@pytest.mark.spec("scaler 50.3")
@clouded()
async def test_a_place_in_the_cluster_whose_commit_was_not_answered_comes_back(bench: CloudBench) -> None:
    bench.node.traps.fail("insert_cluster_spawn", done=True)
    job = await bench.submits()
    await bench.until(lambda: bench.cloud.machines, within=1000)
    (row,) = await bench.spawns()
    assert {row.agent_id} == set(bench.cloud.machines), "the place that nobody knew of is free again"
    assert row.bound_job_id == job.id
    assert bench.node.coordinator.book.total.agents == 1


@clouded()
async def test_a_scale_up_that_may_have_been_written_is_taken_back(bench: CloudBench) -> None:
    bench.node.traps.fail("emit_scale_up", done=True)
    await bench.submits()
    await bench.until(lambda: bench.cloud.told(SCALE_DOWN), within=60)
    await bench.until(lambda: bench.cloud.machines, within=200)
    assert set(bench.cloud.machines) <= {row.agent_id for row in await bench.spawns()}


@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.05, 0.2, 1.0, 2.0])
def test_killed_at_any_moment_every_machine_has_a_row(seconds: float) -> None:
    @clouded()
    async def run(bench: CloudBench) -> None:
        jobs = [await bench.submits() for _ in range(2)]
        await bench.passes(seconds)
        await bench.node.is_killed()
        known = {row.agent_id for row in await bench.spawns()}
        assert set(bench.cloud.machines) <= known
        await bench.node.starts()
        await bench.until(lambda: len(bench.cloud.machines) == 2, within=600)
        assert set(bench.cloud.machines) <= {row.agent_id for row in await bench.spawns()}
        for job in jobs:
            await bench.node.coordinator.jobs.cancel_job(job.id, force=False, reason="no")
        await bench.all_gone(within=900)

    run()
