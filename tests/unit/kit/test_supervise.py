"""kit.supervise: services come back, short jobs fail alone, and leaving the block leaves nothing behind."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any, Never

import pytest

from kici.kit.supervise import RESTART_SECONDS_MAX, Supervisor
from kici.testing.virtual_time import virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def failing_after(seconds: float, starts: list[float]) -> Callable[[], Coroutine[Any, Any, Never]]:
    async def run() -> Never:
        starts.append(now())
        await asyncio.sleep(seconds)
        raise ValueError("the service broke")

    return run


async def for_ever() -> Never:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing resolves that future")


@virtual
async def test_a_failed_service_comes_back_after_delays_that_double_up_to_a_limit() -> None:
    starts: list[float] = []
    async with Supervisor("test") as supervisor:
        supervisor.service("broken", failing_after(0, starts))
        await asyncio.sleep(200)
    gaps = [round(later - earlier, 6) for earlier, later in pairwise(starts)]
    assert gaps[:9] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6]
    assert set(gaps[9:]) == {RESTART_SECONDS_MAX}


@virtual
async def test_a_service_that_ran_long_comes_back_quickly_again() -> None:
    starts: list[float] = []
    async with Supervisor("test") as supervisor:
        supervisor.service("broken", failing_after(RESTART_SECONDS_MAX + 1, starts))
        await asyncio.sleep(RESTART_SECONDS_MAX * 4)
    assert [round(start, 6) for start in starts[:3]] == [0.0, 31.1, 62.2]


@virtual
async def test_one_broken_service_does_not_disturb_another() -> None:
    ticks: list[float] = []

    async def steady() -> Never:
        while True:
            ticks.append(now())
            await asyncio.sleep(1)

    async with Supervisor("test") as supervisor:
        supervisor.service("broken", failing_after(0, []))
        supervisor.service("steady", steady)
        await asyncio.sleep(3.5)
    assert ticks == [0, 1, 2, 3]


def test_a_failure_is_logged_with_the_name_and_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    @virtual
    async def run() -> None:
        async with Supervisor("test") as supervisor:
            supervisor.service("reaper", failing_after(0, []))
            await asyncio.sleep(0.05)

    with caplog.at_level(logging.ERROR):
        run()
    (record,) = caplog.records
    assert record.getMessage() == "service.failed"
    assert vars(record)["service"] == "reaper"
    assert record.exc_info is not None


@virtual
async def test_leaving_cancels_what_runs_and_waits_for_its_clean_up() -> None:
    cleaned: list[float] = []

    async def slow_to_leave() -> Never:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(2)
            cleaned.append(now())

    async with Supervisor("test") as supervisor:
        supervisor.service("slow", slow_to_leave)
        await asyncio.sleep(1)
    assert cleaned == [3]
    assert now() == 3


@virtual
async def test_leaving_an_idle_supervisor_takes_no_time() -> None:
    async with Supervisor("test") as supervisor:
        supervisor.service("idle", for_ever)
        await asyncio.sleep(1)
    assert now() == 1
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_an_error_in_the_block_is_raised_as_itself() -> None:
    async def block() -> None:
        async with Supervisor("test") as supervisor:
            supervisor.service("idle", for_ever)
            raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        await block()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_a_cancelled_block_ends_its_services() -> None:
    ended = asyncio.Event()

    async def service() -> Never:
        try:
            await for_ever()
        finally:
            ended.set()

    async def block() -> None:
        async with Supervisor("test") as supervisor:
            supervisor.service("idle", service)
            await asyncio.sleep(3600)

    task = asyncio.create_task(block())
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@virtual
async def test_a_short_job_fails_alone() -> None:
    async def fail() -> None:
        raise ValueError("the job broke")

    done: list[str] = []

    async def work() -> None:
        await asyncio.sleep(1)
        done.append("other")

    async with Supervisor("test") as supervisor:
        _ = supervisor.spawn("bad", fail())
        _ = supervisor.spawn("good", work())
        await asyncio.sleep(2)
    assert done == ["other"]


@virtual
async def test_a_short_job_is_named_and_can_be_cancelled() -> None:
    async with Supervisor("host") as supervisor:
        task = supervisor.spawn("job", asyncio.sleep(3600))
        assert task.get_name() == "host.job"
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert task.cancelled()
    assert now() == 0


@virtual
async def test_what_is_begun_while_the_block_ends_by_an_error_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    async def late() -> None:
        ran.append("late")

    async def ends(supervisor: Supervisor) -> None:
        try:
            await asyncio.sleep(10)
        finally:
            supervisor.start("late", late())

    async def breaks() -> None:
        async with Supervisor("test") as supervisor:
            supervisor.start("ends", ends(supervisor))
            await asyncio.sleep(1)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await breaks()
    assert ran == []
    assert caplog.records == []
