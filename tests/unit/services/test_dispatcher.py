"""Jobs and agents find each other: who gets which job, in what order, and what a slow or lost answer costs."""

import asyncio
from collections.abc import Sequence
from typing import Final

import pytest

from kici.config.model import LabelSet, WarmPool
from kici.domain import knobs
from kici.domain.ids import DEFAULT_ORG, JobId, OrgId
from kici.domain.job import Job, JobStatus
from kici.domain.resources import Ask, ResourceRequest
from kici.stores.database import Rows, Step
from kici.stores.sqlite.engine import Inline
from kici.testing.bench_agent import BenchAgent
from kici.testing.coordinator_bench import Bench, a_request, a_scaler, benched
from kici.wire.messages import CloseCode, JobCancel, JobDispatch, JobStart

CPU: Final = ResourceRequest(requests=Ask(cpus=1.0))
LINK_SECONDS_MAX: Final = 0.020
"""Of one message of the simulated link."""
BESIDE: Final = (["beat"], ["put_capacity"])
"""Written by others meanwhile: nobody waits for it."""


async def finishes(bench: Bench, agent: BenchAgent) -> JobId:
    """Take the next job and end it."""
    job_id = await agent.starts()
    agent.ends(job_id)
    return job_id


async def still_works(bench: Bench, agent: BenchAgent) -> None:
    """Assert that the agent is given the next job."""
    job = await bench.submits("linux")
    assert await finishes(bench, agent) == job.id


# --- who gets what


@benched(
    a_scaler(label_sets=(LabelSet(labels=("linux", "x64"), resources=CPU),), warm_pool=WarmPool(enabled=True, size=1))
)
async def test_a_warm_hand_off_waits_for_two_commits_and_three_messages_and_nothing_else(bench: Bench) -> None:
    """Claimed where it is inserted, offered, acknowledged, started: no clock decides when."""
    written: list[list[str]] = []
    unit = Inline.unit

    async def counted(database: Inline, steps: Sequence[Step]) -> list[Rows] | None:
        written.append([step.query.value for step in steps])
        return await unit(database, steps)

    loop = asyncio.get_running_loop()
    for number in range(20):
        agent = await bench.made(number)
        await bench.passes()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Inline, "unit", counted)
            began = loop.time()
            job = await bench.submits("linux")
            assert await agent.starts() == job.id
        assert loop.time() - began < 3 * LINK_SECONDS_MAX + 0.01
        assert [queries for queries in written if queries not in BESIDE] == [["submit_run"], ["start_job"]]
        written.clear()
        agent.ends(job.id)
        agent.leaves()


@benched()
async def test_a_job_goes_to_an_idle_agent_that_fits(bench: Bench) -> None:
    agent = await bench.an_agent()
    await bench.an_agent("other", "windows")
    job = await bench.submits("linux")
    assert await agent.starts() == job.id
    found = await bench.job(job)
    assert (found.status, found.agent_id, found.attempts) == (JobStatus.RUNNING, agent.agent_id, 0)


@benched()
async def test_a_job_that_no_agent_fits_waits_and_goes_to_the_first_that_comes(bench: Bench) -> None:
    busy = await bench.an_agent("busy", "windows")
    job = await bench.submits("linux")
    await busy.is_left_alone()
    assert await bench.status(job) is JobStatus.QUEUED
    assert await (await bench.an_agent()).starts() == job.id


@pytest.mark.spec("T1.2")
@benched()
async def test_the_oldest_of_equal_jobs_goes_first(bench: Bench) -> None:
    jobs = [await bench.submits("linux") for _ in range(3)]
    agent = await bench.an_agent()
    assert [await finishes(bench, agent) for _ in jobs] == [job.id for job in jobs]


@pytest.mark.spec("T1.2")
@benched()
async def test_the_oldest_job_goes_first_whatever_its_class(bench: Bench) -> None:
    jobs = [await bench.submits(*labels) for labels in (("linux",), ("x64",), ("linux", "x64"), ("linux",))]
    agent = await bench.an_agent()
    assert [await finishes(bench, agent) for _ in jobs] == [job.id for job in jobs]


@pytest.mark.spec("T1.2")
@benched()
async def test_a_rejected_job_goes_back_ahead_of_younger_ones(bench: Bench) -> None:
    rejecting = await bench.an_agent("a")
    old, young = await bench.submits("linux"), await bench.submits("linux")
    rejecting.rejects(await rejecting.is_offered())
    await bench.passes()
    assert (await bench.job(old)).status is JobStatus.QUEUED
    other = await bench.an_agent("b")
    assert [await finishes(bench, other) for _ in range(2)] == [old.id, young.id]


@pytest.mark.spec("T1.3")
@benched()
async def test_a_gated_agent_is_not_given_a_plain_job_by_direct_dispatch(bench: Bench) -> None:
    gated = await bench.an_agent("gated", "linux", "gpu", gate=["gpu"])
    plain = await bench.submits("linux")
    await gated.is_left_alone()
    assert await bench.status(plain) is JobStatus.QUEUED
    fitting = await bench.submits("linux", "gpu")
    assert await gated.starts() == fitting.id


@pytest.mark.spec("T1.3")
@benched()
async def test_a_gated_agent_that_comes_or_becomes_free_does_not_drain_plain_jobs(bench: Bench) -> None:
    await bench.submits("linux")
    first = await bench.submits("linux", "gpu")
    await bench.submits("linux")
    gated = await bench.an_agent("gated", "linux", "gpu", gate=["gpu"])
    assert await finishes(bench, gated) == first.id
    await gated.is_left_alone(seconds=30)


@pytest.mark.spec("T1.3")
@benched(a_scaler("gpus", ("linux", "gpu"), mandatory_labels=("gpu",)))
async def test_a_gated_agent_of_a_scaler_is_not_given_a_plain_job_when_its_own_is_gone(bench: Bench) -> None:
    bound = await bench.submits("linux", "gpu")
    agent = await bench.booted()
    plain = await bench.submits("linux")
    gate = bench.traps.hold("register_agent", done=False)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(agent.registers())
        await gate.reached()
        await bench.store.claim_job(bound.id, bench.coordinator.dispatcher.claim_of(agent.agent_id, None, DEFAULT_ORG))
        gate.open()
    await agent.is_left_alone(seconds=15)
    assert await bench.status(plain) is JobStatus.QUEUED


@benched()
async def test_excluded_labels_keep_a_job_from_an_agent(bench: Bench) -> None:
    agent = await bench.an_agent("agent-1", "linux", "slow")
    await bench.submits("linux", exclude=frozenset({"slow"}))
    await agent.is_left_alone(seconds=15)


@benched()
async def test_an_agent_with_two_slots_works_on_two_jobs_and_no_more(bench: Bench) -> None:
    agent = await bench.an_agent(slots=2)
    jobs = [await bench.submits("linux") for _ in range(3)]
    assert [await agent.starts() for _ in range(2)] == [job.id for job in jobs[:2]]
    await agent.is_left_alone(seconds=15)
    agent.ends(jobs[1].id)
    assert await agent.starts() == jobs[2].id


@benched()
async def test_both_slots_of_an_agent_that_comes_are_filled_from_the_queue(bench: Bench) -> None:
    jobs = [await bench.submits("linux") for _ in range(2)]
    agent = await bench.an_agent(slots=2)
    assert {await agent.starts(within=15) for _ in jobs} == {job.id for job in jobs}


@benched()
async def test_a_job_that_names_a_host_waits_for_that_host(bench: Bench) -> None:
    here = await bench.an_agent("here", "linux", "kici:host:here")
    job = await bench.submits("linux", "kici:host:there")
    await here.is_left_alone(seconds=15)
    there = await bench.an_agent("there", "linux", "kici:host:there")
    assert await there.starts() == job.id


@pytest.mark.spec("T0.3")
@benched(a_scaler())
async def test_the_agent_made_for_a_job_gets_that_job_though_an_older_one_waits(bench: Bench) -> None:
    older = await bench.submits("linux")
    first = await bench.booted(0)
    younger = await bench.submits("linux")
    second = await bench.made(1)
    assert await second.starts() == younger.id
    assert await bench.status(older) is JobStatus.QUEUED
    await first.registers()
    assert await first.starts() == older.id


# --- how long an agent may take to acknowledge


HASTY = OrgId("hasty")
ACK = knobs.DISPATCH_ACK_TIMEOUT_MS.name


async def hastes(bench: Bench) -> None:
    """One org has a deadline of its own."""
    await bench.coordinator.settings.patch(HASTY, {ACK: 2_000})
    await bench.coordinator.settings.view(HASTY)


async def deadline_ms(bench: Bench, job: Job) -> int:
    found = await bench.job(job)
    assert found.ack_deadline is not None
    assert found.dispatched_at is not None
    return found.ack_deadline - found.dispatched_at


@benched()
async def test_an_org_has_its_own_acknowledgement_deadline_for_offers_and_drains(bench: Bench) -> None:
    await hastes(bench)
    agent = await bench.an_agent(slots=4)
    (alone,) = await bench.submits_run({"a": a_request("a", org=HASTY)}, org=HASTY)
    assert await agent.is_offered() == alone.id
    assert await deadline_ms(bench, alone) == 2_000
    (offered, _) = await bench.submits_run({key: a_request(key, org=HASTY) for key in "ab"}, org=HASTY)
    await agent.is_offered()
    assert await deadline_ms(bench, offered) == 2_000
    (waiting,) = await bench.submits_run({"a": a_request("a", "windows", org=HASTY)}, org=HASTY)
    await (await bench.an_agent("w", "windows")).is_offered()
    assert await deadline_ms(bench, waiting) == 2_000
    usual = await bench.submits("linux")
    await agent.is_offered()
    assert await deadline_ms(bench, usual) == 10_000


@benched(a_scaler())
async def test_an_org_has_its_own_acknowledgement_deadline_for_jobs_that_an_agent_was_made_for(bench: Bench) -> None:
    await hastes(bench)
    (job,) = await bench.submits_run({"a": a_request("a", org=HASTY)}, org=HASTY)
    await (await bench.made()).is_offered()
    assert await deadline_ms(bench, job) == 2_000


@benched()
async def test_an_agent_that_may_get_jobs_of_several_orgs_has_the_longest_of_their_deadlines(bench: Bench) -> None:
    await hastes(bench)
    (hasty,) = await bench.submits_run({"a": a_request("a", org=HASTY)}, org=HASTY)
    await bench.submits("linux")
    agent = await bench.an_agent()
    assert await agent.is_offered() == hasty.id
    assert await deadline_ms(bench, hasty) == 10_000


# --- drain


@pytest.mark.spec("T7.1")
@benched(a_scaler())
async def test_while_draining_a_running_job_finishes_and_nothing_new_starts(bench: Bench) -> None:
    agent = await bench.an_agent()
    running = await bench.submits("linux")
    await agent.starts()
    bench.coordinator.drain.draining = True
    waiting = await bench.submits("linux")
    agent.ends(running.id)
    assert (await bench.ended(running)).status is JobStatus.SUCCESS
    await agent.is_left_alone(seconds=30)
    assert await bench.status(waiting) is JobStatus.QUEUED
    assert not bench.orders


@pytest.mark.spec("T7.1")
@benched()
async def test_an_agent_that_comes_while_draining_gets_no_job(bench: Bench) -> None:
    await bench.submits("linux")
    bench.coordinator.drain.draining = True
    agent = await bench.an_agent()
    await agent.is_left_alone(seconds=30)


# --- races


@benched()
async def test_a_job_cancelled_while_its_claim_is_under_way_is_not_offered_and_takes_no_slot(bench: Bench) -> None:
    agent = await bench.an_agent()
    gate = bench.traps.hold("claim_job", done=True)
    first = await offered_later(bench)
    await gate.reached()
    await bench.cancels(await bench.job(first))
    second = await bench.submits("linux")
    assert await agent.starts() == second.id
    gate.open()
    await bench.passes()
    assert [offer.job_id for offer in agent.all(JobDispatch)] == [second.id]
    agent.ends(second.id)
    await still_works(bench, agent)


async def offered_later(bench: Bench) -> JobId:
    """A job that is offered by a claim of its own: one of two in a run."""
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b", "windows")})
    return jobs[0].id


@benched()
async def test_an_agent_lost_between_claim_and_delivery_costs_its_job_nothing_but_the_way(bench: Bench) -> None:
    agent = await bench.an_agent("a")
    gate = bench.traps.hold("claim_job", done=True)
    job_id = await offered_later(bench)
    await gate.reached()
    agent.cut()
    await bench.passes()
    gate.open()
    other = await bench.an_agent("b")
    assert await other.starts(within=20) == job_id
    assert not agent.all(JobDispatch)


@pytest.mark.parametrize("unanswered", ["job", "requeue_job"])
def test_a_claim_that_an_outage_keeps_from_being_returned_is_returned_by_its_deadline(
    unanswered: str, caplog: pytest.LogCaptureFixture
) -> None:
    @benched()
    async def scenario(bench: Bench) -> None:
        agent = await bench.an_agent("a")
        bench.traps.fail("claim_job", done=False)
        gate = bench.traps.hold("claim_oldest", done=True)
        jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b")})
        await gate.reached()
        agent.cut()
        await bench.passes()
        bench.traps.fail(unanswered, done=False, times=2)
        gate.open()
        await bench.passes(5)
        other = await bench.an_agent("b")
        assert {await finishes(bench, other) for _ in jobs} == {job.id for job in jobs}

    scenario()
    assert [record.exc_text for record in caplog.records if record.exc_info] == []


@benched()
async def test_an_agent_that_came_back_during_a_claim_for_its_old_connection_gets_the_job(bench: Bench) -> None:
    agent = await bench.an_agent()
    gate = bench.traps.hold("claim_job", done=True)
    job_id = await offered_later(bench)
    await gate.reached()
    agent.cut()
    await bench.passes()
    await agent.registers()
    gate.open()
    assert await finishes(bench, agent) == job_id
    assert (await bench.ended(await bench.job(job_id))).status is JobStatus.SUCCESS
    assert (await bench.job(job_id)).attempts <= 1


@benched()
async def test_a_claim_whose_answer_is_lost_does_not_cost_the_agent_its_connection(bench: Bench) -> None:
    agent = await bench.an_agent()
    bench.traps.fail("claim_job", done=True)
    job_id = await offered_later(bench)
    assert await finishes(bench, agent) == job_id
    await bench.passes(20)
    assert agent.closed_with is None
    await still_works(bench, agent)


@benched()
async def test_a_claim_that_failed_gives_the_agent_and_the_job_back(bench: Bench) -> None:
    agent = await bench.an_agent()
    bench.traps.fail("claim_job", done=False)
    job_id = await offered_later(bench)
    assert await finishes(bench, agent) == job_id


@benched()
async def test_a_drain_whose_answer_is_lost_still_brings_the_job(bench: Bench) -> None:
    job = await bench.submits("linux")
    bench.traps.fail("claim_oldest", done=True)
    agent = await bench.an_agent()
    assert await finishes(bench, agent) == job.id
    await bench.passes(20)
    assert agent.closed_with is None


@benched()
async def test_a_submission_whose_answer_is_lost_is_run_by_the_agent_it_was_meant_for(bench: Bench) -> None:
    agent = await bench.an_agent()
    bench.traps.fail("submit", done=True)
    with pytest.raises(Exception, match="did not answer"):
        await bench.submits("linux")
    (job,) = await bench.jobs()
    assert await finishes(bench, agent) == job.id
    assert agent.closed_with is None


@pytest.mark.spec("T1.10", "H10")
@benched(a_scaler())
async def test_a_bound_agent_that_comes_after_its_run_was_cancelled_does_not_get_the_job(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.booted()
    gate = bench.traps.hold("register_agent", done=False)
    async with asyncio.TaskGroup() as tasks:
        registering = tasks.create_task(agent.authenticates())
        await registering
        agent.says(agent.registration())
        await gate.reached()
        await bench.coordinator.jobs.cancel_run(job.run_id, force=False, reason="no longer wanted")
        gate.open()
    await agent.is_left_alone(seconds=15)
    assert await bench.status(job) is JobStatus.CANCELLED


@benched()
async def test_a_job_is_offered_once_although_two_agents_come_at_the_same_moment(bench: Bench) -> None:
    job = await bench.submits("linux")
    agents = [await bench.a_program(name) for name in ("a", "b")]
    async with asyncio.TaskGroup() as tasks:
        for agent in agents:
            tasks.create_task(agent.registers())
    await bench.passes()
    assert [offer.job_id for agent in agents for offer in agent.all(JobDispatch)] == [job.id]


@benched()
async def test_nothing_starts_before_running_is_committed(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    gate = bench.traps.hold("start_job", done=False)
    agent.acks(await agent.is_offered())
    await gate.reached()
    await bench.passes()
    assert not agent.all(JobStart)
    gate.open()
    await agent.hears(JobStart)
    assert await bench.status(job) is JobStatus.RUNNING


@benched(settings={knobs.DISPATCH_ACK_TIMEOUT_MS.name: 2000})
async def test_an_acknowledgement_counts_for_the_offer_that_it_answers(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    gate = bench.traps.hold("start_job", done=False)
    agent.acks(await agent.is_offered())
    await gate.reached()
    assert await agent.is_closed() == CloseCode.ACK_TIMEOUT
    await agent.registers()
    assert await agent.is_offered() == job.id
    gate.open()
    await bench.passes()
    assert await bench.status(job) is JobStatus.DISPATCHED
    agent.acks(job.id)
    await agent.hears(JobStart)
    assert await bench.status(job) is JobStatus.RUNNING


@benched()
async def test_a_job_that_was_cancelled_before_its_acknowledgement_is_dropped(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.is_offered()
    await bench.cancels(job)
    cancel = await agent.hears(JobCancel)
    assert (cancel.job_id, cancel.force) == (job.id, True)
    agent.acks(job.id)
    agent.ends(job.id, "cancelled")
    await bench.passes()
    assert not agent.all(JobStart)
    await still_works(bench, agent)
