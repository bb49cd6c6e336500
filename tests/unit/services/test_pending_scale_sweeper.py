"""The re-drive: when waiting jobs are offered again, how many, in what order, and that nobody starves."""

import asyncio

import pytest

from kici.domain import knobs
from kici.domain.errors import Conflict
from kici.domain.ids import AgentId, ScalerName
from kici.domain.job import Job, JobStatus
from kici.domain.scale import AtCapacity
from kici.domain.spawn import ScaleDownReason
from kici.observe.events import Event
from kici.testing.coordinator_bench import Bench, a_request, a_scaler, benched
from kici.testing.fake_backend import refuses

BACKOFF = knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name
NO_SWEEP = 3600.0
REDISPATCHES = "kici_orch_scaler_redispatch_total"


async def makes_room(bench: Bench, number: int = 0) -> None:
    """The agent of a machine ends its job and leaves."""
    agent = bench.agents[bench.orders[number].agent_id]
    agent.ends(await agent.starts())
    await bench.passes(0.2)
    agent.leaves()
    await bench.until(lambda: agent.agent_id not in bench.machines.alive)


# --- capacity is freed


@pytest.mark.spec("T0.4", "scaler 41.4.1", "D29")
@benched(a_scaler("local", max_agents=1), sweep_seconds=NO_SWEEP)
async def test_a_job_refused_for_capacity_is_asked_for_again_a_quarter_second_after_a_release(bench: Bench) -> None:
    await bench.submits("linux")
    await bench.made(0)
    waiting = await bench.submits("linux")
    await bench.passes(5)
    assert await bench.status(waiting) is JobStatus.QUEUED
    await makes_room(bench)
    freed_at = bench.clock.monotonic()
    await bench.machine(1)
    assert bench.clock.monotonic() - freed_at < 0.35
    assert bench.metric(REDISPATCHES, trigger="hook") == 1
    assert bench.metric(REDISPATCHES, trigger="sweep") == 0


@pytest.mark.spec("scaler 10.7.6", "D29")
@benched(a_scaler("local", max_agents=20), sweep_seconds=NO_SWEEP)
async def test_ten_releases_within_the_debounce_cause_one_pass(bench: Bench) -> None:
    await bench.passes(2)
    passes = bench.faults.calls["waiting_classes"]
    for _ in range(10):
        bench.coordinator.pending.capacity_freed()
        await bench.passes(0.02)
    await bench.passes(3)
    assert bench.faults.calls["waiting_classes"] - passes == 1


@pytest.mark.spec("D29")
@benched(a_scaler("local", max_agents=1), sweep_seconds=NO_SWEEP)
async def test_releases_that_never_stop_do_not_put_off_the_pass(bench: Bench) -> None:
    await bench.submits("linux")
    await bench.made(0)
    await bench.submits("linux")

    async def release_for_ever() -> None:
        while True:
            bench.coordinator.pending.capacity_freed()
            await bench.passes(0.1)

    releasing = asyncio.create_task(release_for_ever())
    await makes_room(bench)
    freed_at = bench.clock.monotonic()
    await bench.machine(1)
    assert bench.clock.monotonic() - freed_at < 0.5
    releasing.cancel()


@benched(a_scaler(), sweep_seconds=NO_SWEEP)
async def test_a_release_during_a_pass_causes_one_more(bench: Bench) -> None:
    await bench.passes(2)
    gate = bench.traps.hold("waiting_classes", done=True)
    bench.coordinator.pending.capacity_freed()
    await gate.reached()
    passes = bench.faults.calls["waiting_classes"]
    bench.coordinator.pending.capacity_freed()
    gate.open()
    await bench.passes(3)
    assert bench.faults.calls["waiting_classes"] - passes == 1


# --- the sweep


@pytest.mark.spec("scaler 41.4.2", "D6")
@benched(a_scaler("local", max_agents=1))
async def test_a_release_that_nobody_told_of_is_found_by_the_sweep(bench: Bench) -> None:
    await bench.submits("linux")
    await bench.made(0)
    await bench.submits("linux")
    await bench.passes(5)
    bench.coordinator.teardown.capacity_freed = lambda: None
    await makes_room(bench)
    freed_at = bench.clock.monotonic()
    await bench.machine(1)
    assert bench.clock.monotonic() - freed_at <= 10.5
    assert bench.metric(REDISPATCHES, trigger="sweep") == 1


@pytest.mark.spec("T1.11", "scaler 41.4.3")
@benched(a_scaler(), sweep_seconds=NO_SWEEP)
async def test_a_trigger_during_a_pass_starts_no_second_one(bench: Bench) -> None:
    gate = bench.traps.hold("waiting_classes", done=True)
    first = asyncio.create_task(bench.coordinator.pending.tick("hook"))
    await gate.reached()
    assert await bench.coordinator.pending.tick("sweep") == 0
    gate.open()
    assert await first == 0


@pytest.mark.spec("scaler 41.4.7", "T7.1")
@benched(a_scaler())
async def test_while_draining_nothing_is_made_and_nothing_spins(bench: Bench) -> None:
    bench.coordinator.drain.draining = True
    await bench.submits("linux")
    await bench.passes(300)
    assert not bench.orders
    bench.coordinator.drain.draining = False
    await bench.machine(0)


@pytest.mark.spec("scaler 41.4.6")
@benched(a_scaler(), settings={BACKOFF: 60_000})
async def test_a_scaler_in_backoff_is_not_asked(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([refuses()])
    await bench.submits("linux")
    await bench.passes(55)
    assert len(bench.told(Event.SPAWN_ADMITTED)) == 1


@pytest.mark.spec("D13")
@benched(a_scaler(), sweep_seconds=NO_SWEEP, settings={BACKOFF: 7_000})
async def test_a_scaler_in_backoff_is_asked_at_the_very_moment_that_it_ends(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([refuses()])
    await bench.submits("linux")
    await bench.until(lambda: bool(bench.told(Event.SPAWN_FAILED)))
    failed_at = bench.clock.monotonic()
    await bench.machine(0)
    assert bench.clock.monotonic() - failed_at == pytest.approx(7, abs=0.1)
    assert bench.metric(REDISPATCHES, trigger="sweep") == 1
    assert bench.metric(REDISPATCHES, trigger="hook") == 0


@pytest.mark.spec("D13")
@benched(a_scaler(), sweep_seconds=NO_SWEEP, settings={BACKOFF: 7_000})
async def test_a_job_that_comes_during_a_backoff_is_asked_for_when_it_ends(bench: Bench) -> None:
    bench.coordinator.failures.defer(ScalerName("local"), AgentId("another"), "it did not work")
    began_at = bench.clock.monotonic()
    await bench.passes(3)
    await bench.submits("linux")
    await bench.machine(0)
    assert bench.clock.monotonic() - began_at == pytest.approx(7, abs=0.1)


@pytest.mark.spec("D13", "T1.13")
@benched(a_scaler("one", ("linux",)), a_scaler("two", ("windows",)), sweep_seconds=NO_SWEEP)
async def test_of_two_backoffs_the_earlier_one_ends_the_wait(bench: Bench) -> None:
    for name, seconds in (("one", 0), ("two", 10)):
        await bench.passes(seconds)
        bench.coordinator.failures.defer(ScalerName(name), AgentId("another"), "it did not work")
    began_at = bench.clock.monotonic()
    await bench.submits("windows")
    await bench.submits("linux")
    assert (await bench.machine(0)).label_set == ("linux",)
    assert bench.clock.monotonic() - began_at == pytest.approx(20, abs=0.2)
    assert (await bench.machine(1)).label_set == ("windows",)
    assert bench.clock.monotonic() - began_at == pytest.approx(30, abs=0.2)


# --- who is asked for


@pytest.mark.spec("T1.11", "scaler 41.4.5", "D29")
@benched(a_scaler("local", max_agents=100), sweep_seconds=NO_SWEEP)
async def test_a_pass_offers_the_ten_oldest_jobs_of_a_class(bench: Bench) -> None:
    bench.coordinator.drain.draining = True
    jobs = await bench.submits_run({f"job-{number}": a_request(f"job-{number}") for number in range(25)})
    await bench.passes(1)
    bench.coordinator.drain.draining = False
    assert await bench.coordinator.pending.tick("sweep") == 10
    bound = {row.bound_job_id for row in await bench.spawns()}
    assert bound == {job.id for job in jobs[:10]}
    await bench.passes(2)
    assert len(await bench.spawns()) == 25


@pytest.mark.spec("D29")
@benched(a_scaler("small", ("linux",), max_agents=1), a_scaler("large", ("windows",)), sweep_seconds=NO_SWEEP)
async def test_a_class_that_is_refused_does_not_keep_another_from_its_scaler(bench: Bench) -> None:
    bench.coordinator.drain.draining = True
    await bench.submits_run({f"job-{number}": a_request(f"job-{number}") for number in range(30)})
    served = await bench.submits("windows")
    await bench.passes(1)
    bench.coordinator.drain.draining = False
    await bench.coordinator.pending.tick("sweep")
    assert served.id in {row.bound_job_id for row in await bench.spawns()}
    assert len(await bench.spawns()) == 2


@benched(a_scaler("local", max_agents=100), sweep_seconds=NO_SWEEP)
async def test_a_job_whose_agent_boots_is_not_asked_for_again_and_takes_no_place_of_the_ten(bench: Bench) -> None:
    booting = [await bench.submits("linux") for _ in range(12)]
    await bench.passes(1)
    bench.coordinator.drain.draining = True
    late = await bench.submits("linux")
    await bench.passes(1)
    bench.coordinator.drain.draining = False
    assert await bench.coordinator.pending.tick("sweep") == 1
    assert {row.bound_job_id for row in await bench.spawns()} == {job.id for job in [*booting, late]}


@benched(a_scaler())
async def test_a_waiting_job_goes_to_an_agent_that_is_idle_before_a_scaler_is_asked(bench: Bench) -> None:
    bench.coordinator.drain.draining = True
    job = await bench.submits("linux")
    agent = await bench.an_agent()
    await bench.passes(1)
    bench.coordinator.drain.draining = False
    bench.coordinator.pending.capacity_freed()
    assert await agent.starts(within=2) == job.id
    assert not bench.orders


@pytest.mark.spec("scaler 41.4.2")
@benched(a_scaler("one", ("linux",)), a_scaler("two", ("windows",)), sweep_seconds=NO_SWEEP)
async def test_an_error_for_one_class_does_not_stop_the_others(bench: Bench) -> None:
    bench.coordinator.drain.draining = True
    jobs = [await bench.submits(*labels) for labels in (("linux",), ("windows",))]
    await bench.passes(1)
    bench.coordinator.drain.draining = False
    real = bench.coordinator.manager.request

    async def request(job: Job) -> object:
        if job.id == jobs[0].id:
            raise Conflict("something unforeseen")
        return await real(job)

    bench.coordinator.manager.request = request  # type: ignore[method-assign, assignment]  # one class has bad luck
    assert await bench.coordinator.pending.tick("sweep") == 1
    assert [row.bound_job_id for row in await bench.spawns()] == [jobs[1].id]


@benched(a_scaler())
async def test_an_outage_ends_a_pass_and_the_next_one_goes_on(bench: Bench) -> None:
    bench.faults.is_down = True
    bench.coordinator.pending.capacity_freed()
    await bench.passes(25)
    bench.faults.is_down = False
    job = await bench.submits("linux")
    assert await (await bench.made()).starts(within=15) == job.id


@pytest.mark.spec("T9.1")
@benched(a_scaler("local", max_agents=1), sweep_seconds=NO_SWEEP)
async def test_asking_why_a_job_waits_counts_as_no_refusal(bench: Bench) -> None:
    await bench.submits("linux")
    await bench.made(0)
    waiting = await bench.submits("linux")
    await bench.passes(1)
    refusals = bench.metric("kici_orch_scaler_spawn_refusals_total")
    assert refusals == 1
    for _ in range(5):
        await bench.verdict(waiting)
        assert isinstance(bench.coordinator.manager.judge(waiting.demand), AtCapacity)
    assert bench.metric("kici_orch_scaler_spawn_refusals_total") == refusals


@benched(a_scaler("local", max_agents=1))
async def test_a_machine_that_cannot_be_ended_still_counts_until_it_is_gone(bench: Bench) -> None:
    await bench.submits("linux")
    agent = await bench.made(0)
    bench.machines.alive[agent.agent_id].destroy_failures_left = 3
    agent.ends(await agent.starts())
    await bench.passes(0.2)
    await bench.submits("linux")
    agent.leaves()
    await bench.passes(2)
    assert len(bench.orders) == 1
    await bench.machine(1)
    assert agent.agent_id not in bench.machines.alive
    assert bench.backends["local"].destroyed[0] == (agent.agent_id, ScaleDownReason.JOB_COMPLETE)
