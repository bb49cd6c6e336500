"""Processes of microVMs: seen through `/proc`, held by pidfd, ended by KILL.

The process of a machine may be another user's, so a signal may be refused; the pidfd proves directly before that the
process is still the one that was meant, and afterwards that it is gone, whoever sent the signal.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kici.adapters import proc
from kici.adapters.host_commands import HostCommands
from kici.adapters.processes import LinuxProcess, collect_child
from kici.decide.microvm_probe import GONE, Liveness, Probe, Sight, judge, parse_pid
from kici.domain.errors import DeterministicRefusal, KiciError, Retryable
from kici.domain.ids import Instant
from kici.ports.processes import ProcessId
from kici.ports.vmm import VmPlace

log = logging.getLogger(__name__)

KILL_SECONDS: Final = 10.0


class HeldVm(LinuxProcess):
    """Contract: `ports.vmm.RunningVm`.  `uid`: the user whom sudo may become to end it; None: no sudo."""

    def __init__(self, process_id: ProcessId, pidfd: int, *, commands: HostCommands, uid: int | None) -> None:
        super().__init__(process_id, pidfd, collect=collect_child)
        self._commands = commands
        self._uid = uid

    def kill_now(self) -> bool:
        if self._pidfd is None:
            return True
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return True

    async def kill(self) -> None:
        if not self.kill_now():
            await self._kill_as_its_user()
        try:
            async with asyncio.timeout(KILL_SECONDS):
                if self.is_alive():
                    await self.wait()
        except TimeoutError as error:
            raise Retryable(f"process {self.id.pid} is still there {KILL_SECONDS:g} s after KILL") from error

    async def _kill_as_its_user(self) -> None:
        pid = self.id.pid
        if self._uid is None or not self._commands.sudo:
            raise Retryable(
                f"process {pid} of a microVM is another user's, and we may not end it: "
                "give us CAP_KILL, run as root, or set requireSudo: true"
            )
        try:
            await self._commands.run("sudo", "-n", "-u", f"#{self._uid}", "kill", "-s", "KILL", str(pid))
        except KiciError as error:
            if self.is_alive():
                raise Retryable(
                    f"process {pid} of a microVM could not be ended as user {self._uid}: {error}; "
                    f"sudoers needs a line such as `kici ALL=(#{self._uid}) NOPASSWD: /usr/bin/kill`"
                ) from error


def hold(probe: Probe, *, boot: str, commands: HostCommands, uid: int | None) -> HeldVm | None:
    """The process that a probe saw; None when it is gone, or another by now."""
    if probe.pid is None or probe.started is None:
        return None
    pidfd = proc.open_same(probe.pid, started=probe.started)
    if pidfd is None:
        return None
    process_id = ProcessId(pid=probe.pid, started=probe.started, boot=boot)
    return HeldVm(process_id, pidfd, commands=commands, uid=uid)


async def end_remains(vm: HeldVm | None, place: VmPlace) -> None:
    """End what a start that failed left running; a failure of that goes into the log only."""
    if vm is None:
        return
    try:
        await vm.kill()
    except KiciError as error:
        log.warning("vm.undo_failed", extra={"kici": {"agent_id": place.vm_id, "error": str(error)}})
    finally:
        vm.close()


def probe_pid_file(
    path: Path, *, name: str, faults: Callable[[int], tuple[str, ...]], root: Path = proc.PROC
) -> Probe | None:
    """What a PID file and `/proc` say; None: there is no PID file.  `faults(pid)`: what contradicts its identity."""
    try:
        text, written = path.read_text(), path.stat().st_mtime
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        # No evidence in either direction, so it may run.
        return Probe(liveness=Liveness.RUNNING, detail=f"{path} cannot be read: {error}")
    pid = parse_pid(text)
    return GONE if pid is None else look_at(pid, written, name=name, faults=faults, root=root)


def look_at(
    pid: int, written: float, *, name: str, faults: Callable[[int], tuple[str, ...]], root: Path = proc.PROC
) -> Probe:
    """Judge the process of this number, which somebody wrote down at this time."""
    seen = proc.look(pid, root)
    if seen is None:
        return GONE
    sight = Sight(
        pid=pid,
        pid_file_at=Instant(int(written * 1000)),
        started=seen.started,
        boot_at=boot_at(root),
        name=name_of(pid, root),
        faults=faults(pid),
    )
    return judge(sight, name=name)


def boot_at(root: Path = proc.PROC) -> Instant:
    """When this host's kernel started, by its own account."""
    for line in (root / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return Instant(int(line.split()[1]) * 1000)
    raise AssertionError(f"{root}/stat has no btime")


def identity(program: str) -> str:
    """Which file a program is, and when it was written."""
    try:
        found = os.stat(program)
    except OSError as error:
        raise DeterministicRefusal(f"{program} cannot be used: {error.strerror}") from error
    return f"{program}:{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def name_of(pid: int, root: Path = proc.PROC) -> str:
    """What the kernel calls a process; empty when it is gone."""
    try:
        return (root / str(pid) / "comm").read_text().removesuffix("\n")
    except OSError:
        return ""


def words_of(pid: int, root: Path = proc.PROC) -> list[str]:
    """A process's command line; empty when it cannot be read."""
    try:
        return (root / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def find(matches: Callable[[str, list[str]], bool], root: Path = proc.PROC) -> Iterator[int]:
    """Processes by name and command line: for machines whose PID file was never written."""
    for entry in os.listdir(root):
        if entry.isdigit() and matches(name_of(int(entry), root), words_of(int(entry), root)):
            yield int(entry)


def same_folder(pid: int, folder: Path, root: Path = proc.PROC) -> bool | None:
    """Whether a process has this folder as its root; None: it does not let us see."""
    try:
        theirs, ours = (root / str(pid) / "root").stat(), folder.stat()
    except OSError:
        return None
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)
