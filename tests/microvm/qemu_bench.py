"""QEMU with a real Linux guest and our real agent in it, on a host in a network namespace."""

from dataclasses import replace
from pathlib import Path

from tests.microvm.lab import Namespace
from tests.microvm.linux_guest import linux_guest
from tests.microvm.real_bench import BRIDGE, RealMicroVmBench

from kici.adapters import proc
from kici.adapters.processes import LinuxProcesses
from kici.adapters.qemu_vmm import QemuTools, QemuVmm, this_qemu_host
from kici.backends.firecracker.settings import MicroVmSet
from kici.decide.isolate import Policy
from kici.decide.microvm import Bridge
from kici.testing.contracts.backend import Kind


def linux_set(kind: Kind) -> MicroVmSet:
    folder = linux_guest()
    return MicroVmSet(
        labels=("linux", kind.value),
        kernel=folder / ("missing" if kind is Kind.REFUSED else "vmlinux"),
        initrd=folder / "vmlinux.initrd",
        rootfs=folder / "rootfs.ext4",
        overlay_mib=64,
        policy=Policy(),
        env={},
        backpressure=None,
        hardware=lambda limits: (1, 256),
    )


class QemuBench(RealMicroVmBench):
    def __init__(self, folder: Path, network: Namespace, *, bridge: Bridge = BRIDGE) -> None:
        super().__init__(folder, network, bridge=bridge)
        self.settings = replace(self.settings, sets=tuple(linux_set(kind) for kind in Kind), stop_seconds=1.0)

    def make_vmm(self) -> QemuVmm:
        host = replace(this_qemu_host(), has_kvm=False)
        tools = QemuTools(
            processes=LinuxProcesses(), commands=self.commands, boot=proc.boot_id(), accel="tcg", host=host
        )
        return QemuVmm(tools)

    def vmm_pids(self) -> dict[str, int]:
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            if b"qemu-system" in words[0] and state != b"Z" and words[1] == b"-name":
                vm_id = words[2].decode()
                if (self.settings.base / "qemu" / vm_id).exists():
                    found[vm_id] = int(entry.name)
        return found
