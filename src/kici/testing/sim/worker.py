"""A simulated worker: a host without a database, with the real services, started and killed and started again.

Its agents reach coordinators by themselves; the relay is not part of the simulation, since it only moves bytes.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Final

from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.kit.supervise import Supervisor
from kici.ports.link import LinkHandler
from kici.services.machine_pools import MachinePools
from kici.services.worker_agents import HostAgents
from kici.services.worker_host import WorkerHost
from kici.services.worker_links import WorkerIdentity, WorkerLinks
from kici.services.worker_records import HostRecords
from kici.testing.fake_files import FakeFiles
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.fleet import SimFleetBuilder
from kici.testing.sim.hosts import HostView, SimHost
from kici.testing.sim.life import CURRENT, Life, MortalClock
from kici.testing.sim.network import ANYBODY, Network
from kici.testing.sim.plan import Plan
from kici.testing.sim.trace import WORLD, Trace
from kici.testing.sim_clock import SimClock
from kici.testing.sim_link import LinkClosed

YARD: Final = "yard"
"""The scaler of a worker; its name and the number of the worker."""
RECORDS: Final = Path("/worker/agents")
JOIN_SECONDS: Final = 0.5


def yard(plan: Plan, number: int) -> ScalersConfig:
    """What a worker may make."""
    entry = ScalerEntry(
        name=ScalerName(f"{YARD}-{number}"),
        type=BackendType.BARE_METAL,
        max_agents=plan.worker_agents,
        label_sets=(LabelSet(labels=("linux", YARD)),),
    )
    return ScalersConfig(scalers=(entry,), global_max_agents=plan.worker_agents)


class Keys:
    """Implements `ports.workers.WorkerKeys`: files that outlive the program."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.kept: str | None = None

    def credential(self) -> str | None:
        return self.kept

    def keep(self, credential: str | None) -> None:
        self.kept = credential

    def join_token(self) -> str | None:
        return self.token


class MortalFiles(FakeFiles):
    """A disk as one run of a program sees it: a dead one writes nothing."""

    def __init__(self, disk: FakeFiles, life: Life) -> None:
        super().__init__()
        self.contents, self.folders = disk.contents, disk.folders
        self._life = life

    def write(self, path: Path, data: bytes) -> None:
        self._life.check()
        super().write(path, data)

    def remove(self, path: Path) -> None:
        self._life.check()
        super().remove(path)


class SimWorker:
    def __init__(self, number: int, plan: Plan, entropy: SeededEntropy, host: SimHost, network: Network) -> None:
        self.name = host.name
        self.host = host
        self.disk = FakeFiles()
        self.keys = Keys()
        self.urls: tuple[str, ...] = ()
        """Where coordinators let workers in; set before it is started."""
        self._plan = plan
        self._entropy = entropy
        self._config = yard(plan, number)
        self._network = network
        self._trace: Trace = host.trace
        self._life = Life(self.name)
        self._life.is_alive = False
        self._task: asyncio.Task[None] | None = None
        self._runs = 0
        self._down_seconds = 0.0
        self._wires = 0

    @property
    def is_up(self) -> bool:
        return self._life.is_alive

    async def keep_running(self) -> None:
        """Start it, and start it again whenever it ended.  Leave by cancellation."""
        while True:
            self._runs += 1
            self._down_seconds = 1.0
            self._task = task = asyncio.get_running_loop().create_task(
                self._run(), name=f"{self.name} run {self._runs}"
            )
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                self._trace.violate(f"{self.name} failed: {error!r}")
            await asyncio.sleep(self._down_seconds)

    def kill(self, down_seconds: float) -> None:
        """As kill -9: its machines and its disk stay."""
        if self._life.is_alive and self._task is not None:
            self._trace.tell(f"{self.name} is killed, down for {down_seconds:.1f} s", WORLD)
            self._trace.count("worker killed")
            self._down_seconds = down_seconds
            self._life.die()
            self.host.view = None
            self.cut()
            self._task.cancel()

    def cut(self) -> None:
        """Reset all its links."""
        for number in range(self._wires):
            self._network.cut(self._wire_id(number))

    async def dial(self, url: str, handler: LinkHandler) -> None:
        """Implements `ports.workers.Dialer`."""
        life = self._life
        wire_id = self._wire_id(self._wires)
        self._wires += 1
        try:
            end = await self._network.connect(url, wire_id)
        except ConnectionError as error:
            raise Retryable(str(error)) from error
        life.check()
        session = handler.connected(end)
        try:
            while True:
                frame = await end.receive()
                life.check()
                await session.received(frame)
        except LinkClosed as closed:
            if life.is_alive:
                await session.closed(closed.code)

    async def _run(self) -> None:
        """One run of the program."""
        self._life = life = Life(f"{self.name}#{self._runs}")
        _ = CURRENT.set(life)
        clock = MortalClock(SimClock(), life)
        self._trace.tell(f"{life.name} starts", WORLD)
        try:
            while self.keys.token is None:
                await life.sleep(JOIN_SECONDS)
            async with Supervisor(self.name) as supervisor:
                agents = self._agents(life, clock, supervisor)
                links = self._links(agents, clock, supervisor, life)
                await agents.recover()
                supervisor.service("look-again", agents.run)
                supervisor.service("link-timers", links.run_timers)
                for url in self.urls:
                    supervisor.service(f"link {url}", partial(links.keep_linked, url))
                await asyncio.Event().wait()
        finally:
            life.is_alive = False

    def _agents(self, life: Life, clock: MortalClock, supervisor: Supervisor) -> HostAgents:
        view = HostView(self.host, life, kills=lambda where: False)
        view.under_way = tuple
        builder = SimFleetBuilder(
            self._plan,
            view=view,
            clock=clock,
            url=ANYBODY,
            entropy=self._entropy.fork(f"{life.name} spawns"),
            on_exit=lambda agent_id, how: agents.ended(agent_id, how),
        )
        agents = HostAgents(
            host_id=InstanceId(self.name),
            fleet=builder.fleet(self._config),
            pools=MachinePools(ledger=None, caps=dict, clock=clock),
            records=HostRecords(MortalFiles(self.disk, life), RECORDS),
            supervisor=supervisor,
            clock=clock,
            url_for=lambda runtime, agent_id: ANYBODY,
            retired=lambda record: None,
        )
        return agents

    def _links(self, agents: HostAgents, clock: MortalClock, supervisor: Supervisor, life: Life) -> WorkerLinks:
        return WorkerLinks(
            host=WorkerHost(agents=agents, supervisor=supervisor),
            urls=self.urls,
            dialer=self,
            keys=self.keys,
            identity=WorkerIdentity(worker_id=self.name, name=self.name, version="sim"),
            clock=clock,
            entropy=self._entropy.fork(f"{life.name} links"),
            gave_up=lambda why: self._trace.violate(f"{self.name} is refused by all: {why}", WORLD),
        )

    def _wire_id(self, number: int) -> AgentId:
        return AgentId(f"{self.name}/{number}")
