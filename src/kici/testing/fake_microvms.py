"""A host of microVMs in memory: a VMM, a bridge and drives under the ports of the real ones.

`FakeMicroVmHost` is the machine: it outlives the backend of one coordinator.  What a guest does is said by scripts,
by label set; what goes wrong by `faults`, which name a call and the error that it raises.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from itertools import count
from pathlib import Path
from typing import Any

from kici.decide.isolate import Needs, Policy, name_of
from kici.decide.microvm import Bridge, Guest, VmmKind
from kici.decide.microvm_probe import GONE, Liveness, Probe
from kici.domain.errors import Conflict, KiciError, Retryable
from kici.domain.ids import AgentId, Instant
from kici.ports.host_network import BridgeHealth
from kici.ports.processes import Exit, ProcessId
from kici.ports.vmm import RunningVm, SnapshotUnusable, VmPlace, VmSpec, VmStart
from kici.testing.fake_files import FakeFiles

BRIDGE = Bridge(
    name="kici-br0",
    cidr=IPv4Network("10.0.0.0/24"),
    gateway=IPv4Address("10.0.0.1"),
    netmask=IPv4Address("255.255.255.0"),
    table="kici",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestScript:
    """What a guest does once it is started."""

    prints: str = "ready\n"
    launch_seconds: float = 0.0
    lives_seconds: float | None = None
    """None: until it is ended."""
    is_deaf: bool = False
    """Does not end when it is asked."""
    warms: str | None = "kici-init: warm address clock entropy mac\n"
    """What it prints when it is told only to warm up; None: it does not understand, and ends."""
    warm_seconds: float = 1.0


@dataclass(slots=True, eq=False)
class FakeProcess:
    """The VMM of one machine."""

    vm_id: AgentId
    folder: Path
    id: ProcessId
    is_booted: bool = False
    start: VmStart | None = None
    boot_data: Mapping[str, Any] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_confirmed: bool = True
    resists: bool = False
    """Nobody may end it."""

    def end(self) -> None:
        self.ended.set()


class FakeMicroVmHost:
    def __init__(self, files: FakeFiles) -> None:
        self.files = files
        self.processes: dict[AgentId, FakeProcess] = {}
        self.taps: dict[str, bool] = {}
        """Name, and whether its link is up."""
        self.rules: dict[str, tuple[str, str]] = {}
        """By address: whose, and the interface that it may come from."""
        self.folders: dict[Path, Instant] = {}
        self.script = GuestScript()
        self.faults: dict[str, KiciError] = {}
        self.calls: list[str] = []
        self.is_healthy = True
        self.free_bytes = 2**40
        self.fingerprint = "a VMM"
        self.images: dict[Path, str] = {}
        """Which file a path is; any other than those here is what its path says."""
        self.on_provision: Callable[[], None] = lambda: None
        self._pids = count(500)

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            raise self.faults[name]

    def running(self) -> dict[AgentId, FakeProcess]:
        return {vm_id: each for vm_id, each in self.processes.items() if not each.ended.is_set()}

    def next_pid(self) -> int:
        return next(self._pids)


class FakeRunningVm:
    def __init__(self, process: FakeProcess) -> None:
        self._process = process

    @property
    def id(self) -> ProcessId:
        return self._process.id

    def is_alive(self) -> bool:
        return not self._process.ended.is_set()

    async def wait(self) -> Exit:
        await self._process.ended.wait()
        return Exit()

    def kill_now(self) -> bool:
        if self._process.resists:
            return False
        self._process.end()
        return True

    async def kill(self) -> None:
        if not self.kill_now():
            raise Retryable(f"process {self.id.pid} is another user's")
        await asyncio.sleep(0)

    def close(self) -> None:
        return


class FakeVmm:
    def __init__(self, host: FakeMicroVmHost) -> None:
        self._host = host

    @property
    def kind(self) -> str:
        return VmmKind.FIRECRACKER

    @property
    def owner(self) -> tuple[int, int] | None:
        return (10_000, 10_000)

    @property
    def opens_interface_at_launch(self) -> bool:
        return False

    @property
    def files(self) -> Mapping[str, str]:
        return {"kernel": "kernel", "initrd": "initrd", "rootfs": "rootfs", "overlay": "overlay", "log": "vmm.log"}

    async def launch(self, spec: VmSpec) -> RunningVm:
        host = self._host
        host.called("launch")
        await asyncio.sleep(host.script.launch_seconds)
        process_id = ProcessId(pid=host.next_pid(), started=1, boot="boot-1")
        process = FakeProcess(spec.place.vm_id, spec.place.folder, process_id)
        host.processes[spec.place.vm_id] = process
        return FakeRunningVm(process)

    async def boot(self, spec: VmSpec) -> None:
        host = self._host
        host.called("boot")
        is_up = host.taps.get(spec.guest.tap)
        process = host.processes[spec.place.vm_id]
        if spec.start is VmStart.WARM_UP:
            assert is_up is False, "what is only to be copied has an interface, whose link is down"
        else:
            assert is_up, "rules and link come before the guest"
        if spec.start is VmStart.RESTORE:
            for name in self.snapshot_files:
                if host.files.contents.get(spec.place.root / name) != b"guest":
                    raise SnapshotUnusable(f"{name} is no snapshot")
        process.is_booted, process.boot_data, process.start = True, spec.boot_data, spec.start
        if spec.start is VmStart.WARM_UP:
            asyncio.get_running_loop().call_later(host.script.warm_seconds, self._warm, spec.place, process)
            return
        host.files.append(spec.place.console, host.script.prints.encode())
        if host.script.lives_seconds is not None:
            asyncio.get_running_loop().call_later(host.script.lives_seconds, process.end)

    def _warm(self, place: VmPlace, process: FakeProcess) -> None:
        if self._host.script.warms is None:
            process.end()
        elif not process.ended.is_set():
            self._host.files.append(place.console, self._host.script.warms.encode())

    @property
    def snapshot_files(self) -> tuple[str, ...]:
        return "memory", "state"

    def fingerprint(self) -> str:
        return self._host.fingerprint

    async def snapshot(self, place: VmPlace) -> None:
        self._host.called("snapshot")
        for name in self.snapshot_files:
            self._host.files.contents[place.root / name] = b"guest"

    async def forget_boot_data(self, place: VmPlace) -> None:
        self._host.called("forget")
        if place.vm_id in self._host.processes:
            self._host.processes[place.vm_id].boot_data = None

    async def ask_to_stop(self, place: VmPlace) -> bool:
        self._host.called("ask")
        if not self._host.script.is_deaf:
            self._host.processes[place.vm_id].end()
        return True

    def probe(self, place: VmPlace) -> Probe:
        process = self._host.processes.get(place.vm_id)
        if process is None or process.ended.is_set():
            return GONE
        return Probe(
            liveness=Liveness.RUNNING,
            pid=process.id.pid,
            started=process.id.started,
            started_at=Instant(1),
            is_confirmed=process.is_confirmed,
            detail="" if process.is_confirmed else "it is called 'bash'",
        )

    def hold(self, place: VmPlace, probe: Probe) -> RunningVm | None:
        process = self._host.processes.get(place.vm_id)
        return None if process is None or process.ended.is_set() else FakeRunningVm(process)

    async def tidy(self, place: VmPlace) -> None:
        self._host.called("tidy")

    async def problems(self) -> list[str]:
        return []


class FakeHostNetwork:
    def __init__(self, host: FakeMicroVmHost, bridge: Bridge = BRIDGE) -> None:
        self._host = host
        self._bridge = bridge

    @property
    def bridge(self) -> Bridge:
        return self._bridge

    async def health(self) -> BridgeHealth:
        self._host.called("health")
        return BridgeHealth(faults=() if self._host.is_healthy else ("it is broken",))

    async def provision(self) -> None:
        self._host.called("provision")
        self._host.is_healthy = True
        self._host.on_provision()

    async def probe_isolation(self) -> None:
        self._host.called("probe_isolation")

    async def make_tap(self, guest: Guest, *, owner: int | None) -> None:
        self._host.called("make_tap")
        await asyncio.sleep(0)
        if guest.tap in self._host.taps:
            raise Conflict(f"there is an interface {guest.tap} already")
        self._host.taps[guest.tap] = False

    async def admit(self, guest: Guest, *, policy: Policy, needs: Needs) -> None:
        self._host.called("admit")
        await asyncio.sleep(0)
        self._host.rules[str(guest.address)] = (name_of(guest.vm_id), guest.tap)

    async def link_up(self, guest: Guest) -> None:
        self._host.called("link_up")
        assert str(guest.address) in self._host.rules, "rules come before the link"
        self._host.taps[guest.tap] = True

    async def dismiss(self, guest: Guest) -> None:
        self._host.called("dismiss")
        await asyncio.sleep(0)
        if self._host.rules.get(str(guest.address), ("",))[0] == name_of(guest.vm_id):
            del self._host.rules[str(guest.address)]

    async def remove_tap(self, name: str) -> bool:
        self._host.called("remove_tap")
        await asyncio.sleep(0)
        return self._host.taps.pop(name, None) is not None

    async def taps(self) -> Sequence[str]:
        return sorted(self._host.taps)

    async def admitted(self) -> dict[str, str]:
        return {address: owner for address, (owner, _) in self._host.rules.items()}


class FakeDrives:
    def __init__(self, host: FakeMicroVmHost) -> None:
        self._host = host

    async def prewarm(self, size_mib: int) -> None:
        self._host.called("prewarm")

    async def make_overlay(self, target: Path, size_mib: int, *, owner: tuple[int, int] | None) -> None:
        self._host.called("make_overlay")
        await asyncio.sleep(0)
        self._host.files.contents[target] = b"drive"

    async def bring(self, source: Path, target: Path, *, reader: int | None) -> None:
        self._host.called(f"bring {source}")
        self._host.files.contents[target] = self._host.files.contents.get(source, b"image")

    def identity(self, path: Path) -> str:
        self._host.called(f"bring {path}")
        return self._host.images.get(path, str(path))

    async def keep(self, source: Path, target: Path, *, root: Path) -> None:
        self._host.called("keep")
        self._host.files.contents[target] = self._host.files.contents.pop(source)

    async def copy(self, source: Path, target: Path, *, owner: tuple[int, int] | None) -> None:
        self._host.called("copy")
        if source not in self._host.files.contents:
            raise Retryable(f"there is no {source}")
        self._host.files.contents[target] = self._host.files.contents[source]

    def rename(self, folder: Path, target: Path) -> None:
        self._host.folders[target] = self._host.folders.pop(folder)
        self._host.folders.setdefault(target.parent, Instant(0))
        self._host.files.contents = {
            (target / path.relative_to(folder) if folder in path.parents else path): data
            for path, data in self._host.files.contents.items()
        }

    def touch(self, folder: Path) -> None:
        self._host.called(f"touch {folder.name}")

    async def discard(self) -> int:
        self._host.called("discard")
        return 0

    def free_bytes(self, path: Path) -> int:
        return self._host.free_bytes

    async def make_folder(self, path: Path) -> None:
        self._host.called("make_folder")
        if path in self._host.folders:
            raise Conflict(f"folder {path} is there already, and not ours")
        self._host.folders[path] = Instant(0)

    async def make_file(self, path: Path, *, owner: tuple[int, int] | None) -> None:
        self._host.called("make_file")
        self._host.files.contents[path] = b""

    async def open_up(self, root: Path) -> None:
        self._host.called("open_up")

    async def remove(self, folder: Path) -> None:
        self._host.called("remove")
        await asyncio.sleep(0)
        for path in [each for each in self._host.folders if each == folder or folder in each.parents]:
            del self._host.folders[path]
        await self._host.files.remove_folder(folder)

    def folders(self, base: Path) -> dict[str, Instant]:
        found = {path.name: at for path, at in self._host.folders.items() if path.parent == base}
        return {name: at for name, at in found.items() if not name.startswith(".")}
