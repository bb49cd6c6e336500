"""kit.finish: work that a cancellation does not cut in half, with a bound."""

import asyncio

import pytest

from kici.kit.finish import finish
from kici.testing.virtual_time import virtual


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual
async def test_gives_the_result() -> None:
    async def work() -> int:
        await asyncio.sleep(1)
        return 7

    assert await finish(work(), seconds=5, what="the count") == 7
    assert now() == 1


@virtual
async def test_raises_what_the_work_raised() -> None:
    async def work() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await finish(work(), seconds=5, what="the search")


@virtual
async def test_a_cancelled_caller_waits_for_the_end_and_is_cancelled_then() -> None:
    done: list[float] = []

    async def work() -> None:
        await asyncio.sleep(3)
        done.append(now())

    task = asyncio.create_task(finish(work(), seconds=5, what="the write"))
    for _ in range(3):
        await asyncio.sleep(0.5)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [3]
    assert now() == 3


@virtual
async def test_too_slow_work_is_stopped_and_named() -> None:
    stopped: list[float] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(now())

    with pytest.raises(TimeoutError, match=r"the flush did not finish within 2\.5 s"):
        await finish(work(), seconds=2.5, what="the flush")
    assert stopped == [2.5]


@virtual
async def test_the_bound_also_holds_for_a_cancelled_caller() -> None:
    task = asyncio.create_task(finish(asyncio.sleep(60), seconds=2, what="the flush"))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert now() == 2
