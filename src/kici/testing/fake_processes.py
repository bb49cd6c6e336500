"""A host in memory that runs scripted programs, under the same contract as the real one.

`Script`s are found by the path of the program.  The host outlives the `FakeProcesses` of one coordinator: make
another over the same host, and it finds what the first one started.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from kici.domain.errors import DeterministicRefusal, Retryable
from kici.ports.processes import MARK, Completed, Exit, Process, ProcessId, Program
from kici.testing.fake_files import FakeFiles

TERM: Final = 15
KILL: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a program does when it runs."""

    start_seconds: float = 0.0
    """How long starting it takes."""
    output: str = ""
    prints_environment: str | None = None
    """Print `hello` and this variable, then the mark and the names of all others."""
    lives_seconds: float | None = None
    """None: until it is ended."""
    exit: Exit = field(default_factory=lambda: Exit(code=0))
    """How it ends by itself."""
    ignores_term: bool = False
    children: int = 0
    """Further processes that it starts."""
    start_error: DeterministicRefusal | Retryable | None = None


@dataclass(slots=True, eq=False)
class Running:
    id: ProcessId
    mark: str
    script: Script
    parent: int | None = None
    exit: Exit | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, how: Exit) -> None:
        if self.exit is None:
            self.exit = how
            self.ended.set()


class FakeHost:
    """The machine: its programs and what runs."""

    def __init__(self, files: FakeFiles, scripts: Mapping[str, Script], *, boot: str = "boot-1") -> None:
        self.files = files
        self.scripts = dict(scripts)
        self.boot = boot
        self.table: dict[int, Running] = {}
        self.started: list[Program] = []
        self.is_stuck = False
        """Nothing can be ended while this holds."""
        self._pids = count(100)

    def running(self) -> list[Running]:
        return [one for one in self.table.values() if one.exit is None]

    def run(self, program: Program, script: Script) -> Running:
        self.started.append(program)
        self.files.append(program.output, _output_of(script, program).encode())
        root = self._add(program.mark, script, None)
        for _ in range(script.children):
            self._add(program.mark, Script(ignores_term=script.ignores_term), root.id.pid)
        if script.lives_seconds is not None:
            asyncio.get_running_loop().call_later(script.lives_seconds, root.end, script.exit)
        return root

    def _add(self, mark: str, script: Script, parent: int | None) -> Running:
        pid = next(self._pids)
        one = Running(ProcessId(pid=pid, started=pid * 7, boot=self.boot), mark, script, parent)
        self.table[pid] = one
        return one


def _output_of(script: Script, program: Program) -> str:
    if script.prints_environment is None:
        return script.output
    lines = ["hello", program.env[script.prints_environment], f"{MARK}={program.mark}", *sorted(program.env)]
    return "".join(f"{line}\n" for line in lines)


class FakeProcess:
    def __init__(self, running: Running, *, knows_exit: bool) -> None:
        self._running = running
        self._knows_exit = knows_exit

    @property
    def id(self) -> ProcessId:
        return self._running.id

    def is_alive(self) -> bool:
        return self._running.exit is None

    async def wait(self) -> Exit:
        await self._running.ended.wait()
        assert self._running.exit is not None, "it has ended"
        return self._running.exit if self._knows_exit else Exit()

    def close(self) -> None:
        return


class FakeProcesses:
    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self.commands: list[tuple[str, ...]] = []
        """Short commands that were run."""
        self.command: Callable[[Sequence[str]], Completed] = lambda argv: Completed(code=0, output="")

    async def start(self, program: Program) -> Process:
        script = self._host.scripts.get(program.argv[0])
        if script is None:
            raise DeterministicRefusal(f"this host refuses to start {program.argv[0]}: no such program")
        if script.start_seconds:
            await asyncio.sleep(script.start_seconds)
        if script.start_error is not None:
            raise script.start_error
        return FakeProcess(self._host.run(program, script), knows_exit=True)

    def adopt(self, process_id: ProcessId) -> Process | None:
        one = self._host.table.get(process_id.pid)
        if one is None or one.id != process_id or one.exit is not None:
            return None
        return FakeProcess(one, knows_exit=False)

    async def marked(self, prefix: str) -> Sequence[tuple[str, ProcessId]]:
        found = (one for one in self._host.running() if one.mark.startswith(prefix))
        return [(one.mark, one.id) for one in sorted(found, key=lambda one: (one.parent is not None, one.id.pid))]

    async def end_tree(self, root: ProcessId | None, *, mark: str, grace_seconds: float) -> bool:
        if self._host.is_stuck:
            return False
        family = [one for one in self._host.running() if one.mark == mark or one.id == root]
        for one in family:
            if grace_seconds > 0 and not one.script.ignores_term:
                one.end(Exit(signal=TERM))
        left = [one for one in family if one.exit is None]
        if left:
            await asyncio.sleep(grace_seconds)
        for one in left:
            one.end(Exit(signal=KILL))
        return True

    async def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_seconds: float) -> Completed:
        self.commands.append(tuple(argv))
        return self.command(argv)
