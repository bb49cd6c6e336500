"""Clean-up that a cancellation must not cut in half."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, T], *, seconds: float, what: str) -> T:
    """Run `work` to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    Raises `TimeoutError` naming `what` when it takes longer than `seconds`: it is cancelled then.
    """

    async def bounded() -> T:
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError as error:
            raise TimeoutError(f"{what} did not finish within {seconds:g} s") from error

    task = asyncio.ensure_future(bounded())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()
