"""Real firecracker and jailer with the tiny guest, in a network namespace, as a bench of the contract of backends."""

import asyncio
import atexit
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cache
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from tests.microvm.firecracker_download import firecracker_folder
from tests.microvm.lab import Namespace, namespace
from tests.microvm.tiny_guest import compile_guest

from kici.adapters import proc
from kici.adapters.block_drives import HostDrives
from kici.adapters.clock import RealClock
from kici.adapters.entropy import SystemEntropy
from kici.adapters.files import RealFiles
from kici.adapters.firecracker_vmm import FirecrackerTools, FirecrackerVmm
from kici.adapters.host_commands import HostCommands
from kici.adapters.host_network import IpHostNetwork
from kici.adapters.ipam import AddressPool, MemoryAddresses
from kici.adapters.processes import LinuxProcesses
from kici.adapters.this_host import this_cgroups
from kici.backends.firecracker.backend import MicroVmBackend
from kici.backends.firecracker.plan import OnStep
from kici.backends.firecracker.settings import MicroVmSet, MicroVmSettings, MicroVmTools
from kici.decide.isolate import Needs, Policy
from kici.decide.microvm import Bridge
from kici.decide.microvm_firecracker import Jail
from kici.domain.ids import AgentId, ScalerName
from kici.domain.resources import NOTHING
from kici.kit.supervise import Supervisor
from kici.ports.backend import SpawnOrder
from kici.ports.processes import MARK
from kici.ports.vmm import Vmm
from kici.testing.contracts.backend import MAX_AGENTS, Heard, Kind

SCALER = ScalerName("vms")
UID = 65_100
BRIDGE = Bridge(
    name="kici-br0",
    cidr=IPv4Network("10.200.0.0/24"),
    gateway=IPv4Address("10.200.0.1"),
    netmask=IPv4Address("255.255.255.0"),
    table="kici",
)
URL = f"ws://{BRIDGE.gateway}:4000/ws"
ENV = {Kind.LIVES: "silent", Kind.SLOW: "silent", Kind.DIES: "exit", Kind.REFUSED: ""}


@cache
def guest_folder() -> Path:
    """Holds the tiny guest and a root file system that it does not look at."""
    folder = Path(tempfile.mkdtemp(prefix="kici-tiny-guest-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    compile_guest(folder)
    (folder / "rootfs.ext4").write_bytes(b"\0" * 65536)
    return folder


def a_set(kind: Kind, *, boot: str | None = None, env: Mapping[str, str] | None = None) -> MicroVmSet:
    kernel = "missing" if kind is Kind.REFUSED else "tiny-guest.elf"
    return MicroVmSet(
        labels=("linux", kind.value),
        kernel=guest_folder() / kernel,
        initrd=None,
        rootfs=guest_folder() / "rootfs.ext4",
        overlay_mib=8,
        policy=Policy(),
        env=env if env is not None else {"TG_BOOT": ENV[kind] if boot is None else boot},
        backpressure=None,
        hardware=lambda limits: (1, 64),
    )


def an_order(agent_id: AgentId, kind: Kind) -> SpawnOrder:
    return SpawnOrder(
        agent_id=agent_id,
        label_set=("linux", kind.value),
        labels=("linux", kind.value, "kici:scaler:vms"),
        gate=frozenset(),
        token="sesame",
        orchestrator_url=URL,
        limits=NOTHING,
        requests=NOTHING,
    )


class RealMicroVmBench:
    """One host: `folder` holds its data directory and its chroots, `network` is its network."""

    def __init__(
        self, folder: Path, network: Namespace, *, bridge: Bridge = BRIDGE, scaler: ScalerName = SCALER
    ) -> None:
        self.heard = Heard()
        self.folder = folder
        self.network = network
        self.bridge = bridge
        self.on_step: OnStep | None = None
        self.commands = HostCommands()
        self.pool: AddressPool | None = None
        self.socket_wait_ms = 30_000
        self.settings = MicroVmSettings(
            scaler=scaler,
            max_agents=MAX_AGENTS,
            sets=tuple(a_set(kind) for kind in Kind),
            base=folder / "jail",
            data_dir=folder / "data",
            stop_seconds=0.2,
        )
        programs = firecracker_folder()
        self.jail = Jail(
            jailer=str(programs / "jailer"),
            firecracker=str(programs / "firecracker"),
            base=str(self.settings.base),
            uid=UID,
            gid=UID,
            parent_cgroup=f"kici-test-{folder.name}",
        )
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        supervisor = await self._stack.enter_async_context(Supervisor("bench"))
        self.addresses = MemoryAddresses(self.pool or AddressPool(), bridge=self.bridge, scaler=self.settings.scaler)
        self.host_network = IpHostNetwork(self.bridge, self.commands)
        self.vmm = self.make_vmm()
        self.drives = HostDrives(self.settings.base / self.vmm.kind, self.commands)
        self.backend = MicroVmBackend(
            settings=self.settings,
            tools=MicroVmTools(
                vmm=self.vmm,
                network=self.host_network,
                addresses=self.addresses,
                drives=self.drives,
                files=RealFiles(),
                clock=RealClock(),
                entropy=SystemEntropy(),
                needs=lambda url: Needs(coordinator_port=4000),
            ),
            supervisor=supervisor,
            on_exit=self.heard.on_exit,
            on_step=self.on_step,
        )

    def make_vmm(self) -> Vmm:
        return FirecrackerVmm(
            self.jail,
            FirecrackerTools(
                processes=LinuxProcesses(),
                commands=self.commands,
                cgroups=this_cgroups().support,
                boot=proc.boot_id(),
                socket_wait_ms=lambda: self.socket_wait_ms,
            ),
        )

    def configure(self, **changes: object) -> None:
        self.settings = replace(self.settings, **changes)  # type: ignore[arg-type]  # as its caller knows

    def order(self, agent_id: AgentId, kind: Kind) -> SpawnOrder:
        return an_order(agent_id, kind)

    def vmm_pids(self) -> dict[str, int]:
        """Running VMMs of this bench by machine, seen without the code under test."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                root = os.stat(entry / "root")
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            if words[0] != b"/firecracker" or state == b"Z":
                continue
            vm_id = words[2].decode()
            place = self.settings.base / "firecracker" / vm_id / "root"
            if place.exists() and (place.stat().st_ino, place.stat().st_dev) == (root.st_ino, root.st_dev):
                found[vm_id] = int(entry.name)
        return found

    def leftovers(self) -> dict[str, set[str]]:
        """Everything of any machine that is on the host, by kind."""
        folders = {path.name for path in self.settings.base.glob("*/scaler-*")}
        rules = self.network.run("nft", "list", "ruleset")
        chains = {word.strip(",") for word in rules.split() if word.startswith(("f_scaler", "i_scaler", "t_scaler"))}
        return {
            "processes": set(self.vmm_pids()) | self._marked(),
            "records": {path.stem for path in (self.settings.data_dir / "microvms").glob("*.json")},
            "folders": folders,
            "interfaces": {name for name in self.network.interfaces() if name.startswith("kici-") and "br" not in name},
            "rules": chains,
            "control groups": {
                str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{self.jail.parent_cgroup}/scaler-*")
            },
        }

    def _marked(self) -> set[str]:
        """Machines of which some program runs that says so in its environment: a jailer at work, QEMU."""
        needle = f"{MARK}={self.settings.data_dir}/microvms/".encode()
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
            except OSError:
                continue
            if state != b"Z":
                found |= {word[len(needle) :].decode() for word in words if word.startswith(needle)}
        return found

    def on_host(self) -> frozenset[AgentId]:
        names: set[str] = set()
        for found in self.leftovers().values():
            names |= found
        ids = {name.replace("_", "-").rsplit("/", 1)[-1] for name in names}
        tails = {name[-8:] for name in ids}
        return frozenset(AgentId(f"scaler-bare-metal-{tail}") for tail in tails)

    async def die(self, agent_id: AgentId) -> None:
        vmm = os.pidfd_open(self.vmm_pids()[agent_id])
        signal.pidfd_send_signal(vmm, signal.SIGKILL)
        await asyncio.to_thread(select.select, [vmm], [], [])  # its root folder goes before it is dead
        os.close(vmm)

    async def restart(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()
        await self.start()

    async def close(self) -> None:
        await self.backend.shutdown_all()
        await self.backend.cleanup_orphans(frozenset())
        await self._stack.aclose()
        self._remove_groups()

    def _remove_groups(self) -> None:
        """Those above the machines' own, which real coordinators share and keep."""
        for path in Path("/sys/fs/cgroup").glob(f"*/{self.jail.parent_cgroup}"):
            path.rmdir()


@contextmanager
def vm_host() -> Iterator[tuple[Path, Namespace]]:
    """A folder on a disk and a network for one host."""
    firecracker_folder()  # while there is still a way out
    with tempfile.TemporaryDirectory(prefix="kici-vm-") as name, namespace() as network, network.enter():
        yield Path(name), network


@asynccontextmanager
async def real_microvms(
    make: Callable[[Path, Namespace], "RealMicroVmBench"] | None = None,
) -> AsyncIterator["RealMicroVmBench"]:
    with vm_host() as (folder, network):
        bench = (make or RealMicroVmBench)(folder, network)
        await bench.start()
        try:
            yield bench
        finally:
            await bench.close()
            for pid in bench.vmm_pids().values():
                os.kill(pid, signal.SIGKILL)
        assert not {kind: found for kind, found in bench.leftovers().items() if found}, bench.leftovers()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left behind"


def is_gone(pid: int) -> bool:
    done = subprocess.run(("ps", "-o", "stat=", "-p", str(pid)), capture_output=True, text=True, check=False)
    return done.stdout.strip().startswith("Z") or not done.stdout.strip()
