"""Agents that were asked for and never come."""

import pytest

from kici.domain import knobs
from kici.domain.job import JobStatus
from kici.observe.events import Event
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.fake_backend import SpawnScript

DEADLINE = knobs.SCALER_SPAWN_TIMEOUT_MS.name
BACKOFF = knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name


@pytest.mark.spec("scaler 14.6.1", "scaler 14.6.3")
@benched(a_scaler("local", max_agents=1), settings={BACKOFF: 1_000})
async def test_an_agent_that_does_not_come_within_five_minutes_is_ended_and_another_is_made(bench: Bench) -> None:
    job = await bench.submits("linux", queue_timeout_ms=0)
    silent = await bench.booted(0)
    await bench.passes(290)
    assert list(bench.machines.alive) == [silent.agent_id]
    agent = await bench.made(1)
    assert bench.clock.monotonic() < 320
    assert silent.agent_id not in bench.machines.alive
    assert bench.backends["local"].destroyed == [(silent.agent_id, "spawn-timeout")]
    assert await agent.starts() == job.id


@pytest.mark.spec("scaler 14.6.2")
@benched(a_scaler(), settings={DEADLINE: 900_000})
async def test_a_longer_deadline_for_spawns_is_a_longer_wait_for_agents(bench: Bench) -> None:
    await bench.submits("linux", queue_timeout_ms=0)
    silent = await bench.booted(0)
    await bench.passes(600)
    assert list(bench.machines.alive) == [silent.agent_id]
    await bench.until(lambda: bool(bench.told(Event.SPAWN_PRUNED)), within=310)


@pytest.mark.spec("scaler 14.6.1")
@benched(a_scaler(), settings={DEADLINE: 20_000})
async def test_a_shorter_deadline_for_spawns_does_not_shorten_the_wait(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.booted(0)
    await bench.passes(250)
    await agent.registers()
    assert await agent.starts() == job.id


@pytest.mark.spec("scaler 9.6.10")
@benched(a_scaler("local", max_concurrent_spawns=1), settings={DEADLINE: 600_000})
async def test_a_spawn_that_stands_in_line_is_not_stale_however_old_it_is(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(seconds=599)])
    await bench.submits("linux", queue_timeout_ms=0)
    waiting = await bench.submits("linux", queue_timeout_ms=0)
    agent = await bench.made(1)
    assert bench.clock.monotonic() > 599
    assert await agent.starts() == waiting.id


@pytest.mark.spec("scaler 14.6.3", "scaler 12")
@benched(a_scaler(), settings={DEADLINE: 300_000})
async def test_a_spawn_that_hangs_past_the_window_is_ended_once(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(seconds=0.1, settle_seconds=float(10_000))])
    await bench.submits("linux", queue_timeout_ms=400_000)
    order = await bench.machine(0)
    await bench.until(lambda: order.agent_id not in bench.machines.alive, within=320)
    await bench.passes(20)
    assert [end["agent_id"] for end in bench.told(Event.SPAWN_DESTROYED)] == [order.agent_id]


@pytest.mark.spec("scaler 14.6.10")
@benched(a_scaler("local", max_agents=4), settings={BACKOFF: 900_000})
async def test_two_passes_over_a_stale_spawn_end_it_once(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(destroy_seconds=60)])
    await bench.submits("linux", queue_timeout_ms=0)
    await bench.machine(0)
    await bench.passes(300)
    first, second = bench.coordinator.stale.tick(), bench.coordinator.stale.tick()
    assert second == 0
    assert first <= 1
    await bench.passes(70)
    assert len(bench.told(Event.SPAWN_PRUNED)) == 1
    await bench.is_clean()


@benched(a_scaler(), settings={BACKOFF: 900_000})
async def test_the_job_of_an_agent_that_never_came_says_so(bench: Bench) -> None:
    job = await bench.submits("linux", queue_timeout_ms=400_000)
    await bench.booted(0)
    found = await bench.ended(job, within=410)
    assert found.status is JobStatus.TIMED_OUT
    assert "did not register within" in (found.reason or "")


@benched(a_scaler())
async def test_a_jump_of_the_wall_clock_prunes_nobody(bench: Bench) -> None:
    job = await bench.submits("linux", queue_timeout_ms=0)
    agent = await bench.booted(0)
    bench.clock.skew_ms += 1_800_000
    await bench.passes(30)
    await agent.registers()
    assert await agent.starts() == job.id
