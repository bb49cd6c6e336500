"""Programs on hosts without pidfds: macOS through `ps`, and Windows as far as it goes.

Weaker than on Linux: a signal goes to a pid that was checked a moment before.  On Windows only processes that this
object started can be found again, and their trees are ended with `taskkill` (see `decide.launch`).
"""

import asyncio
import calendar
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from kici.adapters.proc import Seen, family
from kici.adapters.processes import FORCE_SECONDS, execute, refusal, run_command
from kici.ports.processes import MARK, Completed, Exit, Process, ProcessId, Program

ABSOLUTE: Final = "absolute"
"""In place of a boot: start times here are moments, which no other boot repeats."""
POLL_SECONDS: Final = 0.2
_PS: Final = ("ps", "-axwwo", "pid=,ppid=,pgid=,stat=,lstart=")
_PS_MARKS: Final = {"darwin": ("ps", "-axwwEo", "pid=,command="), "linux": ("ps", "axwweo", "pid=,command=")}
_PS_ENV: Final = {"PATH": "/bin:/usr/bin", "LC_ALL": "C", "TZ": "UTC"}
_LSTART_WORDS: Final = 5


def parse_ps(text: str) -> dict[int, Seen]:
    """Running processes from the output of `ps`; a process group stands for the session that we made it with."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 + _LSTART_WORDS or words[3].startswith("Z"):
            continue
        pid, parent, group = map(int, words[:3])
        started = calendar.timegm(time.strptime(" ".join(words[4 : 4 + _LSTART_WORDS])))
        found[pid] = Seen(pid, parent, group, group, started)
    return found


def parse_marks(text: str) -> dict[int, str]:
    """Marks from `ps` with environments: as far as it shows them, and no value with a space."""
    found = {}
    for line in text.splitlines():
        pid, _, words = line.strip().partition(" ")
        _, is_marked, rest = words.partition(f"{MARK}=")
        if is_marked:
            found[int(pid)] = rest.split(" ", 1)[0]
    return found


class PolledProcess:
    """A process whose end is noticed by asking again and again."""

    def __init__(
        self, process_id: ProcessId, ask: Callable[[], Exit | None], forget: Callable[[], object] = lambda: None
    ) -> None:
        self._id = process_id
        self._ask = ask
        self._forget = forget

    @property
    def id(self) -> ProcessId:
        return self._id

    def is_alive(self) -> bool:
        return self._ask() is None

    async def wait(self) -> Exit:
        while True:
            how = self._ask()
            if how is not None:
                return how
            await asyncio.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._forget()


class PortableProcesses:
    def __init__(self, system: str = sys.platform) -> None:
        self._is_windows = system == "win32"
        self._ps_marks = _PS_MARKS.get(system, _PS_MARKS["darwin"])
        self._children: dict[ProcessId, subprocess.Popen[bytes]] = {}

    async def start(self, program: Program) -> Process:
        try:
            child = execute(program, program.argv)
        except (OSError, ValueError) as error:
            raise refusal(error, program.argv[0]) from error
        seen = None if self._is_windows else self._snapshot().get(child.pid)
        process_id = ProcessId(pid=child.pid, started=0 if seen is None else seen.started, boot=ABSOLUTE)
        self._children[process_id] = child
        return self._polled(process_id)

    def adopt(self, process_id: ProcessId) -> Process | None:
        process = self._polled(process_id)
        return process if process_id.boot == ABSOLUTE and process.is_alive() else None

    async def marked(self, prefix: str) -> Sequence[tuple[str, ProcessId]]:
        if self._is_windows:
            return []
        seen, marks = self._snapshot(), self._marks()
        found = sorted((seen[pid].session != pid, pid) for pid in marks.keys() & seen if marks[pid].startswith(prefix))
        return [(marks[pid], ProcessId(pid=pid, started=seen[pid].started, boot=ABSOLUTE)) for _, pid in found]

    async def end_tree(self, root: ProcessId | None, *, mark: str, grace_seconds: float) -> bool:
        if root is not None and root.boot != ABSOLUTE:
            root = None
        if root is not None and grace_seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._ask(root, mark)
        with suppress(TimeoutError):
            async with asyncio.timeout(FORCE_SECONDS):
                while family := self._family(root, mark):
                    _signal(family, signal.SIGKILL)
                    await asyncio.sleep(POLL_SECONDS)
            return True
        return False

    async def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_seconds: float) -> Completed:
        return await run_command(argv, env=env, timeout_seconds=timeout_seconds)

    async def _ask(self, root: ProcessId, mark: str) -> None:
        """TERM the root's process group, once each, until nothing is left of it."""
        asked: set[int] = set()
        while group := [one for one in self._family(root, mark) if one.group == root.pid]:
            _signal([one for one in group if one.pid not in asked], signal.SIGTERM)
            asked |= {one.pid for one in group}
            await asyncio.sleep(POLL_SECONDS)

    def _family(self, root: ProcessId | None, mark: str) -> list[Seen]:
        for child in self._children.values():
            child.poll()
        seen, marks = self._snapshot(), self._marks()
        marked = {pid for pid, found in marks.items() if found == mark}
        return [seen[pid] for pid in sorted(family(seen, root, marked=marked, own=os.getpid()))]

    def _polled(self, process_id: ProcessId) -> PolledProcess:
        def ask() -> Exit | None:
            child = self._children.get(process_id)
            if child is not None:
                code = child.poll()
                if code is None:
                    return None
                return Exit(signal=-code) if code < 0 else Exit(code=code)
            seen = None if self._is_windows else self._snapshot().get(process_id.pid)
            return None if seen is not None and seen.started == process_id.started else Exit()

        def forget() -> None:
            child = self._children.pop(process_id, None)
            if child is not None and child.poll() is None:
                child.returncode = 0  # it lives on without us; tells Popen's finaliser that this is meant

        return PolledProcess(process_id, ask, forget)

    def _snapshot(self) -> dict[int, Seen]:
        return parse_ps(_output_of(_PS))

    def _marks(self) -> dict[int, str]:
        return parse_marks(_output_of(self._ps_marks))


def _output_of(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, env=_PS_ENV, capture_output=True, text=True, errors="replace", check=False, timeout=10)
    return done.stdout


def _signal(processes: Sequence[Seen], number: signal.Signals) -> None:
    for one in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(one.pid, number)
