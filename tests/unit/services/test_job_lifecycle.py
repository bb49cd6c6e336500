"""From the claim to the end: acknowledgement, start, rejection, cancel, and what follows from each end."""

import asyncio

import pytest

from kici.domain.errors import StoreDown
from kici.domain.ids import DEFAULT_ORG, JobId
from kici.domain.job import JobStatus, RunStatus
from kici.domain.secret import SecretRef
from kici.testing.coordinator_bench import Bench, a_request, a_scaler, benched
from kici.wire.messages import (
    AgentStatus,
    JobAck,
    JobCancel,
    JobDispatch,
    JobStart,
    JobStatusAck,
    JobStatusReport,
    LogAck,
    RegisterAck,
)

TOKEN = SecretRef(context="deploy", key="token")


# --- the ordinary way


@pytest.mark.spec("T2.3", "D30")
@benched(a_scaler())
async def test_a_bound_job_needs_only_register_ack_output_and_status(bench: Bench) -> None:
    job = await bench.submits("linux", env={"A": "1"})
    agent = await bench.booted()
    ack = await agent.registers()
    assert ack.pending_dispatch
    assert ack.scaler_managed
    assert await agent.starts() == job.id
    agent.writes(job.id, b"hello\n")
    assert (await agent.hears(LogAck)).offset == 6
    agent.ends(job.id, "failed", exit_code=3)
    await agent.hears(JobStatusAck)
    found = await bench.job(job)
    assert (found.status, found.exit_code, found.scaler) == (JobStatus.FAILED, 3, "local")
    assert agent.all(JobStart)[0].env == {"A": "1"}


@benched()
async def test_the_final_status_is_acknowledged_only_after_it_is_committed(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    gate = bench.traps.hold("finish_job", done=False)
    agent.ends(job.id)
    await gate.reached()
    await bench.passes()
    assert not agent.all(JobStatusAck)
    gate.open()
    await agent.hears(JobStatusAck)
    assert await bench.status(job) is JobStatus.SUCCESS


@benched()
async def test_a_final_status_that_the_store_does_not_take_is_kept_until_it_does(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    bench.faults.is_down = True
    agent.ends(job.id)
    await bench.passes(30)
    assert not agent.all(JobStatusAck)
    bench.faults.is_down = False
    await agent.hears(JobStatusAck)
    assert await bench.status(job) is JobStatus.SUCCESS


@benched()
async def test_a_final_status_that_comes_twice_counts_once(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.ends(job.id, "failed", exit_code=1)
    agent.ends(job.id, "success")
    await bench.passes()
    assert len(agent.all(JobStatusAck)) == 2
    assert await bench.status(job) is JobStatus.FAILED
    assert bench.metric("kici_orch_jobs_finished_total", status="failed") == 1
    assert bench.metric("kici_orch_jobs_finished_total", status="success") == 0


@benched()
async def test_an_acknowledgement_that_comes_twice_starts_the_job_for_the_same_agent_only(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    agent.acks(await agent.is_offered())
    agent.acks(job.id)
    await bench.passes()
    assert {start.job_id for start in agent.all(JobStart)} == {job.id}
    assert await bench.status(job) is JobStatus.RUNNING


@benched()
async def test_an_acknowledgement_of_somebody_elses_job_starts_nothing(bench: Bench) -> None:
    agent, thief = await bench.an_agent("a"), await bench.an_agent("b", "windows")
    job = await bench.submits("linux")
    await agent.is_offered()
    thief.says(JobAck(job_id=job.id))
    assert (await thief.hears(JobCancel)).job_id == job.id
    assert not thief.all(JobStart)
    assert await bench.status(job) is JobStatus.DISPATCHED


# --- rejection


@pytest.mark.spec("T2.11")
@benched()
async def test_a_draining_agent_finishes_its_job_and_returns_a_racing_one(bench: Bench) -> None:
    agent = await bench.an_agent(slots=2)
    running = await bench.submits("linux")
    await agent.starts()
    agent.says(AgentStatus(active_jobs=1, draining=True))
    racing = await bench.submits("linux")
    agent.rejects(await agent.is_offered(), "draining")
    await bench.passes()
    later = await bench.submits("linux")
    await agent.is_left_alone(seconds=15)
    agent.ends(running.id)
    assert (await bench.ended(running)).status is JobStatus.SUCCESS
    await agent.is_left_alone(seconds=15)
    other = await bench.an_agent("other")
    assert await other.starts() == racing.id
    other.ends(racing.id)
    assert await other.starts() == later.id


@benched()
async def test_an_agent_that_declined_a_job_is_asked_again_once_it_says_that_it_drains_no_more(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    agent.rejects(await agent.is_offered(), "draining")
    await agent.is_left_alone(seconds=5)
    agent.says(AgentStatus(active_jobs=0, draining=False))
    assert await agent.starts(within=1) == job.id


@benched()
async def test_an_agent_that_was_busy_is_asked_again_once_it_ends_a_job(bench: Bench) -> None:
    agent = await bench.an_agent(slots=2)
    running = await bench.submits("linux")
    await agent.starts()
    declined = await bench.submits("linux")
    agent.rejects(await agent.is_offered(), "busy")
    await agent.is_left_alone(seconds=5)
    agent.ends(running.id)
    assert await agent.starts(within=1) == declined.id


@benched()
async def test_an_agent_that_was_busy_without_reason_is_asked_again_after_a_while(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    agent.rejects(await agent.is_offered(), "busy")
    await agent.is_left_alone(seconds=5)
    assert await agent.starts(within=30) == job.id


@benched()
async def test_a_rejection_that_the_store_does_not_take_at_once_costs_the_agent_nothing(bench: Bench) -> None:
    agent = await bench.an_agent("a")
    job = await bench.submits("linux")
    bench.traps.fail("requeue_job", done=False)
    agent.rejects(await agent.is_offered(), "draining")
    other = await bench.an_agent("b")
    assert await other.starts(within=5) == job.id
    await bench.passes(15)
    assert agent.closed_with is None


@pytest.mark.spec("D3")
@benched(a_scaler())
async def test_a_made_agent_that_declines_its_job_is_replaced_by_another(bench: Bench) -> None:
    job = await bench.submits("linux")
    declining = await bench.made(0)
    declining.rejects(await declining.is_offered(), "busy")
    assert await (await bench.made(1)).starts() == job.id
    await bench.passes()
    assert list(bench.machines.alive) == [bench.orders[1].agent_id]


@pytest.mark.parametrize("done", [False, True], ids=["before the commit", "after the commit"])
@benched(a_scaler())
async def test_a_made_agent_that_declines_is_replaced_though_the_store_did_not_answer_at_once(
    bench: Bench, done: bool
) -> None:
    job = await bench.submits("linux")
    declining = await bench.made(0)
    bench.traps.fail("requeue_job", done=done)
    declining.rejects(await declining.is_offered(), "busy")
    assert await (await bench.made(1)).starts(within=5) == job.id
    assert (await bench.job(job)).attempts == 1


@pytest.mark.spec("T1.5")
@benched()
async def test_a_job_returned_five_times_fails_and_names_its_attempts(bench: Bench) -> None:
    agents = [await bench.an_agent(f"agent-{number}") for number in range(6)]
    job = await bench.submits("linux")
    for _ in range(5):
        await bench.until(lambda: any(agent.all(JobDispatch) and not agent.closed_with for agent in agents))
        for agent in agents:
            offers = agent.all(JobDispatch)
            if offers:
                agents.remove(agent)
                agent.rejects(job.id)
                break
        await bench.passes()
    found = await bench.ended(job)
    assert (found.status, found.attempts) == (JobStatus.FAILED, 5)
    assert "5 dispatch attempts" in (found.reason or "")
    assert not agents[0].all(JobDispatch)
    assert bench.metric("kici_orch_jobs_finished_total", status="failed") == 1


@pytest.mark.spec("T1.5")
@benched()
async def test_a_job_that_failed_by_its_attempts_wakes_who_waits_for_it(bench: Bench) -> None:
    job = await bench.submits("linux")
    waiting = asyncio.create_task(bench.coordinator.jobs.wait(job.id, 600, unlike=JobStatus.QUEUED))
    for number in range(5):
        agent = await bench.an_agent(f"agent-{number}")
        agent.rejects(await agent.is_offered())
        await bench.passes()
    asked_at = bench.clock.monotonic()
    found = await waiting
    assert found is not None
    assert found.status is JobStatus.FAILED
    assert bench.clock.monotonic() - asked_at < 0.1


# --- secrets


@benched()
async def test_secrets_reach_only_the_start_message(bench: Bench) -> None:
    await bench.coordinator.secrets.put(DEFAULT_ORG, TOKEN, "hunter2")
    agent = await bench.an_agent()
    await bench.submits("linux", secrets={"TOKEN": "deploy:token"})
    await agent.starts()
    assert agent.all(JobStart)[0].secrets == {"TOKEN": "hunter2"}
    assert "hunter2" not in repr(await bench.jobs())


@pytest.mark.spec("T6.5")
@benched()
async def test_a_job_whose_secret_is_missing_fails_naming_it_and_the_agent_goes_on(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux", secrets={"TOKEN": "deploy:token"})
    agent.acks(await agent.is_offered())
    found = await bench.ended(job)
    assert found.status is JobStatus.FAILED
    assert "deploy:token" in (found.reason or "")
    assert "kici-admin secrets set" in (found.reason or "")
    assert (await agent.hears(JobCancel)).job_id == job.id
    assert not agent.all(JobStart)
    next_job = await bench.submits("linux")
    await bench.passes()
    assert len(agent.all(JobDispatch)) == 1, "it has the first job until it says that it dropped it"
    agent.ends(job.id, "cancelled")
    assert await agent.starts() == next_job.id


@benched()
async def test_a_store_that_is_down_when_secrets_are_needed_delays_the_job_and_does_not_fail_it(bench: Bench) -> None:
    await bench.coordinator.secrets.put(DEFAULT_ORG, TOKEN, "hunter2")
    agent = await bench.an_agent()
    job = await bench.submits("linux", secrets={"TOKEN": "deploy:token"})
    bench.traps.fail("secret", done=False, times=3)
    assert await agent.starts() == job.id
    assert not agent.all(JobCancel)
    assert agent.all(JobStart)[0].secrets == {"TOKEN": "hunter2"}


@benched()
async def test_a_job_that_cannot_start_and_cannot_be_ended_yet_is_not_dropped_before_it_is(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux", secrets={"TOKEN": "deploy:token"})
    bench.traps.fail("finish_job", done=False)
    agent.acks(await agent.is_offered())
    await agent.hears(JobCancel)
    assert await bench.status(job) is JobStatus.FAILED


# --- needs


@benched()
async def test_a_job_is_released_when_all_that_it_needs_succeeded(bench: Bench) -> None:
    agent = await bench.an_agent(slots=3)
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b"), "c": a_request("c", needs=["a", "b"])})
    a, b, c = (job.id for job in jobs)
    assert {await agent.starts(), await agent.starts()} == {a, b}
    agent.ends(a)
    await agent.is_left_alone()
    assert await bench.status(c) is JobStatus.PENDING
    agent.ends(b)
    assert await agent.starts() == c
    agent.ends(c)
    await bench.ended(jobs[2])
    assert (await bench.run(jobs[0].run_id)).status is RunStatus.SUCCESS


@benched(a_scaler())
async def test_the_agent_that_ended_a_job_takes_the_one_that_it_released(bench: Bench) -> None:
    agent = await bench.an_agent()
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b", needs=["a"])})
    agent.ends(await agent.starts())
    assert await agent.starts(within=1) == jobs[1].id
    assert not bench.orders


@pytest.mark.spec("T1.2")
@benched(a_scaler("local", max_agents=1))
async def test_a_released_job_keeps_the_place_of_its_submission(bench: Bench) -> None:
    agent = await bench.an_agent("agent-1", "linux", "box")
    jobs = await bench.submits_run({"a": a_request("a", "box"), "b": a_request("b", "box", needs=["a"])})
    await agent.starts()
    later = await bench.submits("box")
    agent.ends(jobs[0].id)
    assert await agent.starts() == jobs[1].id
    agent.ends(jobs[1].id)
    assert await agent.starts() == later.id


@benched()
async def test_an_older_waiting_job_goes_before_a_released_younger_one(bench: Bench) -> None:
    agent = await bench.an_agent()
    blocking = await bench.submits("linux")
    await agent.starts()
    older = await bench.submits("linux")
    jobs = await bench.submits_run({"a": a_request("a", "windows"), "b": a_request("b", needs=["a"])})
    windows = await bench.an_agent("w", "windows")
    windows.ends(await windows.starts())
    await bench.passes()
    agent.ends(blocking.id)
    assert await agent.starts() == older.id
    agent.ends(older.id)
    assert await agent.starts() == jobs[1].id


@benched()
async def test_what_needs_a_failed_job_is_skipped_with_the_reason(bench: Bench) -> None:
    agent = await bench.an_agent()
    jobs = await bench.submits_run(
        {"a": a_request("a"), "b": a_request("b", needs=["a"]), "c": a_request("c", needs=["b"])}
    )
    await agent.starts()
    agent.ends(jobs[0].id, "failed", exit_code=1)
    for job in jobs[1:]:
        found = await bench.ended(job)
        assert found.status is JobStatus.SKIPPED
        assert jobs[0].id in (found.reason or "") or jobs[1].id in (found.reason or "")
    assert (await bench.run(jobs[0].run_id)).status is RunStatus.FAILED
    await agent.is_left_alone()


@benched()
async def test_a_released_job_that_the_store_could_not_tell_of_runs_all_the_same(bench: Bench) -> None:
    agent = await bench.an_agent()
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b", needs=["a"])})
    await agent.starts()
    bench.traps.fail("job", done=False, times=2)
    agent.ends(jobs[0].id)
    assert await agent.starts(within=30) == jobs[1].id


# --- cancel


@pytest.mark.spec("T1.10")
@benched()
async def test_cancelling_a_run_ends_what_waits_and_no_agent_gets_it_later(bench: Bench) -> None:
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b", needs=["a"])})
    await bench.coordinator.jobs.cancel_run(jobs[0].run_id, force=False, reason="no longer wanted")
    agent = await bench.an_agent()
    await agent.is_left_alone(seconds=15)
    assert {await bench.status(job) for job in jobs} == {JobStatus.CANCELLED}
    assert (await bench.run(jobs[0].run_id)).status is RunStatus.CANCELLED


@benched()
async def test_cancelling_a_run_tells_the_running_job_and_its_dependents_never_start(bench: Bench) -> None:
    agent = await bench.an_agent()
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b", needs=["a"])})
    await agent.starts()
    await bench.coordinator.jobs.cancel_run(jobs[0].run_id, force=False, reason="no longer wanted")
    cancel = await agent.hears(JobCancel)
    assert (cancel.job_id, cancel.force) == (jobs[0].id, False)
    assert await bench.status(jobs[0]) is JobStatus.CANCELLING
    agent.ends(jobs[0].id, "success")
    await bench.ended(jobs[0])
    await agent.is_left_alone(seconds=15)
    assert (await bench.run(jobs[0].run_id)).status is RunStatus.CANCELLED
    assert await bench.status(jobs[1]) is JobStatus.CANCELLED


@pytest.mark.spec("T7.5")
@benched()
async def test_force_reaches_the_agent_of_a_running_job(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    await bench.cancels(job, force=True)
    assert (await agent.hears(JobCancel)).force


@pytest.mark.spec("T7.5")
@benched()
async def test_force_reaches_the_agent_of_a_job_that_is_being_cancelled_already(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    await bench.cancels(job)
    assert not (await agent.hears(JobCancel)).force
    await bench.cancels(job, force=True)
    assert (await agent.hears(JobCancel)).force


@pytest.mark.spec("T7.5")
@benched()
async def test_force_reaches_every_agent_of_a_run_that_is_being_cancelled_already(bench: Bench) -> None:
    agents = [await bench.an_agent(name) for name in ("a", "b")]
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b")})
    for agent in agents:
        await agent.starts()
    for force in (False, True):
        await bench.coordinator.jobs.cancel_run(jobs[0].run_id, force=force, reason="no longer wanted")
        assert [(await agent.hears(JobCancel)).force for agent in agents] == [force, force]


@benched()
async def test_a_cancel_whose_answer_was_lost_reaches_the_agent_when_it_is_repeated(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    bench.traps.fail("cancel", done=True)
    with pytest.raises(StoreDown):
        await bench.cancels(job)
    assert not agent.all(JobCancel)
    await bench.cancels(job)
    assert (await agent.hears(JobCancel)).job_id == job.id


@pytest.mark.spec("T7.4")
@benched(a_scaler())
async def test_a_job_cancelled_while_its_agent_boots_ends_and_so_does_the_machine(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.booted()
    await bench.cancels(job)
    assert (await bench.ended(job)).status is JobStatus.CANCELLED
    await bench.passes()
    await bench.is_clean()
    assert not agent.all(JobDispatch)


@pytest.mark.spec("T7.4")
@benched(a_scaler())
async def test_a_job_cancelled_before_its_spawn_row_is_written_leaves_nothing(bench: Bench) -> None:
    gate = bench.traps.hold("insert_spawn", done=False)
    job = await bench.submits("linux")
    await gate.reached()
    await bench.cancels(job)
    gate.open()
    await bench.passes(5)
    await bench.is_clean()


@benched()
async def test_a_cancelled_job_whose_agent_is_gone_is_told_when_it_comes_back(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.cut()
    await bench.passes()
    await bench.cancels(job)
    assert await bench.status(job) is JobStatus.CANCELLING
    await agent.registers((job.id, "running"))
    assert (await agent.hears(JobCancel)).job_id == job.id
    kinds = [type(message) for message in agent.heard if isinstance(message, RegisterAck | JobCancel)]
    assert kinds[-2:] == [RegisterAck, JobCancel], "an agent ignores what comes before it is registered"


@pytest.mark.spec("H6")
@benched()
async def test_a_cancel_and_an_end_at_the_same_moment_have_one_outcome(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    gate = bench.traps.hold("cancel", done=False)
    cancelling = asyncio.create_task(bench.cancels(job))
    await gate.reached()
    agent.ends(job.id)
    await agent.hears(JobStatusAck)
    gate.open()
    assert (await cancelling).status is JobStatus.SUCCESS
    assert await bench.status(job) is JobStatus.SUCCESS
    assert not agent.all(JobCancel)


@benched()
async def test_the_process_of_a_step_that_started_changes_nothing(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.says(JobStatusReport(job_id=job.id, state="running"))
    await bench.passes()
    assert await bench.status(job) is JobStatus.RUNNING
    assert not agent.all(JobStatusAck)


@benched()
async def test_a_status_of_a_job_that_nobody_knows_is_acknowledged_so_that_the_agent_forgets_it(bench: Bench) -> None:
    agent = await bench.an_agent()
    agent.ends(JobId("job-of-another-life"))
    assert (await agent.hears(JobStatusAck)).job_id == "job-of-another-life"
