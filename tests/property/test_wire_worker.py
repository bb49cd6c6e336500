"""The worker link: what is encoded decodes to the same, and no bytes whatever do harm to either half."""

import contextlib
import typing
from enum import StrEnum
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.property.test_wire_messages import SIMPLE, of_type

from kici.wire import worker_gate, worker_half
from kici.wire.codec import BadFrame, UnknownType, encode
from kici.wire.messages import Message
from kici.wire.worker_codec import decode_from_worker, decode_order
from kici.wire.worker_gate import GatePhase, Judge, WorkerGate
from kici.wire.worker_half import HalfPhase, WorkerHalf
from kici.wire.worker_messages import WorkerHello, WorkerMessage, WorkerOrder


def of_kind(kind: Any) -> st.SearchStrategy[Any]:
    """As for agents' messages, with tuples where those have lists."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    if isinstance(kind, typing.NewType):
        return of_kind(kind.__supertype__)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return st.lists(of_kind(arguments[0]), max_size=3).map(tuple)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return of_struct(kind)
    if arguments and typing.get_origin(kind) is not dict:
        return st.one_of([of_kind(argument) for argument in arguments])
    if arguments:
        return st.dictionaries(of_kind(arguments[0]), of_kind(arguments[1]), max_size=3)
    return of_type(kind)


def of_struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: of_kind(hints[name]) for name in kind.__struct_fields__})


def of_union(union: Any) -> st.SearchStrategy[Any]:
    return st.one_of([of_struct(kind) for kind in typing.get_args(union)])


REPORTS, ORDERS = of_union(WorkerMessage), of_union(WorkerOrder)
HELLO = WorkerHello(worker_id="w", name="n", nonce="x")


@given(message=REPORTS)
def test_reports_survive_the_wire(message: Message) -> None:
    assert decode_from_worker(encode(message)) == message


@given(order=ORDERS)
def test_orders_survive_the_wire(order: Message) -> None:
    assert decode_order(encode(order)) == order


@given(frame=st.binary(max_size=100))
def test_bytes_are_a_message_or_refused(frame: bytes) -> None:
    for decode in (decode_from_worker, decode_order):
        with contextlib.suppress(BadFrame, UnknownType):
            decode(frame)


FRAMES = st.lists(st.one_of(REPORTS.map(encode), ORDERS.map(encode), st.binary(max_size=30)), max_size=12)


@given(frames=FRAMES, steps=st.lists(st.floats(0, 20), min_size=12, max_size=12))
def test_the_gate_says_nothing_after_its_end_and_is_never_linked_unjudged(
    frames: list[bytes], steps: list[float]
) -> None:
    now, judged, closed = 0.0, False, False
    gate = WorkerGate(instance_id="c", nonce="n", now=now)
    for frame, step in zip(frames, steps, strict=False):
        now += step
        effects = [*gate.tick(now), *gate.receive(frame, now)]
        assert not (closed and effects)
        if any(isinstance(effect, Judge) for effect in effects):
            judged = True
            effects += gate.welcomed(proof="", credential=None)
        closed = any(isinstance(effect, worker_gate.Close) for effect in effects) or closed
        assert judged or gate.phase is not GatePhase.LINKED


@given(frames=FRAMES, steps=st.lists(st.floats(0, 20), min_size=12, max_size=12))
def test_the_worker_takes_no_order_of_who_shows_nothing(frames: list[bytes], steps: list[float]) -> None:
    now, over = 0.0, False
    half = WorkerHalf(HELLO, credential="sesame", join_token=None, now=now)
    half.opened()
    for frame, step in zip(frames, steps, strict=False):
        now += step
        effects = [*half.tick(now), *half.receive(frame, now)]
        assert not (over and effects)
        assert not any(isinstance(effect, worker_half.Ordered) for effect in effects)
        over = over or any(isinstance(effect, worker_half.Over) for effect in effects)
    assert half.phase is not HalfPhase.LINKED
