import asyncio

import pytest

from kici.ports.link import Link
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_link import ABNORMAL, CLOSE_SECONDS, TOO_SLOW, LinkClosed, SimEnd, SimWire
from kici.testing.virtual_time import virtual


def wire(**options: int) -> SimWire:
    return SimWire(SeededEntropy(1), delay_seconds=(0.01, 0.5), names=("agent", "coordinator"), **options)


async def closing_of(end: SimEnd) -> tuple[int, str]:
    with pytest.raises(LinkClosed) as closed:
        await end.receive()
    return closed.value.code, closed.value.reason


@virtual
async def test_frames_arrive_later_and_in_order_whatever_their_delays() -> None:
    link: Link = (between := wire()).a
    for number in range(100):
        link.send(b"%d" % number)
    received = [await between.b.receive() for _ in range(100)]
    assert received == [b"%d" % number for number in range(100)]
    assert asyncio.get_running_loop().time() >= 0.01
    assert link.remote == "coordinator"


@virtual
async def test_a_close_is_seen_by_the_peer_after_the_frames_before_it() -> None:
    between = wire()
    between.a.send(b"last words")
    between.a.close(4001, "unwanted")
    between.a.send(b"too late")
    assert [frame async for frame in between.b] == [b"last words"]
    assert await closing_of(between.b) == (4001, "unwanted")
    assert await closing_of(between.a) == (4001, "unwanted")
    assert between.a.is_closed
    assert between.b.is_closed


@virtual
async def test_a_cut_is_felt_at_both_ends_at_once() -> None:
    between = wire()
    between.a.send(b"lost")
    between.cut()
    assert await closing_of(between.a) == (ABNORMAL, "connection lost")
    assert await closing_of(between.b) == (ABNORMAL, "connection lost")
    assert asyncio.get_running_loop().time() == 0


@virtual
async def test_what_had_arrived_before_a_cut_can_still_be_read() -> None:
    between = wire()
    between.a.send(b"here")
    await asyncio.sleep(1)
    between.cut()
    assert await between.b.receive() == b"here"
    assert (await closing_of(between.b))[0] == ABNORMAL


@virtual
async def test_half_open_swallows_everything_and_tells_nobody() -> None:
    between = wire()
    between.a.send(b"under way")
    between.half_open()
    between.b.send(b"hello?")
    for end in (between.a, between.b):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600):
                await end.receive()
    assert not between.a.is_closed
    between.a.close(4004, "no heartbeat")
    before = asyncio.get_running_loop().time()
    assert await closing_of(between.a) == (4004, "no heartbeat")
    assert asyncio.get_running_loop().time() - before == CLOSE_SECONDS
    assert not between.b.is_closed


@virtual
async def test_one_direction_alone_can_be_lost() -> None:
    between = wire()
    between.half_open(to_a=False)
    between.b.send(b"heard")
    between.a.send(b"unheard")
    assert await between.a.receive() == b"heard"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await between.b.receive()


@virtual
async def test_drain_waits_for_a_peer_that_reads_slowly() -> None:
    between = wire(bytes_max=100)
    between.a.send(b"x" * 40)
    between.a.send(b"x" * 40)

    async with asyncio.TaskGroup() as group:
        draining = group.create_task(between.a.drain())
        await asyncio.sleep(60)
        assert not draining.done()
        await between.b.receive()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert draining.done()


@virtual
async def test_a_peer_that_does_not_read_is_closed() -> None:
    between = wire(bytes_max=100)
    for _ in range(3):
        between.a.send(b"x" * 40)
    assert between.a.is_closed
    await between.a.drain()
    assert (await closing_of(between.a))[0] == TOO_SLOW


@virtual
async def test_both_may_close_at_once() -> None:
    between = wire()
    between.a.close(1000, "a")
    between.b.close(1000, "b")
    assert (await closing_of(between.a))[0] == 1000
    assert (await closing_of(between.b))[0] == 1000
