"""Benches for the contract of backends where the agents are on the host of a worker.

The link is in memory: every message is encoded, carried by a later turn of the loop, and decoded.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.contract.backend_benches import MISSING, an_order

from kici.adapters.cgroups import NoCgroups
from kici.backends.bare_metal.backend import BareMetalBackend, BareMetalSettings
from kici.backends.bare_metal.compute import Tools
from kici.backends.remote.backend import RemoteBackend
from kici.decide.admit import HostCaps, ScalerCaps
from kici.decide.entries import Routable
from kici.decide.launch import LaunchHost, ProcessSet
from kici.decide.route import Router
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.kit.supervise import Supervisor
from kici.ports.backend import Backend, Compute, OnExit, SpawnOrder
from kici.ports.processes import Exit
from kici.services.machine_pools import MachinePools
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.services.worker_agents import HostAgents
from kici.services.worker_host import WorkerHost
from kici.services.worker_records import HostRecords
from kici.services.workers_channel import Channel
from kici.testing.contracts.backend import MAX_AGENTS, Heard, Kind
from kici.testing.fake_backend import FakeBackend, FakeMachines, SpawnScript, refuses
from kici.testing.fake_files import FakeFiles
from kici.testing.fake_processes import FakeHost, FakeProcesses, Script
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SimClock
from kici.wire.codec import encode
from kici.wire.worker_codec import decode_from_worker, decode_order
from kici.wire.worker_messages import (
    Answer,
    ComputeGone,
    SpawnProgress,
    WorkerInventory,
    WorkerMessage,
    WorkerOrder,
)

SCALER = ScalerName("local")
RECORDS = Path("/worker/agents")
COORDINATOR = InstanceId("a-coordinator")


class Pipe:
    """One link: the worker's seat on one side, the channel and backend of a coordinator on the other."""

    instance_id = COORDINATOR

    def __init__(self, host: WorkerHost, channel: Channel, backend: RemoteBackend) -> None:
        self._host = host
        self._channel = channel
        self._backend = backend
        self.is_open = True
        channel.attach(self.order)
        host.attach(self)

    def close(self) -> None:
        self.is_open = False
        self._channel.detach()
        self._host.detach(self)

    def send(self, message: WorkerMessage) -> None:
        frame = encode(message)
        asyncio.get_running_loop().call_soon(lambda: self._heard(decode_from_worker(frame)) if self.is_open else None)

    def order(self, order: WorkerOrder) -> None:
        frame = encode(order)
        asyncio.get_running_loop().call_soon(
            lambda: self._host.ordered(self, decode_order(frame)) if self.is_open else None
        )

    def _heard(self, message: WorkerMessage) -> None:
        match message:
            case Answer():
                self._channel.answered(message)
            case SpawnProgress():
                self._backend.progressed(message)
            case ComputeGone(agent_id=agent_id, how=how):
                self._backend.ended(AgentId(agent_id), how)
            case WorkerInventory(agents=agents, gone=gone):
                self._backend.compared(
                    {AgentId(one.agent_id): one for one in agents}, {AgentId(one.agent_id): one.how for one in gone}
                )
                self._channel.send_again()
            case _:
                pass


def an_entry(index: int, *labels: str) -> Routable:
    return Routable(
        scaler=SCALER,
        backend_type="bare-metal",
        set_index=index,
        label_set=labels,
        offers=frozenset(labels),
        agent_labels=labels,
        gate=frozenset(),
    )


class RemoteBench:
    """A coordinator with one worker, whose scaler has a backend of any kind."""

    def __init__(self, *, restarts_worker: bool) -> None:
        """`restart` is of the coordinator alone, or of both."""
        self.heard = Heard()
        self.files = FakeFiles()
        self.clock = SimClock()
        self._restarts_worker = restarts_worker
        self._worker = AsyncExitStack()
        self._coordinator = AsyncExitStack()

    async def start(self) -> None:
        await self.start_worker()
        await self.start_coordinator()

    async def start_worker(self) -> None:
        supervisor = await self._worker.enter_async_context(Supervisor("worker"))
        self.local = self.make_local(lambda agent_id, how: self.agents.ended(agent_id, how), supervisor)
        caps = ScalerCaps(scaler=SCALER, agents_max=MAX_AGENTS)
        runtime = ScalerRuntime(name=SCALER, backend=self.local, caps=caps, orchestrator_url="ws://worker/ws")
        entries = [an_entry(index, "linux", kind.value) for index, kind in enumerate(Kind)]
        self.agents = HostAgents(
            host_id=InstanceId("a-worker"),
            fleet=Fleet(runtimes={SCALER: runtime}, router=Router(entries), caps=HostCaps(agents_max=100)),
            pools=MachinePools(ledger=None, caps=dict, clock=self.clock),
            records=HostRecords(self.files, RECORDS),
            supervisor=supervisor,
            clock=self.clock,
            url_for=lambda runtime, agent_id: runtime.orchestrator_url,
            retired=lambda record: None,
        )
        self.host = WorkerHost(agents=self.agents, supervisor=supervisor)
        await self.agents.recover()

    async def start_coordinator(self) -> None:
        supervisor = await self._coordinator.enter_async_context(Supervisor("coordinator"))
        self.channel = Channel(clock=self.clock, entropy=SeededEntropy("requests"))
        self.channel.name = "a worker"
        self.backend = RemoteBackend(
            scaler=SCALER,
            backend_type=self.local.type,
            channel=self.channel,
            on_exit=self.heard.on_exit,
            supervisor=supervisor,
            clock=self.clock,
        )
        self.backend.offered([("linux", kind.value) for kind in Kind], MAX_AGENTS)
        self.link()

    def link(self) -> None:
        self.pipe = Pipe(self.host, self.channel, self.backend)

    def cut(self) -> None:
        self.pipe.close()

    def make_local(self, on_exit: OnExit, supervisor: Supervisor) -> Backend:
        raise NotImplementedError

    def made(self) -> frozenset[AgentId]:
        """Agents of which anything is on the host, but the worker's own records."""
        raise NotImplementedError

    def order(self, agent_id: AgentId, kind: Kind) -> SpawnOrder:
        return an_order(agent_id, kind)

    def on_host(self) -> frozenset[AgentId]:
        records = {AgentId(name.removesuffix(".json")) for name in self.files.names(RECORDS)}
        assert records == self.agents.holdings.ids(), "a record for each agent, and no other"
        assert len(self.agents.book.reservations) == len(records), "a reservation for each agent, and no other"
        return frozenset(records | self.made())

    async def die(self, agent_id: AgentId) -> None:
        raise NotImplementedError

    async def restart(self) -> None:
        self.cut()
        await self._coordinator.aclose()
        if self._restarts_worker:
            await self.restart_worker()
        await self.start_coordinator()

    async def restart_worker(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """`meanwhile` happens when nobody looks."""
        await self._worker.aclose()
        self.stop_watching()
        meanwhile()
        await self.start_worker()

    def stop_watching(self) -> None:
        """The program that watched the host's computes is gone."""

    async def close(self) -> None:
        await self.backend.shutdown_all()
        await self.agents.leave(keep_agents=False)
        await self._coordinator.aclose()
        await self._worker.aclose()


class Blindable(FakeBackend):
    """Machines of an engine that may not be there yet."""

    blind = False

    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        if self.blind:
            raise Retryable("the engine does not answer")
        return await super().recover(known)


class RemoteFakeBench(RemoteBench):
    """Scriptable machines on the worker."""

    def __init__(self, *, restarts_worker: bool) -> None:
        super().__init__(restarts_worker=restarts_worker)
        self.made_ever: list[SpawnOrder] = []
        self.machines = FakeMachines(on_made=self.made_ever.append)
        self.blind = False
        """Whether the next local backend cannot look at its host."""

    def stop_watching(self) -> None:
        self.machines.watchers.clear()

    def make_local(self, on_exit: OnExit, supervisor: Supervisor) -> "Blindable":
        self.local: Blindable
        local = Blindable(
            scaler=SCALER,
            machines=self.machines,
            clock=self.clock,
            on_exit=on_exit,
            sets=tuple(("linux", kind.value) for kind in Kind),
            max_agents=MAX_AGENTS,
        )
        local.blind = self.blind
        return local

    def order(self, agent_id: AgentId, kind: Kind) -> SpawnOrder:
        script = {
            Kind.LIVES: SpawnScript(),
            Kind.DIES: SpawnScript(dies_after_seconds=0.05),
            Kind.REFUSED: refuses(),
            Kind.SLOW: SpawnScript(seconds=5.0),
        }[kind]
        self.local.scripts = iter([script])
        return an_order(agent_id, kind)

    def made(self) -> frozenset[AgentId]:
        return frozenset(self.machines.alive)

    async def die(self, agent_id: AgentId) -> None:
        self.machines.die(agent_id)


class RemoteProcessBench(RemoteBench):
    """Processes of a simulated machine on the worker, made by the real bare-metal backend."""

    def __init__(self, *, restarts_worker: bool) -> None:
        super().__init__(restarts_worker=restarts_worker)
        self.host_files = FakeFiles()
        self.programs = {kind: f"/opt/{kind.value}" for kind in Kind} | {Kind.REFUSED: MISSING}
        scripts = {
            self.programs[Kind.LIVES]: Script(output="ready\n", children=2),
            self.programs[Kind.DIES]: Script(output="oh no\n", lives_seconds=0.2, exit=Exit(code=3)),
            self.programs[Kind.SLOW]: Script(start_seconds=1.0),
        }
        self.machine = FakeHost(self.host_files, scripts)

    def make_local(self, on_exit: OnExit, supervisor: Supervisor) -> BareMetalBackend:
        return BareMetalBackend(
            settings=BareMetalSettings(
                scaler=SCALER,
                max_agents=MAX_AGENTS,
                sets=tuple(
                    ProcessSet(labels=("linux", kind.value), binary_path=path, env={"STUB": kind.value})
                    for kind, path in self.programs.items()
                ),
                enforce_cgroups=False,
                data_dir=Path("/data"),
                stop_seconds=0.5,
            ),
            host=LaunchHost(system="linux", environment={}, python="/bin/python", program_folder="/bin"),
            tools=Tools(
                processes=FakeProcesses(self.machine),
                files=self.host_files,
                cgroups=NoCgroups(),
                clock=self.clock,
            ),
            supervisor=supervisor,
            on_exit=on_exit,
        )

    def made(self) -> frozenset[AgentId]:
        names = {Path(one.mark).name for one in self.machine.running()}
        names |= {path.name.split(".")[0] for path in self.host_files.contents}
        return frozenset(map(AgentId, names))

    async def die(self, agent_id: AgentId) -> None:
        for one in self.machine.running():
            if Path(one.mark).name == agent_id and one.parent is None:
                one.end(Exit(signal=9))


@asynccontextmanager
async def started(make: Callable[..., RemoteBench], *, restarts_worker: bool) -> AsyncIterator[RemoteBench]:
    bench = make(restarts_worker=restarts_worker)
    await bench.start()
    yield bench
    await bench.close()


@asynccontextmanager
async def linked() -> AsyncIterator[RemoteFakeBench]:
    """Machines on a worker; no restart unless a test makes it."""
    bench = RemoteFakeBench(restarts_worker=False)
    await bench.start()
    yield bench
    if not bench.channel.is_given_up and not bench.channel.is_linked:
        bench.link()
    await bench.close()
