"""The agent's half: handshake, the one job, coming back, leaving."""

from typing import Any

import pytest
from msgspec import structs

from kici.wire.agent_effects import (
    Connect,
    Disconnect,
    Effect,
    Exit,
    ExitCode,
    Note,
    Send,
    StartStep,
    StepEnd,
    StopStep,
)
from kici.wire.agent_half import AgentHalf
from kici.wire.agent_settings import AgentSettings
from kici.wire.agent_states import HANDSHAKE_SECONDS, SILENCE_SECONDS, Phase
from kici.wire.codec import encode
from kici.wire.messages import (
    AgentExit,
    AgentLeaving,
    AgentMessage,
    AgentRegister,
    AgentStatus,
    AuthFailure,
    AuthRequest,
    AuthSuccess,
    ClaimCredentials,
    ClaimCredentialsResponse,
    CloseCode,
    ConfigAck,
    CoordinatorsChanged,
    Credentials,
    ErrorMessage,
    Heartbeat,
    JobAck,
    JobCancel,
    JobDispatch,
    JobReject,
    JobStart,
    JobStatusAck,
    JobStatusReport,
    JobVerdict,
    LogAck,
    LogChunkMessage,
    Message,
    RegisterAck,
    Reuse,
    Unsupported,
)

REGISTER = AgentRegister(agent_id="a", labels=["linux"])
OFFER = JobDispatch(job_id="j", run_id="r")
START = JobStart(job_id="j", run_id="r", command=["true"])


class Agent:
    """A half, with a clock in hand and everything it did."""

    def __init__(self, **settings: Any) -> None:
        register = structs.replace(REGISTER, scaler_managed=settings.pop("scaler_managed", False))
        self.now = 100.0
        self.half = AgentHalf(AgentSettings(url="ws://a/ws", register=register, **settings), jitter=lambda: 1.0)
        self.half.start(self.now)

    def connect(self) -> list[Effect]:
        return self.half.connected(self.now)

    def hear(self, *messages: Message) -> list[Effect]:
        return [effect for message in messages for effect in self.half.receive(encode(message), self.now)]

    def lose(self, code: int = 1006) -> list[Effect]:
        return self.half.disconnected(code, "why", self.now)

    def later(self, seconds: float) -> list[Effect]:
        """Let time pass as a program does: from deadline to deadline."""
        end = self.now + seconds
        effects = []
        while (deadline := self.half.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            effects += self.half.tick(self.now)
        self.now = end
        return effects + self.half.tick(end)

    def register(self, **ack: Any) -> list[Effect]:
        self.connect()
        return self.hear(RegisterAck(agent_id="a", **ack))

    def come_back(self, **ack: Any) -> list[Effect]:
        self.lose()
        effects = self.later(60)
        assert Connect("ws://a/ws") in effects
        return self.connect() + self.hear(RegisterAck(agent_id="a", **ack))


def said(effects: list[Effect]) -> list[AgentMessage]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def working(**options: Any) -> Agent:
    ack = options.pop("ack", {})
    agent = Agent(**options)
    agent.register(**ack)
    agent.hear(OFFER, START)
    return agent


def registration(number: int = 1, **fields: Any) -> AgentRegister:
    return structs.replace(REGISTER, incarnation="100.000000", connection_number=number, **fields)


def done(state: str = "success", **fields: Any) -> JobStatusReport:
    return JobStatusReport(job_id="j", state=state, **{"exit_code": 0, **fields})  # type: ignore[arg-type]  # a test's


# --- handshake


def test_connects_authenticates_and_registers() -> None:
    agent = Agent(token="t")
    assert agent.connect() == [Send(AuthRequest(token="t"))]
    assert agent.hear(AuthSuccess(connection_id="c")) == [Send(registration())]
    assert agent.hear(RegisterAck(agent_id="a")) == [Send(ConfigAck())]
    assert agent.half.phase is Phase.REGISTERED


def test_without_a_token_it_registers_at_once() -> None:
    assert Agent().connect() == [Send(registration())]


def test_each_of_its_connections_has_a_number() -> None:
    agent = Agent()
    agent.register()
    agent.lose()
    agent.later(60)
    assert agent.connect() == [Send(registration(2))]


@pytest.mark.spec("T3.6")
def test_a_refused_token_ends_the_program() -> None:
    agent = Agent(token="t")
    agent.connect()
    (end,) = agent.hear(AuthFailure(reason="revoked"))
    assert end == Exit(ExitCode.REFUSED, "authentication failed: revoked")
    assert agent.lose(CloseCode.AUTH_FAILED) == []
    assert agent.half.next_deadline() is None


@pytest.mark.parametrize("code", [CloseCode.UNAUTHORIZED, CloseCode.AUTH_FAILED])
def test_a_permanent_close_ends_the_program(code: int) -> None:
    agent = working()
    assert agent.lose(code) == [Exit(ExitCode.REFUSED, "why")]


def test_a_dismissed_agent_ends_in_peace() -> None:
    assert working().lose(CloseCode.DISMISSED) == [Exit(ExitCode.DONE, "why")]


@pytest.mark.parametrize("code", [1001, 1006, 4002, 4003, 4004, 4005, 4006, 4007, 4031, 4032])
def test_after_any_other_close_it_comes_back(code: int) -> None:
    agent = Agent()
    agent.register()
    assert [type(effect) for effect in agent.lose(code)] == [Note]
    assert Connect("ws://a/ws") in agent.later(90)


def test_a_handshake_that_hangs_is_given_up() -> None:
    agent = Agent(token="t")
    agent.connect()
    assert agent.later(HANDSHAKE_SECONDS) == [Disconnect(CloseCode.TIMEOUT, "not registered within 30 s")]


def test_a_claim_code_is_traded_for_an_identity() -> None:
    agent = Agent(claim_code="code", self_labels=("kici:os:linux",), scaler_managed=True)
    assert agent.connect() == [Send(ClaimCredentials(request_id="claim", claim_code="code"))]
    credentials = Credentials(agent_token="t", agent_id="scaler-event-1", labels=["gpu"])
    assert agent.hear(ClaimCredentialsResponse(request_id="claim", credentials=credentials)) == [
        Send(AuthRequest(token="t"))
    ]
    (register,) = said(agent.hear(AuthSuccess(connection_id="c")))
    assert register == registration(agent_id="scaler-event-1", labels=["gpu", "kici:os:linux"], scaler_managed=True)
    assert agent.half.agent_id == "scaler-event-1"


def test_a_code_that_was_redeemed_is_not_offered_again() -> None:
    agent = Agent(claim_code="code")
    agent.connect()
    credentials = Credentials(agent_token="t", agent_id="x")
    agent.hear(ClaimCredentialsResponse(request_id="claim", credentials=credentials))
    agent.lose()
    agent.later(2)
    assert agent.connect() == [Send(AuthRequest(token="t"))]


@pytest.mark.spec("scaler 46.4.1")
def test_a_refused_claim_code_ends_the_program() -> None:
    agent = Agent(claim_code="code")
    agent.connect()
    answer = ClaimCredentialsResponse(request_id="claim", error="claim code already consumed")
    assert agent.hear(answer) == [Exit(ExitCode.REFUSED, "claim code refused: claim code already consumed")]


def test_a_claim_that_could_not_be_judged_is_offered_again() -> None:
    agent = Agent(claim_code="code")
    agent.connect()
    answer = ClaimCredentialsResponse(request_id="claim", error="store down", retryable=True)
    assert [type(effect) for effect in agent.hear(answer)] == [Disconnect]


@pytest.mark.spec("scaler 46.4.2")
def test_with_a_token_a_claim_code_is_not_used() -> None:
    assert Agent(claim_code="code", token="t").connect() == [Send(AuthRequest(token="t"))]


def test_what_it_does_not_know_is_answered_and_what_it_cannot_read_ends_the_connection() -> None:
    agent = Agent()
    agent.register()
    assert agent.half.receive('{"type":"dance"}', agent.now) == [Send(Unsupported(what="dance"))]
    assert [type(effect) for effect in agent.half.receive("{", agent.now)] == [Disconnect]


def test_messages_of_the_wrong_phase_are_ignored() -> None:
    agent = Agent(token="t")
    agent.connect()
    assert agent.hear(OFFER, START, RegisterAck(agent_id="a"), JobStatusAck(job_id="j")) == []
    assert agent.half.phase is Phase.AUTHENTICATING


def test_errors_of_the_coordinator_are_noted() -> None:
    agent = Agent()
    agent.register()
    assert agent.hear(ErrorMessage(code="RATE_LIMITED", message="slow")) == [
        Note("coordinator.error", "RATE_LIMITED slow")
    ]


def test_it_beats_as_often_as_it_is_told() -> None:
    agent = Agent()
    agent.register(heartbeat_ms=10_000)
    beats = []
    for _ in range(30):
        agent.half.heard(agent.now)
        beats += said(agent.later(1))
    assert beats == [Heartbeat(active_jobs=0)] * 3


def test_a_heartbeat_of_zero_is_not_taken_at_its_word() -> None:
    agent = Agent()
    agent.register(heartbeat_ms=0)
    assert len(said(agent.later(2))) == 2


def test_a_silent_connection_counts_as_dead_and_a_ping_as_life() -> None:
    agent = Agent()
    agent.register(heartbeat_ms=3_600_000)
    assert agent.later(SILENCE_SECONDS - 1) == []
    agent.half.heard(agent.now)
    assert agent.later(SILENCE_SECONDS - 1) == []
    assert agent.later(1) == [Disconnect(CloseCode.HEARTBEAT, "nothing heard for 50 s")]


# --- the job


@pytest.mark.spec("T2.3")
def test_a_job_is_acknowledged_started_reported_and_forgotten() -> None:
    agent = Agent()
    agent.register()
    assert agent.hear(OFFER) == [Send(JobAck(job_id="j"))]
    assert agent.hear(START) == [StartStep(START)]
    assert agent.half.step_started() == [Send(JobStatusReport(job_id="j", state="running"))]
    chunk = LogChunkMessage(job_id="j", stream=1, offset=0, data=b"hi")
    assert agent.half.output(1, b"hi", agent.now) == [Send(chunk)]
    assert agent.half.step_ended(StepEnd(exit_code=0), agent.now) == [Send(done(stdout_bytes=2))]
    assert agent.half.active_jobs == 1
    assert agent.hear(JobStatusAck(job_id="j")) == []
    assert agent.half.active_jobs == 0


def test_nothing_starts_before_it_is_told_to() -> None:
    agent = Agent()
    agent.register()
    assert agent.hear(OFFER) + agent.later(3600) != []
    assert not any(isinstance(effect, StartStep) for effect in agent.hear(OFFER))


def test_a_repeated_offer_is_acknowledged_again_and_a_repeated_start_is_ignored() -> None:
    agent = working()
    assert agent.hear(OFFER) == [Send(JobAck(job_id="j"))]
    assert agent.hear(START) == []


@pytest.mark.spec("T3.4")
def test_a_second_offer_is_rejected_while_a_job_is_held() -> None:
    agent = working()
    assert agent.hear(JobDispatch(job_id="k", run_id="r")) == [Send(JobReject(job_id="k", reason="busy"))]
    agent.half.step_ended(StepEnd(exit_code=0), agent.now)
    assert agent.hear(JobDispatch(job_id="k", run_id="r")) == [Send(JobReject(job_id="k", reason="busy"))]


def test_a_start_of_a_job_that_it_does_not_hold_is_reported_as_failed() -> None:
    agent = Agent()
    agent.register()
    (report,) = said(agent.hear(START))
    assert isinstance(report, JobStatusReport)
    assert report.state == "failed"
    assert agent.half.active_jobs == 0


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (StepEnd(exit_code=0), {"state": "success", "exit_code": 0}),
        (StepEnd(exit_code=3), {"state": "failed", "exit_code": 3}),
        (StepEnd(signal=9), {"state": "failed", "signal": 9, "exit_code": None, "reason": "killed by signal 9"}),
        (StepEnd(exit_code=127, error="no x"), {"state": "failed", "exit_code": 127, "reason": "no x"}),
    ],
)
def test_how_the_step_ended_is_how_the_job_ended(end: StepEnd, expected: dict[str, Any]) -> None:
    agent = working()
    assert agent.half.step_ended(end, agent.now) == [Send(done(**expected))]


def test_the_first_output_leaves_at_once_and_the_rest_is_gathered() -> None:
    agent = working()
    assert len(said(agent.half.output(1, b"a", agent.now))) == 1
    assert agent.half.output(1, b"b", agent.now) == []
    agent.now += 0.05
    assert agent.half.output(1, b"c", agent.now) == []
    (chunk,) = said(agent.later(0.05))
    assert chunk == LogChunkMessage(job_id="j", stream=1, offset=1, data=b"bc")
    assert agent.later(0.1) == []
    assert len(said(agent.half.output(1, b"d", agent.now))) == 1


def test_much_output_does_not_wait() -> None:
    agent = working()
    agent.half.output(1, b"a", agent.now)
    assert len(said(agent.half.output(1, b"b" * 65536, agent.now))) == 1


def test_the_end_is_said_after_the_last_output() -> None:
    agent = working()
    agent.half.output(1, b"a", agent.now)
    agent.half.output(2, b"b", agent.now)
    chunk, report = said(agent.half.step_ended(StepEnd(exit_code=0), agent.now))
    assert chunk == LogChunkMessage(job_id="j", stream=2, offset=0, data=b"b")
    assert report == done(stdout_bytes=1, stderr_bytes=1)
    assert said(agent.later(1)) == []


def test_reading_stops_until_output_is_acknowledged() -> None:
    agent = working(window_bytes=1000)
    agent.half.output(1, b"a" * 1000, agent.now)
    assert not agent.half.wants_output
    agent.hear(LogAck(job_id="k", stream=1, offset=1000))
    assert not agent.half.wants_output
    agent.hear(LogAck(job_id="j", stream=1, offset=1000))
    assert agent.half.wants_output


def test_a_step_that_runs_too_long_is_stopped() -> None:
    agent = Agent(step_timeout_ms=5000)
    agent.register()
    agent.hear(OFFER, START)
    assert StopStep("j", 10.0) not in agent.later(4.9)
    assert StopStep("j", 10.0) in agent.later(0.1)
    (report,) = said(agent.half.step_ended(StepEnd(signal=15), agent.now))
    assert report == done("timed_out", exit_code=None, signal=15, reason="ran longer than 5 s")


def test_a_jobs_own_timeout_wins_over_the_agents() -> None:
    agent = Agent(step_timeout_ms=5000)
    agent.register()
    agent.hear(OFFER, structs.replace(START, timeout_ms=1000))
    assert StopStep("j", 10.0) in agent.later(1)


@pytest.mark.spec("T7.5")
def test_a_cancelled_step_has_its_grace_and_force_has_none() -> None:
    agent = working()
    assert agent.hear(JobCancel(job_id="j", grace_ms=5000)) == [StopStep("j", 5.0)]
    assert agent.hear(JobCancel(job_id="j", force=True)) == [StopStep("j", 0.0)]
    assert agent.hear(JobCancel(job_id="k", force=True)) == []
    (report,) = said(agent.half.step_ended(StepEnd(exit_code=0), agent.now))
    assert report == done("cancelled")


@pytest.mark.parametrize(("asked_ms", "seconds"), [(600_000, 30.0), (-1, 0.0)])
def test_a_grace_is_bounded(asked_ms: int, seconds: float) -> None:
    assert working().hear(JobCancel(job_id="j", grace_ms=asked_ms)) == [StopStep("j", seconds)]


def test_a_job_that_is_cancelled_before_its_start_never_runs() -> None:
    agent = Agent()
    agent.register()
    agent.hear(OFFER)
    (report,) = said(agent.hear(JobCancel(job_id="j")))
    assert isinstance(report, JobStatusReport)
    assert (report.state, report.exit_code) == ("cancelled", None)
    assert agent.hear(START) == []


def test_a_cancellation_that_overtakes_the_registration_counts() -> None:
    agent = working()
    agent.lose()
    agent.later(60)
    agent.connect()
    assert agent.hear(JobCancel(job_id="j", grace_ms=1000)) == [StopStep("j", 1.0)]
    agent.hear(RegisterAck(agent_id="a", jobs=[JobVerdict(job_id="j", action="resume")]))
    (report,) = said(agent.half.step_ended(StepEnd(signal=15), agent.now))
    assert isinstance(report, JobStatusReport)
    assert report.state == "cancelled"


# --- coming back


def test_a_returning_agent_lists_its_job_and_sends_what_is_missing() -> None:
    agent = working()
    agent.half.output(1, b"abcdef", agent.now)
    agent.half.output(2, b"xyz", agent.now)
    verdict = JobVerdict(job_id="j", action="resume", stdout_offset=4, stderr_offset=0)
    register, config, *chunks = said(agent.come_back(jobs=[verdict]))
    assert isinstance(register, AgentRegister)
    assert [(ref.job_id, ref.phase) for ref in register.in_flight_jobs] == [("j", "running")]
    assert config == ConfigAck()
    assert chunks == [
        LogChunkMessage(job_id="j", stream=1, offset=4, data=b"ef"),
        LogChunkMessage(job_id="j", stream=2, offset=0, data=b"xyz"),
    ]


def test_output_of_a_disconnected_agent_is_kept_and_reading_stops_at_the_bound() -> None:
    agent = working(window_bytes=1000)
    agent.lose()
    assert agent.half.output(1, b"a" * 500, agent.now) == []
    assert agent.half.wants_output
    agent.half.output(1, b"b" * 500, agent.now)
    assert not agent.half.wants_output


def test_a_final_status_is_kept_until_it_is_acknowledged() -> None:
    agent = working()
    agent.lose()
    assert agent.half.step_ended(StepEnd(exit_code=7), agent.now) == []
    agent.later(60)
    (register,) = said(agent.connect())
    assert isinstance(register, AgentRegister)
    assert [ref.phase for ref in register.in_flight_jobs] == ["finished"]
    verdict = JobVerdict(job_id="j", action="resume")
    assert done("failed", exit_code=7) in said(agent.hear(RegisterAck(agent_id="a", jobs=[verdict])))
    assert done("failed", exit_code=7) in said(agent.come_back(jobs=[verdict]))
    agent.hear(JobStatusAck(job_id="j"))
    assert agent.half.active_jobs == 0


def test_a_job_that_was_only_acknowledged_may_still_be_started() -> None:
    agent = Agent()
    agent.register()
    agent.hear(OFFER)
    effects = agent.come_back(jobs=[JobVerdict(job_id="j", action="start")])
    assert not any(isinstance(effect, StartStep) for effect in effects)
    assert agent.hear(START) == [StartStep(START)]


@pytest.mark.parametrize("verdicts", [[JobVerdict(job_id="j", action="drop")], []], ids=["drop", "no verdict"])
def test_a_dropped_job_is_killed_and_never_mentioned_again(verdicts: list[JobVerdict]) -> None:
    agent = working()
    assert StopStep("j", 0.0) in agent.come_back(jobs=verdicts)
    assert agent.half.output(1, b"late", agent.now) == []
    assert agent.half.active_jobs == 1
    assert agent.half.step_ended(StepEnd(signal=9), agent.now) == []
    assert agent.half.active_jobs == 0


NEXT = JobStart(job_id="k", run_id="r", command=["true"])


def dying() -> Agent:
    """The step of a dropped job is being killed, and the next job is to start."""
    agent = working()
    agent.come_back()
    assert agent.hear(JobDispatch(job_id="k", run_id="r")) == [Send(JobAck(job_id="k"))]
    assert agent.hear(NEXT) == []
    return agent


def test_the_next_job_starts_when_the_dropped_one_is_dead() -> None:
    agent = dying()
    assert agent.half.output(1, b"of the old one", agent.now) == []
    assert agent.half.step_ended(StepEnd(signal=9), agent.now) == [StartStep(NEXT)]
    assert said(agent.half.output(1, b"x", agent.now)) == [LogChunkMessage(job_id="k", stream=1, offset=0, data=b"x")]


def test_the_next_job_may_be_cancelled_before_the_dropped_one_is_dead() -> None:
    agent = dying()
    (report,) = said(agent.hear(JobCancel(job_id="k")))
    assert isinstance(report, JobStatusReport)
    assert report.state == "cancelled"
    assert agent.half.step_ended(StepEnd(signal=9), agent.now) == []


def test_the_next_job_may_be_dropped_as_well() -> None:
    agent = dying()
    agent.come_back()
    assert agent.half.step_ended(StepEnd(signal=9), agent.now) == []
    assert agent.half.active_jobs == 0


def test_told_to_stop_with_a_dying_step_it_leaves() -> None:
    agent = dying()
    assert Exit(ExitCode.DONE, "signal") in agent.half.stop(agent.now)


def test_a_scaler_made_agent_leaves_when_its_job_is_dropped() -> None:
    agent = working(scaler_managed=True)
    assert Exit(ExitCode.DONE, "done") in agent.come_back()


def test_a_dropped_job_is_not_listed_while_it_dies() -> None:
    agent = working()
    agent.come_back()
    (register, *_) = said(agent.come_back())
    assert isinstance(register, AgentRegister)
    assert register.in_flight_jobs == []


def test_a_finished_job_that_is_dropped_is_over_at_once() -> None:
    agent = working()
    agent.half.step_ended(StepEnd(exit_code=0), agent.now)
    agent.come_back(jobs=[JobVerdict(job_id="j", action="drop")])
    assert agent.half.active_jobs == 0


def test_an_acknowledgement_of_a_running_job_means_that_it_is_not_ours() -> None:
    assert working().hear(JobStatusAck(job_id="j")) == [StopStep("j", 0.0)]


def test_a_job_in_hand_makes_it_hurry() -> None:
    agent = working()
    for _ in range(20):
        agent.lose()
        deadline = agent.half.next_deadline()
        assert deadline is not None
        assert deadline - agent.now <= 5.0
        assert Connect("ws://a/ws") in agent.later(5)


# --- leaving


@pytest.mark.spec("T3.1")
def test_a_scaler_made_agent_leaves_once_its_jobs_end_is_acknowledged() -> None:
    agent = working(scaler_managed=True)
    agent.half.step_ended(StepEnd(exit_code=0), agent.now)
    assert said(agent.later(29)) == []
    assert agent.hear(JobStatusAck(job_id="j")) == [Send(AgentLeaving(reason="done")), Exit(ExitCode.DONE, "done")]


@pytest.mark.spec("T3.1")
def test_a_static_agent_stays() -> None:
    agent = working(orphan_seconds=None)
    agent.half.step_ended(StepEnd(exit_code=0), agent.now)
    agent.hear(JobStatusAck(job_id="j"))
    for _ in range(3600):
        agent.half.heard(agent.now)
        assert not any(isinstance(effect, Exit) for effect in agent.later(1))


def test_the_coordinator_knows_whether_an_agent_is_scaler_made() -> None:
    agent = working(ack={"scaler_managed": True})
    agent.half.step_ended(StepEnd(exit_code=0), agent.now)
    assert Exit(ExitCode.DONE, "done") in agent.hear(JobStatusAck(job_id="j"))


@pytest.mark.spec("T3.2")
@pytest.mark.spec("scaler 46.4.4")
@pytest.mark.parametrize(("ack", "seconds"), [({"pending_dispatch": True}, 60), ({}, 5)])
def test_an_agent_that_never_gets_a_job_leaves(ack: dict[str, Any], seconds: float) -> None:
    agent = Agent(scaler_managed=True)
    agent.register(**ack, heartbeat_ms=3_600_000)
    for _ in range(int(seconds) - 1):
        agent.half.heard(agent.now)
        assert agent.later(1) == []
    assert agent.later(1) == [Send(AgentLeaving(reason="idle")), Exit(ExitCode.DONE, "idle")]


@pytest.mark.spec("T3.3")
@pytest.mark.spec("scaler 46.4.3")
def test_a_warm_agent_waits_for_its_job_and_leaves_after_it() -> None:
    agent = Agent(scaler_managed=True)
    agent.register(warm_pool=True)
    for _ in range(3600):
        agent.half.heard(agent.now)
        assert not any(isinstance(effect, Exit) for effect in agent.later(1))
    agent.hear(OFFER, START)
    agent.half.step_ended(StepEnd(exit_code=0), agent.now)
    assert Exit(ExitCode.DONE, "done") in agent.hear(JobStatusAck(job_id="j"))


def test_with_reuse_it_takes_follow_up_jobs_until_it_is_idle() -> None:
    agent = working(scaler_managed=True, ack={"reuse": Reuse(idle_seconds=20), "heartbeat_ms": 3_600_000})
    for _ in range(3):
        agent.half.step_ended(StepEnd(exit_code=0), agent.now)
        assert agent.hear(JobStatusAck(job_id="j")) == []
        agent.later(19)
        agent.half.heard(agent.now)
        agent.hear(OFFER, START)
    agent.half.step_ended(StepEnd(exit_code=0), agent.now)
    agent.hear(JobStatusAck(job_id="j"))
    assert Exit(ExitCode.DONE, "done") in agent.later(20)


def test_a_disconnected_agent_does_not_count_idle_time() -> None:
    agent = Agent(scaler_managed=True)
    agent.register()
    agent.lose()
    assert not any(isinstance(effect, Exit) for effect in agent.later(59))


def test_an_orphan_gives_up_after_its_time_and_a_registration_starts_it_anew() -> None:
    agent = working(scaler_managed=True, orphan_seconds=100)
    agent.lose()
    assert not any(isinstance(effect, Exit) for effect in agent.later(99))
    agent.connect()
    agent.hear(RegisterAck(agent_id="a", jobs=[JobVerdict(job_id="j", action="resume")]))
    agent.lose()
    assert not any(isinstance(effect, Exit) for effect in agent.later(99))
    assert Exit(ExitCode.ORPHANED, "orphaned") in agent.later(1)


def test_an_agent_that_never_reached_anybody_is_an_orphan_too() -> None:
    agent = Agent(orphan_seconds=100)
    effects = []
    for _ in range(101):
        if agent.half.phase is Phase.CONNECTING:
            agent.lose()
        effects += agent.later(1)
    assert Exit(ExitCode.ORPHANED, "orphaned") in effects


@pytest.mark.spec("T2.11")
def test_a_draining_agent_finishes_its_job_and_takes_no_other() -> None:
    agent = working()
    assert agent.half.drain(agent.now) == [Send(AgentStatus(active_jobs=1, draining=True))]
    assert agent.half.drain(agent.now) == []
    assert agent.hear(JobDispatch(job_id="k", run_id="r")) == [Send(JobReject(job_id="k", reason="draining"))]
    agent.half.step_ended(StepEnd(exit_code=0), agent.now)
    assert agent.hear(JobStatusAck(job_id="j")) == [
        Send(AgentLeaving(reason="drained")),
        Exit(ExitCode.DONE, "drained"),
    ]


def test_a_draining_agent_says_so_again_after_a_reconnect() -> None:
    agent = working()
    agent.half.drain(agent.now)
    resume = JobVerdict(job_id="j", action="resume")
    assert AgentStatus(active_jobs=1, draining=True) in said(agent.come_back(jobs=[resume]))


def test_an_idle_agent_that_is_told_to_drain_or_exit_leaves_at_once() -> None:
    for connected in (True, False):
        agent = Agent()
        if connected:
            agent.register()
        assert Exit(ExitCode.DONE, "drained") in agent.half.drain(agent.now)
    agent = Agent()
    agent.register()
    assert Exit(ExitCode.DONE, "drained") in agent.hear(AgentExit(reason="scaled down"))


@pytest.mark.spec("D4")
def test_it_goes_where_it_was_told_last_when_it_is_sent_away() -> None:
    agent = working()
    agent.hear(CoordinatorsChanged(coordinators=["ws://gone/ws"]))
    agent.hear(CoordinatorsChanged(coordinators=["ws://a/ws", "ws://b/ws"]))
    agent.lose(CloseCode.HANDOVER)
    assert Connect("ws://b/ws") in agent.later(5)


def test_a_draining_agent_without_a_job_does_not_come_back() -> None:
    agent = working()
    agent.half.drain(agent.now)
    agent.half.step_ended(StepEnd(exit_code=0), agent.now)
    assert not any(isinstance(effect, Exit) for effect in agent.lose())  # its end is not acknowledged yet
    agent.later(1)
    agent.connect()
    assert Exit(ExitCode.DONE, "drained") in agent.hear(RegisterAck(agent_id="a"))


@pytest.mark.spec("T3.7")
def test_told_to_stop_it_stops_the_step_reports_and_leaves() -> None:
    agent = working()
    assert agent.half.stop(agent.now) == [StopStep("j", 3.0)]
    assert agent.half.stop(agent.now) == []
    (report,) = said(agent.half.step_ended(StepEnd(signal=15), agent.now))
    assert isinstance(report, JobStatusReport)
    assert (report.state, report.reason) == ("failed", "the agent was told to stop (SIGTERM)")
    assert agent.hear(JobStatusAck(job_id="j")) == [Send(AgentLeaving(reason="signal")), Exit(ExitCode.DONE, "signal")]


def test_told_to_stop_it_does_not_wait_for_an_answer_for_ever() -> None:
    agent = working()
    agent.half.stop(agent.now)
    agent.half.step_ended(StepEnd(signal=15), agent.now)
    effects = agent.later(3.5)
    assert effects[-2:] == [Send(AgentLeaving(reason="signal")), Exit(ExitCode.DONE, "signal")]


def test_told_to_stop_while_disconnected_it_ends_with_its_step() -> None:
    agent = working()
    agent.lose()
    agent.half.stop(agent.now)
    assert agent.half.step_ended(StepEnd(signal=15), agent.now) == [Exit(ExitCode.DONE, "signal")]


@pytest.mark.parametrize("messages", [(), (OFFER,)], ids=["idle", "acknowledged"])
def test_told_to_stop_with_nothing_running_it_leaves_at_once(messages: tuple[Message, ...]) -> None:
    agent = Agent()
    agent.register()
    agent.hear(*messages)
    assert agent.half.stop(agent.now) == [Send(AgentLeaving(reason="signal")), Exit(ExitCode.DONE, "signal")]


def test_after_the_exit_nothing_happens_any_more() -> None:
    agent = working()
    agent.lose(CloseCode.DISMISSED)
    assert agent.hear(OFFER) == []
    assert agent.half.output(1, b"x", agent.now) == []
    assert agent.half.step_ended(StepEnd(exit_code=0), agent.now) == []
    assert agent.half.stop(agent.now) == []
    assert agent.later(10_000) == []
