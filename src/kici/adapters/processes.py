"""Programs on Linux: identity by start time, signals and waiting through pidfds, families through `/proc`.

A pidfd names its process for as long as it is open, so nothing here can hit whoever got the pid next.  It turns
readable when the process ends, child of ours or not, which is how the loop learns of it.
"""

import asyncio
import errno
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kici.adapters import proc
from kici.adapters.process_looks import Looks
from kici.adapters.short_commands import outputs
from kici.domain.errors import DeterministicRefusal, Retryable
from kici.ports.processes import MARK, Completed, Exit, Process, ProcessId, Program

FORCE_SECONDS: Final = 10.0
"""How long ending a family by force may take before it is reported as not confirmed."""
LOOK_AGAIN_SECONDS: Final = 0.01
OUTPUT_BYTES_MAX: Final = 8192
_PASSING: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.ENOSPC})
_ENTER_GROUPS: Final = (
    'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ >"$1" || exit 126; shift; n=$((n-1)); done; exec "$@"'
)
"""A shell enters the control groups and then becomes the program: nothing of it ever runs outside them."""


class LinuxProcess:
    """A process held by its pidfd.  `collect` is asked once, when it has ended, how."""

    def __init__(self, process_id: ProcessId, pidfd: int, collect: Callable[[int], Exit]) -> None:
        self._id = process_id
        self._pidfd: int | None = pidfd
        self._collect = collect
        self._exit = Exit()
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._on_end)

    @property
    def id(self) -> ProcessId:
        return self._id

    def is_alive(self) -> bool:
        if self._pidfd is None:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    async def wait(self) -> Exit:
        await self._ended.wait()
        return self._exit

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens when it has ended or was closed."""
        if self._pidfd is not None:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _on_end(self) -> None:
        assert self._pidfd is not None, "the reader is removed before the pidfd is closed"
        self._exit = self._collect(self._pidfd)
        self.close()
        self._ended.set()


class LinuxProcesses:
    def __init__(self) -> None:
        self._boot = proc.boot_id()
        self._looks = Looks()

    async def start(self, program: Program) -> Process:
        # One block without an await: a cancellation comes before or after it, never in between.
        argv = program.argv
        if program.groups:
            check_program(argv[0], program.env)
            groups = [str(path) for path in program.groups]
            argv = ("/bin/sh", "-c", _ENTER_GROUPS, "sh", str(len(groups)), *groups, *argv)
        try:
            child = execute(program, argv)
        except (OSError, ValueError) as error:
            raise refusal(error, program.argv[0]) from error
        return hold_child(child, self._boot)

    def adopt(self, process_id: ProcessId) -> LinuxProcess | None:
        if process_id.boot != self._boot:
            return None
        pidfd = proc.open_same(process_id.pid, started=process_id.started)
        return None if pidfd is None else LinuxProcess(process_id, pidfd, lambda _pidfd: Exit())

    async def marked(self, prefix: str) -> Sequence[tuple[str, ProcessId]]:
        seen, found = await self._looks.look()
        pids = sorted((pid for pid, mark in found.items() if mark.startswith(prefix)), key=lambda p: _rank(seen[p]))
        return [(found[pid], self._identify(seen[pid])) for pid in pids]

    async def end_tree(self, root: ProcessId | None, *, mark: str, grace_seconds: float) -> bool:
        if root is not None and root.boot != self._boot:
            root = None
        if root is not None and grace_seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._ask(root, mark)
        with suppress(TimeoutError):
            async with asyncio.timeout(FORCE_SECONDS):
                await self._force(root, mark)
            return True
        return False

    async def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_seconds: float) -> Completed:
        return await run_command(argv, env=env, timeout_seconds=timeout_seconds)

    def _identify(self, seen: proc.Seen) -> ProcessId:
        return ProcessId(pid=seen.pid, started=seen.started, boot=self._boot)

    async def _ask(self, root: ProcessId, mark: str) -> None:
        """TERM the root's process group, once each, until nothing is left of it.

        When it is gone there is nobody left to clear up the rest.
        """
        asked: set[ProcessId] = set()
        while group := [one for one, group in await self._family(root, mark) if group == root.pid]:
            with _held(group):
                for process in group:
                    if process.id not in asked:
                        asked.add(process.id)
                        process.send(signal.SIGTERM)
                for process in group:
                    await process.wait()

    async def _force(self, root: ProcessId | None, mark: str) -> None:
        """KILL a family until nothing is left of it."""
        while family := await self._family(root, mark) or await self._late_family(root, mark):
            with _held([process for process, _ in family]):
                for process, _ in family:
                    process.send(signal.SIGKILL)
                for process, _ in family:
                    await process.wait()

    async def _late_family(self, root: ProcessId | None, mark: str) -> list[tuple[LinuxProcess, int]]:
        """Looks again: in the midst of an exec a process shows neither environment nor command line."""
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
        return await self._family(root, mark)

    async def _family(self, root: ProcessId | None, mark: str) -> list[tuple[LinuxProcess, int]]:
        """Who is left of a family, held, with their process groups."""
        seen, found = await self._looks.look()
        marked = {pid for pid, value in found.items() if value == mark}
        pids = proc.family(seen, root, marked=marked, own=os.getpid())
        held = ((self.adopt(self._identify(seen[pid])), seen[pid].group) for pid in sorted(pids))
        return [(process, group) for process, group in held if process is not None]


@contextmanager
def _held(processes: Sequence[LinuxProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.close()


def execute(program: Program, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a child as leader of its own session, on any host."""
    output = os.open(program.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        return subprocess.Popen(
            argv,
            env={**program.env, MARK: program.mark},
            cwd=program.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=program.inherits,
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    finally:
        os.close(output)


def hold_child(child: subprocess.Popen[bytes], boot: str) -> LinuxProcess:
    """A child of ours by its pidfd.  Its pid cannot be reused before we have reaped it."""
    child.returncode = 0  # tells Popen's finaliser that there is nothing left for it to do
    process_id = ProcessId(pid=child.pid, started=proc.started_at(child.pid), boot=boot)
    return LinuxProcess(process_id, os.pidfd_open(child.pid), collect_child)


def check_program(name: str, env: Mapping[str, str]) -> None:
    """Raise `DeterministicRefusal` for a program that could not be executed.

    For starts in which a shell executes it, since a shell tells only by its exit code.
    """
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is None:
        kind = errno.EACCES if Path(name).exists() else errno.ENOENT
        raise refusal(OSError(kind, os.strerror(kind)), name)
    try:
        with Path(found).open("rb") as file:
            head = file.read(256)
    except PermissionError:
        return  # may be executed without being readable
    if head.startswith(b"#!"):
        words = head[2:].split(b"\n", 1)[0].split()
        if words and not Path(os.fsdecode(words[0])).exists():
            raise refusal(OSError(errno.ENOENT, "no such interpreter", os.fsdecode(words[0])), name)
    elif not head.startswith(b"\x7fELF"):
        raise refusal(OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC)), name)


def refusal(error: OSError | ValueError, program: str) -> DeterministicRefusal | Retryable:
    """What a failed start means for the next one."""
    if isinstance(error, OSError) and error.errno in _PASSING:
        return Retryable(f"cannot start {program} now: {error.strerror}")
    what = f"{error.strerror} ({error.filename or program})" if isinstance(error, OSError) else str(error)
    return DeterministicRefusal(
        f"this host refuses to start {program}: {what}; check that the path exists here and may be executed, "
        "and that its environment is of sane size"
    )


async def run_command(argv: Sequence[str], *, env: Mapping[str, str], timeout_seconds: float) -> Completed:
    """Run a short command on any host.  One that takes too long is killed."""
    try:
        child = await asyncio.create_subprocess_exec(
            *argv,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except (OSError, ValueError) as error:
        raise Retryable(f"cannot run {argv[0]}: {error}") from error
    try:
        output, _ = await outputs(child, seconds=timeout_seconds)
    except TimeoutError as error:
        raise Retryable(f"{argv[0]} did not end within {timeout_seconds:g} s") from error
    assert child.returncode is not None
    return Completed(code=child.returncode, output=output[-OUTPUT_BYTES_MAX:].decode(errors="replace"))


def exit_of(status: int) -> Exit:
    """From a wait status as `waitpid` gives it."""
    code = os.waitstatus_to_exitcode(status)
    return Exit(signal=-code) if code < 0 else Exit(code=code)


def collect_child(pidfd: int) -> Exit:
    """Reap a child of ours that has ended."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return Exit()
    if result is None:
        return Exit()
    return Exit(code=result.si_status) if result.si_code == os.CLD_EXITED else Exit(signal=result.si_status)


def _rank(seen: proc.Seen) -> tuple[bool, int]:
    """Session leaders first, older ones first."""
    return (seen.session != seen.pid, seen.started)
