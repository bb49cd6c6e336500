"""An agent registers: who is let in, with which gate, and what becomes of the jobs that it has and should have."""

import asyncio

import pytest
from msgspec import structs

from kici.apps.surface import surface_of
from kici.config.model import LabelSet, Reuse, WarmPool
from kici.domain import knobs
from kici.domain.agent import AgentSession
from kici.domain.ids import AgentId, InstanceId, JobId, ScalerName
from kici.domain.job import Job, JobStatus
from kici.domain.platform import Arch, Os, Platform
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.spawn import SpawnState
from kici.observe.events import Event
from kici.ports.store import Claim
from kici.testing.bench_agent import BenchAgent
from kici.testing.builders import a_session
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.wire.messages import (
    AgentExit,
    AgentStatus,
    CloseCode,
    JobCancel,
    JobDispatch,
    JobStart,
    JobVerdict,
    RegisterAck,
)

SMALL = ResourceRequest(requests=Ask(cpus=1))


async def is_refused(agent: BenchAgent, *jobs: tuple[JobId, str]) -> int:
    """Connect, register, and get the close code of the refusal."""
    await agent.authenticates()
    agent.says(agent.registration(*jobs))
    code = await agent.is_closed()
    assert not agent.all(RegisterAck)
    return code


def verdicts(ack: RegisterAck) -> list[tuple[str, str]]:
    return [(verdict.job_id, verdict.action) for verdict in ack.jobs]


# --- who is let in


@pytest.mark.spec("T2.2")
@benched(a_scaler())
async def test_a_token_made_for_one_agent_registers_no_other(bench: Bench) -> None:
    await bench.submits("linux")
    await bench.submits("linux")
    thief, victim = await bench.booted(0), await bench.booted(1)
    thief.agent_id = victim.agent_id
    assert await is_refused(thief) == CloseCode.AUTH_FAILED


@pytest.mark.spec("T2.2")
@benched(a_scaler())
async def test_a_label_outside_of_the_token_is_refused_though_self_reports_pass(bench: Bench) -> None:
    await bench.submits("linux")
    agent = await bench.booted()
    agent.labels += ["kici:os:linux", "kici:arch:x64", "kici:host:somewhere"]
    await agent.registers()
    agent.cut()
    agent.labels.append("gpu")
    await bench.passes(1)
    other_job = await bench.submits("linux")
    other = await bench.booted(1)
    other.labels.append("gpu")
    assert await is_refused(other) == CloseCode.AUTH_FAILED
    assert await bench.status(other_job) is JobStatus.QUEUED


@pytest.mark.spec("scaler 21.6.12")
@benched()
async def test_an_id_that_is_connected_with_one_token_cannot_be_taken_with_another(bench: Bench) -> None:
    first = await bench.an_agent("agent-1")
    second = await bench.a_program("agent-1")
    assert await is_refused(second) == CloseCode.INVALID_MESSAGE
    job = await bench.submits("linux")
    assert await first.starts() == job.id


@pytest.mark.spec("scaler 21.6.6")
@benched(a_scaler("one"), a_scaler("two", ("windows",)))
async def test_a_made_id_without_a_record_is_refused_and_every_local_backend_reclaims_it(bench: Bench) -> None:
    stranger = await bench.a_program("scaler-bare-metal-deadbeef")
    reaped: list[str] = []
    for name, backend in bench.backends.items():

        async def reap(agent_id: AgentId, name: str = name) -> bool:
            reaped.append(f"{name} {agent_id}")
            return False

        backend.reap_unowned = reap  # type: ignore[method-assign]  # only told
    assert await is_refused(stranger) == CloseCode.INTERNAL
    await bench.passes()
    assert sorted(reaped) == ["one scaler-bare-metal-deadbeef", "two scaler-bare-metal-deadbeef"]
    assert len(bench.coordinator.registry) == 0


@pytest.mark.spec("T0.5", "scaler 21.6.7")
@pytest.mark.parametrize("done", [False, True], ids=["before the commit", "after the commit"])
@benched(a_scaler("gpus", ("linux", "gpu"), mandatory_labels=("gpu",)))
async def test_a_made_agent_that_the_store_could_not_register_comes_back_and_gets_its_gate_and_its_job(
    bench: Bench,
    done: bool,
) -> None:
    job = await bench.submits("linux", "gpu")
    agent = await bench.booted()
    bench.traps.fail("register_agent", done=done)
    assert await is_refused(agent) == CloseCode.INTERNAL
    assert len(bench.coordinator.registry) == 0
    assert list(bench.machines.alive) == [agent.agent_id], "nothing was reclaimed"
    assert bench.metric("kici_orch_scaler_adoption_lookup_failures_total") == 1
    ack = await agent.registers()
    assert ack.pending_dispatch
    assert await agent.starts() == job.id
    connected = bench.coordinator.registry.get(agent.agent_id)
    assert connected is not None
    assert connected.shape.gate == {"gpu"}
    assert (await bench.job(job)).attempts == 0
    assert len(bench.orders) == 1


@pytest.mark.spec("T0.5", "scaler 21.6.8", "D4")
@benched()
async def test_a_static_agent_that_the_store_could_not_register_may_try_again(bench: Bench) -> None:
    agent = await bench.a_program()
    await agent.authenticates()
    bench.faults.is_down = True
    agent.says(agent.registration())
    assert await agent.is_closed() == CloseCode.INTERNAL
    bench.faults.is_down = False
    assert bench.metric("kici_orch_scaler_adoption_lookup_failures_total") == 0
    await agent.registers()


@benched()
async def test_a_store_that_fails_in_the_middle_of_taking_an_agent_back_costs_its_job_nothing(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.cut()
    await bench.passes()
    bench.traps.fail("resume_job", done=False)
    await agent.authenticates()
    agent.says(agent.registration((job.id, "running")))
    assert await agent.is_closed() == CloseCode.INTERNAL
    await bench.passes()
    await agent.registers((job.id, "running"))
    await bench.passes(300 - 120)
    assert await bench.status(job) is JobStatus.RUNNING


@benched()
async def test_an_agent_that_the_store_could_not_take_back_and_that_stays_away_loses_its_job_in_the_end(
    bench: Bench,
) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.cut()
    await bench.passes()
    bench.traps.fail("resume_job", done=False)
    await agent.authenticates()
    agent.says(agent.registration((job.id, "running")))
    await agent.is_closed()
    assert (await bench.ended(job, within=130)).status is JobStatus.FAILED


@pytest.mark.spec("T2.5", "scaler 21.6.9")
@benched(a_scaler())
async def test_a_socket_that_closes_while_its_agent_registers_leaves_no_agent_and_is_told_once(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.booted()
    gate = bench.traps.hold("register_agent", done=True)
    await agent.authenticates()
    agent.says(agent.registration())
    await gate.reached()
    agent.cut()
    await bench.passes(1)
    gate.open()
    other = await bench.made(1)
    assert await other.starts() == job.id
    await bench.passes(5)
    assert bench.coordinator.registry.get(agent.agent_id) is None
    assert [loss["agent_id"] for loss in bench.told(Event.AGENT_LOST)] == [agent.agent_id]
    assert [end["agent_id"] for end in bench.told(Event.SPAWN_DESTROYED)] == [agent.agent_id]
    assert [session.agent_id for session in await bench.store.sessions(instance_id=None, limit=9)] == [other.agent_id]


@benched(a_scaler())
async def test_an_agent_whose_end_was_decided_while_it_registered_is_dismissed_and_given_nothing(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.booted()
    gate = bench.traps.hold("register_agent", done=True)
    await agent.authenticates()
    agent.says(agent.registration())
    await gate.reached()
    waiting = await bench.submits("linux", "x64")
    bench.machines.die(agent.agent_id, "exited with code 1")
    await bench.passes()
    gate.open()
    assert await agent.is_closed() == CloseCode.DISMISSED
    assert not agent.all(JobDispatch)
    others = [await bench.made(number) for number in (1, 2)]
    assert {await other.starts(within=120) for other in others} == {job.id, waiting.id}


# --- what an agent is


@pytest.mark.spec("scaler 21.6.1", "D3")
@benched(a_scaler("gpus", ("linux", "gpu"), mandatory_labels=("gpu",)))
async def test_a_made_agent_is_acknowledged_with_its_job_and_its_row_lives_on(bench: Bench) -> None:
    job = await bench.submits("linux", "gpu")
    agent = await bench.booted()
    ack = await agent.registers()
    assert (ack.scaler_managed, ack.pending_dispatch, ack.warm_pool) == (True, True, False)
    assert ack.coordinators == ["ws://coordinator/ws"]
    (row,) = await bench.spawns()
    assert (row.state, row.bound_job_id) == (SpawnState.REGISTERED, job.id)
    assert row.gate == {"gpu"}
    session = await bench.store.session(agent.agent_id)
    assert session is not None
    assert session.scaler == "gpus"
    assert session.gate == {"gpu"}


@pytest.mark.spec("scaler 21.6.10")
@benched(
    a_scaler("windows", ("windows", "box"), platform=Platform(Os.WINDOWS, Arch.X64)),
    a_scaler("linux", ("linux", "box"), platform=Platform(Os.LINUX, Arch.X64)),
)
async def test_an_agent_has_the_gate_of_the_set_that_it_was_made_for(bench: Bench) -> None:
    await bench.submits("linux", "box")
    await bench.made()
    (linux,) = bench.coordinator.registry
    assert linux.shape.gate == frozenset()
    await bench.submits("windows", "box")
    windows = await bench.made(1)
    found = bench.coordinator.registry.get(windows.agent_id)
    assert found is not None
    assert "windows" in found.shape.gate


@pytest.mark.spec("H8")
@benched(a_scaler())
async def test_a_repeated_registration_is_answered_as_the_first(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    agent.says(agent.registration((job.id, "running")))
    await bench.passes()
    first, second = agent.all(RegisterAck)
    assert (second.scaler_managed, second.warm_pool, second.reuse) == (True, False, None)
    assert second.agent_id == first.agent_id
    assert verdicts(second) == [(job.id, "resume")]
    assert agent.closed_with is None
    assert await bench.status(job) is JobStatus.RUNNING
    assert len(bench.coordinator.registry) == 1
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@benched()
async def test_a_repeated_registration_of_an_idle_static_agent_changes_nothing(bench: Bench) -> None:
    agent = await bench.an_agent()
    agent.says(agent.registration())
    await bench.passes()
    assert not agent.all(RegisterAck)[1].scaler_managed
    job = await bench.submits("linux")
    assert await agent.starts() == job.id


@pytest.mark.spec("scaler 21.6.11")
@benched(a_scaler("local", max_agents=2))
async def test_a_registration_ends_the_backoff_of_its_scaler(bench: Bench) -> None:
    await bench.submits("linux")
    agent = await bench.booted()
    bench.coordinator.failures.defer(
        bench.coordinator.spawns.get(agent.agent_id).spawn.scaler,  # type: ignore[union-attr]  # it is there
        AgentId("another"),
        "it did not work",
    )
    waiting = await bench.submits("linux")
    await bench.passes(1)
    assert len(bench.orders) == 1
    await agent.registers()
    assert await (await bench.made(1)).starts() == waiting.id


@pytest.mark.spec("D10")
@benched(a_scaler())
async def test_a_made_agent_is_given_no_second_job(bench: Bench) -> None:
    first = await bench.submits("linux")
    agent = await bench.made(0)
    await agent.starts()
    second = await bench.submits("linux")
    agent.ends(first.id)
    await agent.is_left_alone(seconds=15)
    assert await (await bench.made(1)).starts() == second.id


@pytest.mark.spec("D10")
@benched(a_scaler())
async def test_a_made_agent_that_comes_back_after_its_job_is_given_no_second_one(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made(0)
    await agent.starts()
    agent.cut()
    await bench.passes()
    await agent.registers((job.id, "finished"))
    agent.ends(job.id)
    await bench.ended(job)
    await bench.submits("linux")
    await agent.is_left_alone(seconds=15)


@benched(a_scaler())
async def test_a_made_agent_whose_job_is_taken_gets_another_that_fits(bench: Bench) -> None:
    bound = await bench.submits("linux")
    agent = await bench.booted()
    static = await bench.an_agent()
    assert await static.starts(within=15) == bound.id
    ack = await agent.registers()
    assert not ack.pending_dispatch
    other = await bench.submits("linux")
    assert await agent.starts(within=15) == other.id


@benched(a_scaler("local", label_sets=(LabelSet(labels=("linux",), resources=SMALL),)))
async def test_a_made_agent_whose_job_is_taken_gets_none_that_declares_other_resources(bench: Bench) -> None:
    bound = await bench.submits("linux")
    agent = await bench.booted()
    static = await bench.an_agent()
    assert await static.starts(within=15) == bound.id
    await agent.registers()
    await bench.submits("linux", cpus=4)
    await agent.is_left_alone(seconds=15)


# --- jobs from before


@benched()
async def test_a_running_job_is_resumed_from_where_its_stored_output_ends(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.writes(job.id, b"hello")
    await bench.passes()
    agent.cut()
    await bench.passes()
    assert await bench.status(job) is JobStatus.RECOVERING
    ack = await agent.registers((job.id, "running"))
    assert ack.jobs == [JobVerdict(job_id=job.id, action="resume", stdout_offset=5)]
    assert await bench.status(job) is JobStatus.RUNNING


@pytest.mark.spec("D30")
@benched()
async def test_an_acknowledged_job_whose_start_was_lost_is_started_once_it_comes_back(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    gate = bench.traps.hold("start_job", done=True)
    agent.acks(await agent.is_offered())
    await gate.reached()
    agent.cut()
    gate.open()
    await bench.passes(1)
    assert await bench.status(job) is JobStatus.RECOVERING
    ack = await agent.registers((job.id, "acked"))
    assert verdicts(ack) == [(job.id, "start")]
    await agent.hears(JobStart)
    assert await bench.status(job) is JobStatus.RUNNING
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@benched()
async def test_a_finished_job_whose_status_was_lost_is_reported_after_the_return(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.cut()
    await bench.passes()
    ack = await agent.registers((job.id, "finished"))
    assert verdicts(ack) == [(job.id, "resume")]
    agent.ends(job.id, "failed", exit_code=7)
    assert (await bench.ended(job)).exit_code == 7


@benched()
async def test_a_job_that_the_agent_lost_fails_when_it_comes_back_without_it(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.cut()
    await bench.passes()
    await agent.registers()
    found = await bench.ended(job, within=2)
    assert found.status is JobStatus.FAILED
    assert "came back without" in (found.reason or "")
    following = await bench.submits("linux")
    assert await agent.starts() == following.id


@benched()
async def test_a_job_that_the_agent_lost_ends_though_it_is_cancelled_at_that_moment(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    assert await agent.starts() == job.id
    agent.cut()
    await bench.passes()
    gate = bench.traps.hold("finish_job", done=False)
    async with asyncio.TaskGroup() as group:
        returning = group.create_task(agent.registers())
        await gate.reached()
        await bench.store.cancel(job.run_id, job.id, reason="a person wished it")
        gate.open()
        await returning
    assert (await bench.ended(job)).status is JobStatus.CANCELLED


@benched()
async def test_an_offered_job_that_the_agent_never_saw_is_offered_again(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.is_offered()
    wire = agent.wires[-1]
    await agent.registers()
    wire.cut()
    assert await agent.starts() == job.id
    assert (await bench.job(job)).attempts == 1


WARM = WarmPool(enabled=True, size=1, idle_timeout_seconds=600.0)
CPU = ResourceRequest(requests=Ask(cpus=1.0), limits=Ask(cpus=1.0))


@benched(a_scaler(label_sets=(LabelSet(labels=("warm",), resources=CPU),), max_agents=1, warm_pool=WARM))
async def test_an_agent_whose_offer_was_returned_while_it_came_back_is_free(bench: Bench) -> None:
    agent = await bench.made()
    claimed = bench.traps.hold("submit", done=True)
    offered_again = bench.traps.hold("offer_again", done=False)
    async with asyncio.TaskGroup() as group:
        submission = group.create_task(bench.submits("warm"))
        await claimed.reached()
        agent.cut()
        returning = group.create_task(agent.registers())
        await offered_again.reached()
        claimed.open()
        await bench.passes()
        offered_again.open()
        await returning
    assert await agent.starts() == submission.result().id
    agent.ends(submission.result().id)
    assert (await bench.ended(submission.result())).status is JobStatus.SUCCESS


@benched(a_scaler(label_sets=(LabelSet(labels=("warm",), resources=CPU),), max_agents=2, warm_pool=WARM))
async def test_a_warm_agent_that_never_heard_of_its_cancelled_job_is_sent_away_when_it_returns(bench: Bench) -> None:
    agent = await bench.made()
    job = await bench.submits("warm")
    await agent.is_offered()
    agent.goes_silent()
    await bench.cancels(job)
    await agent.registers()  # as one to which the offer was lost
    await agent.hears(AgentExit)


@benched()
async def test_a_job_that_is_no_longer_the_agents_is_dropped(bench: Bench) -> None:
    agent = await bench.an_agent()
    ack = await agent.registers((JobId("job-of-another-life"), "running"))
    assert verdicts(ack) == [("job-of-another-life", "drop")]


@benched()
async def test_an_agent_that_lists_another_agents_job_is_told_to_drop_it(bench: Bench) -> None:
    owner, other = await bench.an_agent("a"), await bench.a_program("b")
    job = await bench.submits("linux")
    await owner.starts()
    assert verdicts(await other.registers((job.id, "running"))) == [(job.id, "drop")]
    assert await bench.status(job) is JobStatus.RUNNING


@pytest.mark.spec("D30")
@benched()
async def test_a_job_cancelled_before_its_start_while_the_agent_was_away_ends_on_return(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    gate = bench.traps.hold("start_job", done=True)
    agent.acks(await agent.is_offered())
    await gate.reached()
    agent.cut()
    gate.open()
    await bench.passes(1)
    await bench.cancels(job)
    ack = await agent.registers((job.id, "acked"))
    assert verdicts(ack) == [(job.id, "drop")]
    assert (await bench.ended(job)).status is JobStatus.CANCELLED
    assert not agent.all(JobStart)


@benched()
async def test_an_agent_that_drains_says_so_again_when_it_is_back(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    agent.cut()
    await bench.passes()
    await agent.registers((job.id, "running"))
    agent.says(AgentStatus(active_jobs=1, draining=True))
    agent.ends(job.id)
    await bench.ended(job)
    await bench.submits("linux")
    await agent.is_left_alone(seconds=15)


@benched(a_scaler(max_agents=1, reuse=Reuse(idle_seconds=600.0, max_jobs=2)))
async def test_a_job_that_a_reused_agent_was_told_of_only_after_its_return_counts(bench: Bench) -> None:
    first = await bench.submits("linux")
    agent = await bench.made()
    assert await agent.starts() == first.id
    gate = bench.traps.hold("claim_oldest", done=True)
    second, third = await bench.submits("linux"), await bench.submits("linux")
    agent.ends(first.id)
    await gate.reached()
    agent.cut()
    await bench.passes()
    await agent.registers()
    assert await agent.starts() == second.id
    gate.open()
    await bench.passes(1)
    agent.ends(second.id)
    await bench.ended(second)
    await bench.passes(1)
    assert (await bench.job(third)).agent_id != agent.agent_id


@pytest.mark.parametrize("listed", [True, False])
def test_an_agent_that_ran_its_job_at_another_coordinator_first_keeps_it_when_it_comes_to_its_maker(
    listed: bool,
) -> None:
    @benched(a_scaler())
    async def scenario(bench: Bench) -> None:
        job, other = await bench.submits("linux"), await bench.submits("linux")
        agent = await bench.booted()
        assert (await bench.spawns())[0].bound_job_id == job.id
        there = a_session(
            agent_id=agent.agent_id,
            instance_id=InstanceId("instance-b"),
            scaler=ScalerName("local"),
            backend_type="bare-metal",
            incarnation="run-1",
            connection_number=1,
        )
        claim = Claim(agent_id=agent.agent_id, instance_id=there.instance_id, ack_ms=10_000)
        assert await bench.store.register_agent(there, needs_spawn=True, bound=claim) is not None
        await bench.store.start_job(job.id, agent.agent_id)
        await agent.authenticates()
        jobs = [(job.id, "running")] if listed else []
        said = agent.registration(*jobs)
        agent.says(structs.replace(said, incarnation="run-1", connection_number=2))
        ack = await agent.hears(RegisterAck)
        assert verdicts(ack) == [(job.id, "resume")] * listed
        await bench.passes(1)
        assert not agent.all(JobDispatch) or not listed
        assert await bench.status(job) is (JobStatus.RUNNING if listed else JobStatus.FAILED)
        assert (await bench.job(other)).agent_id != agent.agent_id

    scenario()


async def goes_elsewhere(bench: Bench, agent: BenchAgent, job: Job) -> AgentSession:
    """The agent goes to another coordinator in a newer connection, and starts a job there."""
    there = a_session(
        agent_id=agent.agent_id, instance_id=InstanceId("instance-b"), incarnation="run-1", connection_number=9
    )
    assert await bench.store.register_agent(there, needs_spawn=False, bound=None) is not None
    claim = Claim(agent_id=agent.agent_id, instance_id=there.instance_id, ack_ms=10_000)
    assert await bench.store.claim_job(job.id, claim) is not None
    assert await bench.store.start_job(job.id, agent.agent_id) is not None
    return there


@pytest.mark.spec("T2.8")
@pytest.mark.parametrize("is_lost_there", [False, True])
@pytest.mark.parametrize("was_here", [False, True])
def test_a_job_that_an_agent_was_given_elsewhere_while_it_registered_here_goes_on(
    is_lost_there: bool, was_here: bool
) -> None:
    @benched()
    async def scenario(bench: Bench) -> None:
        agent = await bench.a_program()
        jobs: list[tuple[JobId, str]] = []
        if was_here:
            first = await bench.submits("linux")
            await agent.registers()
            jobs = [(await agent.starts(), "running")]
            assert jobs[0][0] == first.id
            agent.cut()
            await bench.passes(1)
        later = await bench.submits("linux")
        gate = bench.traps.hold("held_jobs", done=False)
        await agent.authenticates()
        agent.says(structs.replace(agent.registration(*jobs), incarnation="run-1", connection_number=1))
        await gate.reached()
        there = await goes_elsewhere(bench, agent, later)
        if is_lost_there:
            await bench.store.release_agent(agent.agent_id, there.connection_id)
        gate.open()
        await bench.passes(5)
        assert await bench.status(later) in {JobStatus.RUNNING, JobStatus.RECOVERING}
        assert (await bench.job(later)).owner_instance_id == "instance-b"

    scenario()


@benched()
async def test_an_agent_is_offered_nothing_while_what_it_brings_is_compared_with_the_store(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.is_offered()
    returned = bench.traps.hold("requeue_job", done=True)
    agent.cut()
    await returned.reached()
    async with asyncio.TaskGroup() as group:
        returning = group.create_task(agent.registers((job.id, "acked")))
        await bench.passes(1)
        gate = bench.traps.hold("held_jobs", done=False)
        returned.open()
        await gate.reached()
        await bench.passes(1)
        assert await bench.status(job) is JobStatus.QUEUED
        gate.open()
        ack = await returning
    assert verdicts(ack) == [(job.id, "drop")]
    assert await agent.starts() == job.id
    assert not agent.all(JobCancel)


@pytest.mark.parametrize("is_written", [False, True], ids=["tried again", "under way"])
def test_an_acknowledgement_of_the_process_before_starts_no_job_that_the_new_one_lacks(
    is_written: bool,
) -> None:
    @benched()
    async def scenario(bench: Bench) -> None:
        agent = await bench.an_agent()
        job = await bench.submits("linux")
        await agent.is_offered()
        start = bench.traps.hold("start_job", done=False)
        agent.acks(job.id)
        await start.reached()
        if not is_written:
            start.open(fails=True)
        requeue = bench.traps.hold("requeue_job", done=False)
        older = agent.wires[-1]
        async with asyncio.TaskGroup() as group:
            returning = group.create_task(agent.registers())
            await requeue.reached()
            start.open()
            await bench.passes(5)
            requeue.open()
            await returning
        older.cut()
        if is_written:
            assert (await bench.ended(job)).status is JobStatus.FAILED
        else:
            assert await agent.starts() == job.id

    scenario()


# --- while the coordinator drains


@pytest.mark.spec("T7.1", "H10")
@benched(a_scaler(), settings={knobs.DISPATCH_ACK_TIMEOUT_MS.name: 30_000})
async def test_a_bound_agent_that_comes_while_the_coordinator_drains_gets_its_job_when_that_ends(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.booted()
    control = surface_of(bench.coordinator, version="0", stop=lambda keep_agents: None).coordinator
    await control.set_draining(True)
    ack = await agent.registers()
    assert not ack.pending_dispatch
    await agent.is_left_alone(seconds=3)
    await control.set_draining(False)
    assert await agent.starts(within=2) == job.id
    assert not agent.all(JobCancel)


@benched(a_scaler())
async def test_a_second_registration_right_behind_the_first_keeps_the_bound_job(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.booted()
    first_gate = bench.traps.hold("register_agent", done=True)
    second_gate = bench.traps.hold("register_agent", done=True)
    await agent.authenticates()
    agent.says(agent.registration())
    await first_gate.reached()
    registering = asyncio.create_task(agent.registers())
    await second_gate.reached()
    first_gate.open()
    await bench.passes(0.1)
    second_gate.open()
    await registering
    assert await agent.starts(within=5) == job.id
    await bench.passes(15)
    assert (await bench.job(job)).attempts == 0
    assert list(bench.machines.alive) == [agent.agent_id]


@benched(a_scaler())
async def test_two_registrations_of_one_agent_at_the_same_moment_leave_one_connection(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.booted()
    gate = bench.traps.hold("register_agent", done=True)
    await agent.authenticates()
    agent.says(agent.registration())
    await gate.reached()
    first = agent.wires[-1]
    registering = asyncio.create_task(agent.registers())
    await bench.passes(1)
    gate.open()
    await registering
    await agent.starts()
    await bench.passes(1)
    assert len(bench.coordinator.registry) == 1
    assert first.b.is_closed or agent.wires[-1].b.is_closed
    assert await bench.status(job) is JobStatus.RUNNING
