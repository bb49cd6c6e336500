"""The contract of every background service: `run` for ever, `tick` once, stop by cancellation and nothing else.

Each case takes a factory of fresh services with their fakes and runs on virtual time.  A test parametrises
`CASES` over the factories of its services; nothing here knows any of them.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, Never, Protocol

from kici.kit.supervise import Supervisor

STOP_SECONDS: Final = 10.0
"""Virtual time within which a cancelled service must have left."""
_TURNS: Final = 12
_STRESS_ROUNDS: Final = 10
_STRESS_PAIRS: Final = 50


class Service(Protocol):
    async def run(self) -> Never:
        """Work for ever.  Left by cancellation only."""
        ...

    async def tick(self) -> object:
        """One pass."""
        ...


ServiceFactory = Callable[[], Service]
Case = Callable[[ServiceFactory], Coroutine[Any, Any, None]]


async def ticks_alone(make: ServiceFactory) -> None:
    """One pass needs no running loop around it, and can be followed by another."""
    with _nothing_left():
        service = make()
        _ = await service.tick()
        _ = await service.tick()


async def runs_and_stops(make: ServiceFactory) -> None:
    """An hour of work raises nothing; then it leaves in bounded time, with nothing left running."""
    with _nothing_left(), _no_failures():
        await _run_for(make(), seconds=3600.0)


async def starts_again_after_a_stop(make: ServiceFactory) -> None:
    """The same object may be run again: a supervisor does so after a failure."""
    service = make()
    with _nothing_left(), _no_failures():
        await _run_for(service, seconds=60.0)
        await _run_for(service, seconds=60.0)


async def stops_twice(make: ServiceFactory) -> None:
    """A second cancellation while it leaves is harmless."""
    with _nothing_left():
        task = asyncio.create_task(make().run())
        await asyncio.sleep(60.0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await _gone(task)


async def is_cancelled_while_it_starts(make: ServiceFactory) -> None:
    """Whatever it awaits first, a cancellation there gets it out."""
    with _nothing_left():
        for turns in range(_TURNS):
            task = asyncio.create_task(make().run())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await _gone(task)


async def bears_stress(make: ServiceFactory) -> None:
    """Many starts and stops of one object, at different moments of its life."""
    with _nothing_left(), _no_failures():
        for round_number in range(_STRESS_ROUNDS):
            service = make()
            for pair in range(_STRESS_PAIRS):
                await _run_for(service, seconds=round_number * pair * 0.01)


CASES: Final[tuple[Case, ...]] = (
    ticks_alone,
    runs_and_stops,
    starts_again_after_a_stop,
    stops_twice,
    is_cancelled_while_it_starts,
    bears_stress,
)


async def _run_for(service: Service, *, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    async with Supervisor("contract") as supervisor:
        supervisor.service(type(service).__name__, service.run)
        await asyncio.sleep(seconds)
        leaving = loop.time()
    took = loop.time() - leaving
    assert took <= STOP_SECONDS, f"it took {took:g} s to stop"


async def _gone(task: asyncio.Task[Never]) -> None:
    done, _ = await asyncio.wait({task}, timeout=STOP_SECONDS)
    assert done, f"still running {STOP_SECONDS:g} s after it was cancelled"
    assert task.cancelled(), f"it ended otherwise than by its cancellation: {task.exception()!r}"


@contextmanager
def _nothing_left() -> Iterator[None]:
    """Fail when tasks live on that were not there before."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before
    assert not left, f"tasks left behind: {sorted(task.get_name() for task in left)}"


@contextmanager
def _no_failures() -> Iterator[None]:
    """Fail when the supervisor had to log a failure meanwhile."""
    failures: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = failures.append  # type: ignore[method-assign, assignment]  # the shortest handler there is
    logger = logging.getLogger("kici.kit.supervise")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not failures, logging.Formatter().format(failures[0])
