"""The same work for many things, a few of them at a time."""

import asyncio

import pytest

from kici.kit.crowd import each
from kici.testing.virtual_time import virtual


@virtual
async def test_everything_is_done_once_and_never_more_at_a_time_than_was_said() -> None:
    done: list[int] = []
    now = most = 0

    async def work(item: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(1 + item % 3)
        now -= 1
        done.append(item)

    await each(range(50), work, at_once=8)
    assert sorted(done) == list(range(50))
    assert most == 8


@virtual
async def test_work_that_raises_ends_the_rest() -> None:
    async def work(item: int) -> None:
        if item == 1:
            raise ValueError("no")
        await asyncio.sleep(100)

    with pytest.raises(ExceptionGroup) as caught:
        await each([0, 1, 2], work, at_once=2)
    assert caught.group_contains(ValueError)
