"""One look at all processes serves everybody who asked before it began, and nobody who asked later."""

import asyncio
import threading
from collections.abc import Iterator

from kici.adapters.process_looks import Looks, Seen, see


class Eyes:
    """Each look waits until it is let, and sees its own number as a mark."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = threading.Semaphore(0)
        self.looks = Looks(self._see)

    def _see(self) -> Seen:
        self.begun += 1
        number = self.begun
        assert self.may_end.acquire(timeout=10)
        return Seen({}, {0: str(number)})

    async def begins(self, number: int) -> None:
        async with asyncio.timeout(5):
            while self.begun < number:  # noqa: ASYNC110  # a thread tells nobody
                await asyncio.sleep(0.001)

    def asked(self, times: int) -> "list[asyncio.Task[Seen]]":
        return [asyncio.create_task(self.looks.look()) for _ in range(times)]


async def seen_by(tasks: "list[asyncio.Task[Seen]]") -> list[str]:
    async with asyncio.timeout(5):
        return [seen.marks[0] for seen in await asyncio.gather(*tasks)]


async def test_a_look_under_way_serves_nobody_who_asks_now_and_the_next_one_all_of_them() -> None:
    eyes = Eyes()
    (first,) = eyes.asked(1)
    await eyes.begins(1)
    later = eyes.asked(10)
    await asyncio.sleep(0)
    eyes.may_end.release(2)
    assert await seen_by([first, *later]) == ["1"] + ["2"] * 10
    assert eyes.begun == 2


async def test_who_leaves_takes_nobody_along() -> None:
    eyes = Eyes()
    (first,) = eyes.asked(1)
    await eyes.begins(1)
    leads, *others = eyes.asked(3)
    await asyncio.sleep(0)
    leads.cancel()
    eyes.may_end.release(2)
    assert await seen_by([first, *others]) == ["1", "2", "2"]
    assert leads.cancelled()


async def test_a_failed_look_is_made_again_by_those_who_waited() -> None:
    calls: Iterator[OSError | Seen] = iter([OSError("gone"), Seen({}, {0: "seen"})])

    def see_or_fail() -> Seen:
        found = next(calls)
        if isinstance(found, OSError):
            raise found
        return found

    looks = Looks(see_or_fail)
    one, other = await asyncio.gather(looks.look(), looks.look(), return_exceptions=True)
    assert isinstance(one, OSError)
    assert isinstance(other, Seen)


def test_sees_this_process() -> None:
    assert see().processes
