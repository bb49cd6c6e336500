import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine

import pytest

from kici.testing.sim_clock import SimClock
from kici.testing.virtual_time import SimDeadlock, SimEndless, SimLoop, run_virtual, virtual


@virtual
async def test_waiting_takes_exactly_the_time_that_was_asked_for() -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(3600)
    assert loop.time() == 3600
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await asyncio.Event().wait()
    assert loop.time() == 3602.5


@virtual
async def test_task_groups_events_and_queues_work_unchanged() -> None:
    event = asyncio.Event()
    queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
    seen: list[int] = []

    async def produce() -> None:
        for number in range(3):
            await asyncio.sleep(1)
            await queue.put(number)
        event.set()

    async def consume() -> None:
        while len(seen) < 3:
            seen.append(await queue.get())

    async with asyncio.TaskGroup() as group:
        group.create_task(produce())
        group.create_task(consume())
        await event.wait()
    assert seen == [0, 1, 2]


def test_a_result_is_returned_and_an_error_raised() -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise ValueError("no")

    assert run_virtual(answer) == 42
    with pytest.raises(ValueError, match="no"):
        run_virtual(fail)


def test_a_deadlock_names_the_tasks_and_where_they_wait() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_for_nobody(), name="lonely")

    with pytest.raises(SimDeadlock, match=r"lonely: .*wait_for_nobody \(test_virtual_time.py:\d+\) > Event.wait"):
        run_virtual(main)


def test_an_endless_ticker_is_stopped_at_the_limit_of_virtual_time() -> None:
    async def main() -> None:
        while True:
            await SimClock().sleep(10)

    with pytest.raises(SimEndless, match="after 100 virtual seconds"):
        run_virtual(main, limit_seconds=100)


def test_a_spinning_task_is_found_although_time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kici.testing.virtual_time.BUSY_TURNS_MAX", 1000)

    async def spin() -> None:
        while True:
            await SimClock().sleep(0)

    with pytest.raises(SimEndless, match="spinning"):
        run_virtual(spin)


def test_a_stuck_program_is_still_cleaned_up() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("main")

    with pytest.raises(SimDeadlock):
        run_virtual(main)
    assert cleaned == ["main"]


async def use_a_thread() -> None:
    await asyncio.to_thread(print)


async def use_a_process() -> None:
    await asyncio.create_subprocess_exec("true")


async def use_a_socket() -> None:
    await asyncio.open_connection("127.0.0.1", 9)


@pytest.mark.parametrize("escape", [use_a_thread, use_a_process, use_a_socket])
def test_what_would_bring_back_real_time_is_refused(escape: Callable[[], Coroutine[None, None, None]]) -> None:
    with pytest.raises(RuntimeError, match="not simulated"):
        run_virtual(escape)


def test_a_task_group_cancels_its_children_in_an_order_that_repeats() -> None:
    def order() -> list[str]:
        cancelled: list[str] = []

        async def child(name: str) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                cancelled.append(name)

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(child(f"child-{number}"))
                await asyncio.sleep(1)
                raise KeyError

        with pytest.raises(ExceptionGroup):
            run_virtual(main)
        return cancelled

    ballast = [object() for _ in range(1000)]  # other addresses for the second run
    first = order()
    del ballast[::3]
    assert first == order()
    assert len(first) == 50


PROGRAM = """
    import asyncio, hashlib, sys
    from kici.testing.seeded_entropy import SeededEntropy
    from kici.testing.sim_link import SimWire
    from kici.testing.virtual_time import run_virtual

    async def main():
        trace = hashlib.sha256()
        loop = asyncio.get_running_loop()
        entropy = SeededEntropy(int(sys.argv[1]))

        def note(*what):
            trace.update(repr((round(loop.time(), 9), *what)).encode())

        async def talk(number):
            wire = SimWire(entropy.fork(f"wire-{number}"))
            try:
                for turn in range(20):
                    wire.a.send(b"%d" % turn)
                    note(number, await wire.b.receive())
                    async with asyncio.timeout(entropy.uniform(0, 2)):
                        await asyncio.sleep(entropy.uniform(0, 1))
            except TimeoutError:
                note(number, "timeout")
            finally:
                note(number, "over", asyncio.current_task().get_name())

        try:
            async with asyncio.timeout(5), asyncio.TaskGroup() as group:
                for number in range(100):
                    group.create_task(talk(number))
        except TimeoutError:
            note("all stopped")
        return trace.hexdigest()

    print(run_virtual(main))
"""


def trace_of(seed: int, hash_seed: int) -> str:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(program, env=environment, check=True, capture_output=True, text=True, timeout=30).stdout


def test_a_seed_gives_the_same_trace_in_separate_processes() -> None:
    assert trace_of(1, hash_seed=1) == trace_of(1, hash_seed=2)
    assert trace_of(1, hash_seed=1) != trace_of(2, hash_seed=1)


def test_loops_do_not_share_their_numbering() -> None:
    async def name() -> str:
        task = asyncio.current_task()
        assert task is not None
        return task.get_name()

    assert run_virtual(name) == run_virtual(name)


def test_time_starts_at_zero() -> None:
    loop = SimLoop()
    assert loop.time() == 0
    loop.close()
