"""QEMU as the program of microVMs, with the kernel's help or without.  Contract: `ports.vmm.Vmm`.

Boot data goes through a serial port, by way of a pipe that only we and the machine's process open: it stays there when
we end, until the guest reads it, and nothing of it is left then.  The machine's process holds a lock on its PID file,
which is how its number is proven.
"""

import asyncio
import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kici.adapters import vm_processes
from kici.adapters.firecracker_api import POLL_SECONDS, POLL_SECONDS_MAX
from kici.adapters.host_commands import PATH, HostCommands
from kici.adapters.qmp import Qmp
from kici.adapters.vm_processes import HeldVm, end_remains
from kici.decide.microvm import VmmKind
from kici.decide.microvm_boot import boot_args
from kici.decide.microvm_firecracker import INITRD, KERNEL, OVERLAY, ROOTFS, STATE
from kici.decide.microvm_probe import GONE, Probe
from kici.decide.microvm_qemu import (
    BOOT_PIPE,
    MONITOR,
    PID_FILE,
    PROGRAMS,
    QemuFiles,
    QemuHost,
    accelerator,
    extra_boot_args,
    names_vm,
    qemu_argv,
)
from kici.domain.errors import DeterministicRefusal, KiciError, Permanent, Retryable
from kici.kit.finish import finish
from kici.ports.processes import Process, Processes, Program
from kici.ports.vmm import RunningVm, SnapshotUnusable, VmPlace, VmSpec, VmStart

log = logging.getLogger(__name__)

KVM: Final = Path("/dev/kvm")
SNAPSHOT_SECONDS: Final = 120.0
"""Longest that a guest's memory may take to be written or read."""
_AT_ONCE: Final = 2**40
"""Bytes per second; QEMU holds back otherwise, for a network that is not there."""
_CTRL_ALT_DEL: Final = [{"type": "qcode", "data": key} for key in ("ctrl", "alt", "delete")]
_FLOCK: Final = "hhqqi4x"
_TAIL_BYTES: Final = 2048
_PIPE_BYTES_MAX: Final = 1024 * 1024
_UNDO_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuTools:
    processes: Processes
    commands: HostCommands
    boot: str
    """Which run of the host's kernel this is."""
    accel: str
    """`auto`, `kvm` or `tcg`, as configured."""
    run_as: tuple[int, int] | None = None
    """uid and gid that machines run as; None: ours."""
    socket_wait_ms: Callable[[], int] = lambda: 30_000
    """How long a new process may take to answer, asked for each start."""
    host: QemuHost = field(default_factory=lambda: this_qemu_host())


def this_qemu_host() -> QemuHost:
    arch = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine())
    return QemuHost(arch=arch, has_kvm=_has_kvm(arch))


def _has_kvm(arch: str) -> bool:
    """A kernel may offer the device on a processor that cannot run guests; they would then only seem to start."""
    if not os.access(KVM, os.R_OK | os.W_OK):
        return False
    if arch != "x64":
        return True
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return " vmx" in flags or " svm" in flags


class QemuVmm:
    def __init__(self, tools: QemuTools) -> None:
        self._tools = tools

    @property
    def kind(self) -> str:
        return VmmKind.QEMU

    @property
    def owner(self) -> tuple[int, int] | None:
        return self._tools.run_as

    @property
    def opens_interface_at_launch(self) -> bool:
        return True

    @property
    def files(self) -> Mapping[str, str]:
        return {"kernel": KERNEL, "initrd": INITRD, "rootfs": ROOTFS, "overlay": OVERLAY}

    async def launch(self, spec: VmSpec) -> RunningVm:
        what = f"starting QEMU for {spec.place.vm_id}"
        argv = self._argv(spec)
        try:
            vm = await self._launch(spec, argv)
            if spec.start is VmStart.RESTORE:
                try:
                    await self._load(spec.place)
                except BaseException:
                    vm.close()
                    raise
            return vm
        except BaseException:
            left = self.hold(spec.place, self.probe(spec.place))
            await finish(end_remains(left, spec.place), seconds=_UNDO_SECONDS, what=f"undoing {what}")
            raise

    async def boot(self, spec: VmSpec) -> None:
        place = spec.place
        try:
            _hand_over(place, json.dumps(spec.boot_data, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise Retryable(
                f"QEMU did not take the boot data of {place.vm_id}: {error!r}{_last_words(place)}"
            ) from error
        async with await Qmp.open(place.root / MONITOR) as qmp:
            await qmp.execute("cont")

    @property
    def snapshot_files(self) -> tuple[str, ...]:
        return (STATE,)

    def fingerprint(self) -> str:
        tools = self._tools
        return f"{vm_processes.identity(self._program())}:{self._accelerator()}:{tools.boot}"

    async def snapshot(self, place: VmPlace) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        async with await Qmp.open(place.root / MONITOR) as qmp:
            await qmp.execute("stop")
            await qmp.execute("migrate-set-parameters", **{"max-bandwidth": _AT_ONCE})
            file = os.open(place.root / STATE, flags, 0o600)
            try:
                await qmp.hand_over("snapshot", file)
            finally:
                os.close(file)
            await qmp.execute("migrate", uri="fd:snapshot")
            await _migrated(qmp)

    async def _load(self, place: VmPlace) -> None:
        try:
            file = os.open(place.root / STATE, os.O_RDONLY | os.O_CLOEXEC)
            try:
                async with await Qmp.open(place.root / MONITOR) as qmp:
                    await qmp.hand_over("snapshot", file)
                    await qmp.execute("migrate-incoming", uri="fd:snapshot")
                    await _migrated(qmp)
            finally:
                os.close(file)
        except (OSError, KiciError) as error:
            raise SnapshotUnusable(f"QEMU cannot be restored: {error}{_last_words(place)}") from error

    async def forget_boot_data(self, place: VmPlace) -> None:
        try:
            pipe = os.open(_pipe(place), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise Retryable(f"the boot data of {place.vm_id} cannot be cleared: {error.strerror}") from error
        try:
            with suppress(BlockingIOError):
                while os.read(pipe, _PIPE_BYTES_MAX):
                    pass
        finally:
            os.close(pipe)

    async def ask_to_stop(self, place: VmPlace) -> bool:
        try:
            async with await Qmp.open(place.root / MONITOR) as qmp:
                await qmp.execute("send-key", keys=_CTRL_ALT_DEL)
        except (Retryable, Permanent):
            return False
        return True

    def probe(self, place: VmPlace) -> Probe:
        path = place.root / PID_FILE
        name = self._process_name()
        found = vm_processes.probe_pid_file(path, name=name, faults=lambda pid: _faults(pid, place))
        return found or self._search(place, name)

    def hold(self, place: VmPlace, probe: Probe) -> HeldVm | None:
        uid = None if self._tools.run_as is None else self._tools.run_as[0]
        return vm_processes.hold(probe, boot=self._tools.boot, commands=self._tools.commands, uid=uid)

    async def tidy(self, place: VmPlace) -> None:
        """Nothing of it is outside."""

    async def problems(self) -> list[str]:
        found = []
        try:
            _ = self._program()
            _ = self._accelerator()
        except DeterministicRefusal as error:
            found.append(str(error))
        return found

    # ------------------------------------------------------------------ starting

    async def _launch(self, spec: VmSpec, argv: tuple[str, ...]) -> HeldVm:
        place = spec.place
        _make_pipe(place)
        process = await self._tools.processes.start(
            Program(argv=argv, env={"PATH": PATH}, cwd=place.folder, output=place.console, mark=spec.mark)
        )
        seconds = self._tools.socket_wait_ms() / 1000
        try:
            async with asyncio.timeout(seconds):
                await self._up(place, process)
        except TimeoutError as error:
            raise Retryable(f"QEMU did not open its monitor within {seconds:g} s{_last_words(place)}") from error
        finally:
            process.close()
        vm = self.hold(place, self.probe(place))
        if vm is None:
            raise DeterministicRefusal(f"QEMU ended as soon as it had started{_last_words(place)}")
        return vm

    async def _up(self, place: VmPlace, process: Process) -> None:
        pause = POLL_SECONDS
        while process.is_alive():
            try:
                async with await Qmp.open(place.root / MONITOR):
                    return
            except Retryable:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, POLL_SECONDS_MAX)
        raise DeterministicRefusal(f"QEMU {await process.wait()} at its start{_last_words(place)}")

    def _accelerator(self) -> str:
        try:
            return accelerator(self._tools.accel, self._tools.host)
        except ValueError as error:
            raise DeterministicRefusal(str(error)) from error

    def _argv(self, spec: VmSpec) -> tuple[str, ...]:
        root, host, accel = spec.place.root, self._tools.host, self._accelerator()
        bridge = None if spec.start is VmStart.WARM_UP else spec.bridge
        return qemu_argv(
            self._program(),
            vm_id=spec.place.vm_id,
            arch=host.arch,
            accel=accel,
            machine=spec.machine,
            guest=spec.guest,
            files=QemuFiles(
                kernel=str(root / KERNEL),
                initrd=str(root / INITRD) if spec.has_initrd else None,
                rootfs=str(root / ROOTFS),
                overlay=str(root / OVERLAY),
                folder="root",  # relative, since names of sockets are short
            ),
            args=boot_args(spec.guest, bridge, more=extra_boot_args(accel)),
            run_as=self._tools.run_as,
            is_restored=spec.start is VmStart.RESTORE,
        )

    def _program(self) -> str:
        name = PROGRAMS.get(self._tools.host.arch)
        if name is None:
            raise DeterministicRefusal(f"vmm: qemu does not know how to make guests of {self._tools.host.arch}")
        found = shutil.which(name, path=PATH)
        if found is None:
            raise DeterministicRefusal(f"{name} is not installed on this host; install the package qemu-system")
        return found

    def _process_name(self) -> str:
        return PROGRAMS.get(self._tools.host.arch, "")[:15]

    def _search(self, place: VmPlace, name: str) -> Probe:
        """Without a PID file: a process that its command line says is this machine's."""

        def matches(found: str, words: list[str]) -> bool:
            return found == name and _is_of(place, words)

        if not place.console.exists():  # what it prints goes there from the start
            return GONE
        for pid in vm_processes.find(matches):
            return vm_processes.look_at(pid, time.time(), name=name, faults=lambda _: ())
        return GONE


def _pipe(place: VmPlace) -> Path:
    return place.root / f"{BOOT_PIPE}.in"


def _make_pipe(place: VmPlace) -> None:
    """For our own eyes, in a folder that is."""
    try:
        os.mkfifo(_pipe(place), 0o600)
        (place.root / f"{BOOT_PIPE}.out").symlink_to(os.devnull)
    except OSError as error:
        raise Retryable(f"cannot make the pipe of {place.vm_id}: {error.strerror}") from error


def _hand_over(place: VmPlace, data: bytes) -> None:
    """Raises `OSError` when it does not fit, or QEMU does not listen."""
    pipe = os.open(_pipe(place), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < len(data):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, len(data))
        written = os.write(pipe, data)
        if written != len(data):
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes fit into the pipe")
    finally:
        os.close(pipe)


async def _migrated(qmp: Qmp) -> None:
    """Until a guest's memory has been written or read.  Raises `Retryable` or `DeterministicRefusal`."""
    pause = POLL_SECONDS
    try:
        async with asyncio.timeout(SNAPSHOT_SECONDS):
            while (told := await qmp.execute("query-migrate")).get("status") != "completed":
                if told.get("status") in ("failed", "cancelled"):
                    raise DeterministicRefusal(f"QEMU could not move the guest: {told.get('error-desc', told)}")
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, POLL_SECONDS_MAX)
    except TimeoutError as error:
        raise Retryable(f"QEMU did not move the guest within {SNAPSHOT_SECONDS:g} s") from error


def _faults(pid: int, place: VmPlace) -> tuple[str, ...]:
    found = []
    if not _is_of(place, vm_processes.words_of(pid)):
        found.append(f"the command line of process {pid} does not name {place.vm_id} in {place.folder}")
    holder = lock_holder(place.root / PID_FILE)
    if holder not in (pid, None):
        found.append(f"the PID file is held by process {holder}")
    return tuple(found)


def _is_of(place: VmPlace, words: list[str]) -> bool:
    return names_vm(words, place.vm_id, kernel=str(place.root / KERNEL))


def lock_holder(path: Path) -> int | None:
    """Who has locked a file; 0 for nobody, None when that cannot be seen."""
    try:
        with path.open("r+b") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            told = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return None
    return 0 if told[0] == fcntl.F_UNLCK else int(told[4])


def _last_words(place: VmPlace) -> str:
    try:
        text = place.console.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
    words = "".join(c for c in text if c == "\n" or c.isprintable()).strip()
    return f"; it said:\n{words}" if words else ""
