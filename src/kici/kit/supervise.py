"""Long-lived tasks: every task lives in a group, has a name, and its end is noticed."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Never, Self

log = logging.getLogger(__name__)

RESTART_SECONDS_MIN = 0.1
RESTART_SECONDS_MAX = 30.0


class Supervisor:
    """A task group for the services and short jobs of one program.

    `service` runs something that should never end: an exception is logged and it is started again, after a
    delay that doubles while it keeps failing.  `spawn` runs something that ends: an exception is logged.
    Leaving the block cancels what still runs and waits for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for task in sorted(self._tasks, key=lambda task: task.get_name()):
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup:
            if error is None:
                raise

    def service(self, name: str, run: Callable[[], Coroutine[Any, Any, Never]]) -> None:
        """Keep `run()` going until the block is left."""
        _ = self._start(name, self._keep(name, run))

    def start(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        """As `spawn`, for callers that do not look at the task."""
        _ = self.spawn(name, work)

    def spawn(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run `work` to its end.  The task may be cancelled; its failure is logged, never raised."""
        task = self._start(name, self._once(name, work))
        task.add_done_callback(lambda _: work.close())  # one that is cancelled before its first step never ran
        return task

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        try:
            task = self._group.create_task(work, name=f"{self._name}.{name}")
        except RuntimeError:  # an error or a cancel ends the block: what its tasks would still begin is not begun
            work.close()
            return asyncio.get_running_loop().create_task(_nothing(), name=f"{self._name}.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, name: str, run: Callable[[], Coroutine[Any, Any, Never]]) -> None:
        delay = RESTART_SECONDS_MIN
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await run()
            except Exception:
                log.exception("service.failed", extra={"service": name, "restart_seconds": delay})
            if asyncio.get_running_loop().time() - started > RESTART_SECONDS_MAX:
                delay = RESTART_SECONDS_MIN
            await asyncio.sleep(delay)
            delay = min(delay * 2, RESTART_SECONDS_MAX)

    async def _once(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except Exception:
            log.exception("task.failed", extra={"task": name})


async def _nothing() -> None:
    pass
