"""Frames: what is encoded decodes to the same, and no bytes whatever do harm to either half."""

import contextlib
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.wire.agent_effects import Exit, StartStep, StepEnd, StopStep
from kici.wire.agent_half import AgentHalf
from kici.wire.agent_settings import AgentSettings
from kici.wire.agent_states import Phase as AgentPhase
from kici.wire.codec import BadFrame, UnknownType, decode_from_agent, decode_from_coordinator, encode
from kici.wire.coordinator_half import Authenticate, Close, CoordinatorHalf, Phase, Received, Redeem, Register
from kici.wire.messages import (
    AgentMessage,
    AgentRegister,
    ClaimCredentialsResponse,
    CoordinatorMessage,
    JobCancel,
    JobDispatch,
    JobStart,
    JobStatusAck,
    Message,
    RegisterAck,
)

TEXT = st.text(max_size=20)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: st.integers(-(2**40), 2**40),
    float: st.floats(0, 1e6),
    bool: st.booleans(),
    bytes: st.binary(max_size=50),
    type(None): st.none(),
}


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a message field's type."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        least = next((meta.ge for meta in arguments[1:] if meta.ge is not None), None)
        return of_type(arguments[0]) if least is None else of_type(arguments[0]).filter(lambda value: value >= least)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([of_type(argument) for argument in arguments])
    if origin is list:
        return st.lists(of_type(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    return of_struct(kind)


def of_struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{field.name: of_type(hints[field.name]) for field in msgspec.structs.fields(kind)})


FROM_AGENT: st.SearchStrategy[Message] = st.one_of([of_struct(kind) for kind in typing.get_args(AgentMessage)])
FROM_COORDINATOR: st.SearchStrategy[Message] = st.one_of(
    [of_struct(kind) for kind in typing.get_args(CoordinatorMessage)]
)
RAW = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200),
    st.dictionaries(
        st.sampled_from(["type", "jobId", "x"]),
        st.none() | st.booleans() | st.integers() | TEXT | st.lists(TEXT, max_size=3),
    ).map(lambda value: msgspec.json.encode(value) if _is_encodable(value) else b"{}"),
)


def _is_encodable(value: object) -> bool:
    try:
        msgspec.json.encode(value)
    except (UnicodeError, OverflowError):
        return False
    return True


@given(FROM_AGENT)
def test_what_an_agent_says_survives_the_wire(message: Message) -> None:
    assert decode_from_agent(encode(message)) == message


@given(FROM_COORDINATOR)
def test_what_a_coordinator_says_survives_the_wire(message: Message) -> None:
    assert decode_from_coordinator(encode(message)) == message


@given(RAW)
def test_any_bytes_are_a_message_or_a_named_fault(frame: bytes | str) -> None:
    for decode in (decode_from_agent, decode_from_coordinator):
        with contextlib.suppress(BadFrame, UnknownType):
            decode(frame)


@given(
    auth_required=st.booleans(),
    events=st.lists(
        st.one_of(
            FROM_AGENT.map(encode),
            st.just(encode(AgentRegister(agent_id="a"))),
            RAW,
            st.floats(0, 120),
            st.booleans(),
        ),
        max_size=40,
    ),
)
def test_no_conversation_confuses_the_coordinators_half(auth_required: bool, events: list[Any]) -> None:
    now = 0.0
    half = CoordinatorHalf(auth_required=auth_required, now=now)
    closes = 0
    for event in events:
        was = half.phase
        effects: list[Any]
        if isinstance(event, float):
            now += event
            effects = list(half.tick(now))
        elif isinstance(event, bool):
            effects = answer(half, is_yes=event)
        else:
            effects = list(half.receive(event, now))
        closes += sum(isinstance(effect, Close) for effect in effects)
        assert was is not Phase.CLOSED or effects == []
        for effect in effects:
            match effect:
                case Received():
                    assert was is Phase.REGISTERED
                case Authenticate():
                    assert half.phase in (Phase.AUTHENTICATING, Phase.CLOSED)
                case Register():
                    assert half.phase in (Phase.REGISTERING, Phase.CLOSED)
                case Redeem():
                    half.redeemed(ClaimCredentialsResponse(request_id="r"))
                case _:
                    pass
        assert (half.phase is Phase.CLOSED) == (closes == 1)
        assert (half.next_deadline() is None) == (half.phase is Phase.CLOSED)


def answer(half: CoordinatorHalf, *, is_yes: bool) -> list[Any]:
    match half.phase:
        case Phase.AUTHENTICATING:
            return list(half.authenticated("c") if is_yes else half.auth_failed("no"))
        case Phase.REGISTERING:
            return list(half.registered(RegisterAck(agent_id="a")) if is_yes else half.refused(4006, "no"))
        case _:
            return []


WINDOW = 2000
LIKELY = [
    encode(message)
    for message in (
        RegisterAck(agent_id="a"),
        JobDispatch(job_id="j", run_id="r"),
        JobStart(job_id="j", run_id="r", command=["x"]),
        JobCancel(job_id="j"),
        JobStatusAck(job_id="j"),
    )
]
AGENT_EVENTS = st.one_of(
    st.tuples(st.just("frame"), st.one_of(FROM_COORDINATOR.map(encode), RAW, st.sampled_from(LIKELY))),
    st.tuples(st.just("output"), st.binary(min_size=1, max_size=500)),
    st.tuples(st.just("ended"), st.builds(StepEnd, exit_code=st.integers(0, 255))),
    st.tuples(st.just("time"), st.floats(0, 100)),
    st.tuples(st.sampled_from(["open", "lost", "drain", "stop", "started"]), st.none()),
)


class Driver:
    """Drives an agent's half as its program does, and checks what it asks for."""

    def __init__(self, *, drops: bool) -> None:
        register = AgentRegister(agent_id="a")
        settings = AgentSettings(url="ws://a", register=register, window_bytes=WINDOW, drops_output=drops)
        self.half = AgentHalf(settings, jitter=lambda: 0.5)
        self.now = 0.0
        self.is_running = False
        self.is_over = False
        self.half.start(self.now)

    def do(self, kind: str, value: Any) -> list[Any]:
        match kind:
            case "frame":
                return list(self.half.receive(value, self.now))
            case "time":
                self.now += value
                return list(self.half.tick(self.now))
            case "open":
                return list(self.half.connected(self.now))
            case "lost":
                return list(self.half.disconnected(1006, "", self.now))
            case "drain":
                return list(self.half.drain(self.now))
            case "stop":
                return list(self.half.stop(self.now))
            case _ if self.is_running:
                return self.do_step(kind, value)
            case _:
                return []

    def do_step(self, kind: str, value: Any) -> list[Any]:
        match kind:
            case "started":
                return list(self.half.step_started())
            case "ended":
                self.is_running = False
                return list(self.half.step_ended(value, self.now))
            case "output" if self.half.wants_output:
                return list(self.half.output(1, value, self.now))
            case _:
                return []

    def check(self, effects: list[Any]) -> None:
        for effect in effects:
            assert not self.is_over, "nothing follows the exit"
            match effect:
                case StartStep():
                    assert not self.is_running, "one step at a time"
                    self.is_running = True
                case StopStep():
                    assert self.is_running
                case Exit():
                    self.is_over = True
                case _:
                    pass


@pytest.mark.parametrize("drops", [False, True])
@given(events=st.lists(AGENT_EVENTS, max_size=60))
def test_no_conversation_confuses_the_agents_half(drops: bool, events: list[tuple[str, Any]]) -> None:
    driver = Driver(drops=drops)
    for kind, value in events:
        driver.check(driver.do(kind, value))
        assert driver.half.active_jobs == 1 or not driver.is_running
        if driver.half.phase not in (AgentPhase.OVER, AgentPhase.CONNECTING):
            assert driver.half.next_deadline() is not None, "it would hang"
