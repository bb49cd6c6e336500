"""The coordinator's half of a connection: phases, timers, limits."""

from typing import Any

import pytest

from kici.domain.errors import Bug
from kici.wire.codec import encode
from kici.wire.coordinator_half import (
    Authenticate,
    Close,
    CoordinatorHalf,
    Effect,
    Phase,
    Received,
    Redeem,
    Register,
    Send,
    Unhealthy,
    close_reason,
)
from kici.wire.messages import (
    FRAME_BYTES_MAX,
    AgentRegister,
    AuthFailure,
    AuthRequest,
    AuthSuccess,
    ClaimCredentials,
    ClaimCredentialsResponse,
    CloseCode,
    ErrorMessage,
    Heartbeat,
    JobAck,
    LogChunkMessage,
    Message,
    RegisterAck,
    Unsupported,
)

REGISTER = AgentRegister(agent_id="a", labels=["linux"])
ACK = RegisterAck(agent_id="a", labels=["linux"])


class Conversation:
    """A half, with a clock in hand."""

    def __init__(self, *, auth_required: bool = True) -> None:
        self.now = 100.0
        self.half = CoordinatorHalf(auth_required=auth_required, now=self.now)

    def hear(self, message: Message) -> list[Effect]:
        return self.half.receive(encode(message), self.now)

    def later(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.half.tick(self.now)


def registered(**options: Any) -> Conversation:
    talk = Conversation(**options)
    if options.get("auth_required", True):
        talk.hear(AuthRequest(token="t"))
        talk.half.authenticated("c")
    talk.hear(REGISTER)
    talk.half.registered(ACK)
    return talk


def test_authenticates_registers_and_then_passes_messages_on() -> None:
    talk = Conversation()
    assert talk.hear(AuthRequest(token="t")) == [Authenticate("t")]
    assert talk.half.authenticated("c") == [Send(AuthSuccess(connection_id="c"))]
    assert talk.hear(REGISTER) == [Register(REGISTER)]
    assert talk.half.registered(ACK) == [Send(ACK)]
    assert talk.half.phase is Phase.REGISTERED
    assert talk.hear(JobAck(job_id="j")) == [Received(JobAck(job_id="j"))]


@pytest.mark.spec("T2.1")
def test_closes_when_nothing_is_said_for_five_seconds() -> None:
    talk = Conversation()
    assert talk.half.next_deadline() == 105.0
    assert talk.later(4.9) == []
    assert talk.later(0.1) == [Close(CloseCode.TIMEOUT, "not authenticated within 5 s")]


@pytest.mark.spec("T2.1")
def test_closes_when_an_authenticated_agent_does_not_register_within_ten_seconds() -> None:
    talk = Conversation()
    talk.now += 3
    talk.hear(AuthRequest(token="t"))
    talk.half.authenticated("c", talk.now)
    assert talk.half.next_deadline() == 113.0
    assert talk.later(9.9) == []
    assert talk.later(0.1) == [Close(CloseCode.TIMEOUT, "not registered within 10 s")]


def test_a_slow_token_look_up_is_bounded_by_the_same_timer() -> None:
    talk = Conversation()
    talk.hear(AuthRequest(token="t"))
    assert [type(effect) for effect in talk.later(5)] == [Close]


def test_without_authentication_an_agent_registers_at_once() -> None:
    talk = Conversation(auth_required=False)
    assert talk.half.next_deadline() == 110.0
    assert talk.hear(REGISTER) == [Register(REGISTER)]


def test_without_authentication_a_request_is_still_asked_about() -> None:
    talk = Conversation(auth_required=False)
    assert talk.hear(AuthRequest(token=None)) == [Authenticate(None)]
    assert talk.half.authenticated("c") == [Send(AuthSuccess(connection_id="c"))]
    assert talk.hear(REGISTER) == [Register(REGISTER)]


def test_registering_without_authenticating_is_refused_for_good() -> None:
    talk = Conversation()
    (close,) = talk.hear(REGISTER)
    assert isinstance(close, Close)
    assert close.code == CloseCode.UNAUTHORIZED
    assert close.code in CloseCode.PERMANENT


def test_a_bad_token_is_answered_and_closed() -> None:
    talk = Conversation()
    talk.hear(AuthRequest(token="t"))
    assert talk.half.auth_failed("revoked") == [
        Send(AuthFailure(reason="revoked")),
        Close(CloseCode.AUTH_FAILED, "revoked"),
    ]


def test_an_older_protocol_is_refused() -> None:
    (close,) = Conversation().hear(AuthRequest(token="t", protocol_version=0))
    assert isinstance(close, Close)
    assert close.code == CloseCode.PROTOCOL


def test_frames_are_dropped_while_registering() -> None:
    talk = Conversation(auth_required=False)
    talk.hear(REGISTER)
    assert talk.hear(JobAck(job_id="j")) == []
    assert talk.hear(REGISTER) == []
    assert talk.half.phase is Phase.REGISTERING


def test_a_repeated_registration_is_judged_again() -> None:
    talk = registered()
    assert talk.hear(REGISTER) == [Register(REGISTER)]
    assert talk.half.registered(ACK) == [Send(ACK)]
    assert talk.hear(JobAck(job_id="j")) == [Received(JobAck(job_id="j"))]


def test_a_refused_registration_closes() -> None:
    talk = Conversation(auth_required=False)
    talk.hear(REGISTER)
    assert talk.half.refused(CloseCode.INTERNAL, "no record") == [Close(CloseCode.INTERNAL, "no record")]
    assert talk.half.phase is Phase.CLOSED


def test_answers_after_the_close_have_no_effect() -> None:
    talk = Conversation()
    talk.hear(AuthRequest(token="t"))
    talk.later(5)
    assert talk.half.authenticated("c") == []
    assert talk.half.auth_failed("late") == []
    assert talk.half.registered(ACK) == []
    assert talk.half.refused(4006, "late") == []
    assert talk.half.redeemed(ClaimCredentialsResponse(request_id="r")) == []
    assert talk.hear(REGISTER) == []
    assert talk.half.next_deadline() is None
    assert talk.later(1000) == []


def test_an_answer_that_nobody_asked_for_is_a_bug() -> None:
    with pytest.raises(Bug, match="pending auth"):
        Conversation().half.registered(ACK)


@pytest.mark.parametrize("auth_required", [True, False])
def test_a_claim_code_may_be_offered_before_authentication_and_moves_no_timer(auth_required: bool) -> None:
    talk = Conversation(auth_required=auth_required)
    deadline = talk.half.next_deadline()
    claim = ClaimCredentials(request_id="r", claim_code="c")
    talk.now += 1
    assert talk.hear(claim) == [Redeem(claim)]
    answer = ClaimCredentialsResponse(request_id="r", error="claim code expired")
    assert talk.half.redeemed(answer) == [Send(answer)]
    assert talk.half.next_deadline() == deadline


def test_silence_is_noticed_once_and_then_ends_the_connection() -> None:
    talk = registered()
    assert talk.half.next_deadline() == 190.0
    assert talk.later(90) == [Unhealthy(90.0)]
    assert talk.later(1) == []
    assert talk.half.next_deadline() == 280.0
    assert talk.later(89) == [Close(CloseCode.HEARTBEAT, "silent for 180 s")]


@pytest.mark.parametrize("by_frame", [True, False])
def test_any_sign_of_life_starts_the_silence_anew(by_frame: bool) -> None:
    talk = registered()
    assert talk.later(100) == [Unhealthy(100.0)]
    if by_frame:
        talk.hear(Heartbeat())
    else:
        talk.half.heard(talk.now)
    assert talk.later(89) == []
    assert talk.later(1) == [Unhealthy(90.0)]


def test_an_unreadable_frame_is_answered_and_ends_the_connection() -> None:
    talk = registered()
    error, close = talk.half.receive("{", talk.now)
    assert isinstance(error, Send)
    assert isinstance(error.message, ErrorMessage)
    assert error.message.code == "INVALID_MESSAGE"
    assert isinstance(close, Close)
    assert close.code == CloseCode.INVALID_MESSAGE


def test_a_frame_over_the_limit_is_not_parsed() -> None:
    talk = registered()
    frame = b'{"type":"heartbeat","x":"' + b"y" * FRAME_BYTES_MAX + b'"}'
    assert [type(effect) for effect in talk.half.receive(frame, talk.now)] == [Send, Close]


def test_a_message_of_an_unknown_type_is_answered_and_the_connection_stays() -> None:
    talk = registered()
    assert talk.half.receive('{"type":"dance"}', talk.now) == [Send(Unsupported(what="dance"))]
    assert talk.half.phase is Phase.REGISTERED


def test_a_fast_sender_is_warned_once_and_keeps_being_heard() -> None:
    talk = registered()
    effects = [effect for _ in range(400) for effect in talk.hear(JobAck(job_id="j"))]
    assert sum(isinstance(effect, Received) for effect in effects) == 400
    warnings = [effect.message for effect in effects if isinstance(effect, Send)]
    assert [message.code for message in warnings if isinstance(message, ErrorMessage)] == ["RATE_LIMITED"]


def test_a_sender_that_stays_too_fast_is_cut_off_after_five_seconds() -> None:
    talk = registered()
    for tenth in range(100):
        for _ in range(20):  # twice what is allowed
            effects = talk.hear(JobAck(job_id="j"))
            if talk.half.phase is Phase.CLOSED:
                assert effects[-1] == Close(CloseCode.PROTOCOL, "over the message rate limit for too long")
                assert 50 <= tenth <= 72  # two seconds of burst, five of patience
                return
        talk.now += 0.1
    raise AssertionError("never cut off")


def test_a_busy_log_is_never_punished() -> None:
    talk = registered()
    chunk = LogChunkMessage(job_id="j", stream=1, offset=0, data=b"x" * 200_000)
    for _ in range(1000):
        assert talk.hear(chunk) == [Received(chunk)]


def test_log_chunks_before_registration_count_like_anything_else() -> None:
    talk = Conversation()
    chunk = LogChunkMessage(job_id="j", stream=1, offset=0, data=b"x" * 1_200_000)
    assert talk.hear(chunk) == []
    assert [type(effect) for effect in talk.hear(chunk)] == [Send]


@pytest.mark.parametrize("text", ["x" * 200, "ä" * 100, "x" + "€" * 60])
def test_a_close_reason_fits_its_frame_and_is_not_cut_within_a_character(text: str) -> None:
    reason = close_reason(text)
    assert text.startswith(reason)
    assert 120 <= len(reason.encode()) <= 123
