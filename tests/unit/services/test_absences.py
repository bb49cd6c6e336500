"""A blink is not a death: how long agents may stay away, and what happens when they do not come back."""

import asyncio

import pytest

from kici.domain import knobs
from kici.domain.ids import InstanceId
from kici.domain.job import Job, JobStatus
from kici.testing.bench_agent import BenchAgent
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.wire.messages import JobStart

GRACE = knobs.AGENT_RECONNECT_GRACE_MS.name
ACK = knobs.DISPATCH_ACK_TIMEOUT_MS.name
STATIC_SECONDS = 120


async def a_running_job(bench: Bench) -> tuple[Job, BenchAgent]:
    """A job that runs on an agent made for it."""
    job = await bench.submits("linux")
    agent = await bench.made(len(bench.orders) if bench.agents else 0)
    await agent.starts()
    return job, agent


# --- static agents


@pytest.mark.spec("T2.8", "D9")
@benched()
async def test_a_static_agent_that_returns_in_time_resumes_its_output_and_its_end(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.writes(job.id, b"one ")
    await bench.passes()
    agent.cut()
    await bench.passes(STATIC_SECONDS - 10)
    assert await bench.status(job) is JobStatus.RECOVERING
    await agent.registers((job.id, "running"))
    agent.writes(job.id, b"two", offset=4)
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS
    assert b"".join(chunk.data for chunk in await bench.store.read_log(job.id, after=0, bytes_max=99)) == b"one two"


@pytest.mark.spec("T2.8", "D9")
@benched()
async def test_after_the_grace_the_job_has_failed_with_the_reason_and_a_late_end_is_refused(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.cut()
    await bench.passes(STATIC_SECONDS - 5)
    assert await bench.status(job) is JobStatus.RECOVERING
    found = await bench.ended(job, within=10)
    assert found.status is JobStatus.FAILED
    assert "agent-1" in (found.reason or "")
    assert "did not come back within 120 s" in (found.reason or "")
    ack = await agent.registers((job.id, "finished"))
    assert [verdict.action for verdict in ack.jobs] == ["drop"]
    agent.ends(job.id)
    await bench.passes()
    assert await bench.status(job) is JobStatus.FAILED


@pytest.mark.spec("T2.8")
@benched()
async def test_a_job_that_another_coordinator_takes_up_as_the_grace_ends_goes_on(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.cut()
    gate = bench.traps.hold("finish_job", done=False)
    await gate.reached()
    assert await bench.store.resume_job(job.id, agent.agent_id, InstanceId("instance-b")) is not None
    gate.open()
    await bench.passes(STATIC_SECONDS)
    assert await bench.status(job) is JobStatus.RUNNING


@benched()
async def test_all_jobs_of_an_agent_wait_for_it_and_end_together(bench: Bench) -> None:
    agent = await bench.an_agent(slots=3)
    running = [await bench.submits("linux") for _ in range(2)]
    for _ in running:
        await agent.starts()
    offered = await bench.submits("linux")
    await agent.is_offered()
    agent.cut()
    await bench.passes()
    assert {await bench.status(job) for job in running} == {JobStatus.RECOVERING}
    assert await bench.status(offered) is JobStatus.QUEUED
    for job in running:
        assert (await bench.ended(job, within=STATIC_SECONDS + 5)).status is JobStatus.FAILED


# --- made agents


@pytest.mark.spec("D9")
@benched(a_scaler(), settings={GRACE: 30_000})
async def test_a_made_agent_has_its_own_grace_and_keeps_its_machine_during_it(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    agent.cut()
    await bench.passes(27)
    assert await bench.status(job) is JobStatus.RECOVERING
    assert list(bench.machines.alive) == [agent.agent_id]
    found = await bench.ended(job, within=10)
    assert "did not come back within 30 s" in (found.reason or "")
    await bench.passes(2)
    await bench.is_clean()


@pytest.mark.spec("D9")
@benched(a_scaler(), settings={GRACE: 30_000})
async def test_the_grace_stands_still_while_the_program_does(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    job, agent = await a_running_job(bench)
    agent.cut()
    await bench.passes(2)
    with monkeypatch.context() as stopped:
        stopped.setattr(bench.coordinator.absences, "tick", lambda: asyncio.sleep(0))
        await bench.passes(60)
    await bench.passes(25)
    assert await bench.status(job) is JobStatus.RECOVERING
    await agent.registers((job.id, "running"))
    assert await bench.status(job) is JobStatus.RUNNING


@pytest.mark.spec("D9")
@pytest.mark.parametrize("is_acked", [True, False])
@benched(a_scaler(), settings={GRACE: 30_000, ACK: 5_000})
async def test_a_made_agent_that_was_only_offered_its_job_may_return_for_it(bench: Bench, is_acked: bool) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.is_offered()
    agent.cut()
    await bench.passes(20)
    assert await bench.status(job) is JobStatus.DISPATCHED
    assert list(bench.machines.alive) == [agent.agent_id]
    if is_acked:
        ack = await agent.registers((job.id, "acked"))
        assert [verdict.action for verdict in ack.jobs] == ["start"]
        assert (await agent.hears(JobStart)).job_id == job.id
    else:
        await agent.registers()
        assert await agent.starts() == job.id
    agent.ends(job.id)
    found = await bench.ended(job)
    assert (found.status, found.attempts, found.offers) == (JobStatus.SUCCESS, 0, 1)
    assert len(bench.orders) == 1


@pytest.mark.spec("D9", "T1.14")
@benched(a_scaler(), settings={GRACE: 30_000, ACK: 5_000})
async def test_an_offer_waits_no_longer_than_the_grace_and_is_then_served_by_another(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.is_offered()
    agent.cut()
    await bench.passes(28)
    assert await bench.status(job) is JobStatus.DISPATCHED
    other = await bench.made(1)
    assert await other.starts() == job.id
    assert (await bench.job(job)).attempts == 1
    assert list(bench.machines.alive) == [other.agent_id]


@pytest.mark.spec("D9")
@benched(a_scaler(), settings={GRACE: 30_000, ACK: 5_000})
async def test_one_that_returns_for_its_offer_and_says_nothing_loses_it(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.is_offered()
    agent.cut()
    await bench.passes(20)
    await agent.registers()
    await bench.passes(4)
    assert await bench.status(job) is JobStatus.DISPATCHED
    other = await bench.made(1)
    assert await other.starts() == job.id


@pytest.mark.spec("D9")
@benched(a_scaler(), settings={GRACE: 0})
async def test_without_a_grace_the_job_fails_and_the_machine_goes_at_once(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    agent.cut()
    assert (await bench.ended(job, within=2)).status is JobStatus.FAILED
    await bench.passes(1)
    await bench.is_clean()


@pytest.mark.spec("D9")
@benched(a_scaler(), settings={GRACE: 30_000})
async def test_a_second_blink_after_a_return_has_a_grace_of_its_own(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    for _ in range(3):
        agent.cut()
        await bench.passes(20)
        await agent.registers((job.id, "running"))
    assert await bench.status(job) is JobStatus.RUNNING
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("D9")
@benched(a_scaler(), settings={GRACE: 30_000})
async def test_a_changed_grace_counts_for_the_next_blink(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    await bench.coordinator.settings.patch(None, {GRACE: 5_000})
    await bench.passes(15)
    agent.cut()
    assert (await bench.ended(job, within=8)).status is JobStatus.FAILED


@benched(a_scaler(), settings={GRACE: 30_000})
async def test_a_job_that_is_being_cancelled_ends_cancelled_when_its_agent_stays_away(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    await bench.cancels(job)
    agent.cut()
    await bench.passes(5)
    assert await bench.status(job) is JobStatus.CANCELLING
    assert (await bench.ended(job, within=30)).status is JobStatus.CANCELLED


@benched(a_scaler(), settings={GRACE: 30_000})
async def test_an_agent_that_says_why_it_leaves_is_not_waited_for(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    agent.leaves("signal")
    found = await bench.ended(job, within=5)
    assert found.status is JobStatus.FAILED
    assert "it left (signal)" in (found.reason or "")


# --- the store is down


@pytest.mark.spec("D9")
@benched(a_scaler(), settings={GRACE: 30_000})
async def test_the_grace_stands_still_while_the_store_is_down(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    bench.faults.is_down = True
    agent.cut()
    await bench.passes(300)
    assert list(bench.machines.alive) == [agent.agent_id]
    bench.faults.is_down = False
    await bench.passes(3)
    assert await bench.status(job) is JobStatus.RECOVERING
    await agent.registers((job.id, "running"))
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("D9")
@benched(a_scaler(), settings={GRACE: 30_000})
async def test_an_outage_during_the_grace_does_not_use_it_up(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    agent.cut()
    await bench.passes(5)
    bench.faults.is_down = True
    await bench.passes(100)
    bench.faults.is_down = False
    await bench.passes(10)
    assert await bench.status(job) is JobStatus.RECOVERING
    await agent.registers((job.id, "running"))
    assert await bench.status(job) is JobStatus.RUNNING


@benched(a_scaler(), settings={GRACE: 30_000})
async def test_a_loss_that_could_not_be_settled_is_settled_once_the_store_is_back(bench: Bench) -> None:
    job, agent = await a_running_job(bench)
    bench.faults.is_down = True
    bench.dies(agent)
    await bench.passes(20)
    bench.faults.is_down = False
    assert (await bench.ended(job, within=5)).status is JobStatus.FAILED
    await bench.passes(5)
    await bench.is_clean()


@benched(a_scaler())
async def test_an_offered_job_whose_loss_could_not_be_settled_returns_to_the_queue_later(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made(0)
    await agent.is_offered()
    bench.faults.is_down = True
    agent.cut()
    await bench.passes(20)
    bench.faults.is_down = False
    other = await bench.made(1)
    assert await other.starts() == job.id
    assert (await bench.job(job)).attempts == 1
