"""The machine behind the interface: QEMU, emulated, made and steered as the requests say."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.microvm.stand_in.api import Config, Refused
from tests.microvm.stand_in.metadata import Metadata
from tests.microvm.stand_in.outside import Outside
from tests.microvm.stand_in.wire import Wire

from kici.adapters.qmp import Qmp
from kici.decide.microvm_qemu import extra_boot_args
from kici.domain.errors import DeterministicRefusal, Retryable

PROGRAM: Final = "/usr/bin/qemu-system-x86_64"
_KEYS: Final = [{"type": "qcode", "data": key} for key in ("ctrl", "alt", "delete")]
SAVE_PAUSE_SECONDS: Final = 0.02


class QemuGuest:
    def __init__(self, outside: Outside, vm_id: str, on_end: Callable[[], None]) -> None:
        self._outside = outside
        self._vm_id = vm_id
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._qmp: Qmp | None = None
        self._metadata: Metadata | None = None

    async def start(self, config: Config, data: Callable[[], object]) -> None:
        if not _is_elf(Path(config.source["kernel_image_path"])):
            raise Refused("Start microvm error: Cannot load kernel: Invalid Elf magic number")
        await self._launch(config, (), data)

    async def load(self, config: Config, memory: Path, data: Callable[[], object]) -> None:
        incoming = f"exec:cat {self._outside.path(str(memory))}"
        await self._launch(config, ("-S", "-incoming", incoming), data)
        while (await self._ask("query-status"))["status"] == "inmigrate":  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(SAVE_PAUSE_SECONDS)

    async def pause(self) -> None:
        await self._ask("stop")

    async def resume(self) -> None:
        await self._ask("cont")

    async def press_ctrl_alt_del(self) -> None:
        await self._ask("send-key", keys=_KEYS)

    async def save(self, memory: Path) -> None:
        await self._ask("migrate", uri=f"exec:cat > {self._outside.path(str(memory))}")
        while (found := await self._ask("query-migrate")).get("status") not in ("completed", "failed"):  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(SAVE_PAUSE_SECONDS)
        if found["status"] == "failed":
            raise Refused(f"Create snapshot error: {found}")

    async def _launch(self, config: Config, more: tuple[str, ...], data: Callable[[], object]) -> None:
        wires = {name: Wire(self._outside, each["host_dev_name"]) for name, each in config.interfaces.items()}
        if config.metadata is not None:
            self._metadata = Metadata(config.metadata, data)
            first = wires[config.metadata["network_interfaces"][0]]
            await self._metadata.serve(first.branch(config.metadata["ipv4_address"]))
        ours, theirs = socket.socketpair()
        with theirs:
            ends = {name: wire.end.fileno() for name, wire in wires.items()}
            argv = (*self._argv(config, theirs.fileno(), ends), *more)
            self._process = self._outside.start(argv, fds=(theirs.fileno(), *ends.values()))
        for wire in wires.values():
            wire.end.close()
            wire.plug_in()
        asyncio.get_running_loop().add_reader(os.pidfd_open(self._process.pid), self._ended)
        self._qmp = Qmp(*await asyncio.open_connection(sock=ours))
        await self._ask("qmp_capabilities")

    async def _ask(self, command: str, **arguments: object) -> Any:
        assert self._qmp is not None, "the guest was started"
        try:
            return await self._qmp.execute(command, **arguments)
        except (Retryable, DeterministicRefusal) as error:
            raise Refused(f"the stand-in's QEMU: {error}") from error

    def _ended(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._on_end()

    def _argv(self, config: Config, monitor: int, ends: Mapping[str, int]) -> tuple[str, ...]:
        path, machine, source = self._outside.path, config.machine, config.source
        args = " ".join((source.get("boot_args") or "", *extra_boot_args("tcg")))
        argv = [
            PROGRAM,
            *("-name", self._vm_id),
            *("-nodefaults", "-no-user-config", "-no-reboot"),
            *("-display", "none", "-accel", "tcg", "-cpu", "max"),
            *("-M", "q35,sata=off,smbus=off,usb=off,vmport=off"),
            *("-smp", str(machine["vcpu_count"]), "-m", f"{machine['mem_size_mib']}M"),
            *("-kernel", path(source["kernel_image_path"]), "-append", args),
            *("-serial", "stdio", "-monitor", "none"),
            *("-chardev", f"socket,id=qmp,fd={monitor}", "-mon", "chardev=qmp,mode=control"),
        ]
        if source.get("initrd_path"):
            argv += ["-initrd", path(source["initrd_path"])]
        drives = sorted(config.drives.values(), key=lambda drive: not drive["is_root_device"])
        for number, drive in enumerate(drives):
            readonly = "readonly=on," if drive.get("is_read_only") else ""
            file = f"file={path(drive['path_on_host'])},format=raw,if=none,file.locking=off"
            argv += ["-drive", f"id=d{number},{readonly}{file}", "-device", f"virtio-blk-pci,drive=d{number}"]
        for number, (name, each) in enumerate(config.interfaces.items()):
            mac = f",mac={each['guest_mac']}" if each.get("guest_mac") else ""
            argv += ["-netdev", f"dgram,id=n{number},local.type=fd,local.str={ends[name]}"]
            argv += ["-device", f"virtio-net-pci,netdev=n{number},romfile={mac}"]
        return tuple(argv)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
