"""After a restart: what lives on its host goes on, what does not is settled, and what nobody explains goes."""

import asyncio
from dataclasses import replace

import pytest

from kici.config.model import Reuse
from kici.domain import knobs
from kici.domain.errors import Retryable, StoreDown
from kici.domain.ids import AgentId, InstanceId, JobId
from kici.domain.job import Job, JobStatus
from kici.domain.spawn import SpawnState
from kici.observe.events import Event
from kici.ports.store import Claim
from kici.testing.bench_agent import BenchAgent
from kici.testing.builders import HERE, a_reservation, a_session, a_spawn, an_instance
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.fake_backend import SpawnScript
from kici.wire.messages import JobCancel

GRACE = knobs.AGENT_RECONNECT_GRACE_MS.name
PEER = InstanceId("instance-b")


async def a_running_job(bench: Bench) -> tuple[Job, BenchAgent]:
    job = await bench.submits("linux")
    agent = await bench.made(len(bench.orders))
    await agent.starts()
    return job, agent


async def restarts(bench: Bench, *, down_seconds: float = 2.0) -> None:
    await bench.is_killed()
    await bench.passes(down_seconds)
    await bench.starts()


# --- what runs goes on


@pytest.mark.spec("D28")
@benched(a_scaler())
async def test_a_killed_coordinator_costs_no_running_job(bench: Bench) -> None:
    running = [await a_running_job(bench) for _ in range(3)]
    await restarts(bench)
    assert bench.coordinator.book.total.agents == 3
    for job, agent in running:
        assert await bench.status(job) is JobStatus.RECOVERING
        ack = await agent.registers((job.id, "running"))
        assert [verdict.action for verdict in ack.jobs] == ["resume"]
    await bench.passes(90)
    for job, agent in running:
        assert await bench.status(job) is JobStatus.RUNNING
        agent.ends(job.id)
        found = await bench.ended(job)
        assert (found.status, found.attempts) == (JobStatus.SUCCESS, 0)
        agent.leaves()
    await bench.passes(2)
    await bench.is_clean()


@pytest.mark.spec("D28")
@benched(a_scaler())
async def test_agents_that_were_kept_go_on_after_a_stop(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    await bench.stops(keep_agents=True)
    assert list(bench.machines.alive) == [agent.agent_id]
    await bench.starts()
    await agent.registers((job.id, "running"))
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("D28")
@benched(a_scaler(), settings={GRACE: 30_000})
async def test_the_grace_after_a_restart_counts_from_the_moment_that_agents_may_return(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    await restarts(bench, down_seconds=600)
    await bench.passes(25)
    assert await bench.status(job) is JobStatus.RECOVERING
    assert list(bench.machines.alive) == [agent.agent_id]
    found = await bench.ended(job, within=10)
    assert found.status is JobStatus.FAILED
    assert "the coordinator restarted" in (found.reason or "")
    assert "did not come back within 30 s" in (found.reason or "")
    await bench.passes(2)
    await bench.is_clean()


@pytest.mark.spec("D28")
@benched(a_scaler())
async def test_a_job_whose_machine_died_meanwhile_ends_at_once_with_the_reason(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    await bench.is_killed()
    bench.machines.die(agent.agent_id)
    await bench.starts()
    found = await bench.ended(job, within=2)
    assert found.status is JobStatus.FAILED
    assert "its compute is gone since the restart" in (found.reason or "")
    await bench.is_clean()


@pytest.mark.spec("D28")
@benched(a_scaler())
async def test_a_machine_that_dies_after_the_restart_is_noticed(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    await restarts(bench)
    await bench.passes(1)
    bench.machines.die(agent.agent_id, "was killed by signal 9")
    found = await bench.ended(job, within=3)
    assert "was killed by signal 9" in (found.reason or "")


@pytest.mark.spec("T2.8", "D28")
@benched()
async def test_a_static_agent_has_its_grace_after_a_restart(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    await restarts(bench)
    await bench.passes(100)
    assert await bench.status(job) is JobStatus.RECOVERING
    await agent.registers((job.id, "running"))
    assert await bench.status(job) is JobStatus.RUNNING


@benched(a_scaler())
async def test_a_job_that_was_being_cancelled_is_cancelled_when_its_agent_returns(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    await bench.cancels(job)
    await agent.hears(JobCancel)
    await restarts(bench)
    await agent.registers((job.id, "running"))
    assert (await agent.hears(JobCancel)).job_id == job.id
    agent.ends(job.id, "cancelled")
    assert (await bench.ended(job)).status is JobStatus.CANCELLED


# --- what was booting


@pytest.mark.spec("D28", "scaler 20.6.2")
@benched(a_scaler())
async def test_a_spawn_that_was_booting_and_lives_serves_its_job(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.booted()
    await restarts(bench)
    await bench.passes(30)
    assert len(await bench.spawns()) == 1
    assert len(bench.orders) == 1
    await agent.registers()
    assert await agent.starts() == job.id


@pytest.mark.spec("D28", "scaler 20.6.2")
@benched(a_scaler())
async def test_a_spawn_that_was_booting_and_is_gone_leaves_nothing_and_its_job_is_served_by_another(
    bench: Bench,
) -> None:
    job = await bench.submits("linux")
    gone = await bench.booted()
    await bench.is_killed()
    bench.machines.die(gone.agent_id)
    await bench.starts()
    assert await (await bench.made(1)).starts() == job.id
    assert len(await bench.spawns()) == 1
    assert (await bench.job(job)).attempts == 0


@pytest.mark.spec("D28")
@benched(a_scaler(), settings={knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name: 1_000})
async def test_the_deadline_of_a_booting_agent_counts_from_its_spawn_not_from_the_restart(bench: Bench) -> None:
    await bench.submits("linux", queue_timeout_ms=0)
    await bench.booted()
    await bench.passes(200)
    await restarts(bench)
    await bench.until(lambda: bool(bench.told(Event.SPAWN_PRUNED)), within=110)


@benched(a_scaler())
async def test_a_row_that_was_written_before_the_crash_and_nothing_made_is_forgotten(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(seconds=50)])
    job = await bench.submits("linux")
    await bench.until(lambda: bool(bench.told(Event.SPAWN_ADMITTED)))
    await bench.passes(5)
    await restarts(bench)
    assert await (await bench.made(0)).starts() == job.id
    assert len(await bench.spawns()) == 1


@benched(a_scaler())
async def test_a_compute_that_was_being_ended_is_ended(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(destroy_seconds=50)])
    job, agent = await a_running_job(bench)
    agent.ends(job.id)
    await bench.ended(job)
    agent.leaves()
    await bench.passes(2)
    assert [row.state for row in await bench.spawns()] == [SpawnState.ENDING]
    await restarts(bench)
    await bench.passes(60)
    await bench.is_clean()


# --- what nobody explains


@pytest.mark.spec("D28")
@benched(a_scaler())
async def test_a_machine_without_a_row_is_reclaimed(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    agent.ends(job.id)
    await bench.ended(job)
    await bench.is_killed()
    await bench.store.delete_spawn(agent.agent_id)
    await bench.starts()
    assert not bench.machines.alive


@pytest.mark.spec("D28")
@benched(a_scaler(), settings={GRACE: 30_000})
async def test_a_registered_agent_without_a_job_that_stays_silent_past_the_grace_is_reclaimed(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    agent.ends(job.id)
    await bench.ended(job)
    await restarts(bench)
    await bench.passes(25)
    assert list(bench.machines.alive) == [agent.agent_id]
    await bench.passes(10)
    await bench.is_clean()


@benched(a_scaler())
async def test_sessions_of_the_process_before_are_gone(bench: Bench) -> None:
    await bench.an_agent()
    await bench.store.register_agent(
        a_session(agent_id=AgentId("far-away"), instance_id=PEER), needs_spawn=False, bound=None
    )
    await restarts(bench)
    assert [session.agent_id for session in await bench.store.sessions(instance_id=None, limit=9)] == ["far-away"]


# --- other coordinators


@pytest.mark.spec("T1.12", "H4", "scaler 20.6.3")
@benched(a_scaler(), is_started=False)
async def test_jobs_and_spawns_of_another_coordinator_are_left_alone(bench: Bench) -> None:
    await bench.starts()
    job = await bench.submits("windows", queue_timeout_ms=0)
    far_away = AgentId("scaler-bare-metal-00000009")
    await bench.store.claim_job(job.id, Claim(agent_id=far_away, instance_id=PEER, ack_ms=10_000_000))
    await bench.store.start_job(job.id, far_away)
    theirs = a_spawn(
        agent_id=far_away, owner_instance_id=PEER, state=SpawnState.BOOTING, bound_job_id=JobId("job-other")
    )
    await bench.store.insert_spawn(theirs, replace(a_reservation(theirs), owner_instance_id=PEER), None)
    await restarts(bench)
    await bench.passes(200)
    assert await bench.status(job) is JobStatus.RUNNING
    assert [row.agent_id for row in await bench.spawns()] == [far_away]
    assert not bench.coordinator.book.reservations
    assert bench.coordinator.spawns.get(far_away) is None


@pytest.mark.parametrize("skew_ms", [-600_000, 600_000])
def test_an_agent_of_a_coordinator_that_died_has_its_grace_by_the_clock_of_the_store(skew_ms: int) -> None:
    @benched()
    async def scenario(bench: Bench) -> None:
        bench.clock.skew_ms = skew_ms
        job = await bench.submits("windows", queue_timeout_ms=0)
        far_away = AgentId("far-away")
        await bench.store.beat(an_instance(id=PEER))
        await bench.store.claim_job(job.id, Claim(agent_id=far_away, instance_id=PEER, ack_ms=10_000_000))
        await bench.store.start_job(job.id, far_away)
        await bench.passes(110)
        assert await bench.status(job) is JobStatus.RECOVERING
        await bench.passes(80)  # more than one that was made may take
        assert await bench.status(job) is JobStatus.RECOVERING
        await bench.passes(60)
        assert await bench.status(job) is JobStatus.FAILED

    scenario()


@pytest.mark.spec("scaler 20.6.4")
@benched(a_scaler(), is_started=False)
async def test_a_row_of_an_owner_that_nobody_knows_is_neither_taken_up_nor_deleted(bench: Bench) -> None:
    nobody, agent_id = InstanceId(""), AgentId("scaler-bare-metal-00000009")
    row = a_spawn(agent_id=agent_id, owner_instance_id=nobody, state=SpawnState.BOOTING)
    await bench.store.insert_spawn(row, replace(a_reservation(row), owner_instance_id=nobody), None)
    await bench.starts()
    await bench.passes(100)
    assert [row.agent_id for row in await bench.spawns()] == [agent_id]
    assert bench.coordinator.spawns.get(agent_id) is None
    assert not bench.coordinator.book.reservations


# --- trouble at the start


@pytest.mark.spec("scaler 20.6.7")
@benched(a_scaler("one", ("linux",)), a_scaler("two", ("windows",)))
async def test_a_backend_that_cannot_sweep_its_orphans_does_not_keep_the_others_from_it(bench: Bench) -> None:
    await bench.submits("windows")
    await bench.machine()
    await bench.is_killed()
    for row in await bench.spawns():
        await bench.store.delete_spawn(row.agent_id)

    async def fails(owned: frozenset[AgentId]) -> int:
        raise Retryable("the engine does not answer")

    await bench.boots_up(lambda: setattr(bench.backends["one"], "cleanup_orphans", fails))
    await bench.coordinator.start()
    await bench.passes(1)
    assert [left["scaler"] for left in bench.told(Event.ORPHANS_LEFT)] == ["one"]
    assert not bench.machines.alive or len(bench.told(Event.SPAWN_ADMITTED)) == 2


@pytest.mark.spec("scaler 20.4", "D28")
@benched(a_scaler("one", ("linux",)), a_scaler("two", ("windows",)))
async def test_a_backend_that_cannot_look_at_its_host_does_not_stop_the_start_or_cost_its_jobs(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    await bench.is_killed()

    async def fails(known: frozenset[AgentId]) -> tuple[()]:
        raise Retryable("the engine does not answer")

    await bench.boots_up(lambda: setattr(bench.backends["one"], "recover", fails))
    await bench.coordinator.start()
    await agent.registers((job.id, "running"))
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS
    other = await bench.submits("windows")
    assert await (await bench.made(1)).starts() == other.id


@pytest.mark.spec("scaler 20.6.5")
@benched(a_scaler(), is_started=False)
async def test_an_agent_that_comes_before_everything_is_taken_up_again_waits(bench: Bench) -> None:
    await bench.starts()
    job, agent = await a_running_job(bench)
    await bench.is_killed()
    gate = bench.traps.hold("spawns", done=False)
    starting = asyncio.create_task(bench.starts())
    await gate.reached()
    assert not bench.coordinator.is_recovered
    gate.open()
    await starting
    assert bench.coordinator.is_recovered
    await agent.registers((job.id, "running"))
    assert await bench.status(job) is JobStatus.RUNNING
    assert (await bench.store.reservations(owner=HERE, limit=9))[0].agent_id == agent.agent_id


@pytest.mark.spec("scaler 20.6.8", "D28")
@benched(a_scaler(), is_started=False)
async def test_without_its_records_nothing_starts_and_nothing_is_ended(bench: Bench) -> None:
    await bench.starts()
    job, agent = await a_running_job(bench)
    await bench.is_killed()
    bench.faults.is_down = True
    with pytest.raises(StoreDown):
        await bench.starts()
    await bench.passes(5)
    assert list(bench.machines.alive) == [agent.agent_id]
    await bench._leaves()
    bench.faults.is_down = False
    await bench.starts()
    await agent.registers((job.id, "running"))
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("D9", "D28")
@benched(a_scaler(reuse=Reuse(idle_seconds=600.0, max_jobs=5)), settings={GRACE: 30_000})
async def test_an_agent_that_came_after_the_restart_and_blinks_has_its_own_grace(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    agent.ends(job.id)
    await bench.passes()
    await bench.is_killed()
    await bench.starts()
    await agent.registers()
    later = await bench.submits("linux")
    assert await agent.starts() == later.id
    await bench.passes(28)
    agent.cut()
    await bench.passes(5)  # the grace after the restart is over
    assert await bench.status(later) is JobStatus.RECOVERING
    assert list(bench.machines.alive) == [agent.agent_id]


@pytest.mark.spec("D28")
@benched(a_scaler(reuse=Reuse(idle_seconds=600.0, max_jobs=5)), settings={GRACE: 30_000})
async def test_a_slow_stop_that_keeps_agents_ends_none_of_them_for_being_away(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    agent.ends(job.id)
    await bench.passes()
    await restarts(bench)
    await agent.registers()
    later = await bench.submits("linux")
    assert await agent.starts() == later.id
    await bench.passes(25)
    gate = bench.traps.hold("delete_sessions_of", done=False)
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.stops(keep_agents=True))
        await gate.reached()
        await bench.passes(10)  # the grace after the restart is over
        gate.open()
    assert [row.state for row in await bench.spawns()] == [SpawnState.REGISTERED]
    await bench.starts()
    await agent.registers((later.id, "running"))
    agent.ends(later.id)
    assert (await bench.ended(later)).status is JobStatus.SUCCESS
