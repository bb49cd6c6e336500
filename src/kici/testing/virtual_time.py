"""An event loop on virtual time: nothing waits, and the same program runs the same way every time.

When no callback is ready, time jumps to the next timer.  `asyncio.timeout`, `TaskGroup`, `Event` and `Queue`
work unchanged, because only the selector and the loop's clock are replaced.  Threads, sockets and processes are
refused: they would bring back real time and real order.  What must be decided by chance is decided by a seeded
`Entropy`, never by the loop.

In tests: `@virtual` on an async test function, or `run_virtual(main)` inside a plain one.  A whole directory runs
on virtual time, fixtures included, when its conftest imports `pytest_asyncio_loop_factories` from here.
"""

import asyncio
import contextvars
import functools
import heapq
import itertools
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, Never, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LIMIT_SECONDS: Final = 24 * 3600.0
"""Virtual time after which a run is called endless."""
BUSY_TURNS_MAX: Final = 1_000_000
"""Turns of the loop without time moving after which a run is called a busy loop."""
TIMERS_MIN: Final = 100
"""Of so few timers those that were cancelled are left where they are."""
_FRAMES_MAX: Final = 8
_TASKS_REPORTED_MAX: Final = 50


class SimStuck(Exception):
    """The simulated program will not get any further.  The message shows where each task waits."""


class SimDeadlock(SimStuck):
    """Every task waits, and no timer will wake any."""


class SimEndless(SimStuck):
    """The limit of virtual time is reached, or time has stopped while tasks keep running."""


class SimTask(asyncio.Task[Any]):
    """A task that hashes by the number of its creation.

    A set of plain tasks is ordered by their addresses, so a `TaskGroup` would cancel its children in an order
    that differs from run to run.
    """

    def __init__(self, coro: Coroutine[Any, Any, Any], *, number: int, **options: Any) -> None:
        self._number = number  # before the base class: it puts the task into sets
        if options.get("name") is None:
            options["name"] = f"Task-{number}"
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualSelector(selectors.BaseSelector):
    """Holds the loop's own wake-up pipe and refuses every other file; nobody asks it whether one is ready."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        del timeout
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self._keys:  # the first one is the loop's own wake-up pipe
            raise RuntimeError("sockets and pipes are not simulated: use kici.testing.sim_link")
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def _fill(handle: Any, callback: Any, args: Any, loop: Any, context: contextvars.Context | None) -> None:
    """What `asyncio.Handle` does when it is made, without a look at debug mode."""
    handle._context = contextvars.copy_context() if context is None else context
    handle._loop = loop
    handle._callback = callback
    handle._args = args
    handle._cancelled = False
    handle._repr = None
    handle._source_traceback = None


class _Handle(asyncio.Handle):
    """As its base, made without a look at debug mode: a run makes ten thousands."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: contextvars.Context | None) -> None:
        _fill(self, callback, args, loop, context)


class _Timer(asyncio.TimerHandle):
    __slots__ = ()
    _loop: Any

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: contextvars.Context | None) -> None:
        _fill(self, callback, args, loop, context)
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback, self._args = None, ()
            if self._scheduled:
                self._loop._timer_cancelled_count += 1


class _Due(float):
    """When a timer is due, and the timer: the heap compares numbers, which takes no call of a method."""

    __slots__ = ("timer",)
    timer: _Timer


class SimLoop(asyncio.SelectorEventLoop):
    """The loop.  `time()` starts at 0 and moves only when nothing else can.

    It turns as asyncio's own does, in the same order, and leaves out what only a loop with files needs.
    """

    _ready: deque[Any]
    _stopping: bool
    _clock_resolution: float

    def __init__(self, *, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._now = 0.0
        self._limit_seconds = limit_seconds
        self._busy_turns = 0
        self._due: list[_Due] = []
        self._timer_cancelled_count = 0
        super().__init__(VirtualSelector())
        numbers = itertools.count(1)

        def new_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> SimTask:
            return SimTask(coro, number=next(numbers), loop=loop, **options)

        self.set_task_factory(new_task)

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def call_soon(  # type: ignore[override]  # arguments are not matched with those of the callback
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]  # as above
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # as above
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        due = _Due(when)
        due.timer = timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._due, due)
        return timer

    def _run_once(self) -> None:
        """One turn: let time pass if nothing is ready, then run what is."""
        self._forget_cancelled()
        due, ready = self._due, self._ready
        if ready or self._stopping:
            self._busy_turns += 1
            if self._busy_turns > BUSY_TURNS_MAX:
                raise SimEndless(_report(f"{BUSY_TURNS_MAX} turns of the loop at one moment: something is spinning"))
        elif due:
            self._pass_time(due[0] - self._now)
        else:
            raise SimDeadlock(_report("every task waits and no timer is pending"))
        until = self._now + self._clock_resolution
        while due and due[0] < until:
            timer = heapq.heappop(due).timer
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio's own does
                what = f"Exception in callback {handle._callback!r}"
                self.call_exception_handler({"message": what, "exception": error, "handle": handle})

    def _pass_time(self, seconds: float) -> None:
        if seconds > 0:
            self._now += seconds
            self._busy_turns = 0
            if self._now > self._limit_seconds:
                raise SimEndless(_report(f"still going after {self._limit_seconds:g} virtual seconds"))

    def _forget_cancelled(self) -> None:
        """Take cancelled timers from the head of the heap; all of them once they are most of it."""
        due = self._due
        if len(due) > TIMERS_MIN and self._timer_cancelled_count * 2 > len(due):
            due[:] = [one for one in due if not one.timer._cancelled]
            heapq.heapify(due)
            self._timer_cancelled_count = 0
            return
        while due and due[0].timer._cancelled:
            heapq.heappop(due)
            self._timer_cancelled_count -= 1

    def run_in_executor(self, *_: Any) -> Never:  # type: ignore[override]  # refuses whatever it is given
        raise RuntimeError("threads are not simulated: give the code an inline implementation")

    async def subprocess_exec(self, *_: Any, **__: Any) -> Never:
        raise RuntimeError("processes are not simulated: give the code a fake Processes port")

    async def subprocess_shell(self, *_: Any, **__: Any) -> Never:
        raise RuntimeError("processes are not simulated: give the code a fake Processes port")


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, limit_seconds: float = LIMIT_SECONDS) -> T:
    """Run `main()` to its end on a fresh `SimLoop`, cancel what it left behind, and return its result.

    Raises `SimDeadlock` or `SimEndless` when it cannot end.
    """
    with asyncio.Runner(loop_factory=lambda: SimLoop(limit_seconds=limit_seconds)) as runner:
        try:
            return runner.run(main())
        except SimStuck:
            _abandon(runner.get_loop())
            raise


def virtual(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make an async test function a plain one that runs on virtual time.  Its fixtures must be plain, too."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(lambda: test(*args, **kwargs))

    return run


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The hook of pytest-asyncio: import it into a conftest to put that directory on virtual time."""
    return {"virtual": SimLoop}


def _abandon(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks of a stuck loop one turn at a time, so that closing it cannot get stuck again."""
    for _ in range(10):
        left = sorted(asyncio.all_tasks(loop), key=hash)
        if not left:
            return
        for task in left:
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()


def _report(why: str) -> str:
    tasks = sorted(asyncio.all_tasks(), key=hash)
    shown = [f"- {task.get_name()}: {_where(task)}" for task in tasks[:_TASKS_REPORTED_MAX]]
    return "\n".join([f"{why}; {len(tasks)} tasks:", *shown])


def _where(task: asyncio.Task[Any]) -> str:
    """The chain of awaits of a task, outermost first."""
    frames: list[str] = []
    waits: Any = task.get_coro()
    while (frame := getattr(waits, "cr_frame", None)) is not None:
        frames.append(f"{waits.__qualname__} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        waits = waits.cr_await
    return " > ".join(frames[-_FRAMES_MAX:]) or "not started"
