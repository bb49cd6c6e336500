"""The contract of the process port, as cases that run on the real host and on the fake one.

A test parametrises `CASES` over factories of `Bench`es: a port, and programs that behave in known ways.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final, Protocol

from kici.domain.errors import DeterministicRefusal, Retryable
from kici.ports.processes import MARK, Exit, Process, Processes, Program

_UNTIL_SECONDS: Final = 10.0


class Kind(StrEnum):
    PRINTS = "prints"
    """Prints `hello` and the value of its environment variable WORD, then ends with code 0."""
    FAILS = "fails"
    """Ends with code 3."""
    SLEEPS = "sleeps"
    STUBBORN = "stubborn"
    """Ignores TERM, and has a child that ignores it, too."""
    SCATTERS = "scatters"
    """Has a child in the same session, one in its own, and one in its own whose parent has gone."""
    MISSING = "missing"


class Bench(Protocol):
    @property
    def processes(self) -> Processes: ...

    def another(self) -> Processes:
        """The port as the next coordinator on this host would make it."""
        ...

    def program(self, kind: Kind, name: str = "a") -> Program:
        """With a mark that ends in `name`."""
        ...

    def output(self, program: Program) -> str: ...

    def alive(self) -> int:
        """How many processes of this bench's programs there are."""
        ...


BenchFactory = Callable[[], AbstractAsyncContextManager[Bench]]
Case = Callable[[Bench], Coroutine[Any, Any, None]]


async def runs_with_exactly_its_environment(bench: Bench) -> None:
    program = replace(bench.program(Kind.PRINTS), env={"WORD": "it's a; $word"})
    process = await bench.processes.start(program)
    assert await process.wait() == Exit(code=0)
    assert bench.output(program).splitlines() == ["hello", "it's a; $word", f"{MARK}={program.mark}", "WORD"]


async def appends_its_output(bench: Bench) -> None:
    program = replace(bench.program(Kind.PRINTS), env={"WORD": "x"})
    for _ in range(2):
        _ = await (await bench.processes.start(program)).wait()
    assert bench.output(program).count("hello") == 2


async def tells_how_it_ended(bench: Bench) -> None:
    failed = await bench.processes.start(bench.program(Kind.FAILS))
    assert await failed.wait() == Exit(code=3)
    assert str(await failed.wait()) == "exited with code 3"
    assert not failed.is_alive()
    sleeper = await bench.processes.start(bench.program(Kind.SLEEPS))
    assert sleeper.is_alive()
    assert await _end(bench, sleeper, 0)
    assert await sleeper.wait() == Exit(signal=9)


async def lets_many_wait_and_some_leave(bench: Bench) -> None:
    process = await bench.processes.start(bench.program(Kind.SLEEPS))
    waiters = [asyncio.create_task(process.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.sleep(0)
    assert await _end(bench, process, 0)
    async with asyncio.timeout(_UNTIL_SECONDS):
        assert await waiters[1] == await waiters[2] == Exit(signal=9)


async def refuses_what_is_not_there(bench: Bench) -> None:
    program = bench.program(Kind.MISSING)
    error: DeterministicRefusal | None = None
    try:
        _ = await bench.processes.start(program)
    except DeterministicRefusal as raised:
        error = raised
    assert error is not None, "a missing program was started"
    assert program.argv[0] in str(error)
    assert bench.alive() == 0


async def lives_on_after_close(bench: Bench) -> None:
    process = await bench.processes.start(bench.program(Kind.SLEEPS))
    process.close()
    await _until(lambda: bench.alive() == 1)
    again = bench.another().adopt(process.id)
    assert again is not None
    assert again.id == process.id
    assert await _end(bench, again, 0)
    assert await again.wait() == Exit()
    again.close()


async def knows_a_process_by_more_than_its_pid(bench: Bench) -> None:
    process = await bench.processes.start(bench.program(Kind.SLEEPS))
    for other in (
        replace(process.id, started=process.id.started + 1),
        replace(process.id, boot="another boot"),
        replace(process.id, pid=4_000_000),
    ):
        assert bench.processes.adopt(other) is None
        assert await bench.processes.end_tree(other, mark=f"{bench.program(Kind.SLEEPS).mark}-x", grace_seconds=0)
    assert process.is_alive()
    assert await _end(bench, process, 0)
    assert bench.processes.adopt(process.id) is None


async def finds_by_mark(bench: Bench) -> None:
    first = await bench.processes.start(bench.program(Kind.SLEEPS, "first"))
    second = await bench.processes.start(bench.program(Kind.SCATTERS, "second"))
    prefix = bench.program(Kind.SLEEPS, "").mark
    async with asyncio.timeout(_UNTIL_SECONDS):
        while len(found := await bench.another().marked(prefix)) < 5:  # noqa: ASYNC110  # there is no event
            await asyncio.sleep(0.01)
    assert sorted(mark.removeprefix(prefix) for mark, _ in found) == ["first", *["second"] * 4]
    assert {first.id, second.id} <= {process_id for _, process_id in found}
    assert next(one for mark, one in found if mark.endswith("second")) == second.id, "leaders and elders first"
    assert await bench.processes.marked(f"{prefix}third") == []
    for process, name in ((first, "first"), (second, "second")):
        assert await bench.processes.end_tree(process.id, mark=prefix + name, grace_seconds=0)
    assert bench.alive() == 0


async def ends_a_willing_one_at_once(bench: Bench) -> None:
    process = await bench.processes.start(bench.program(Kind.SLEEPS))
    started = asyncio.get_running_loop().time()
    assert await _end(bench, process, 60)
    assert asyncio.get_running_loop().time() - started < 30
    assert await process.wait() == Exit(signal=15)


async def forces_a_stubborn_one_with_its_children(bench: Bench) -> None:
    process = await bench.processes.start(bench.program(Kind.STUBBORN))
    await _until(lambda: bench.alive() == 2)
    started = asyncio.get_running_loop().time()
    assert await _end(bench, process, 0.5)
    assert asyncio.get_running_loop().time() - started >= 0.5
    assert await process.wait() == Exit(signal=9)
    assert bench.alive() == 0


async def ends_what_scattered(bench: Bench) -> None:
    process = await bench.processes.start(bench.program(Kind.SCATTERS))
    await _until(lambda: bench.alive() == 4)
    assert await _end(bench, process, 0.2)
    assert bench.alive() == 0


async def ends_the_remains_of_a_dead_root(bench: Bench) -> None:
    process = await bench.processes.start(bench.program(Kind.SCATTERS))
    await _until(lambda: bench.alive() == 4)
    mark = bench.program(Kind.SCATTERS).mark
    # By mark alone, as when no record of the root was left.
    assert await bench.another().end_tree(None, mark=mark, grace_seconds=0)
    assert bench.alive() == 0
    assert await process.wait() == Exit(signal=9)
    assert await bench.processes.end_tree(process.id, mark=mark, grace_seconds=5), "nothing is left to end"


async def runs_short_commands(bench: Bench) -> None:
    program = bench.program(Kind.FAILS)
    done = await bench.processes.run(program.argv, env=program.env, timeout_seconds=10)
    assert done.code == 3
    try:
        _ = await bench.processes.run(bench.program(Kind.SLEEPS).argv, env=program.env, timeout_seconds=0.2)
    except Retryable:
        pass
    else:
        raise AssertionError("a command that takes too long must be given up")
    assert bench.alive() == 0


CASES: Final[tuple[Case, ...]] = (
    runs_with_exactly_its_environment,
    appends_its_output,
    tells_how_it_ended,
    lets_many_wait_and_some_leave,
    refuses_what_is_not_there,
    lives_on_after_close,
    knows_a_process_by_more_than_its_pid,
    finds_by_mark,
    ends_a_willing_one_at_once,
    forces_a_stubborn_one_with_its_children,
    ends_what_scattered,
    ends_the_remains_of_a_dead_root,
    runs_short_commands,
)


async def _end(bench: Bench, process: Process, grace_seconds: float) -> bool:
    mark = bench.program(Kind.SLEEPS).mark
    return await bench.processes.end_tree(process.id, mark=mark, grace_seconds=grace_seconds)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(_UNTIL_SECONDS):
        while not holds():  # noqa: ASYNC110  # there is nothing to subscribe to
            await asyncio.sleep(0.01)
