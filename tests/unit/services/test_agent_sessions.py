"""Agents come, stay and go: the timers of a connection, and the one funnel through which every loss passes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from kici.adapters.no_peers import NoPeers
from kici.domain import knobs
from kici.domain.errors import Retryable
from kici.domain.ids import DEFAULT_ORG, AgentId, InstanceId, JobId, ScalerName, TokenId, scaler_agent_id
from kici.domain.job import JobStatus
from kici.domain.peer import RequestKind
from kici.domain.secret import SecretRef
from kici.observe.events import Event
from kici.services.peers import PeerRequests
from kici.services.shutdown import SHUTDOWN_SECONDS
from kici.testing.bench_agent import BenchAgent
from kici.testing.builders import HERE, a_reservation, a_spawn, an_instance
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.seeded_entropy import SeededEntropy
from kici.wire.messages import (
    AgentExit,
    AuthRequest,
    CloseCode,
    ConfigAck,
    ErrorMessage,
    Heartbeat,
    JobAck,
    JobCancel,
    JobDispatch,
    JobStart,
    RegisterAck,
)

GRACE = knobs.AGENT_RECONNECT_GRACE_MS.name


# --- timers


@pytest.mark.spec("T2.1")
@benched()
async def test_a_connection_that_says_nothing_is_closed_after_five_seconds(bench: Bench) -> None:
    agent = await bench.a_program()
    agent.connects()
    assert await agent.is_closed() == CloseCode.TIMEOUT
    assert bench.clock.monotonic() == pytest.approx(5, abs=2)
    assert len(bench.coordinator.sessions) == 0


@pytest.mark.spec("T2.1")
@benched()
async def test_a_connection_that_authenticates_and_does_not_register_is_closed_after_ten(bench: Bench) -> None:
    agent = await bench.a_program()
    await agent.authenticates()
    began_at = bench.clock.monotonic()
    assert await agent.is_closed() == CloseCode.TIMEOUT
    assert bench.clock.monotonic() - began_at == pytest.approx(10, abs=2)


@benched()
async def test_a_store_that_does_not_answer_holds_the_end_up_for_a_while_only(bench: Bench) -> None:
    _ = await bench.an_agent()
    for method in ("jobs_owned_by", "delete_sessions_of"):
        _ = bench.traps.hold(method, done=False)
    began_at = bench.clock.monotonic()
    async with asyncio.timeout(600):
        await bench.stops()
    assert bench.clock.monotonic() - began_at < 3 * SHUTDOWN_SECONDS


@benched()
async def test_a_registered_agent_that_beats_stays(bench: Bench) -> None:
    agent = await bench.an_agent()
    for _ in range(30):
        await bench.passes(30)
        agent.says(Heartbeat())
    assert agent.closed_with is None
    assert len(bench.coordinator.registry) == 1


@benched()
async def test_time_in_which_the_coordinator_read_nobody_is_not_held_against_anybody(bench: Bench) -> None:
    """The loop was busy, or the program was stopped: what agents sent meanwhile is still unread."""
    registered = await bench.an_agent()
    fresh = await bench.a_program()
    fresh.connects()
    await bench.passes(3)
    asyncio.get_running_loop()._now += 400  # type: ignore[attr-defined]  # nothing runs meanwhile
    await bench.passes(1)
    assert fresh.closed_with is None
    assert registered.closed_with is None
    await bench.passes(3)
    assert fresh.closed_with == CloseCode.TIMEOUT
    assert await is_lost(bench, registered, within=300)


@pytest.mark.spec("T2.6")
@benched()
async def test_a_silent_agent_is_closed_with_the_heartbeat_code_after_three_minutes(bench: Bench) -> None:
    agent = await bench.an_agent()
    began_at = bench.clock.monotonic()
    bench_wire = agent.wires[-1]
    assert await is_lost(bench, agent, within=300)
    assert bench.clock.monotonic() - began_at == pytest.approx(180, abs=3)
    assert bench_wire.b.is_closed


async def is_lost(bench: Bench, agent: BenchAgent, *, within: float = 60) -> bool:
    await bench.until(lambda: bench.coordinator.registry.get(agent.agent_id) is None, within=within)
    return True


# --- tokens


@benched()
async def test_an_unknown_token_is_refused_for_good(bench: Bench) -> None:
    agent = await bench.a_program()
    agent.token = "kat_nobody"
    agent.connects()
    agent.says(AuthRequest(token=agent.token))
    assert await agent.is_closed() == CloseCode.AUTH_FAILED


@benched()
async def test_a_store_that_is_down_refuses_nobody_for_good(bench: Bench) -> None:
    agent = await bench.a_program()
    bench.faults.is_down = True
    agent.connects()
    agent.says(AuthRequest(token=agent.token))
    assert await agent.is_closed() == CloseCode.INTERNAL
    bench.faults.is_down = False
    await agent.registers()


async def token_of(bench: Bench, agent: BenchAgent) -> TokenId:
    connected = bench.coordinator.registry.get(agent.agent_id)
    assert connected is not None
    assert connected.token_id is not None
    return connected.token_id


@pytest.mark.spec("D7", "T2.6")
@benched()
async def test_revoking_a_token_closes_its_agents_at_once_and_fails_their_jobs(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    await bench.coordinator.tokens.revoke_agent_token(await token_of(bench, agent))
    assert await agent.is_closed() == CloseCode.UNAUTHORIZED
    found = await bench.ended(job, within=5)
    assert found.status is JobStatus.FAILED
    assert "revoked" in (found.reason or "")


@pytest.mark.spec("D7")
@benched(a_scaler())
async def test_revoking_the_token_of_a_made_agent_ends_its_machine_too(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    await bench.coordinator.tokens.revoke_agent_token(await token_of(bench, agent))
    assert await agent.is_closed() == CloseCode.UNAUTHORIZED
    assert (await bench.ended(job)).status is JobStatus.FAILED
    await bench.passes()
    await bench.is_clean()


@pytest.mark.spec("D7")
@benched()
async def test_a_connection_that_has_not_registered_yet_is_closed_by_a_revocation_too(bench: Bench) -> None:
    agent = await bench.a_program()
    await agent.authenticates()
    (token,) = await bench.coordinator.tokens.agent_tokens()
    await bench.coordinator.tokens.revoke_agent_token(token.id)
    agent.says(agent.registration())
    assert await agent.is_closed() == CloseCode.UNAUTHORIZED
    assert not agent.all(RegisterAck)
    assert len(bench.coordinator.registry) == 0


@pytest.mark.spec("D7")
@benched()
async def test_a_revocation_while_an_agent_registers_does_not_let_it_in(bench: Bench) -> None:
    agent = await bench.a_program()
    await agent.authenticates()
    (token,) = await bench.coordinator.tokens.agent_tokens()
    gate = bench.traps.hold("register_agent", done=False)
    agent.says(agent.registration())
    await gate.reached()
    await bench.coordinator.tokens.revoke_agent_token(token.id)
    gate.open()
    assert await agent.is_closed() == CloseCode.UNAUTHORIZED
    await bench.passes()
    assert len(bench.coordinator.registry) == 0
    assert not await bench.store.sessions(instance_id=None, limit=10)


@pytest.mark.spec("D7", "H2")
@benched(a_scaler(), settings={knobs.AGENT_TOKEN_TTL_MS.name: 60_000})
async def test_the_token_of_an_agent_may_expire_while_its_job_runs(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    await bench.passes(150)
    assert agent.closed_with is None
    agent.cut()
    await bench.passes()
    await agent.registers((job.id, "running"))
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("D7")
@benched(a_scaler(), settings={knobs.AGENT_TOKEN_TTL_MS.name: 60_000})
async def test_an_expired_token_admits_no_agent_whose_job_has_ended(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    await bench.passes(100)
    agent.ends(job.id)
    await bench.ended(job)
    agent.cut()
    await bench.passes()
    agent.connects()
    agent.says(AuthRequest(token=agent.token))
    assert await agent.is_closed() == CloseCode.AUTH_FAILED


@pytest.mark.spec("T2.10")
@benched(a_scaler())
async def test_no_credential_and_no_secret_is_in_the_database_or_in_the_log(bench: Bench) -> None:
    await bench.coordinator.secrets.put(DEFAULT_ORG, SecretRef(context="deploy", key="token"), "hunter2")
    static = await bench.an_agent("static", "windows")
    job = await bench.submits("linux", secrets={"TOKEN": "deploy:token"})
    made = await bench.made()
    assert (await made.starts(), made.all(JobStart)[0].secrets) == (job.id, {"TOKEN": "hunter2"})
    made.ends(job.id)
    await bench.ended(job)
    made.leaves()
    await bench.passes()
    everything = "\n".join(bench.dump()) + repr(bench.events)
    assert job.id in everything
    for credential in (static.token, made.token, "hunter2"):
        assert credential is not None
        assert credential not in everything
        assert credential.encode().hex() not in everything.lower()


# --- the funnel


async def closes(bench: Bench, agent: BenchAgent) -> None:
    agent.closes()


async def breaks(bench: Bench, agent: BenchAgent) -> None:
    agent.cut()


async def falls_silent(bench: Bench, agent: BenchAgent) -> None:
    agent.goes_silent()
    await bench.passes(185)


async def leaves(bench: Bench, agent: BenchAgent) -> None:
    agent.leaves("signal")


async def sends_rubbish(bench: Bench, agent: BenchAgent) -> None:
    agent.wires[-1].a.send(b"rubbish")


async def is_revoked(bench: Bench, agent: BenchAgent) -> None:
    await bench.coordinator.tokens.revoke_agent_token(await token_of(bench, agent))


async def dies(bench: Bench, agent: BenchAgent) -> None:
    bench.dies(agent)


async def dies_and_its_socket_lingers(bench: Bench, agent: BenchAgent) -> None:
    agent.goes_silent()
    bench.machines.die(agent.agent_id, "was killed by signal 9")


async def is_refused_when_it_registers_again(bench: Bench, agent: BenchAgent) -> None:
    agent.labels = [*agent.labels, "root-of-all-evil"]
    agent.says(agent.registration())


Loss = Callable[[Bench, BenchAgent], Awaitable[None]]
LOSSES = [
    closes,
    breaks,
    falls_silent,
    leaves,
    sends_rubbish,
    is_revoked,
    dies,
    dies_and_its_socket_lingers,
    is_refused_when_it_registers_again,
]


@pytest.mark.spec("T2.6", "H1", "D8")
@pytest.mark.parametrize("loss", LOSSES)
@benched(a_scaler(), settings={GRACE: 5_000})
async def test_every_loss_of_a_made_agent_settles_its_job_once_and_ends_its_machine_once(
    bench: Bench, loss: Loss
) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    await loss(bench, agent)
    found = await bench.ended(job, within=30)
    await bench.passes(30)
    assert found.status is JobStatus.FAILED
    assert agent.agent_id in (found.reason or "")
    assert [loss["agent_id"] for loss in bench.told(Event.AGENT_LOST)] == [agent.agent_id]
    assert len(bench.told(Event.SPAWN_DESTROYED)) == 1
    assert bench.metric("kici_orch_jobs_finished_total", status="failed") == 1
    assert (await bench.job(job)).attempts == 0
    await bench.is_clean()


@pytest.mark.spec("T1.14", "H14", "T2.6")
@pytest.mark.parametrize("loss", LOSSES)
@benched(a_scaler(), settings={GRACE: 5_000})
async def test_every_loss_before_the_start_costs_one_attempt_and_the_lost_agent_is_not_asked_again(
    bench: Bench, loss: Loss
) -> None:
    job = await bench.submits("linux")
    agent = await bench.made(0)
    await agent.is_offered()
    await loss(bench, agent)
    other = await bench.made(1)
    assert await other.starts() == job.id
    assert (await bench.job(job)).attempts == 1
    assert len(agent.all(JobDispatch)) == 1
    await bench.passes(10)
    assert list(bench.machines.alive) == [other.agent_id]


@pytest.mark.spec("T2.6")
@pytest.mark.parametrize("loss", [closes, breaks, falls_silent, leaves, sends_rubbish])
@benched(a_scaler())
async def test_every_loss_of_an_idle_made_agent_ends_its_machine_at_once(bench: Bench, loss: Loss) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    agent.ends(job.id)
    await bench.ended(job)
    await loss(bench, agent)
    await bench.passes(2)
    await bench.is_clean()


@pytest.mark.spec("scaler 22.5.5", "T2.6")
@pytest.mark.parametrize("loss", [closes, breaks, leaves])
@benched(a_scaler())
async def test_the_loss_of_an_idle_static_agent_leaves_nothing_and_touches_nothing(bench: Bench, loss: Loss) -> None:
    agent = await bench.an_agent()
    await loss(bench, agent)
    await bench.passes(2)
    assert len(bench.coordinator.registry) == 0
    assert not await bench.store.sessions(instance_id=None, limit=10)
    assert not bench.backends["local"].destroyed


@pytest.mark.spec("T1.4", "D30")
@benched()
async def test_an_agent_that_never_acknowledges_loses_job_and_connection_and_the_job_runs_elsewhere(
    bench: Bench,
) -> None:
    mute = await bench.an_agent("a")
    job = await bench.submits("linux")
    await mute.is_offered()
    other = await bench.an_agent("b")
    assert await mute.is_closed() == CloseCode.ACK_TIMEOUT
    assert await other.starts() == job.id
    assert (await bench.job(job)).attempts == 1
    mute.says(JobAck(job_id=job.id))
    await bench.passes()
    found = await bench.job(job)
    assert (found.status, found.agent_id) == (JobStatus.RUNNING, other.agent_id)
    assert not mute.all(JobStart)


@pytest.mark.spec("T1.4")
@benched()
async def test_an_acknowledgement_after_the_deadline_does_not_bring_the_job_back(bench: Bench) -> None:
    mute = await bench.an_agent("a")
    job = await bench.submits("linux")
    await mute.is_offered()
    mute.goes_silent()
    other = await bench.an_agent("b")
    await other.starts(within=20)
    assert not await mute_again(bench, mute)
    assert (await bench.job(job)).agent_id == other.agent_id


async def mute_again(bench: Bench, agent: BenchAgent) -> list[JobStart]:
    """It comes back and lists the job that it was offered long ago."""
    (offer,) = agent.all(JobDispatch)
    ack = await agent.registers((offer.job_id, "acked"))  # type: ignore[arg-type]  # an id from the wire
    assert [verdict.action for verdict in ack.jobs] == ["drop"]
    await bench.passes()
    return agent.all(JobStart)


@benched()
async def test_a_frame_of_a_lost_connection_changes_nothing(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.is_offered()
    old = agent.wires[-1]
    await agent.registers((job.id, "acked"))
    await agent.hears(JobStart)
    starts = len(agent.all(JobStart))
    connection = next(iter(bench.coordinator.registry)).seat
    await bench.passes()
    old.a.send(b'{"type":"job.status","jobId":"%s","state":"failed"}' % job.id.encode())
    await bench.passes()
    assert await bench.status(job) is JobStatus.RUNNING
    assert next(iter(bench.coordinator.registry)).seat is connection
    assert len(agent.all(JobStart)) == starts


# --- supersession


@pytest.mark.spec("T2.4", "D8")
@benched(a_scaler())
async def test_a_second_connection_supersedes_the_first_whose_end_changes_nothing(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    first = agent.wires[-1]
    await agent.registers((job.id, "running"))
    await bench.passes(20)
    assert first.b.is_closed
    first.cut()
    await bench.passes(90)
    assert agent.closed_with is None
    assert await bench.status(job) is JobStatus.RUNNING
    assert list(bench.machines.alive) == [agent.agent_id]
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("T2.12", "H15")
@benched(a_scaler())
async def test_a_made_agent_whose_link_is_half_open_comes_back_on_a_fresh_socket_and_keeps_its_job(
    bench: Bench,
) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    agent.goes_silent()
    await bench.passes(60)
    ack = await agent.registers((job.id, "running"))
    assert ack.scaler_managed
    assert [verdict.action for verdict in ack.jobs] == ["resume"]
    for _ in range(7):
        await bench.passes(30)
        agent.says(Heartbeat())
    assert await bench.status(job) is JobStatus.RUNNING
    assert list(bench.machines.alive) == [agent.agent_id]


# --- ownership


@pytest.mark.spec("T2.7")
@benched()
async def test_output_of_another_agents_job_is_refused_with_one_text_and_stored_nowhere(bench: Bench) -> None:
    owner, thief = await bench.an_agent("a"), await bench.an_agent("b", "windows")
    job = await bench.submits("linux")
    await owner.starts()
    thief.writes(job.id, b"lies")
    error = await thief.hears(ErrorMessage)
    assert (error.code, error.message) == ("NOT_OWNED", "not owned by this agent")
    assert not await bench.store.log_ends(job.id)


@pytest.mark.spec("T2.7")
@benched()
async def test_an_end_that_another_agent_reports_changes_nothing(bench: Bench) -> None:
    owner, thief = await bench.an_agent("a"), await bench.an_agent("b", "windows")
    job = await bench.submits("linux")
    await owner.starts()
    thief.ends(job.id, "failed")
    await bench.passes()
    assert await bench.status(job) is JobStatus.RUNNING
    owner.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("T2.7")
@benched()
async def test_five_frames_about_other_agents_jobs_in_a_minute_end_the_connection(bench: Bench) -> None:
    owner, thief = await bench.an_agent("a"), await bench.an_agent("b", "windows")
    job = await bench.submits("linux")
    await owner.starts()
    for _ in range(4):
        thief.writes(job.id, b"lies")
    await bench.passes(70)
    assert thief.closed_with is None
    for _ in range(5):
        thief.writes(job.id, b"lies")
    assert await thief.is_closed() == CloseCode.PROTOCOL
    await bench.passes(1)
    assert bench.coordinator.registry.get(thief.agent_id) is None


# --- draining by an operator


@pytest.mark.spec("T2.11")
@benched()
async def test_an_agent_that_an_operator_drains_is_told_and_offered_nothing_more(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.starts()
    assert bench.coordinator.sessions.drain_agent(agent.agent_id)
    await agent.hears(AgentExit)
    await bench.submits("linux")
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS
    await agent.is_left_alone(seconds=15)


@benched()
async def test_an_agent_that_is_not_here_cannot_be_drained(bench: Bench) -> None:
    assert not bench.coordinator.sessions.drain_agent(AgentId("nobody"))


# --- proof of death


@pytest.mark.spec("D9", "T7.8")
@benched(a_scaler())
async def test_a_machine_that_is_seen_to_end_ends_its_job_without_a_grace(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    bench.dies(agent, "was killed by signal 9")
    found = await bench.ended(job, within=5)
    assert found.status is JobStatus.FAILED
    assert "was killed by signal 9" in (found.reason or "")
    await bench.passes(2)
    await bench.is_clean()


@pytest.mark.spec("D9")
@benched(a_scaler())
async def test_the_last_words_of_an_agent_that_is_seen_dead_still_count(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    agent.ends(job.id)
    bench.machines.die(agent.agent_id, "exited with code 0")
    assert (await bench.ended(job)).status is JobStatus.SUCCESS
    await bench.passes(5)
    await bench.is_clean()


@pytest.mark.spec("D9")
@benched(a_scaler())
async def test_proof_of_death_ends_the_grace_of_an_agent_that_is_away(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    agent.cut()
    await bench.passes(2)
    assert await bench.status(job) is JobStatus.RECOVERING
    bench.machines.die(agent.agent_id, "was killed by signal 9")
    found = await bench.ended(job, within=5)
    assert "was killed by signal 9" in (found.reason or "")


@pytest.mark.spec("D9")
@benched(a_scaler())
async def test_proof_of_death_counts_while_the_store_is_slow_to_forget_the_session(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    gate = bench.traps.hold("release_agent", done=False)
    agent.cut()
    await gate.reached()
    bench.machines.die(agent.agent_id, "was killed by signal 9")
    gate.open()
    assert (await bench.ended(job, within=5)).status is JobStatus.FAILED


@benched(a_scaler())
async def test_an_agent_that_is_back_before_its_old_session_is_forgotten_stays(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    gate = bench.traps.hold("release_agent", done=False)
    agent.cut()
    await gate.reached()
    await agent.registers((job.id, "running"))
    gate.open()
    await bench.passes(90)
    assert await bench.status(job) is JobStatus.RUNNING
    assert await bench.store.session(agent.agent_id) is not None


@benched(a_scaler())
async def test_an_agent_that_is_back_while_its_loss_is_being_settled_keeps_job_and_machine(bench: Bench) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.starts()
    gate = bench.traps.hold("held_jobs", done=True)
    agent.cut()
    await gate.reached()
    registering = asyncio.create_task(agent.registers((job.id, "running")))
    await bench.passes(1)
    gate.open()
    await registering
    await bench.passes(90)
    assert await bench.status(job) is JobStatus.RUNNING
    assert not agent.all(JobCancel)
    assert list(bench.machines.alive) == [agent.agent_id]


@benched(a_scaler())
async def test_an_agent_offered_a_job_that_is_back_while_its_loss_is_being_settled_keeps_its_machine_or_its_job_moves(
    bench: Bench,
) -> None:
    job = await bench.submits("linux")
    agent = await bench.made()
    await agent.is_offered()
    gate = bench.traps.hold("held_jobs", done=True)
    agent.cut()
    await gate.reached()
    registering = asyncio.create_task(agent.registers((job.id, "acked")))
    await bench.passes(1)
    gate.open()
    await registering
    await agent.hears(JobStart)
    await bench.passes(30)
    assert await bench.status(job) is JobStatus.RUNNING
    assert list(bench.machines.alive) == [agent.agent_id]


# --- a stop


@benched()
async def test_a_registration_that_is_under_way_at_a_stop_leaves_no_session(bench: Bench) -> None:
    agent = await bench.a_program()
    registering = bench.traps.hold("register_agent", done=False)
    await agent.tries_to_register()
    await registering.reached()
    stopping = asyncio.create_task(bench.coordinator.shutdown(keep_agents=False))
    await bench.passes(3)
    registering.open()
    await stopping
    await bench.passes()
    assert await bench.store.sessions(instance_id=None, limit=10) == []


@benched()
async def test_an_agent_that_comes_during_a_stop_is_sent_away_and_may_come_back(bench: Bench) -> None:
    agent = await bench.a_program()
    bench.coordinator.drain.stopping = True
    await agent.tries_to_register()
    assert await agent.is_closed() == CloseCode.GOING_AWAY
    assert await bench.store.sessions(instance_id=None, limit=10) == []


# --- boot data


@pytest.mark.spec("scaler 36.18.18")
@benched(a_scaler())
async def test_no_job_starts_before_the_boot_data_of_its_machine_is_gone(bench: Bench) -> None:
    """Else a job that is root in its guest could be quicker, and read the credential of its agent."""
    gone = asyncio.Event()

    async def boot_data_read(agent_id: AgentId) -> None:
        await gone.wait()

    bench.backends[ScalerName("local")].boot_data_read = boot_data_read  # type: ignore[attr-defined]  # as microVMs have it
    job = await bench.submits("linux")
    agent = await bench.made()
    agent.says(ConfigAck())
    assert await agent.is_offered() == job.id
    agent.acks(job.id)
    await bench.passes(3)
    assert agent.all(JobStart) == []
    gone.set()
    assert JobId((await agent.hears(JobStart)).job_id) == job.id
    agent.ends(job.id)
    await bench.ended(job)


@benched(a_scaler())
async def test_an_agent_whose_boot_data_cannot_be_cleared_is_taken_down_and_its_job_goes_elsewhere(
    bench: Bench,
) -> None:
    async def boot_data_read(agent_id: AgentId) -> None:
        raise Retryable("the metadata could not be emptied")

    backend = bench.backends[ScalerName("local")]
    backend.boot_data_read = boot_data_read  # type: ignore[attr-defined]  # as microVMs have it
    job = await bench.submits("linux")
    agent = await bench.made(0)
    agent.says(ConfigAck())
    assert await agent.is_closed() == CloseCode.DISMISSED
    assert agent.all(JobStart) == []
    (told,) = bench.told(Event.AGENT_REFUSED)
    assert "the metadata could not be emptied" in told["reason"]
    del backend.boot_data_read  # type: ignore[attr-defined]
    other = await bench.made(1)
    assert agent.agent_id not in bench.machines.alive
    assert await other.starts() == job.id
    other.ends(job.id)
    await bench.ended(job)


PEER = InstanceId("instance-b")


async def an_agent_of_a_peer(bench: Bench) -> BenchAgent:
    """A microVM that another coordinator made, and whose agent came here."""
    token, plain = await bench.coordinator.tokens.create_agent_token(
        name="theirs", labels=None, gate=frozenset(), expires_in_ms=None
    )
    row = a_spawn(
        agent_id=scaler_agent_id("firecracker", "00000007"),
        scaler=ScalerName("vms"),
        backend_type="firecracker",
        token_id=token.id,
        owner_instance_id=PEER,
        spawned_at=bench.clock.now(),
    )
    await bench.store.beat(an_instance(id=PEER))
    await bench.store.insert_spawn(row, a_reservation(row), None)
    agent = bench.program(row.agent_id, ("linux", "x64"), plain)
    await agent.registers()
    agent.says(ConfigAck())
    return agent


@pytest.mark.parametrize("clears", [True, False])
def test_an_agent_that_another_coordinator_made_gets_no_job_before_that_one_has_cleared_its_boot_data(
    clears: bool,
) -> None:
    @benched()
    async def comes(bench: Bench) -> None:
        asked: list[object] = []

        async def act(payload: Mapping[str, object]) -> object:
            asked.append(payload["agentId"])
            if not clears:
                raise Retryable("its metadata could not be emptied")
            return {"cleared": True}

        peer = PeerRequests(
            store=bench.store,
            notifier=NoPeers(),
            clock=bench.clock,
            entropy=SeededEntropy("peer"),
            instance_id=PEER,
            acts={RequestKind.BOOT_DATA: act},
        )
        agent = await an_agent_of_a_peer(bench)
        job = await bench.submits("linux")
        agent.acks(await agent.is_offered())
        await bench.passes(3)
        assert agent.all(JobStart) == []
        assert await peer.tick() == 1
        assert asked == [agent.agent_id]
        if clears:
            assert JobId((await agent.hears(JobStart)).job_id) == job.id
        else:
            assert await agent.is_closed() == CloseCode.DISMISSED
            assert agent.all(JobStart) == []

    comes()


@benched(a_scaler())
async def test_a_coordinator_clears_the_boot_data_of_its_agents_for_others(bench: Bench) -> None:
    cleared: list[AgentId] = []

    async def boot_data_read(agent_id: AgentId) -> None:
        cleared.append(agent_id)

    bench.backends[ScalerName("local")].boot_data_read = boot_data_read  # type: ignore[attr-defined]  # as microVMs have it
    await bench.submits("linux")
    agent = await bench.booted()
    peer = PeerRequests(
        store=bench.store,
        notifier=NoPeers(),
        clock=bench.clock,
        entropy=SeededEntropy("peer"),
        instance_id=PEER,
        acts={},
    )
    answers = [
        await peer.ask(HERE, RequestKind.BOOT_DATA, {"agentId": each}, seconds=9) for each in (agent.agent_id, "other")
    ]
    assert answers == [{"cleared": True}, {"error": "this coordinator does not look after that agent"}]
    assert cleared == [agent.agent_id]
