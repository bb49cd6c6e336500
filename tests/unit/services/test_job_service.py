"""Submitting, waiting, cancelling: what people may ask of runs and jobs, and what they are told."""

import asyncio
from typing import Any

import pytest

from kici.domain import knobs
from kici.domain.access import Actor, Role
from kici.domain.document import SubmitRun
from kici.domain.errors import Conflict, Denied, NoCapacity, NotFound, StoreDown
from kici.domain.ids import DEFAULT_ORG, JobId, OrgId, RunId
from kici.domain.job import JobStatus, RunStatus
from kici.testing.coordinator_bench import SOMEBODY, Bench, a_request, benched

DEPTH = knobs.QUEUE_MAX_DEPTH.name
QUEUE_TIMEOUT = knobs.QUEUE_TIMEOUT_MS.name
SUBMITTER = Actor(name="ci", role=Role.SUBMITTER, secret_contexts=frozenset({"build"}))


def a_run(*keys: str, org: OrgId = DEFAULT_ORG, **fields: Any) -> SubmitRun:
    return SubmitRun(name="test", org=org, jobs=tuple(a_request(key, **fields) for key in keys or ("job",)))


# --- the limit of the queue


@pytest.mark.spec("T1.7")
@benched(settings={DEPTH: 2})
async def test_a_full_queue_refuses_with_its_numbers_and_accepts_once_it_is_shorter(bench: Bench) -> None:
    for _ in range(2):
        await bench.submits("linux")
    with pytest.raises(NoCapacity, match=r"2 jobs wait and 2 may.*queue_max_depth"):
        await bench.submits("linux")
    agent = await bench.an_agent()
    await agent.starts()
    await bench.passes(1)
    assert await bench.status(await bench.submits("linux")) is JobStatus.QUEUED


@pytest.mark.spec("T1.7")
@benched(settings={DEPTH: 3})
async def test_a_run_that_would_overfill_the_queue_is_refused_as_a_whole(bench: Bench) -> None:
    await bench.submits("linux")
    with pytest.raises(NoCapacity):
        await bench.submits_run({key: a_request(key) for key in "abc"})
    assert len(await bench.jobs()) == 1
    await bench.submits_run({key: a_request(key) for key in "ab"})


@pytest.mark.spec("T1.7")
@benched(settings={DEPTH: 5})
async def test_submissions_at_the_same_moment_do_not_overfill_the_queue_together(bench: Bench) -> None:
    async def submit() -> bool:
        try:
            await bench.submits("linux")
        except NoCapacity:
            return False
        return True

    async with asyncio.TaskGroup() as tasks:
        submitting = [tasks.create_task(submit()) for _ in range(20)]
    assert sum(task.result() for task in submitting) == 5


@pytest.mark.spec("T1.7")
@benched(settings={DEPTH: 1})
async def test_jobs_that_agents_take_at_once_do_not_fill_the_queue(bench: Bench) -> None:
    await bench.an_agent(slots=4)
    for _ in range(4):
        assert await bench.status(await bench.submits("linux")) is JobStatus.DISPATCHED


@pytest.mark.spec("T1.7")
@benched(settings={DEPTH: 1})
async def test_a_submission_that_failed_takes_no_place(bench: Bench) -> None:
    bench.traps.fail("submit", done=False)
    with pytest.raises(StoreDown):
        await bench.submits("linux")
    await bench.submits("linux")


@benched()
async def test_thousands_of_jobs_of_one_run_are_all_run(bench: Bench) -> None:
    agent = await bench.an_agent(slots=10)
    jobs = await bench.submits_run({f"job-{number}": a_request(f"job-{number}") for number in range(200)})
    for _ in jobs:
        agent.ends(await agent.starts())
    for job in jobs:
        assert (await bench.ended(job)).status is JobStatus.SUCCESS


# --- how long a job may wait


@benched(settings={QUEUE_TIMEOUT: 60_000})
async def test_a_job_that_waits_too_long_times_out(bench: Bench) -> None:
    job = await bench.submits("linux")
    await bench.passes(59)
    assert await bench.status(job) is JobStatus.QUEUED
    found = await bench.ended(job, within=5)
    assert (found.status, found.started_at) == (JobStatus.TIMED_OUT, None)
    assert "waited longer than allowed" in (found.reason or "")


@benched(settings={QUEUE_TIMEOUT: 60_000, knobs.UNROUTABLE_GRACE_MS.name: 0})
async def test_a_job_may_say_itself_how_long_it_waits_and_zero_is_for_ever(bench: Bench) -> None:
    patient = await bench.submits("linux", queue_timeout_ms=0)
    hasty = await bench.submits("linux", queue_timeout_ms=5_000)
    await bench.passes(7)
    assert await bench.status(hasty) is JobStatus.TIMED_OUT
    await bench.passes(900)
    assert await bench.status(patient) is JobStatus.QUEUED


@benched(settings={knobs.UNROUTABLE_GRACE_MS.name: 0})
async def test_an_org_has_its_own_queue_timeout(bench: Bench) -> None:
    org = OrgId("hasty")
    await bench.coordinator.settings.patch(org, {QUEUE_TIMEOUT: 5_000})
    await bench.coordinator.settings.view(org)
    jobs = await bench.submits_run({"a": a_request("a", org=org)}, org=org)
    assert (await bench.ended(jobs[0], within=8)).status is JobStatus.TIMED_OUT


@benched(settings={QUEUE_TIMEOUT: 10_000})
async def test_a_started_job_does_not_time_out_in_the_queue(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    await bench.passes(60)
    assert await bench.status(job) is JobStatus.RUNNING


# --- who may what


@benched()
async def test_a_submitter_may_name_only_secrets_of_its_contexts(bench: Bench) -> None:
    request = a_run(secrets={"TOKEN": "deploy:token"})
    with pytest.raises(Denied, match="deploy"):
        await bench.coordinator.jobs.submit(request, SUBMITTER, None)
    await bench.coordinator.jobs.submit(a_run(secrets={"TOKEN": "build:token"}), SUBMITTER, None)


@benched()
async def test_registry_credentials_are_secrets_too(bench: Bench) -> None:
    with pytest.raises(Denied, match="registry"):
        await bench.coordinator.jobs.submit(a_run(registry={"password": "registry:password"}), SUBMITTER, None)


@benched()
async def test_the_same_key_of_the_same_person_makes_one_run(bench: Bench) -> None:
    agent = await bench.an_agent()
    first = await bench.coordinator.jobs.submit(a_run("a", "b"), SOMEBODY, "key")
    again = await bench.coordinator.jobs.submit(a_run("a", "b"), SOMEBODY, "key")
    assert (first.created, again.created) == (True, False)
    assert [job.id for job in again.jobs] == [job.id for job in first.jobs]
    other = await bench.coordinator.jobs.submit(a_run("a"), SUBMITTER, "key")
    assert other.created
    assert len(await bench.jobs()) == 3
    agent.ends(await agent.starts())


# --- waiting


@benched()
async def test_a_waiter_is_woken_by_the_change(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    waiting = asyncio.create_task(bench.coordinator.jobs.wait(job.id, 600, unlike=JobStatus.QUEUED))
    await bench.passes(5.3)
    await agent.starts()
    woken_at = bench.clock.monotonic()
    found = await waiting
    assert found is not None
    assert found.status is JobStatus.RUNNING
    assert bench.clock.monotonic() - woken_at < 0.1


@benched()
async def test_a_waiter_gets_the_job_as_it_is_when_its_time_is_over(bench: Bench) -> None:
    job = await bench.submits("linux")
    asked_at = bench.clock.monotonic()
    found = await bench.coordinator.jobs.wait(job.id, 5, unlike=JobStatus.QUEUED)
    assert found is not None
    assert found.status is JobStatus.QUEUED
    assert bench.clock.monotonic() - asked_at == pytest.approx(5, abs=0.1)


@benched()
async def test_being_offered_wakes_nobody(bench: Bench) -> None:
    await bench.an_agent()
    job = await bench.submits("linux")
    found = await bench.coordinator.jobs.wait(job.id, 3, unlike=JobStatus.QUEUED)
    assert found is not None
    assert found.status is JobStatus.DISPATCHED


@benched()
async def test_waiting_for_a_job_that_is_not_there_ends_at_once(bench: Bench) -> None:
    assert await bench.coordinator.jobs.wait(JobId("job-none"), 600, unlike=JobStatus.QUEUED) is None


# --- cancelling


@benched()
async def test_what_is_not_there_cannot_be_cancelled(bench: Bench) -> None:
    with pytest.raises(NotFound, match="job-none"):
        await bench.coordinator.jobs.cancel_job(JobId("job-none"), force=False, reason="")
    with pytest.raises(NotFound, match="run-none"):
        await bench.coordinator.jobs.cancel_run(RunId("run-none"), force=False, reason="")


@benched()
async def test_what_is_over_cannot_be_cancelled_and_its_end_is_told(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    agent.ends(await agent.starts())
    await bench.ended(job)
    with pytest.raises(Conflict, match="success"):
        await bench.cancels(job)
    with pytest.raises(Conflict, match="success"):
        await bench.coordinator.jobs.cancel_run(job.run_id, force=False, reason="")


@benched()
async def test_cancelling_one_job_skips_what_needs_it_and_leaves_the_rest_of_the_run(bench: Bench) -> None:
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b", needs=["a"]), "c": a_request("c")})
    await bench.cancels(jobs[0])
    statuses = [await bench.status(job) for job in jobs]
    assert statuses == [JobStatus.CANCELLED, JobStatus.SKIPPED, JobStatus.QUEUED]
    assert (await bench.run(jobs[0].run_id)).status is RunStatus.RUNNING


@benched()
async def test_the_reason_of_a_cancel_stays_on_the_job(bench: Bench) -> None:
    job = await bench.submits("linux")
    assert (await bench.cancels(job)).reason == "somebody changed their mind"


@benched()
async def test_clearing_the_queue_ends_what_waits_and_leaves_what_runs(bench: Bench) -> None:
    agent = await bench.an_agent()
    running = await bench.submits("linux")
    await agent.starts()
    waiting = [await bench.submits(*labels) for labels in (("linux",), ("gpu",), ("linux",))]
    assert await bench.coordinator.jobs.clear_queue(reason="cleared") == 3
    assert {await bench.status(job) for job in waiting} == {JobStatus.CANCELLED}
    assert await bench.status(running) is JobStatus.RUNNING


@benched()
async def test_the_queue_shows_who_is_first_in_line(bench: Bench) -> None:
    jobs = [await bench.submits(*labels) for labels in (("linux",), ("gpu",), ("linux",))]
    assert [job.id for job in await bench.coordinator.jobs.queue(2)] == [job.id for job in jobs[:2]]
