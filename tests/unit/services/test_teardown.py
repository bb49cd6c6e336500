"""Taking a compute down: once, in order, until it is certain, and whatever the store does meanwhile."""

import pytest

from kici.domain.errors import Permanent
from kici.domain.ids import AgentId
from kici.domain.job import JobStatus
from kici.domain.spawn import ScaleDownReason, SpawnState
from kici.observe.events import Event
from kici.testing.bench_agent import BenchAgent
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.fake_backend import SpawnScript, fails


async def an_idle_made_agent(bench: Bench) -> BenchAgent:
    """Its job is over, and it has not left yet."""
    job = await bench.submits("linux")
    agent = await bench.made()
    agent.ends(await agent.starts())
    await bench.ended(job)
    return agent


@pytest.mark.spec("D3")
@benched(a_scaler())
async def test_the_row_is_ending_before_the_compute_ends_and_goes_after_it(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(destroy_seconds=5)])
    agent = await an_idle_made_agent(bench)
    agent.leaves()
    await bench.passes(2)
    (row,) = await bench.spawns()
    assert (row.state, row.end_reason) == (SpawnState.ENDING, "job-complete")
    assert list(bench.machines.alive) == [agent.agent_id]
    await bench.passes(5)
    await bench.is_clean()


@pytest.mark.spec("scaler 22.5.2", "D3")
@benched(a_scaler())
async def test_a_compute_that_cannot_be_ended_keeps_its_row_and_gives_its_reservation_back(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(destroy_failures=3)])
    agent = await an_idle_made_agent(bench)
    agent.leaves()
    await bench.passes(2)
    assert [row.state for row in await bench.spawns()] == [SpawnState.ENDING]
    assert not bench.coordinator.book.reservations
    await bench.passes(30)
    assert len(bench.told(Event.SPAWN_DESTROY_FAILED)) == 3
    await bench.is_clean()


@benched(a_scaler())
async def test_an_unforeseen_error_of_a_backend_does_not_leave_a_compute_for_ever(bench: Bench) -> None:
    agent = await an_idle_made_agent(bench)
    backend = bench.backends["local"]
    real = backend.destroy
    errors = iter([RuntimeError("a bug"), TimeoutError("too slow"), Permanent("no")])

    async def destroy(agent_id: AgentId, reason: ScaleDownReason) -> None:
        error = next(errors, None)
        if error is not None:
            raise error
        await real(agent_id, reason)

    backend.destroy = destroy  # type: ignore[method-assign]  # a backend with a bug
    agent.leaves()
    await bench.passes(30)
    await bench.is_clean()


@benched(a_scaler())
async def test_a_store_that_is_down_does_not_keep_a_compute_alive_and_its_row_goes_later(bench: Bench) -> None:
    agent = await an_idle_made_agent(bench)
    bench.faults.is_down = True
    agent.leaves()
    await bench.passes(5)
    assert not bench.machines.alive
    assert len(await bench.spawns()) == 1
    bench.faults.is_down = False
    await bench.passes(5)
    await bench.is_clean()


@benched(a_scaler())
async def test_an_end_that_is_asked_for_many_times_happens_once(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(destroy_seconds=3)])
    agent = await an_idle_made_agent(bench)
    for reason in ScaleDownReason:
        bench.coordinator.manager.agent_gone(agent.agent_id, reason)
    agent.leaves()
    await bench.passes(10)
    assert bench.backends["local"].destroyed == [(agent.agent_id, ScaleDownReason.IDLE)]
    await bench.is_clean()


@benched(a_scaler())
async def test_the_credential_of_an_agent_ends_with_its_compute(bench: Bench) -> None:
    agent = await an_idle_made_agent(bench)
    agent.leaves()
    await bench.passes(2)
    (token,) = [token for token in await bench.store.agent_tokens(limit=9) if token.agent_id == agent.agent_id]
    assert token.revoked_at is not None


@benched(a_scaler())
async def test_a_spawn_under_way_is_called_off_and_its_backend_undoes_it(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(seconds=5, settle_seconds=60)])
    job = await bench.submits("linux")
    await bench.machine()
    await bench.cancels(job)
    await bench.passes(2)
    await bench.is_clean()


@pytest.mark.spec("T0.6")
@benched(a_scaler("local", max_agents=1))
async def test_the_error_of_a_failed_spawn_reaches_its_job_though_the_store_is_away_at_first(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([fails("the disk is full", after_seconds=5), SpawnScript(seconds=600)])
    job = await bench.submits("linux")
    await bench.passes(4)
    bench.faults.is_down = True
    await bench.passes(10)
    bench.faults.is_down = False
    await bench.passes(5)
    assert (await bench.job(job)).last_provisioning_error == "the disk is full"


@benched(a_scaler("local", max_agents=1))
async def test_an_agent_whose_compute_ends_is_given_no_job_meanwhile(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(destroy_seconds=5)])
    agent = await an_idle_made_agent(bench)
    bench.coordinator.manager.agent_gone(agent.agent_id, ScaleDownReason.SHUTDOWN)
    job = await bench.submits("linux")
    await agent.is_left_alone(seconds=3)
    assert await (await bench.made(1)).starts() == job.id
    assert await bench.status(job) is JobStatus.RUNNING
