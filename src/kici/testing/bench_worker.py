"""A worker beside the coordinator of a bench: the real host and links, on simulated machines and wires."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

from kici.config.model import Cap, ScalerEntry, ScalersConfig
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.route import Router
from kici.domain.errors import Retryable
from kici.domain.ids import InstanceId
from kici.kit.supervise import Supervisor
from kici.ports.link import LinkHandler
from kici.services.machine_pools import MachinePools
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.services.worker_agents import HostAgents
from kici.services.worker_host import WorkerHost
from kici.services.worker_links import WorkerIdentity, WorkerLinks
from kici.services.worker_records import HostRecords
from kici.services.workers import Workers
from kici.testing.coordinator_bench import HOST, Bench
from kici.testing.fake_backend import FakeBackend, FakeMachines
from kici.testing.fake_files import FakeFiles
from kici.testing.sim_link import LinkClosed, SimEnd, SimWire

URL = "ws://coordinator/ws/worker"
RECORDS = Path("/worker/agents")


class Keys:
    """Implements `ports.workers.WorkerKeys` in memory."""

    def __init__(self, join_token: str | None) -> None:
        self.token = join_token
        self.kept: str | None = None

    def credential(self) -> str | None:
        return self.kept

    def keep(self, credential: str | None) -> None:
        self.kept = credential

    def join_token(self) -> str | None:
        return self.token


class SimDialer:
    """Opens simulated wires to coordinators by address."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench = bench
        self._name = name
        self.wires: list[SimWire] = []
        self.doors: dict[str, Workers] = {}
        """Coordinators that can be reached."""

    async def dial(self, url: str, handler: LinkHandler) -> None:
        door = self.doors.get(url)
        if door is None:
            raise Retryable(f"{url} cannot be reached")
        wire = SimWire(self._bench.entropy.fork(f"{self._name}/{len(self.wires)}"), names=(self._name, url))
        self.wires.append(wire)
        self._bench.supervisor.start(f"worker.{self._name}", serve(wire.b, door))
        await serve(wire.a, handler)

    def cut(self) -> None:
        """Reset every connection that there is."""
        for wire in self.wires:
            wire.cut()


async def serve(end: SimEnd, handler: LinkHandler) -> None:
    """One end of a connection, as the gateway serves it."""
    session = handler.connected(end)
    try:
        while True:
            await session.received(await end.receive())
    except LinkClosed as closed:
        await session.closed(closed.code)


class BenchWorker:
    """A host that spawns.  Its machines and records outlive its program."""

    def __init__(
        self, bench: Bench, name: str, scalers: Sequence[ScalerEntry], *, max_agents: int = 100, cap: Cap | None = None
    ) -> None:
        self.bench = bench
        self.name = name
        self.worker_id = f"id-of-{name}"
        self.config = ScalersConfig(
            scalers=tuple(scalers), global_max_agents=max_agents, global_resource_cap=cap or Cap()
        )
        self.machines = FakeMachines(on_made=bench._made, on_gone=bench._gone)
        self.files = FakeFiles()
        self.keys = Keys(None)
        self.dialer = SimDialer(bench, name)
        self.backends: dict[str, FakeBackend] = {}
        self.given_up: list[str] = []
        self._stack = AsyncExitStack()

    async def joins(self) -> None:
        """With a fresh token of the bench's coordinator, and linked."""
        _, self.keys.token = await self.bench.coordinator.workers.credentials.create_join_token(by="somebody")
        await self.starts()
        await self.is_linked()

    async def starts(self, *urls: str) -> None:
        bench = self.bench
        self.dialer.doors.setdefault(URL, bench.coordinator.workers.links)
        supervisor = await self._stack.enter_async_context(Supervisor(self.name))
        runtimes = {entry.name: self._runtime(entry) for entry in self.config.scalers}
        self.agents = HostAgents(
            host_id=InstanceId(self.worker_id),
            fleet=Fleet(runtimes=runtimes, router=Router(routables(self.config, HOST)), caps=host_caps(self.config)),
            pools=MachinePools(ledger=None, caps=dict, clock=bench.clock),
            records=HostRecords(self.files, RECORDS),
            supervisor=supervisor,
            clock=bench.clock,
            url_for=lambda runtime, agent_id: f"ws://{self.name}/ws",
            retired=lambda record: None,
        )
        self.host = WorkerHost(agents=self.agents, supervisor=supervisor)
        self.links = WorkerLinks(
            host=self.host,
            urls=urls or (URL,),
            dialer=self.dialer,
            keys=self.keys,
            identity=WorkerIdentity(worker_id=self.worker_id, name=self.name, version="1"),
            clock=bench.clock,
            entropy=bench.entropy.fork(self.name),
            gave_up=self.given_up.append,
        )
        await self.agents.recover()
        supervisor.service("timers", self.links.run_timers)
        for url in urls or (URL,):
            supervisor.service(f"link {url}", partial(self.links.keep_linked, url))

    async def is_killed(self) -> None:
        """As kill -9: machines and records stay."""
        self.machines.watchers.clear()
        self.dialer.cut()
        for backend in self.backends.values():
            backend.machines = FakeMachines()
        await self._stack.aclose()

    async def stops(self, *, keep_agents: bool = False) -> None:
        await self.host.leave(keep_agents=keep_agents)
        await asyncio.sleep(0.1)
        self.links.leave("stopped")
        await self._stack.aclose()

    async def is_linked(self, *, within: float = 60.0) -> None:
        workers = self.bench.coordinator.workers.links
        await self.bench.until(lambda: workers.is_linked(self.worker_id), within=within)

    def cut_off(self) -> None:
        """No coordinator can be reached any more."""
        self.dialer.doors.clear()
        self.dialer.cut()

    def reaches(self, workers: Workers, url: str = URL) -> None:
        self.dialer.doors[url] = workers

    def is_clean(self) -> None:
        """Assert that nothing is left of any agent."""
        assert not self.machines.alive
        assert not self.files.names(RECORDS)
        assert len(self.agents.holdings) == 0
        assert not self.agents.book.reservations

    def _runtime(self, entry: ScalerEntry) -> ScalerRuntime:
        backend = self.backends[entry.name] = FakeBackend(
            scaler=entry.name,
            machines=self.machines,
            clock=self.bench.clock,
            on_exit=lambda agent_id, how: self.agents.ended(agent_id, how),
            sets=tuple(chosen.labels for chosen in entry.label_sets),
            max_agents=entry.max_agents,
        )
        backend.backend_type = entry.type
        runtime = ScalerRuntime(name=entry.name, backend=backend, caps=scaler_caps(entry), orchestrator_url="")
        runtime.warm_pool = entry.warm_pool
        return runtime

    async def leaves(self) -> None:
        with suppress(RuntimeError):
            await self._stack.aclose()
