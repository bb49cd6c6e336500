"""What the clock does to waiting and offered jobs: deadlines, expiry, and jobs that nothing could ever run."""

import pytest

from kici.domain import knobs
from kici.domain.ids import AgentId, InstanceId
from kici.domain.job import JobStatus
from kici.domain.verdict import Unroutable
from kici.observe.events import Event
from kici.ports.store import Claim
from kici.testing.coordinator_bench import Bench, a_request, a_scaler, benched
from kici.wire.messages import CloseCode, Heartbeat, JobDispatch

ACK = knobs.DISPATCH_ACK_TIMEOUT_MS.name
GRACE = knobs.UNROUTABLE_GRACE_MS.name


# --- acknowledgements


@pytest.mark.spec("T1.4")
@benched(settings={ACK: 4_000})
async def test_an_offer_that_is_not_acknowledged_in_time_costs_the_agent_its_connection(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.is_offered()
    offered_at = bench.clock.monotonic()
    assert await agent.is_closed() == CloseCode.ACK_TIMEOUT
    assert bench.clock.monotonic() - offered_at == pytest.approx(4, abs=1.1)
    await bench.passes(1)
    found = await bench.job(job)
    assert (found.status, found.attempts, found.agent_id) == (JobStatus.QUEUED, 1, None)


@pytest.mark.spec("T1.4", "H1", "H14")
@benched(settings={ACK: 4_000})
async def test_the_agent_that_let_a_deadline_pass_is_out_before_its_job_is_offered_again(bench: Bench) -> None:
    mute, _other = await bench.an_agent("a"), await bench.an_agent("b", "windows")
    await bench.submits("linux")
    await mute.is_offered()
    await mute.is_closed()
    await bench.passes(30)
    assert len(mute.all(JobDispatch)) == 1
    assert [loss["cause"] for loss in bench.told(Event.AGENT_LOST)] == ["ack-timeout"]


@benched(settings={ACK: 4_000})
async def test_an_agent_that_is_at_work_keeps_that_job_when_it_lets_another_offer_pass(bench: Bench) -> None:
    agent = await bench.an_agent(slots=2)
    running = await bench.submits("linux")
    await agent.starts()
    offered = await bench.submits("linux")
    await agent.is_offered()
    await agent.is_closed()
    await bench.passes(1)
    assert await bench.status(running) is JobStatus.RECOVERING
    assert await bench.status(offered) is JobStatus.QUEUED
    await agent.registers((running.id, "running"))
    assert await bench.status(running) is JobStatus.RUNNING
    assert await agent.starts() == offered.id


@benched(settings={ACK: 4_000})
async def test_an_acknowledgement_that_waits_for_the_store_is_no_silence(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    bench.faults.is_down = True
    agent.acks(await agent.is_offered())
    await bench.passes(60)
    bench.faults.is_down = False
    await bench.passes(5)
    await bench.until(lambda: bool(bench.told(Event.JOB_STARTED)), within=30)
    found = await bench.job(job)
    assert found.status in (JobStatus.RUNNING, JobStatus.RECOVERING)
    assert found.attempts <= 1


@pytest.mark.spec("T1.6")
@benched(a_scaler(), settings={ACK: 4_000})
async def test_an_offer_of_a_dead_process_is_taken_back_at_its_deadline(bench: Bench) -> None:
    static = await bench.an_agent("static", "windows")
    job = await bench.submits("windows")
    await static.is_offered()
    made_for = await bench.submits("linux")
    mute = await bench.made(0)
    await mute.is_offered()
    await bench.is_killed()
    await bench.starts()
    await bench.passes(10)
    assert await bench.status(job) is JobStatus.QUEUED
    replacement = await bench.made(1)
    assert await replacement.starts() == made_for.id
    assert (await bench.job(made_for)).attempts == 1
    await bench.passes(30)
    assert list(bench.machines.alive) == [replacement.agent_id]


# --- expiry


@benched()
async def test_what_needs_a_job_that_waited_too_long_is_skipped(bench: Bench) -> None:
    jobs = await bench.submits_run(
        {"a": a_request("a", queue_timeout_ms=5_000), "b": a_request("b", needs=["a"], queue_timeout_ms=0)}
    )
    assert (await bench.ended(jobs[0], within=8)).status is JobStatus.TIMED_OUT
    assert (await bench.ended(jobs[1], within=1)).status is JobStatus.SKIPPED


@benched(a_scaler())
async def test_the_agent_that_boots_for_a_job_that_expired_goes(bench: Bench) -> None:
    job = await bench.submits("linux", queue_timeout_ms=5_000)
    await bench.machine()
    await bench.ended(job, within=8)
    await bench.passes(1)
    await bench.is_clean()


# --- cancels that are not obeyed


@pytest.mark.spec("T7.5")
@benched(a_scaler())
async def test_a_cancel_that_its_agent_does_not_obey_is_settled_after_four_minutes(bench: Bench) -> None:
    static, job = await bench.an_agent("static", "windows"), await bench.submits("windows")
    await static.starts()
    made_for = await bench.submits("linux")
    made = await bench.made()
    await made.starts()
    for each in (job, made_for):
        await bench.cancels(each)
    bench.clock.skew_ms += 600_000
    for _ in range(11):
        for agent in (static, made):
            agent.says(Heartbeat())
        await bench.passes(20)
    assert await bench.status(job) is JobStatus.CANCELLING
    for each in (job, made_for):
        found = await bench.ended(each, within=50)
        assert found.status is JobStatus.CANCELLED
        assert "did not end its cancelled job" in (found.reason or "")
    await bench.passes(5)
    await bench.is_clean()
    ack = await static.registers((job.id, "running"))
    assert [verdict.action for verdict in ack.jobs] == ["drop"]
    following = await bench.submits("windows")
    assert await static.starts() == following.id


# --- unroutable


@pytest.mark.spec("T1.8", "D2")
@benched(a_scaler(), settings={GRACE: 40_000})
async def test_a_job_that_nothing_can_run_ends_after_the_grace_with_what_it_lacks(bench: Bench) -> None:
    await bench.an_agent("agent-1", "linux", "arm")
    job = await bench.submits("linux", "gpu")
    await bench.passes(30)
    assert await bench.status(job) is JobStatus.QUEUED
    assert isinstance((await bench.coordinator.explain.verdicts(await bench.job(job)))[-1], Unroutable)
    found = await bench.ended(job, within=40)
    assert found.status is JobStatus.UNROUTABLE
    assert "[gpu, linux]" in (found.reason or "")
    assert "label set [linux, x64] of scaler local: it lacks gpu" in (found.reason or "")
    assert "40 s" in (found.reason or "")


@pytest.mark.spec("T1.8")
@benched(settings={GRACE: 10_000})
async def test_one_agent_that_fits_is_enough_to_keep_a_job_waiting_though_it_is_busy(bench: Bench) -> None:
    agent = await bench.an_agent()
    await bench.submits("linux", queue_timeout_ms=0)
    await agent.starts()
    waiting = await bench.submits("linux", queue_timeout_ms=0)
    for _ in range(20):
        agent.says(Heartbeat())
        await bench.passes(20)
    assert await bench.status(waiting) is JobStatus.QUEUED
    assert (await bench.job(waiting)).unroutable_since is None


@pytest.mark.spec("T1.8")
@benched(a_scaler("local", max_agents=1), settings={GRACE: 10_000})
async def test_a_scaler_that_is_full_is_enough_too(bench: Bench) -> None:
    await bench.submits("linux")
    await bench.made(0)
    waiting = await bench.submits("linux")
    await bench.passes(100)
    assert await bench.status(waiting) is JobStatus.QUEUED


@benched(settings={GRACE: 20_000})
async def test_a_job_that_becomes_routable_in_time_starts_afresh(bench: Bench) -> None:
    job = await bench.submits("linux")
    await bench.passes(12)
    assert (await bench.job(job)).unroutable_since is not None
    agent = await bench.an_agent("agent-1", "linux")
    assert await agent.starts(within=12) == job.id
    assert (await bench.job(job)).unroutable_since is None


@benched(settings={GRACE: 0})
async def test_without_a_grace_no_job_is_ever_called_unroutable(bench: Bench) -> None:
    job = await bench.submits("nobody-has-this", queue_timeout_ms=0)
    await bench.passes(600)
    assert await bench.status(job) is JobStatus.QUEUED
    assert (await bench.job(job)).unroutable_since is None


@pytest.mark.spec("T7.1")
@benched(a_scaler(), settings={GRACE: 10_000})
async def test_a_draining_coordinator_calls_no_job_unroutable(bench: Bench) -> None:
    bench.coordinator.drain.draining = True
    job = await bench.submits("linux")
    await bench.passes(100)
    assert await bench.status(job) is JobStatus.QUEUED


@benched(settings={GRACE: 10_000})
async def test_a_draining_agent_does_not_keep_a_job_waiting(bench: Bench) -> None:
    agent = await bench.an_agent()
    bench.coordinator.sessions.drain_agent(agent.agent_id)
    job = await bench.submits("linux")
    assert (await bench.ended(job, within=30)).status is JobStatus.UNROUTABLE


# --- the net


@benched()
async def test_a_job_and_an_agent_that_missed_each_other_meet_within_ten_seconds(bench: Bench) -> None:
    agent = await bench.an_agent()
    bench.coordinator.dispatcher.waits = lambda job: None  # type: ignore[method-assign]  # nobody hears of it
    real = bench.coordinator.dispatcher.offer

    async def lost(job: object) -> bool:
        return False

    bench.coordinator.dispatcher.offer = lost  # type: ignore[method-assign]  # the hint is lost
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b", "windows")})
    bench.coordinator.dispatcher.offer = real  # type: ignore[method-assign]  # so was only that one
    assert await agent.starts(within=21) == jobs[0].id


@pytest.mark.spec("H4", "T1.12")
@benched()
async def test_a_claim_of_another_coordinator_within_its_deadline_is_left_alone(bench: Bench) -> None:
    job = await bench.submits("linux")
    claim = Claim(agent_id=AgentId("far-away"), instance_id=InstanceId("instance-b"), ack_ms=600_000)
    await bench.store.claim_job(job.id, claim)
    await bench.passes(60)
    found = await bench.job(job)
    assert (found.status, found.agent_id) == (JobStatus.DISPATCHED, AgentId("far-away"))
