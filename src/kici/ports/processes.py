"""Programs on this host: start them, know them again after a restart, wait for their end, end them.

A pid alone names nothing for long.  A `ProcessId` (pid, start time, boot) names one process for ever, and every
signal goes to a process that was proven to be that one.  Programs are started as leaders of their own session
with their output in a file, so that they outlive whoever started them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

MARK: Final = "AGENT_COMPUTE_MARK"
"""Environment name whose value says which compute a process belongs to.  Children inherit it.

An assignment to it as a word of the command line counts as well, for programs that close their environment.
Not a `KICI_` name on purpose: agents refuse those that they do not know.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    pid: int
    started: int
    """When it started, in the host's own unit; only ever compared for equality."""
    boot: str
    """Which run of the host's kernel this was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended.  Neither known: it was not ours to wait for (found again after a restart)."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"exited with signal {self.signal}"
        if self.code is not None:
            return f"exited with code {self.code}"
        return "exited (with which status is unknown: it is no child of this process)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to start.  Standard input is empty; standard output and error are appended to `output`."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    """The whole environment, exactly; may hold credentials."""
    cwd: Path
    output: Path
    mark: str
    """Value of `MARK`: added to the environment."""
    groups: tuple[Path, ...] = ()
    """`cgroup.procs` files that the process enters before the program begins."""
    inherits: tuple[int, ...] = ()
    """Descriptors of ours that the process has open, too.  Not on Windows."""


class Process(Protocol):
    """One process.  Holding it keeps a handle of the host's; `close` gives that back and lets the process live."""

    @property
    def id(self) -> ProcessId: ...

    def is_alive(self) -> bool: ...

    async def wait(self) -> Exit:
        """Return when it has ended.  Any number of callers may wait."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A short command that ran to its end."""

    code: int
    output: str
    """Standard output and error, cut to the last 8 KiB."""


class Starter(Protocol):
    async def start(self, program: Program) -> Process:
        """Start a program.  Cancelling the call leaves no process behind.

        Raises `DeterministicRefusal` when the host would refuse this very start again (no such file, not
        executable, too long), `Retryable` when it may not (out of processes, memory, descriptors).
        """
        ...


class Processes(Starter, Protocol):
    def adopt(self, process_id: ProcessId) -> Process | None:
        """The running process of this identity; None when it is gone, whoever has its pid now."""
        ...

    async def marked(self, prefix: str) -> Sequence[tuple[str, ProcessId]]:
        """Running processes whose `MARK` begins with `prefix`, with the mark's value; session leaders first."""
        ...

    async def end_tree(self, root: ProcessId | None, *, mark: str, grace_seconds: float) -> bool:
        """End a program and everything it started: its descendants, its session, whatever carries its mark.
        Without a root, what carries the mark.

        Asks its process group first (TERM), then forces (KILL) what is left after `grace_seconds`; 0 forces at
        once.  Returns whether nothing is left.  A root that is gone is no error: its remains are ended.
        """
        ...

    async def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_seconds: float) -> Completed:
        """Run a short command.  Raises `Retryable` when it cannot be started or takes too long."""
        ...
