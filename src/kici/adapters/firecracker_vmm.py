"""The firecracker program and its jailer.  Contract: `ports.vmm.Vmm`.

The jailer makes the machine's root, becomes a user without rights, and starts firecracker in a PID namespace of its
own; its own process ends at once, with a code that tells only whether that much worked.  From then on the PID file
in the machine's root names the process, and its interface answers on a socket there.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from kici.adapters import vm_processes
from kici.adapters.firecracker_api import CALL_SECONDS, POLL_SECONDS, POLL_SECONDS_MAX, ApiRefused, FirecrackerApi
from kici.adapters.host_commands import PATH, HostCommands
from kici.adapters.vm_processes import HeldVm, end_remains
from kici.decide.launch import CgroupSupport
from kici.decide.microvm import VmmKind
from kici.decide.microvm_boot import EMPTY, boot_args
from kici.decide.microvm_firecracker import (
    INITRD,
    KERNEL,
    MEMORY,
    OVERLAY,
    PID_FILE,
    RENAMES_SINCE,
    ROOTFS,
    SOCKET,
    STATE,
    VMM_LOG,
    ApiCall,
    Jail,
    boot_calls,
    can_rename,
    cgroup_options,
    jailer_argv,
    load_call,
    resume_calls,
    snapshot_calls,
)
from kici.decide.microvm_probe import GONE, Liveness, Probe
from kici.domain.errors import DeterministicRefusal, KiciError, Permanent, Retryable
from kici.kit.finish import finish
from kici.ports.processes import Processes, ProcessId, Program
from kici.ports.vmm import RunningVm, SnapshotUnusable, VmPlace, VmSpec, VmStart

log = logging.getLogger(__name__)

NAME: Final = "firecracker"
KVM: Final = Path("/dev/kvm")
_CGROUPS: Final = Path("/sys/fs/cgroup")
SNAPSHOT_SECONDS: Final = 120.0
"""Longest that a guest's memory may take to be written or read."""
FORGET_TRIES: Final = 3
_TAIL_BYTES: Final = 2048
FULL_BYTES: Final = 4 * 1024 * 1024
"""Less room than the jailer needs for its copy of firecracker."""
_SPARE_SECONDS: Final = 15.0
"""What clean-up of a failed start may take on top of the wait for the socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirecrackerTools:
    processes: Processes
    commands: HostCommands
    cgroups: CgroupSupport
    boot: str
    """Which run of the host's kernel this is."""
    socket_wait_ms: Callable[[], int]
    """How long a new VMM may take to answer, asked for each start."""
    netns: str | None = None
    """Network namespace that the VMM is put into; None: ours."""


class FirecrackerVmm:
    def __init__(self, jail: Jail, tools: FirecrackerTools) -> None:
        self._jail = jail
        self._tools = tools

    @property
    def kind(self) -> str:
        return VmmKind.FIRECRACKER

    @property
    def owner(self) -> tuple[int, int]:
        return self._jail.uid, self._jail.gid

    @property
    def opens_interface_at_launch(self) -> bool:
        return False

    @property
    def files(self) -> Mapping[str, str]:
        return {"kernel": KERNEL, "initrd": INITRD, "rootfs": ROOTFS, "overlay": OVERLAY, "log": VMM_LOG}

    async def launch(self, spec: VmSpec) -> RunningVm:
        place, seconds = spec.place, self._tools.socket_wait_ms() / 1000
        what = f"starting the VMM of {place.vm_id}"
        try:
            async with asyncio.timeout(seconds):
                # Not cut in half: between the jailer's fork and its PID file nobody could tell what it started.
                await finish(self._jailed(spec, seconds), seconds=seconds + _SPARE_SECONDS, what=what)
                return await self._up(place)
        except BaseException as error:
            left = self.hold(place, self.probe(place))
            await finish(end_remains(left, place), seconds=_SPARE_SECONDS, what=f"undoing {what}")
            if isinstance(error, TimeoutError):
                raise Retryable(
                    f"the VMM of {place.vm_id} did not open its socket within {seconds:g} s "
                    f"(firecracker_api_socket_wait_ms){_last_words(place)}"
                ) from error
            raise

    async def boot(self, spec: VmSpec) -> None:
        if spec.start is VmStart.RESTORE:
            await self._restore(spec)
            return
        args = boot_args(spec.guest, None if spec.start is VmStart.WARM_UP else spec.bridge)
        calls = boot_calls(spec.machine, spec.guest, args=args, has_initrd=spec.has_initrd, metadata=spec.boot_data)
        await self._send(spec.place, calls)

    async def _restore(self, spec: VmSpec) -> None:
        try:
            await self._send(spec.place, [load_call(spec.guest)], seconds=SNAPSHOT_SECONDS)
        except KiciError as error:
            raise SnapshotUnusable(str(error)) from error
        await self._send(spec.place, resume_calls(spec.boot_data))

    @property
    def snapshot_files(self) -> tuple[str, ...]:
        return MEMORY, STATE

    def fingerprint(self) -> str:
        return f"{vm_processes.identity(self._jail.firecracker)}:{self._tools.boot}"

    async def snapshot(self, place: VmPlace) -> None:
        async with await FirecrackerApi.open(self._socket(place)) as api:
            told = await api.send(ApiCall(method="GET", path="/version", body=None))
        version = str(told.get("firecracker_version"))
        if not can_rename(version):
            wanted = ".".join(map(str, RENAMES_SINCE))
            raise DeterministicRefusal(
                f"firecracker {version} cannot give the interface of a restored machine another name; {wanted} can"
            )
        await self._send(place, snapshot_calls(), seconds=SNAPSHOT_SECONDS)

    async def _send(self, place: VmPlace, calls: list[ApiCall], *, seconds: float = CALL_SECONDS) -> None:
        """One after the other."""
        async with await FirecrackerApi.open(self._socket(place)) as api:
            for call in calls:
                try:
                    await api.send(call, seconds=seconds)
                except Retryable as error:
                    raise Retryable(f"{error}{_last_words(place)}") from error

    async def forget_boot_data(self, place: VmPlace) -> None:
        for left in reversed(range(FORGET_TRIES)):
            try:
                async with await FirecrackerApi.open(self._socket(place)) as api:
                    await api.send(ApiCall(method="PUT", path="/mmds", body=EMPTY))
            except Retryable as error:
                if not self.probe(place).is_running:
                    return  # and its metadata is gone with it
                if not left:
                    raise Retryable(f"the metadata of {place.vm_id} could not be emptied: {error}") from error
            else:
                return

    async def ask_to_stop(self, place: VmPlace) -> bool:
        try:
            async with await FirecrackerApi.open(self._socket(place)) as api:
                await api.send(ApiCall(method="PUT", path="/actions", body={"action_type": "SendCtrlAltDel"}))
        except (Retryable, Permanent):
            return False
        return True

    def probe(self, place: VmPlace) -> Probe:
        found = vm_processes.probe_pid_file(place.root / PID_FILE, name=NAME, faults=lambda pid: _faults(pid, place))
        return found or self._search(place)

    def hold(self, place: VmPlace, probe: Probe) -> HeldVm | None:
        tools = self._tools
        return vm_processes.hold(probe, boot=tools.boot, commands=tools.commands, uid=self._jail.uid)

    async def tidy(self, place: VmPlace) -> None:
        """The jailer leaves its control groups behind."""
        name = f"{self._jail.parent_cgroup}/{place.vm_id}"
        for folder in (*_CGROUPS.glob(f"*/{name}"), _CGROUPS / name):
            _remove_group(folder)

    async def problems(self) -> list[str]:
        found = []
        for what, path in (("firecrackerPath", self._jail.firecracker), ("jailerPath", self._jail.jailer)):
            state = _state(Path(path), os.X_OK)
            if state is not None:
                found.append(f"{what} {path} {state}; install it or mend the path")
        state = _state(KVM, os.R_OK | os.W_OK)
        if state is not None:
            found.append(f"{KVM} {state}; vmm: qemu with accel: tcg works without it")
        return found

    # ------------------------------------------------------------------ starting

    async def _jailed(self, spec: VmSpec, seconds: float) -> None:
        """Until the jailer has ended, which leaves the VMM's PID file.  Raises `TimeoutError`."""
        place, jail = spec.place, self._jail
        jailer = await self._tools.processes.start(
            Program(
                argv=jailer_argv(jail, place.vm_id, self._options(spec)),
                env={"PATH": PATH},
                cwd=place.folder,
                output=place.console,
                mark=spec.mark,
            )
        )
        try:
            async with asyncio.timeout(seconds):
                exit_ = await jailer.wait()
            if exit_.code != 0:
                raise _not_started(f"the jailer {exit_} during boot", place)
        finally:
            if jailer.is_alive():  # stuck
                await self._kill(jailer.id)
            jailer.close()

    async def _kill(self, process_id: ProcessId) -> None:
        known = Probe(liveness=Liveness.RUNNING, pid=process_id.pid, started=process_id.started)
        held = vm_processes.hold(known, boot=self._tools.boot, commands=self._tools.commands, uid=None)
        if held is not None:
            await held.kill()
            held.close()

    def _options(self, spec: VmSpec) -> tuple[str, ...]:
        limits = cgroup_options(self._tools.cgroups, spec.machine)
        return limits if self._tools.netns is None else ("--netns", self._tools.netns, *limits)

    async def _up(self, place: VmPlace) -> HeldVm:
        """Until the VMM answers; its process, held."""
        vm = self.hold(place, self.probe(place))
        pause = POLL_SECONDS
        try:
            while vm is not None and vm.is_alive():
                if await self._answers(place):
                    return vm
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, POLL_SECONDS_MAX)
        except BaseException:
            if vm is not None:
                vm.close()
            raise
        raise _not_started("the VMM exited during boot", place)

    async def _answers(self, place: VmPlace) -> bool:
        try:
            async with await FirecrackerApi.open(self._socket(place)) as api:
                await api.send(ApiCall(method="GET", path="/", body=None))
        except Retryable:
            return False
        except ApiRefused as error:
            raise _not_started(str(error), place) from error
        return True

    def _search(self, place: VmPlace) -> Probe:
        """Without a PID file: a process that its command line says is this machine's, or its jailer still at work."""
        if not place.console.exists():  # what the jailer prints goes there from the start
            return GONE
        jailer = Path(self._jail.jailer).name[:15]

        def matches(name: str, words: list[str]) -> bool:
            pairs = set(pairwise(words))
            is_ours = name == NAME or ("--chroot-base-dir", self._jail.base) in pairs
            return name in (NAME, jailer) and ("--id", place.vm_id) in pairs and is_ours

        for pid in vm_processes.find(matches):
            if vm_processes.name_of(pid) == jailer:
                return Probe(liveness=Liveness.RUNNING, pid=pid, detail=f"jailer {pid} is still at work")
            if vm_processes.same_folder(pid, place.root) is not False:
                return vm_processes.look_at(pid, time.time(), name=NAME, faults=lambda pid: _faults(pid, place))
        return GONE

    def _socket(self, place: VmPlace) -> Path:
        return place.root / SOCKET


def _state(path: Path, mode: int) -> str | None:
    """What is wrong with a file that we need; None: nothing."""
    if os.access(path, mode):
        return None
    return "may not be used by us" if path.exists() else "is not there"


def _faults(pid: int, place: VmPlace) -> tuple[str, ...]:
    if vm_processes.same_folder(pid, place.root) is False:
        return (f"process {pid} has another root directory",)
    return ()


def _not_started(what: str, place: VmPlace) -> DeterministicRefusal:
    """A program that does not start here will not start here next time either."""
    return DeterministicRefusal(f"{what}{_last_words(place)}")


def _last_words(place: VmPlace) -> str:
    """What the programs said last; on a full disk they could say nothing."""
    space = os.statvfs(place.folder) if place.folder.exists() else None
    if space is not None and space.f_bavail * space.f_frsize < FULL_BYTES:
        return f"; there is no space left on the disk of {place.folder}"
    text = ""
    for path in (place.root / VMM_LOG, place.console):
        try:
            text += path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            continue
    words = "".join(c for c in text if c == "\n" or c.isprintable()).strip()
    return f"; it said:\n{words}" if words else ""


def _remove_group(folder: Path) -> None:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("vm.group_left", extra={"kici": {"folder": str(folder), "error": str(error)}})
