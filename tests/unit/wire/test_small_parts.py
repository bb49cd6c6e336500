"""The small parts of both halves: leaving, route, pace, timers, codec."""

from typing import Any

import pytest

from kici.wire.codec import BadFrame, UnknownType, decode_from_agent, decode_from_coordinator
from kici.wire.leaving import Patience, leaves_after
from kici.wire.messages import FRAME_BYTES_MAX, CloseCode, Heartbeat, RegisterAck, Reuse
from kici.wire.pace import BYTE_BURST, MESSAGE_BURST, Pace
from kici.wire.route import Route
from kici.wire.timers import Timers

PATIENCE = Patience(idle_seconds=5, pending_dispatch_seconds=60)


@pytest.mark.spec("scaler 46.3")
@pytest.mark.parametrize(
    ("ack", "jobs_done", "expected"),
    [
        ({}, 0, 5),
        ({"pending_dispatch": True}, 0, 60),
        ({"warm_pool": True}, 0, None),
        ({"warm_pool": True, "pending_dispatch": True}, 0, None),
        ({}, 1, 0),
        ({"warm_pool": True}, 1, 0),
        ({"reuse": Reuse(idle_seconds=30)}, 0, 5),
        ({"reuse": Reuse(idle_seconds=30)}, 1, 30),
        ({"reuse": Reuse(idle_seconds=30)}, 100, 30),
        ({"reuse": Reuse(idle_seconds=30, max_jobs=2)}, 1, 30),
        ({"reuse": Reuse(idle_seconds=30, max_jobs=2)}, 2, 0),
        ({"reuse": Reuse(idle_seconds=-1)}, 1, 0),
    ],
)
def test_a_scaler_made_agent_waits_as_long_as_it_may_be_useful(
    ack: dict[str, Any], jobs_done: int, expected: float | None
) -> None:
    answer = RegisterAck(agent_id="a", **ack)
    assert leaves_after(answer, scaler_managed=True, jobs_done=jobs_done, patience=PATIENCE) == expected
    assert leaves_after(answer, scaler_managed=False, jobs_done=jobs_done, patience=PATIENCE) is None


def lose(route: Route, code: int = 1006, **options: Any) -> float:
    return route.lost(code, **{"was_registered": False, "delay_ms_max": 60_000, "in_hurry": False, **options})


def test_pauses_grow_up_to_a_minute_and_are_at_least_half_of_that() -> None:
    for jitter, share in ((0.0, 0.5), (1.0, 1.0)):
        route = Route("ws://a/ws", jitter=lambda jitter=jitter: jitter)  # type: ignore[misc]  # binds the loop variable
        pauses = [lose(route) for _ in range(20)]
        assert pauses[:3] == [1.0 * share, 1.5 * share, 2.25 * share]
        assert pauses[-1] == 60 * share


def test_with_a_job_in_hand_it_comes_back_within_five_seconds() -> None:
    route = Route("ws://a/ws", jitter=lambda: 1.0)
    assert max(lose(route, in_hurry=True) for _ in range(30)) == 5.0


def test_a_registration_starts_the_pauses_anew() -> None:
    route = Route("ws://a/ws", jitter=lambda: 1.0)
    for _ in range(10):
        lose(route)
    route.registered([])
    assert lose(route) == 1.0


def test_a_superseded_agent_does_not_play_ping_pong() -> None:
    route = Route("ws://a/ws", jitter=lambda: 1.0)
    route.registered([])
    assert lose(route, CloseCode.SUPERSEDED, was_registered=True) > 30


def test_a_broken_connection_is_tried_again_where_it_was_then_elsewhere() -> None:
    route = Route("ws://a/ws", jitter=lambda: 0.5)
    route.registered(["ws://b/ws"])
    lose(route, was_registered=True)
    assert route.url == "ws://a/ws"
    lose(route)
    assert route.url == "ws://b/ws"
    lose(route)
    assert route.url == "ws://a/ws"


@pytest.mark.parametrize("code", [CloseCode.HANDOVER, CloseCode.GOING_AWAY])
def test_an_agent_that_is_sent_away_goes_elsewhere(code: int) -> None:
    route = Route("ws://a/ws", jitter=lambda: 0.5)
    route.registered(["ws://b/ws"])
    lose(route, code, was_registered=True)
    assert route.url == "ws://b/ws"


def test_an_encrypted_route_is_never_left_for_one_in_the_clear() -> None:
    route = Route("wss://a/ws", jitter=lambda: 0.5)
    route.registered(["ws://b/ws", "http://c", "wss://d/ws"])
    lose(route)
    assert route.url == "wss://d/ws"
    lose(route)
    assert route.url == "wss://a/ws"


def test_addresses_that_are_gone_are_forgotten_but_never_the_first_one() -> None:
    route = Route("ws://a/ws", jitter=lambda: 0.5)
    route.registered(["ws://b/ws", "ws://c/ws"])
    lose(route)
    route.registered(["ws://c/ws"])
    seen = {route.url}
    for _ in range(6):
        lose(route)
        seen.add(route.url)
    assert seen == {"ws://a/ws", "ws://b/ws", "ws://c/ws"}


def test_the_number_of_addresses_is_bounded() -> None:
    route = Route("ws://a/ws", jitter=lambda: 0.5)
    route.registered([f"ws://h{number}/ws" for number in range(1000)])
    seen = set()
    for _ in range(1000):
        lose(route)
        seen.add(route.url)
    assert len(seen) == 16


def test_a_burst_is_free_and_the_debt_is_paid_by_silence() -> None:
    pace = Pace(0.0)
    assert all(pace.count(1, 0.0) is None for _ in range(MESSAGE_BURST))
    overrun = pace.count(1, 0.0)
    assert overrun is not None
    assert overrun.is_new
    assert overrun.wait_seconds == pytest.approx(0.01)
    assert pace.count(1, 1.0) is None


def test_bytes_have_a_limit_of_their_own() -> None:
    pace = Pace(0.0)
    assert pace.count(BYTE_BURST, 0.0) is None
    assert pace.count(1000, 0.0) is not None


def test_a_debt_is_never_larger_than_the_burst() -> None:
    pace = Pace(0.0)
    for _ in range(100_000):
        pace.count(1, 0.0)
    overrun = pace.count(1, 0.0)
    assert overrun is not None
    assert overrun.wait_seconds == pytest.approx(2.0)


def test_timers_ring_in_order_and_once() -> None:
    timers: Timers[str] = Timers()
    timers.set("b", 2.0)
    timers.set("a", 1.0)
    timers.set("c", 3.0)
    assert timers.next() == 1.0
    assert list(timers.due(2.0)) == ["a", "b"]
    assert list(timers.due(2.0)) == []
    timers.clear("c", "never set")
    assert timers.next() is None


def test_a_timer_that_is_cleared_while_others_ring_does_not_ring() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("b", 2.0)
    rung = []
    for name in timers.due(5.0):
        rung.append(name)
        timers.clear("b")
    assert rung == ["a"]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff",
        "\ud800",
        "{}",
        "[]",
        '{"type":1}',
        '{"type":"x","type":1}',
        '{"type":"\\ud800"}',
        '{"type":"heartbeat","activeJobs":"1"}',
        '{"type":"log.chunk","jobId":"j","stream":3,"offset":0,"data":""}',
        '{"type":"log.chunk","jobId":"j","stream":1,"offset":0,"data":"!"}',
        "[" * 100_000,
        b"x" * (FRAME_BYTES_MAX + 1),
    ],
    ids=lambda frame: repr(frame)[:40],
)
def test_what_is_no_message_is_refused(frame: bytes | str) -> None:
    with pytest.raises(BadFrame):
        decode_from_agent(frame)


def test_unknown_fields_are_ignored_and_unknown_types_are_told_apart() -> None:
    assert decode_from_agent('{"type":"heartbeat","activeJobs":2,"mood":"fine"}') == Heartbeat(active_jobs=2)
    with pytest.raises(UnknownType, match="'dance'"):
        decode_from_agent('{"type":"dance"}')
    with pytest.raises(UnknownType):
        decode_from_coordinator('{"type":"heartbeat"}')
