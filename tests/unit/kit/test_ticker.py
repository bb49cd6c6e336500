"""kit.ticker: a pace, and nudges that hurry it."""

import asyncio

from kici.kit.ticker import Ticker
from kici.testing.virtual_time import virtual


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual
async def test_waits_for_its_interval() -> None:
    ticker = Ticker(10)
    assert [await ticker.next(), await ticker.next()] == [False, False]
    assert now() == 20


@virtual
async def test_a_nudge_ends_the_current_wait() -> None:
    ticker = Ticker(10)
    asyncio.get_running_loop().call_later(3, ticker.nudge)
    assert await ticker.next() is True
    assert now() == 3
    assert await ticker.next() is False
    assert now() == 13


@virtual
async def test_nudges_during_a_pass_cause_one_more_pass_at_once() -> None:
    ticker = Ticker(10)
    ticker.nudge()
    ticker.nudge()
    assert await ticker.next() is True
    assert now() == 0
    assert await ticker.next() is False
    assert now() == 10


@virtual
async def test_a_nudge_at_the_very_end_of_the_interval_is_not_lost() -> None:
    ticker = Ticker(10)
    asyncio.get_running_loop().call_later(10, ticker.nudge)
    answers = [await ticker.next(), await ticker.next()]
    assert True in answers
    assert now() <= 20


@virtual
async def test_a_changed_interval_holds_from_the_next_wait() -> None:
    ticker = Ticker(10)
    await ticker.next()
    ticker.seconds = 1
    await ticker.next()
    assert now() == 11
