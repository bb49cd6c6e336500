"""The same work for many things, a few of them at a time."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def each(items: Iterable[T], work: Callable[[T], Coroutine[Any, Any, object]], *, at_once: int) -> None:
    """Returns when all is done.  Work that raises ends the rest, as in a task group."""
    waiting = iter(items)

    async def take() -> None:
        for item in waiting:
            _ = await work(item)

    async with asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(take(), name=f"worker {number}")
