"""How QEMU is told what machine to make: one command line.

The guest sees the same as under firecracker: a root drive that it cannot write, an overlay drive, one network
interface, a console.  Its boot data comes by a serial port of its own (`PORT`) that is written once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kici.decide.microvm import Guest, Machine

PID_FILE: Final = "qemu.pid"
MONITOR: Final = "qmp.sock"
BOOT_PIPE: Final = "boot"
"""Two files: what the guest reads of comes by `boot.in`, and what it writes goes to `boot.out`, which is nowhere."""
PORT: Final = "kici.boot"
"""Name of the guest's serial port with the boot data."""
PROGRAMS: Final = {"x64": "qemu-system-x86_64", "arm64": "qemu-system-aarch64"}
_MACHINES: Final = {"x64": "q35,sata=off,smbus=off,usb=off,vmport=off", "arm64": "virt"}
_QUIET_BOOT: Final = (
    "quiet",
    "mitigations=off",
    "tsc=reliable",
    "no_timer_check",
    "cryptomgr.notests",
    "nowatchdog",
    "rcupdate.rcu_expedited=1",
)
"""What an emulated guest need not do while it boots; none of it weakens the border between guest and host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuHost:
    """What decides on the processor of a guest."""

    arch: str
    """`x64` or `arm64`, as this host is."""
    has_kvm: bool
    """`/dev/kvm` can be opened by us, and the processor has what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuFiles:
    """Paths of one machine's files."""

    kernel: str
    initrd: str | None
    rootfs: str
    overlay: str
    folder: str
    """Where sockets and the PID file are."""


def accelerator(wanted: str, host: QemuHost) -> str:
    """`kvm` or `tcg`.  Raises `ValueError` with the reason when the wanted one is not there."""
    if wanted == "kvm" and not host.has_kvm:
        raise ValueError("accel: kvm is asked for, but /dev/kvm cannot be used here; accel: tcg emulates instead")
    return "kvm" if host.has_kvm and wanted != "tcg" else "tcg"


def extra_boot_args(accel: str) -> Sequence[str]:
    return _QUIET_BOOT if accel == "tcg" else ("quiet",)


def qemu_argv(  # noqa: PLR0913  # a machine has these parts
    program: str,
    *,
    vm_id: str,
    arch: str,
    accel: str,
    machine: Machine,
    guest: Guest,
    files: QemuFiles,
    args: str,
    run_as: tuple[int, int] | None,
    is_restored: bool = False,
) -> tuple[str, ...]:
    """The whole command line.  The guest does not run yet: it waits for `cont`, a restored one for its past before."""
    elevate = "allow" if run_as else "deny"
    return (
        program,
        *("-name", vm_id),
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-S",
        *(("-incoming", "defer") if is_restored else ()),
        *("-display", "none"),
        *("-accel", accel),
        *("-M", _MACHINES[arch]),
        *("-cpu", "host" if accel == "kvm" else "max"),
        *("-smp", str(machine.vcpus)),
        *("-m", f"{machine.mem_mib}M"),
        *("-kernel", files.kernel),
        *(() if files.initrd is None else ("-initrd", files.initrd)),
        *("-append", args),
        *_drive("rootfs", files.rootfs, "readonly=on,file.locking=off"),
        *_drive("overlay", files.overlay, "cache=unsafe,discard=unmap"),
        *("-netdev", f"tap,id=net,ifname={guest.tap},script=no,downscript=no"),
        *("-device", f"virtio-net-pci,netdev=net,mac={guest.mac},romfile="),
        *("-chardev", f"pipe,id=boot,path={files.folder}/{BOOT_PIPE}"),
        *("-device", "virtio-serial-pci"),
        *("-device", f"virtserialport,chardev=boot,name={PORT}"),
        *("-qmp", f"unix:{files.folder}/{MONITOR},server=on,wait=off"),
        *("-pidfile", f"{files.folder}/{PID_FILE}"),
        *("-serial", "stdio"),
        *("-monitor", "none"),
        *(() if run_as is None else ("-runas", f"{run_as[0]}:{run_as[1]}")),
        *("-sandbox", f"on,obsolete=deny,elevateprivileges={elevate},spawn=deny,resourcecontrol=deny"),
    )


def names_vm(argv: Sequence[str], vm_id: str, *, kernel: str) -> bool:
    """Whether a command line is one of ours for this machine.

    Other coordinators of the host draw ids of their own, so the folder has to be the machine's too: its `kernel`.
    """
    return {("-name", vm_id), ("-kernel", kernel)} <= set(pairwise(argv))


def _drive(name: str, path: str, options: str) -> tuple[str, ...]:
    return (
        *("-drive", f"id={name},file={path},format=raw,if=none,{options}"),
        *("-device", f"virtio-blk-pci,drive={name}"),
    )
