"""MicroVMs on a host in memory, as a bench of the contract of backends."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kici.adapters.ipam import AddressPool, MemoryAddresses
from kici.backends.firecracker.backend import MicroVmBackend
from kici.backends.firecracker.plan import OnStep
from kici.backends.firecracker.settings import MicroVmSet, MicroVmSettings, MicroVmTools
from kici.decide.isolate import Needs, Policy
from kici.domain.errors import DeterministicRefusal
from kici.domain.ids import AgentId, ScalerName
from kici.domain.resources import NOTHING
from kici.kit.supervise import Supervisor
from kici.ports.backend import SpawnOrder
from kici.testing.contracts.backend import MAX_AGENTS, Heard, Kind
from kici.testing.fake_files import FakeFiles
from kici.testing.fake_microvms import BRIDGE, FakeDrives, FakeHostNetwork, FakeMicroVmHost, FakeVmm, GuestScript
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SimClock

SCALER = ScalerName("vms")
MISSING = Path("/nowhere/vmlinux")
SCRIPTS = {
    Kind.LIVES: GuestScript(),
    Kind.DIES: GuestScript(prints="kici-init: cannot go on\n", lives_seconds=0.2),
    Kind.REFUSED: GuestScript(),
    Kind.SLOW: GuestScript(launch_seconds=1.0),
}


def an_order(agent_id: AgentId, kind: Kind) -> SpawnOrder:
    return SpawnOrder(
        agent_id=agent_id,
        label_set=("linux", kind.value),
        labels=("linux", kind.value, "kici:scaler:vms"),
        gate=frozenset(),
        token="sesame",
        orchestrator_url="ws://10.0.0.1:4000/ws",
        limits=NOTHING,
        requests=NOTHING,
    )


def a_set(kind: Kind) -> MicroVmSet:
    return MicroVmSet(
        labels=("linux", kind.value),
        kernel=MISSING if kind is Kind.REFUSED else Path("/opt/vmlinux"),
        initrd=None,
        rootfs=Path("/opt/rootfs.ext4"),
        overlay_mib=64,
        policy=Policy(),
        env={},
        backpressure=None,
        hardware=lambda limits: (1, 128),
    )


SETTINGS = MicroVmSettings(
    scaler=SCALER,
    max_agents=MAX_AGENTS,
    sets=tuple(a_set(kind) for kind in Kind),
    base=Path("/srv/jailer"),
    data_dir=Path("/data"),
)


class FakeMicroVmBench:
    def __init__(self) -> None:
        self.heard = Heard()
        self.files = FakeFiles()
        self.host = FakeMicroVmHost(self.files)
        self.host.faults[f"bring {MISSING}"] = DeterministicRefusal(f"{MISSING} cannot be read: no such file")
        self.settings = SETTINGS
        self.on_step: OnStep | None = None
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        supervisor = await self._stack.enter_async_context(Supervisor("bench"))
        self.addresses = MemoryAddresses(AddressPool(), bridge=BRIDGE, scaler=SCALER)
        self.vmm = FakeVmm(self.host)
        self.backend = MicroVmBackend(
            settings=self.settings,
            tools=MicroVmTools(
                vmm=self.vmm,
                network=FakeHostNetwork(self.host),
                addresses=self.addresses,
                drives=FakeDrives(self.host),
                files=self.files,
                clock=SimClock(),
                entropy=SeededEntropy(7),
                needs=lambda url: Needs(coordinator_port=4000),
            ),
            supervisor=supervisor,
            on_exit=self.heard.on_exit,
            on_step=self.on_step,
        )

    def order(self, agent_id: AgentId, kind: Kind) -> SpawnOrder:
        self.host.script = SCRIPTS[kind]
        return an_order(agent_id, kind)

    def on_host(self) -> frozenset[AgentId]:
        """By everything that a machine may leave; each of them names it."""
        host = self.host
        names: set[str] = {path.stem for path in self.files.contents if path.parent == Path("/data/microvms")}
        names |= {path.name for path in host.folders if path.parent == Path("/srv/jailer/firecracker")}
        names |= set(host.running())
        names |= {f"scaler-bare-metal-{tap.removeprefix('kici-')}" for tap in host.taps}
        names |= {owner.replace("_", "-") for owner, _ in host.rules.values()}
        return frozenset(map(AgentId, names))

    async def die(self, agent_id: AgentId) -> None:
        self.host.processes[agent_id].end()

    async def restart(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()
        await self.start()

    async def close(self) -> None:
        await self.backend.shutdown_all()
        await self.backend.cleanup_orphans(frozenset())
        await self._stack.aclose()

    def with_settings(self, **changes: object) -> None:
        self.settings = replace(self.settings, **changes)  # type: ignore[arg-type]  # as its caller knows


@asynccontextmanager
async def fake_microvms() -> AsyncIterator[FakeMicroVmBench]:
    bench = FakeMicroVmBench()
    await bench.start()
    yield bench
    await bench.close()
    assert not bench.on_host(), "something is left on the host"
    assert not await bench.addresses.held(), "addresses are left"
