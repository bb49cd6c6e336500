"""One coordinator as a whole: its readiness, its drain, its ordered end, and the numbers that it shows."""

import asyncio

import pytest

from kici.apps.surface import surface_of
from kici.config.model import LabelSet
from kici.domain import knobs
from kici.domain.ids import AgentId
from kici.domain.job import JobStatus
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.spawn import SpawnState
from kici.observe.events import Event
from kici.services.shutdown import SHUTDOWN_SECONDS
from kici.testing.bench_agent import BenchAgent
from kici.testing.builders import HERE
from kici.testing.coordinator_bench import Bench, a_request, a_scaler, benched
from kici.testing.fake_backend import SpawnScript, refuses
from kici.web.surface import Coordinator

SIZED = (LabelSet(labels=("linux",), resources=ResourceRequest(requests=Ask(cpus=2, memory="1g"))),)
BACKOFF = knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name


def control(bench: Bench) -> Coordinator:
    return surface_of(bench.coordinator, version="0", stop=lambda keep_agents: None).coordinator


async def a_running_agent(bench: Bench) -> BenchAgent:
    await bench.submits("linux")
    agent = await bench.made(len(bench.orders))
    await agent.starts()
    return agent


# --- readiness


@pytest.mark.spec("T9.5")
@benched(a_scaler(), is_started=False)
async def test_it_is_ready_once_it_has_recovered_and_started(bench: Bench) -> None:
    await bench.boots_up()
    assert "recovering" in (await control(bench).not_ready() or "")
    await bench.coordinator.start()
    assert await control(bench).not_ready() is None


@pytest.mark.spec("T9.5")
@benched()
async def test_it_is_not_ready_while_the_store_is_away(bench: Bench) -> None:
    bench.faults.is_down = True
    assert "did not answer" in (await control(bench).not_ready() or "")
    bench.faults.is_down = False
    assert await control(bench).not_ready() is None


@benched()
async def test_it_is_not_ready_while_it_stops(bench: Bench) -> None:
    bench.coordinator.drain.stopping = True
    assert await control(bench).not_ready() == "stopping"
    bench.coordinator.drain.stopping = False


# --- drain


@pytest.mark.spec("T7.1")
@benched(a_scaler())
async def test_draining_counts_what_runs_and_its_end_starts_what_waits_at_once(bench: Bench) -> None:
    agent = await bench.an_agent()
    running = await bench.submits("linux")
    await agent.starts()
    state = await control(bench).set_draining(True)
    assert (state.draining, state.jobs_running) == (True, 1)
    waiting = [await bench.submits("linux") for _ in range(2)]
    agent.ends(running.id)
    await bench.ended(running)
    assert (await control(bench).drain_state()).jobs_running == 0
    await bench.passes(30)
    assert {await bench.status(job) for job in waiting} == {JobStatus.QUEUED}
    assert not bench.orders
    await control(bench).set_draining(False)
    assert await agent.starts(within=1) == waiting[0].id
    assert (await bench.machine(0)).bound_job_id == waiting[1].id
    assert bench.metric("kici_orchestrator_draining") == 0


@pytest.mark.spec("T7.1")
@benched()
async def test_a_long_queue_is_worked_off_after_a_drain(bench: Bench) -> None:
    await control(bench).set_draining(True)
    jobs = await bench.submits_run({f"job-{number}": a_request(f"job-{number}") for number in range(100)})
    agents = [await bench.an_agent(f"agent-{number}", slots=2) for number in range(3)]
    await control(bench).set_draining(False)
    for number in range(len(jobs)):
        agent = agents[number % 3]
        agent.ends(await agent.starts(within=15))
    for job in jobs:
        assert (await bench.ended(job)).status is JobStatus.SUCCESS


# --- the end


@pytest.mark.spec("T7.2", "D28")
@benched(a_scaler())
async def test_a_stop_ends_every_local_compute_and_says_so_to_its_jobs(bench: Bench) -> None:
    running, offered, booting = [await bench.submits("linux") for _ in range(3)]
    first, second = await bench.made(0), await bench.made(1)
    await first.starts()
    await second.is_offered()
    await bench.machine(2)
    began_at = bench.clock.monotonic()
    await bench.coordinator.shutdown(keep_agents=False)
    assert bench.clock.monotonic() - began_at < 2
    assert not bench.machines.alive
    assert not await bench.spawns()
    found = await bench.job(running)
    assert (found.status, found.reason) == (JobStatus.FAILED, "the coordinator was stopped while the job ran")
    for job in (offered, booting):
        found = await bench.job(job)
        assert (found.status, found.attempts) == (JobStatus.QUEUED, 0)
    assert not await bench.store.instances(limit=9)
    assert not await bench.store.sessions(instance_id=None, limit=9)


@pytest.mark.spec("D28")
@benched(a_scaler())
async def test_a_stop_settles_the_job_of_an_agent_that_is_away_too(bench: Bench) -> None:
    agent = await a_running_agent(bench)
    (job,) = await bench.jobs()
    agent.cut()
    await bench.passes(2)
    assert await bench.status(job) is JobStatus.RECOVERING
    await bench.coordinator.shutdown(keep_agents=False)
    assert await bench.status(job) is JobStatus.FAILED
    assert not bench.machines.alive


@pytest.mark.spec("D28")
@benched(a_scaler())
async def test_a_stop_cancels_what_was_being_cancelled(bench: Bench) -> None:
    await a_running_agent(bench)
    (job,) = await bench.jobs()
    await bench.cancels(job)
    await bench.coordinator.shutdown(keep_agents=False)
    assert await bench.status(job) is JobStatus.CANCELLED


@pytest.mark.spec("D28")
@benched(a_scaler())
async def test_a_stop_leaves_the_job_of_a_static_agent_to_it(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    await bench.stops()
    assert await bench.status(job) is JobStatus.RUNNING
    await bench.starts()
    await agent.registers((job.id, "running"))
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("scaler 20.6.6")
@benched(a_scaler("one", ("linux",)), a_scaler("two", ("windows",)))
async def test_a_backend_that_hangs_does_not_hold_up_the_stop_for_ever(bench: Bench) -> None:
    async def hangs(*_: object) -> None:
        await asyncio.Event().wait()

    stuck = bench.backends["one"]
    stuck.destroy = stuck.shutdown_all = hangs  # type: ignore[method-assign, assignment]  # it never answers
    await bench.submits("linux")
    await bench.submits("windows")
    for number in (0, 1):
        await bench.made(number)
    began_at = bench.clock.monotonic()
    await bench.coordinator.shutdown(keep_agents=False)
    assert bench.clock.monotonic() - began_at < 2 * SHUTDOWN_SECONDS + 1
    assert [order.scaler for order in bench.machines.alive.values()] == ["one"]
    assert [left["scaler"] for left in bench.told(Event.SPAWN_LEFT)] == ["one"]
    assert [left["scaler"] for left in bench.told(Event.BACKEND_STUCK)] == ["one"]


@benched(a_scaler())
async def test_a_stop_ends_although_the_store_is_away(bench: Bench) -> None:
    await a_running_agent(bench)
    bench.faults.is_down = True
    began_at = bench.clock.monotonic()
    await bench.coordinator.shutdown(keep_agents=False)
    assert bench.clock.monotonic() - began_at < 2 * SHUTDOWN_SECONDS + 1
    assert not bench.machines.alive
    bench.faults.is_down = False


@pytest.mark.spec("D28")
@benched(a_scaler())
async def test_a_stop_that_keeps_agents_ends_nothing_and_writes_no_ends(bench: Bench) -> None:
    agent = await a_running_agent(bench)
    (job,) = await bench.jobs()
    await bench.coordinator.shutdown(keep_agents=True)
    assert list(bench.machines.alive) == [agent.agent_id]
    assert await bench.status(job) is JobStatus.RUNNING
    assert [row.state for row in await bench.spawns()] == [SpawnState.REGISTERED]
    assert [row.id for row in await bench.store.instances(limit=9)] == [HERE], "its agents are somebody's"


@benched(a_scaler())
async def test_nothing_new_begins_once_it_stops(bench: Bench) -> None:
    agent = await bench.an_agent()
    await bench.coordinator.shutdown(keep_agents=False)
    await bench.submits("linux")
    await agent.is_left_alone(seconds=30)
    assert not bench.orders


# --- numbers


@pytest.mark.spec("T9.7")
@benched(a_scaler("local", label_sets=SIZED))
async def test_used_cpus_and_memory_are_shown_and_return_to_zero(bench: Bench) -> None:
    agents = [await a_running_agent(bench) for _ in range(3)]
    row = {"scaler": "local", "scalerType": "bare-metal", "machinePool": ""}
    assert bench.metric("kici_orch_scaler_cpus_used", **row) == 6
    assert bench.metric("kici_orch_scaler_memory_bytes_used", **row) == 3 * 1024**3
    for agent in agents:
        bench.dies(agent)
    await bench.passes(5)
    assert bench.metric("kici_orch_scaler_cpus_used", **row) == 0
    assert bench.metric("kici_orch_scaler_memory_bytes_used", **row) == 0
    assert bench.metric("kici_orch_scaler_cpus_used", scaler="__global__", scalerType="", machinePool="") == 0


@pytest.mark.spec("T9.1")
@benched(a_scaler("local", max_agents=1), settings={BACKOFF: 60_000})
async def test_refusals_and_failures_move_counters_of_their_own(bench: Bench) -> None:
    await bench.submits("linux")
    agent = await bench.made()
    await bench.submits("linux")
    await bench.passes()
    assert bench.metric("kici_orch_scaler_spawn_refusals_total") == 1
    bench.backends["local"].scripts = iter([refuses()])
    agent.ends(await agent.starts())
    await bench.passes()
    agent.leaves()
    await bench.passes(5)
    assert bench.metric("kici_orch_scaler_spawn_failures_total", backend="bare-metal", bound="true") == 1
    assert bench.metric("kici_orch_scaler_spawn_refusals_total") == 1


@pytest.mark.spec("T9.1")
@benched(settings={knobs.UNROUTABLE_GRACE_MS.name: 20_000})
async def test_what_happens_to_jobs_and_agents_is_counted(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await bench.submits("nobody-has-this")
    agent.rejects(await agent.is_offered())
    await bench.passes(1)
    assert bench.metric("kici_orch_jobs_requeued_total") == 1
    await bench.passes(5)
    assert bench.metric("kici_orch_dispatch_queue_depth", status="queued") == 2
    assert await agent.starts(within=30) == job.id
    agent.ends(job.id)
    agent.cut()
    await bench.passes(40)
    assert bench.metric("kici_orch_dispatch_queue_depth", status="queued") == 0
    assert bench.metric("kici_orch_unroutable_fast_failed_total") == 1
    assert bench.metric("kici_orch_agents_lost_total", cause="connection-closed") == 1
    assert bench.metric("kici_orch_dispatch_latency_seconds_count") == 2
    stranger = await bench.a_program("stranger")
    stranger.agent_id = AgentId("scaler-bare-metal-00000000")
    await stranger.authenticates()
    stranger.says(stranger.registration())
    await stranger.is_closed()
    assert bench.metric("kici_orch_agents_refused_total", reason="4006") == 1


# --- what people see


@benched()
async def test_a_claim_under_way_is_no_job_of_the_agent(bench: Bench) -> None:
    await bench.submits("linux")
    gate = bench.traps.hold("claim_oldest", done=False)
    agent = await bench.an_agent()
    await gate.reached()
    surface = surface_of(bench.coordinator, version="0", stop=lambda keep_agents: None)
    (row,) = await surface.agents.agents()
    assert (row.agent_id, row.state, row.job_ids) == (agent.agent_id, "busy", ())
    gate.open()


@benched(a_scaler())
async def test_agents_are_shown_from_their_boot_to_their_end(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(seconds=5, destroy_seconds=20)])
    surface = surface_of(bench.coordinator, version="0", stop=lambda keep_agents: None)

    async def state() -> str:
        (row,) = await surface.agents.agents()
        return row.state

    job = await bench.submits("linux")
    await bench.passes(1)
    assert await state() == "booting"
    agent = await bench.made()
    await agent.starts()
    assert await state() == "busy"
    agent.cut()
    await bench.passes(1)
    assert await state() == "away"
    await agent.registers((job.id, "running"))
    agent.ends(job.id)
    agent.leaves()
    await bench.passes(1)
    assert await state() == "ending"
    await bench.passes(25)
    assert not await surface.agents.agents()
