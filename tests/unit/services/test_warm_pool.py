"""Warm pools at work: full before the first job, refilled, shrunk, and never counted twice."""

from dataclasses import replace
from itertools import repeat

import pytest

from kici.config.model import Cap, LabelSet, ScalerEntry, WarmPool
from kici.domain.job import JobStatus
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.spawn import ScaleDownReason
from kici.observe.events import Event
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.fake_backend import SpawnScript, refuses

CPU = ResourceRequest(requests=Ask(cpus=1.0), limits=Ask(cpus=4.0))
SET = LabelSet(labels=("linux", "x64"), resources=CPU)


def pool(size: int, *, max_agents: int = 16, idle_seconds: float = 300.0, enabled: bool = True) -> ScalerEntry:
    warm = WarmPool(enabled=enabled, size=size, idle_timeout_seconds=idle_seconds)
    return a_scaler("local", label_sets=(SET,), max_agents=max_agents, warm_pool=warm)


async def fill(bench: Bench, count: int) -> None:
    """Every machine of the pool comes up as an agent."""
    for number in range(count):
        await bench.made(number)
    await bench.passes()


async def reload(bench: Bench, *scalers: ScalerEntry) -> None:
    bench.file = replace(bench._config(), scalers=scalers)
    report = await bench.coordinator.reload_scalers()
    assert report.outcome == "applied", report
    await bench.passes()


def ended(bench: Bench) -> list[ScaleDownReason]:
    return [reason for _, reason in bench.backends["local"].destroyed]


@pytest.mark.spec("scaler 18.14.15")
@benched(pool(3))
async def test_the_pool_is_filled_at_the_start_without_any_job(bench: Bench) -> None:
    await bench.passes()
    assert len(bench.orders) == 3
    assert all(order.bound_job_id is None for order in bench.orders)
    assert bench.metric("kici_orch_scaler_warm_pool_in_flight", scaler="local", labelSet="linux,x64") == 3
    assert bench.metric("kici_orch_scaler_warm_pool_spawns_total", scaler="local") == 3


@pytest.mark.spec("scaler 18.14.2")
@benched(pool(3))
async def test_spawns_under_way_count(bench: Bench) -> None:
    await bench.passes(100)
    assert len(bench.orders) == 3


@pytest.mark.spec("scaler 18.14.3")
@benched(pool(1))
async def test_a_machine_that_dies_before_it_registers_is_replaced_once_the_scaler_may_be_asked(bench: Bench) -> None:
    first = await bench.machine()
    bench.machines.die(first.agent_id)
    await bench.passes(5)
    assert len(bench.orders) == 1, "the scaler is deferred first"
    await bench.passes(90)
    assert len(bench.orders) == 2


@pytest.mark.spec("scaler 18.14.4")
@benched(pool(5, max_agents=3))
async def test_a_pool_larger_than_its_scaler_fills_what_there_is(bench: Bench) -> None:
    await bench.passes(100)
    assert len(bench.orders) == 3


@pytest.mark.spec("scaler 50.6")
@benched(pool(1))
async def test_the_limits_of_a_warm_agent_are_known_after_a_restart(bench: Bench) -> None:
    agent = await bench.made(0)
    await bench.is_killed()
    await bench.starts()
    await agent.registers()
    await bench.submits("linux", cpus=1.0)  # which limits it to one cpu, and the agent may use four
    await agent.is_left_alone()
    job = await bench.submits("linux")
    assert await agent.starts() == job.id


@benched(pool(2))
async def test_a_warm_agent_takes_a_job_at_once_and_the_pool_is_filled_again(bench: Bench) -> None:
    await fill(bench, 2)
    await bench.passes(30)
    assert bench.metric("kici_orch_scaler_warm_pool_ready", scaler="local", labelSet="linux,x64") == 2
    job = await bench.submits()
    assert await bench.status(job) is JobStatus.DISPATCHED
    await bench.passes(2)
    assert len(bench.orders) == 3


@pytest.mark.spec("scaler 18.14.12")
@benched(pool(1))
async def test_a_job_of_another_shape_gets_an_agent_of_its_own(bench: Bench) -> None:
    await fill(bench, 1)
    await bench.submits(cpus=2.0)
    await bench.passes()
    assert [order.bound_job_id is None for order in bench.orders] == [True, False]


@pytest.mark.spec("scaler 18.14.6")
@benched(pool(2))
async def test_agents_within_the_size_are_never_let_go(bench: Bench) -> None:
    await fill(bench, 2)
    await bench.passes(150)
    assert ended(bench) == []
    assert len(bench.machines.alive) == 2


@pytest.mark.spec("scaler 18.14.7")
@benched(pool(3))
async def test_a_reload_that_shrinks_the_pool_ends_the_oldest_at_once(bench: Bench) -> None:
    await fill(bench, 3)
    await reload(bench, pool(1))
    assert ended(bench) == [ScaleDownReason.IDLE] * 2
    assert list(bench.machines.alive) == [bench.orders[2].agent_id]
    assert bench.metric("kici_orch_scaler_warm_pool_target", scaler="local", labelSet="linux,x64") == 1
    assert bench.metric("kici_orch_scaler_warm_pool_reaped_total", scaler="local") == 2


@pytest.mark.spec("scaler 18.14.8")
@benched(pool(1))
async def test_a_warm_agent_whose_end_takes_long_is_ended_and_counted_once(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(destroy_seconds=90)])
    await fill(bench, 1)
    await reload(bench, pool(1, enabled=False))
    await bench.passes(200)
    assert ended(bench) == [ScaleDownReason.IDLE]
    assert bench.metric("kici_orch_scaler_warm_pool_reaped_total", scaler="local") == 1
    await bench.is_clean()


@pytest.mark.spec("scaler 18.14.14")
@benched(
    a_scaler("broken", label_sets=(SET,), warm_pool=WarmPool(enabled=True, size=2)),
    a_scaler("whole", label_sets=(SET,), warm_pool=WarmPool(enabled=True, size=1)),
    is_started=False,
)
async def test_a_pool_that_cannot_be_filled_does_not_keep_the_others_empty(bench: Bench) -> None:
    await bench.boots_up(lambda: setattr(bench.backends["broken"], "scripts", repeat(refuses())))
    await bench.coordinator.start()
    await bench.passes()
    assert [bench.machines.alive[order.agent_id].scaler for order in bench.orders] == ["whole"]
    assert bench.told(Event.SPAWN_FAILED)


@benched(pool(2))
async def test_a_pool_that_is_switched_off_ends_all_and_its_gauges_go(bench: Bench) -> None:
    await fill(bench, 2)
    await reload(bench, pool(2, enabled=False))
    assert ended(bench) == [ScaleDownReason.IDLE] * 2
    await bench.is_clean()


@pytest.mark.spec("T9.2")
@benched(a_scaler("local", label_sets=(SET,)))
async def test_the_target_of_a_new_pool_shows_at_once(bench: Bench) -> None:
    await reload(bench, pool(4))
    assert bench.metric("kici_orch_scaler_warm_pool_target", scaler="local", labelSet="linux,x64") == 4


@pytest.mark.spec("scaler 18.14.9", "T7.6")
@benched(pool(1))
async def test_an_agent_that_got_a_job_is_not_let_go(bench: Bench) -> None:
    await fill(bench, 1)
    job = await bench.submits()
    await reload(bench, pool(0))
    assert ended(bench) == []
    agent = bench.coordinator.registry.get(bench.orders[0].agent_id)
    assert agent is not None
    assert not agent.draining
    assert await bench.status(job) is JobStatus.DISPATCHED


@pytest.mark.spec("scaler 18.14.11")
@benched(pool(0, idle_seconds=1.0))
async def test_agents_made_for_jobs_are_not_the_pools_to_let_go(bench: Bench) -> None:
    job = await bench.submits()
    agent = await bench.booted()
    await bench.cancels(job)
    assert agent.agent_id in {order.agent_id for order in bench.orders}
    await bench.passes(100)
    assert ScaleDownReason.IDLE not in ended(bench)


@benched(pool(2))
async def test_a_restart_does_not_fill_the_pool_a_second_time(bench: Bench) -> None:
    await fill(bench, 2)
    await bench.is_killed()
    await bench.starts()
    await bench.passes(50)
    assert len(bench.orders) == 2
    for order in bench.orders:
        await bench.agents[order.agent_id].registers()
    await bench.passes(60)
    assert len(bench.orders) == 2
    assert len(bench.machines.alive) == 2


@benched(pool(2))
async def test_a_draining_coordinator_fills_nothing(bench: Bench) -> None:
    await fill(bench, 2)
    bench.coordinator.drain.draining = True
    bench.dies(bench.agents[bench.orders[0].agent_id])
    await bench.passes(100)
    assert len(bench.orders) == 2


@pytest.mark.spec("scaler 14.6.8")
@benched(pool(1, max_agents=4))
async def test_a_warm_agent_that_never_comes_is_counted_as_on_its_way_no_longer(bench: Bench) -> None:
    name = "kici_orch_scaler_warm_pool_in_flight"
    silent = await bench.booted(0)
    await bench.passes(290)
    assert bench.metric(name, scaler="local", labelSet="linux,x64") == 1
    await bench.until(lambda: silent.agent_id not in bench.machines.alive, within=30)
    await bench.coordinator.pools.tick()
    assert bench.metric(name, scaler="local", labelSet="linux,x64") == 0
    await bench.machine(1)


# --- jobs go first

GPU = a_scaler("gpu", ("gpu",))


@benched(pool(2), GPU, max_agents=2)
async def test_idle_warm_agents_give_way_to_a_job_that_finds_no_room(bench: Bench) -> None:
    await fill(bench, 2)
    job = await bench.submits("gpu", queue_timeout_ms=0)
    await bench.until(lambda: bool(ended(bench)), within=15)
    agent = await bench.made(2)
    assert await agent.starts() == job.id
    assert ended(bench) == [ScaleDownReason.IDLE]
    await bench.passes(100)
    assert len(bench.orders) == 3  # the pool waits for room
    agent.ends(job.id)
    await bench.passes()
    agent.leaves()
    await bench.until(lambda: len(bench.orders) == 4, within=35)
    assert bench.orders[3].bound_job_id is None


@benched(a_scaler("local", label_sets=(SET,)), GPU, max_agents=2)
async def test_a_pool_takes_no_room_that_jobs_wait_for(bench: Bench) -> None:
    jobs = [await bench.submits("gpu", queue_timeout_ms=0) for _ in range(3)]
    agents = [await bench.made(number) for number in range(2)]
    for agent in agents:
        await agent.starts()
    await bench.passes(12)
    await reload(bench, pool(2), GPU)
    agents[0].ends(jobs[0].id)
    await bench.passes()
    agents[0].leaves()
    third = await bench.made(2)
    assert await third.starts() == jobs[2].id
    await bench.passes(60)
    assert len(bench.orders) == 3
    assert bench.told(Event.POOL_GIVES_WAY) == []


@benched(pool(1), GPU, max_agents=1)
async def test_pools_do_not_give_way_to_a_job_whose_agent_is_on_its_way(bench: Bench) -> None:
    bench.backends["gpu"].scripts = iter([SpawnScript(seconds=60)])
    await fill(bench, 1)
    job = await bench.submits("gpu", queue_timeout_ms=0)
    await bench.until(lambda: bool(ended(bench)), within=15)
    await bench.passes(50)
    assert len(bench.told(Event.POOL_GIVES_WAY)) == 1
    agent = await bench.made(1)
    assert await agent.starts() == job.id


@benched(pool(2), GPU, max_agents=2, cap=Cap(max_cpu=4))
async def test_a_job_that_no_room_would_be_enough_for_moves_no_pool(bench: Bench) -> None:
    await fill(bench, 2)
    await bench.submits("gpu", queue_timeout_ms=0, cpus=8)
    await bench.passes(60)
    assert ended(bench) == []
