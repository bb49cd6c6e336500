"""Benches for the contract of backends: containers on a fake engine and on a real one."""

import asyncio
import io
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from tests.contract.backend_benches import an_order
from tests.docker_engine import Lab

from kici.adapters.agent_archive import find_archive
from kici.adapters.clock import RealClock
from kici.adapters.docker_engine import DockerEngine
from kici.adapters.nft import Nft
from kici.adapters.processes import LinuxProcesses
from kici.backends.container.backend import ContainerBackend, ContainerSettings
from kici.backends.container.fencing import AgentNetwork
from kici.backends.container.house import ContainerTools, Houses, PortOf
from kici.backends.container.room import FreeBytes
from kici.backends.container.runtime import Archive, FindArchive
from kici.decide.container_plan import AGENT, MANAGED, OWNER, ContainerSet
from kici.domain.ids import AgentId, ScalerName
from kici.kit.supervise import Supervisor
from kici.ports.backend import SpawnOrder
from kici.ports.clock import Clock
from kici.ports.engine import Engine, EngineAddress, EngineKind
from kici.ports.network import PacketFilter
from kici.testing.contracts.backend import MAX_AGENTS, Heard, Kind
from kici.testing.fake_engine import ADDRESS, EngineRoom, FakeEngine, FakePackets, ImageScript
from kici.testing.sim_clock import SimClock

SCALER: Final = ScalerName("pool")
OWNER_ID: Final = "inst-1"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class AnArchive:
    """A runtime that is good for a fake engine."""

    version: str = "v1"
    machine: str = "x86_64"
    entrypoint: tuple[str, ...] = ("/opt/kici/agent",)

    async def open(self) -> IO[bytes]:
        return io.BytesIO(b"a runtime")


async def an_archive() -> Archive:
    return AnArchive()


class ContainerBench:
    """A scaler on an engine: label set `linux, <kind>` has the image `ci/<kind>`."""

    def __init__(self, *, engine_at: Callable[[EngineAddress], Engine], address: EngineAddress, clock: Clock) -> None:
        self.heard = Heard()
        self._engine_at = engine_at
        self.address = address
        self._clock = clock
        self._stack = AsyncExitStack()
        self.settings = ContainerSettings(
            scaler=SCALER,
            type="container",
            owner=OWNER_ID,
            max_agents=MAX_AGENTS,
            sets=tuple(self.label_set(kind) for kind in Kind),
            stop_seconds=1,
        )

    def label_set(self, kind: Kind) -> ContainerSet:
        return ContainerSet(labels=("linux", kind.value), image=f"ci/{kind.value}", pull_policy="Never")

    def tools(self, supervisor: Supervisor) -> ContainerTools:
        raise NotImplementedError

    async def start(self) -> None:
        supervisor = await self._stack.enter_async_context(Supervisor("bench"))
        tools = self.tools(supervisor)
        self.houses = Houses(tools)
        self.backend = ContainerBackend(
            settings=self.settings,
            find_engine=lambda: self.address,
            houses=self.houses,
            tools=tools,
            on_exit=self.heard.on_exit,
        )

    def order(self, agent_id: AgentId, kind: Kind) -> SpawnOrder:
        return an_order(agent_id, kind)

    def configure_for(self, max_agents: int) -> None:
        """Before it starts: how many agents there may be."""
        self.settings = replace(self.settings, max_agents=max_agents)

    async def restart(self) -> None:
        await self._leave()
        await self.start()

    async def _leave(self) -> None:
        await self._stack.aclose()

    async def close(self) -> None:
        await self.backend.shutdown_all()
        await self.backend.cleanup_orphans(frozenset())
        await self._leave()


FAKE_IMAGES: Final = {
    Kind.LIVES: ImageScript(output=("starting", "ready")),
    Kind.DIES: ImageScript(output=("oh no",), lives_seconds=0.2, exit_code=3),
    Kind.REFUSED: ImageScript(refuses="exec: /agent: no such file or directory"),
    Kind.SLOW: ImageScript(create_seconds=0.5, start_seconds=1.0),
}


class FakeEngineBench(ContainerBench):
    def __init__(self, room: EngineRoom | None = None, packets: FakePackets | None = None) -> None:
        self.room = room or EngineRoom()
        self.packets = packets or FakePackets()
        self.find_archive: FindArchive = an_archive
        self.environment: dict[str, str] = {}
        self.free_bytes = 2**40
        self.port_of: PortOf = lambda _: None
        for kind, script in FAKE_IMAGES.items():
            self.room.images[f"ci/{kind.value}:latest"] = script
        super().__init__(engine_at=lambda at: FakeEngine(self.room, at), address=ADDRESS, clock=SimClock())

    def tools(self, supervisor: Supervisor) -> ContainerTools:
        return ContainerTools(
            engine_at=self._engine_at,
            packets=self.packets,
            find_archive=self.find_archive,
            clock=self._clock,
            supervisor=supervisor,
            environment=self.environment,
            resolvers=list,
            free_bytes=lambda _: self.free_bytes,
            port_of=lambda pid: self.port_of(pid),
        )

    def on_host(self) -> frozenset[AgentId]:
        return frozenset(map(AgentId, self.room.agents()))

    async def die(self, agent_id: AgentId) -> None:
        for one in list(self.room.containers.values()):
            if one.spec.labels.get(AGENT) == agent_id:
                self.room.end(one, 137)


SCRIPTS: Final = {
    Kind.LIVES: "trap 'exit 0' TERM; echo ready; sleep 1000 & wait",
    Kind.DIES: "echo oh no; exit 3",
    Kind.REFUSED: "",
    Kind.SLOW: "exec sleep 1000",
}
"""What the agents of a real bench are: shell scripts of images that carry their own agent."""


def import_kinds(lab: Lab, tree: Path) -> None:
    """An image for each kind of agent."""
    for kind, script in SCRIPTS.items():
        command = '["/nowhere"]' if kind is Kind.REFUSED else f'["/bin/sh", "-c", "{script}"]'
        lab.import_image(f"ci/{kind.value}:latest", tree, f"CMD {command}", "LABEL kici-agent=own")


class RealEngineBench(ContainerBench):
    def __init__(
        self, lab: Lab, folder: Path, *, owner: str | None = None, network: AgentNetwork | None = None
    ) -> None:
        self.lab = lab
        self.folder = folder
        self.network = network or AgentNetwork()
        self.free_bytes: FreeBytes | None = None
        self.engines: list[DockerEngine] = []
        address = EngineAddress(url=f"unix://{lab.socket}", kind=EngineKind.DOCKER, is_local=True)
        super().__init__(engine_at=self._open, address=address, clock=RealClock())
        self.settings = replace(self.settings, owner=owner or f"test-{next(_numbers)}")

    def _open(self, address: EngineAddress) -> Engine:
        self.engines.append(DockerEngine(address))
        return self.engines[-1]

    def packets(self) -> PacketFilter:
        return Nft(self.lab.command("nft"))

    def tools(self, supervisor: Supervisor) -> ContainerTools:
        return ContainerTools(
            engine_at=self._engine_at,
            packets=self.packets(),
            find_archive=lambda: find_archive(LinuxProcesses(), self.folder / "runtime"),
            clock=self._clock,
            supervisor=supervisor,
            environment={},
            resolvers=list,
            network=self.network,
            free_bytes=self.free_bytes,
        )

    def on_host(self) -> frozenset[AgentId]:
        found = self.lab.containers(**{MANAGED: "true", OWNER: self.settings.owner})
        return frozenset(AgentId(one["Labels"][AGENT]) for one in found)

    async def die(self, agent_id: AgentId) -> None:
        self.lab.ask("POST", f"/containers/{agent_id}/kill")

    async def _leave(self) -> None:
        await super()._leave()
        while self.engines:
            await self.engines.pop().close()


@asynccontextmanager
async def fake_engine() -> AsyncIterator[FakeEngineBench]:
    bench = FakeEngineBench()
    await bench.start()
    yield bench
    await bench.close()
    assert not bench.packets.addresses(), "rules are left behind"


@asynccontextmanager
async def far_docker(lab: Lab, folder: Path, url: str) -> AsyncIterator[RealEngineBench]:
    """The engine as one on another machine: by TCP, and without rules, which only its own machine could set."""
    bench = RealEngineBench(lab, folder)
    bench.address = EngineAddress(url=url, kind=EngineKind.DOCKER, is_local=False)
    bench.settings = replace(bench.settings, is_isolated=False, is_local=False)
    with lab.enter():  # the network in which the engine listens
        await bench.start()
        try:
            yield bench
        finally:
            await bench.close()
    assert not bench.on_host(), "containers are left behind"


@asynccontextmanager
async def docker(lab: Lab, folder: Path, *, free_bytes: FreeBytes | None = None) -> AsyncIterator[RealEngineBench]:
    bench = RealEngineBench(lab, folder)
    bench.free_bytes = free_bytes
    await bench.start()
    try:
        yield bench
    finally:
        await bench.close()
    assert not bench.on_host(), "containers are left behind"
    assert not await bench.packets().elements("kici_agent_net", "agents_forward"), "rules are left behind"
    assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left behind"
