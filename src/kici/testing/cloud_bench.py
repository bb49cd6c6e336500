"""Coordinators on one store, an event scaler, and a cloud that answers its events: virtual time, agents by hand.

The cloud is a webhook: it makes a machine for each scale-up and removes it at the scale-down, unless a test tells it
to fail, before or after the deed.  `@clouded(...)` runs a test with a `CloudBench`.
"""

import asyncio
import functools
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Never, Protocol

from kici.adapters.sealer import AesGcmSealer
from kici.apps.assembly import Coordinator
from kici.apps.given import Configuration, Given
from kici.backends.event.backend import EventBackend
from kici.backends.event.factory import event_settings
from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.route import Router
from kici.domain.document import SubmitRun
from kici.domain.event import SCALE_DOWN, SCALE_UP, EventState, StoredEvent
from kici.domain.ids import DEFAULT_ORG, AgentId, InstanceId, ScalerName
from kici.domain.job import Job
from kici.domain.platform import Host
from kici.domain.resources import UNDECLARED
from kici.domain.secret import SecretRef
from kici.domain.spawn import Spawn
from kici.domain.workflow import Registration
from kici.kit.finish import finish
from kici.kit.supervise import Supervisor
from kici.ports.backend import SpawnOrder
from kici.ports.event_store import EventFilter
from kici.ports.peers import Topic
from kici.ports.store import Store
from kici.ports.webhook import WebhookCall
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.testing.bench_agent import BenchAgent
from kici.testing.builders import an_instance
from kici.testing.coordinator_bench import HOST, KEY, SOMEBODY, a_request
from kici.testing.fake_backend import FakeBackend, FakeMachines
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SimClock
from kici.testing.sim_link import ABNORMAL, LinkClosed, SimEnd
from kici.testing.sim_store import a_store
from kici.testing.store_traps import Traps, trapped
from kici.testing.virtual_time import run_virtual

CLOUD: Final = ScalerName("cloud")
REF: Final = "acme/cloud"
SECRET: Final = "whsec_c2VjcmV0IG9mIHRoZSBjbG91ZA=="
PATIENCE_SECONDS: Final = 7200.0


@dataclass
class Trouble:
    """What becomes of one call."""

    error: Exception
    after_the_deed: bool = False


@dataclass
class FakeCloud:
    """Implements `WebhookSender`.  A repeated scale-up makes nothing new; an unknown machine is no error."""

    machines: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """What runs: scale-up payloads by agent."""
    calls: list[WebhookCall] = field(default_factory=list)
    made: int = 0
    troubles: deque[Trouble] = field(default_factory=deque)
    is_down: Exception | None = None
    seconds: Callable[[], float] = lambda: 0.01
    """How long the next call takes."""
    made_one: Callable[[Mapping[str, Any]], None] = lambda up: None
    """Called with the scale-up of each machine that begins to exist."""
    removed_one: Callable[[str], None] = lambda agent_id: None

    async def send(self, call: WebhookCall) -> None:
        self.calls.append(call)
        await asyncio.sleep(self.seconds())
        trouble = self.troubles.popleft() if self.troubles else None
        if self.is_down is not None:
            raise self.is_down
        if trouble is not None and not trouble.after_the_deed:
            raise trouble.error
        agent_id = call.payload["agentId"]
        if call.name == SCALE_UP and agent_id not in self.machines:
            self.machines[agent_id] = call.payload
            self.made += 1
            self.made_one(call.payload)
        elif call.name == SCALE_DOWN and self.machines.pop(agent_id, None) is not None:
            self.removed_one(agent_id)
        if trouble is not None:
            raise trouble.error

    async def close(self) -> None:
        pass

    def told(self, name: str) -> list[Mapping[str, Any]]:
        return [call.payload for call in self.calls if call.name == name]


def a_cloud_scaler(name: str = CLOUD, *labels: str, max_agents: int = 4, **fields: Any) -> ScalerEntry:
    return ScalerEntry(
        name=ScalerName(name),
        type=BackendType.EVENT,
        max_agents=max_agents,
        label_sets=(LabelSet(labels=labels or ("cloud",)),),
        provisioning_targets=fields.pop("targets", (REF,)),
        **fields,
    )


class Hints:
    """Implements `Notifier` for one coordinator of the bench: all others hear at once."""

    def __init__(self, heard_by: "Callable[[], list[Hints]]") -> None:
        self._heard_by = heard_by
        self._listeners: list[tuple[Topic, Callable[[], None]]] = []

    def hint(self, topic: Topic) -> None:
        for other in self._heard_by():
            if other is not self:
                other.hears(topic)

    def listen(self, topic: Topic, listener: Callable[[], None]) -> None:
        self._listeners.append((topic, listener))

    def hears(self, topic: Topic) -> None:
        for about, listener in self._listeners:
            if about is topic:
                listener()

    async def run(self) -> Never:
        while True:
            await asyncio.Event().wait()


class Node:
    """One coordinator of the bench."""

    def __init__(self, bench: "CloudBench", name: str) -> None:
        self.bench = bench
        self.name = name
        self.id = InstanceId(name)
        self.url = f"ws://{name}/ws"
        self.traps = Traps()
        self.hints = Hints(bench.hints)
        self.faults = StoreFaults(entropy=bench.entropy.fork(f"faults of {name}"))
        self.orders: list[SpawnOrder] = []
        """Every machine that was made on its own host."""
        self.machines = FakeMachines(on_made=self.orders.append)
        self._stack = AsyncExitStack()
        self._runs = 0
        self.is_up = False

    async def starts(self) -> None:
        self._runs += 1
        self.traps = Traps()
        self.hints = Hints(self.bench.hints)
        self.supervisor = await self._stack.enter_async_context(Supervisor(self.name))
        bench = self.bench
        entropy = bench.entropy.fork(f"{self.name}#{self._runs}")
        config = await self._read()
        builder = _Builder(self, entropy)
        self.coordinator = Coordinator(
            Given(
                store=trapped(faulty(bench.store, self.faults), self.traps),
                clock=bench.clock,
                entropy=entropy,
                supervisor=self.supervisor,
                sealer=AesGcmSealer(KEY, entropy),
                instance=an_instance(id=self.id, address=self.url),
                fleet=builder.fleet(config),
                configuration=Configuration(config=config, read=self._read, builder=builder, host=HOST),
                configured=bench.settings,
                addresses=(self.url,),
                webhooks=bench.cloud,
                notifier=self.hints,
                probe=self,
            )
        )
        await self.coordinator.recover()
        await self.coordinator.start()
        self.is_up = True

    async def is_killed(self) -> None:
        """As kill -9: nothing of it acts any more, its connections break."""
        self.traps.is_dead = True
        self.is_up = False
        connected: list[Connected] = [*self.bench.agents, *self.bench.others]
        for agent in connected:
            if agent.node is self:
                agent.cut()
        await self._stack.aclose()

    async def stops(self) -> None:
        self.is_up = False
        await self.coordinator.shutdown(keep_agents=False)
        await self._stack.aclose()

    async def is_ready(self, address: str) -> bool:
        """Whether another coordinator of the bench can work."""
        node = next(node for node in self.bench.nodes if node.url == address)
        return node.is_up and not node.faults.is_down

    def accept(self, end: SimEnd) -> None:
        self.supervisor.start(f"link.{end.remote}", self._serve(end))

    def metric(self, name: str, **labels: str) -> float:
        self.coordinator.render_metrics()
        return self.coordinator.metrics.registry.get_sample_value(name, labels) or 0.0

    async def _read(self) -> ScalersConfig:
        own = self.bench.own_scalers.get(self.bench.nodes.index(self), self.bench.scalers)
        return ScalersConfig(scalers=own, global_max_agents=100)

    async def _serve(self, end: SimEnd) -> None:
        session = self.coordinator.sessions.connected(end)
        code = ABNORMAL
        try:
            while True:
                await session.received(await end.receive())
        except LinkClosed as closed:
            code = closed.code
        finally:
            if not self.traps.is_dead:
                await finish(session.closed(code), seconds=60, what=f"the end of a link of {end.remote}")


class Connected(Protocol):
    @property
    def node(self) -> Node | None: ...

    def cut(self) -> None: ...


class CloudAgent(BenchAgent):
    """The agent of a machine, connected to one of the coordinators."""

    node: Node


class CloudBench:
    def __init__(self, store: Store, *, scalers: tuple[ScalerEntry, ...], settings: Mapping[str, int]) -> None:
        self.store = store
        self.scalers = scalers
        self.own_scalers: dict[int, tuple[ScalerEntry, ...]] = {}
        """Of coordinators that have others, by their number."""
        self.settings = settings
        self.entropy = SeededEntropy(1)
        self.clock = SimClock()
        self.cloud = FakeCloud()
        self.nodes: list[Node] = []
        self.agents: list[CloudAgent] = []
        self.others: list[Connected] = []
        """Agents that are not played by hand."""
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.failures: list[str] = []

    @property
    def node(self) -> Node:
        return self.nodes[0]

    def hints(self) -> list[Hints]:
        return [node.hints for node in self.nodes if not node.traps.is_dead]

    async def subscribes(self, ref: str = REF, *names: str) -> Registration:
        """The cloud, under this ref."""
        await self.node.coordinator.secrets.put(DEFAULT_ORG, SecretRef("hooks", "cloud"), SECRET)
        document = {
            "ref": ref,
            "on": list(names or (SCALE_UP, SCALE_DOWN)),
            "webhook": {"url": "http://cloud/", "secret": "hooks:cloud"},
        }
        return await self.node.coordinator.events.workflows.apply(document, SOMEBODY)

    async def submits(self, *labels: str, by: int = 0, **fields: Any) -> Job:
        request = SubmitRun(name="test", org=DEFAULT_ORG, jobs=(a_request("job", *(labels or ("cloud",)), **fields),))
        return (await self.nodes[by].coordinator.jobs.submit(request, SOMEBODY, None)).jobs[0]

    async def machine(self, number: int = 0) -> Mapping[str, Any]:
        """The scale-up of a machine, by the order in which they were asked for."""
        await self.until(lambda: len(self.cloud.told(SCALE_UP)) > number)
        return self.cloud.told(SCALE_UP)[number]

    async def made(self, number: int = 0, *, at: int = 0) -> CloudAgent:
        """The agent of a machine, registered with a coordinator."""
        agent = await self.booted(number, at=at)
        await agent.registers()
        return agent

    async def booted(self, number: int = 0, *, at: int = 0) -> CloudAgent:
        """The agent of a machine, with its token."""
        up = await self.machine(number)
        redeemed = await self.nodes[at].coordinator.claims.redeem(up["claimCode"], caller="test")
        return self._agent(redeemed.agent_id, redeemed.labels, redeemed.agent_token, at=at)

    async def made_by(self, of: int, number: int = 0) -> CloudAgent:
        """The agent of a machine of a coordinator's own host, registered there."""
        node = self.nodes[of]
        await self.until(lambda: len(node.orders) > number)
        order = node.orders[number]
        agent = self._agent(order.agent_id, order.labels, order.token, at=of)
        await agent.registers()
        return agent

    def _agent(self, agent_id: AgentId, labels: Sequence[str], token: str | None, *, at: int) -> CloudAgent:
        node = self.nodes[at]
        wire = self.entropy.fork(f"wire/{agent_id}")
        agent = CloudAgent(agent_id, labels=labels, token=token, entropy=wire, accept=node.accept)
        agent.node = node
        self.agents.append(agent)
        return agent

    def moves(self, agent: CloudAgent, to: int) -> None:
        """From now on it connects to another coordinator."""
        agent.node = self.nodes[to]
        agent._accept = agent.node.accept

    async def job(self, job: Job) -> Job:
        found = await self.store.job(job.id)
        assert found is not None
        return found

    async def row(self, agent_id: str) -> Spawn | None:
        return await self.store.spawn(AgentId(agent_id))

    async def spawns(self) -> list[Spawn]:
        return await self.store.spawns(owner=None, limit=1000)

    async def dead_letters(self) -> list[StoredEvent]:
        return await self.store.events(EventFilter(state=EventState.DEAD))

    async def passes(self, seconds: float = 0.5) -> None:
        await asyncio.sleep(seconds)

    async def until(self, holds: Callable[[], object], *, within: float = PATIENCE_SECONDS) -> None:
        async with asyncio.timeout(within):
            while not holds():  # noqa: ASYNC110 (whatever it is, the test waits for it)
                await asyncio.sleep(0.05)

    async def eventually(self, holds: Callable[[], Awaitable[object]], *, within: float = PATIENCE_SECONDS) -> None:
        async with asyncio.timeout(within):
            while not await holds():  # noqa: ASYNC110 (as above, of the store)
                await asyncio.sleep(0.5)

    async def all_gone(self, *, within: float = PATIENCE_SECONDS) -> None:
        """Wait until no machine and no row is left."""

        async def gone() -> bool:
            return not self.cloud.machines and not await self.spawns()

        await self.eventually(gone, within=within)


class _Builder:
    """Backends for entries of the configuration: for events, and pretended ones for everything else."""

    def __init__(self, node: Node, entropy: SeededEntropy) -> None:
        self._node = node
        self._entropy = entropy
        self.defaults = UNDECLARED

    def fleet(self, config: ScalersConfig) -> Fleet:
        return Fleet(
            runtimes={entry.name: self.build(entry) for entry in config.scalers},
            router=Router(routables(config, Host("linux", "x86_64"))),
            caps=host_caps(config),
        )

    def _local(self, entry: ScalerEntry) -> ScalerRuntime:
        node = self._node
        backend = FakeBackend(
            scaler=entry.name,
            machines=node.machines,
            clock=node.bench.clock,
            on_exit=lambda agent_id, how: node.coordinator.sessions.compute_ended(agent_id, how),
            sets=tuple(chosen.labels for chosen in entry.label_sets),
            max_agents=entry.max_agents,
        )
        return ScalerRuntime(name=entry.name, backend=backend, caps=scaler_caps(entry), orchestrator_url=node.url)

    def build(self, entry: ScalerEntry) -> ScalerRuntime:
        if entry.type is not BackendType.EVENT:
            return self._local(entry)
        from kici.apps.provisioning import Provisioning

        find = Provisioning(
            find_events=lambda: self._node.coordinator.events.emitter,
            find_claims=lambda: self._node.coordinator.claims,
            entropy=self._entropy,
        )
        runtime = ScalerRuntime(
            name=entry.name,
            backend=EventBackend(
                settings=event_settings(entry),
                events=find.events(),
                claims=find.claims(),
                clock=self._node.bench.clock,
                entropy=self._entropy,
            ),
            caps=scaler_caps(entry),
            orchestrator_url=self._node.url,
        )
        runtime.provisioning_targets = entry.provisioning_targets
        return runtime

    def check(self, entry: ScalerEntry) -> None:
        pass

    def apply(self, runtime: ScalerRuntime, entry: ScalerEntry) -> None:
        assert isinstance(runtime.backend, EventBackend)
        runtime.backend.settings = event_settings(entry)
        runtime.caps = scaler_caps(entry)
        runtime.provisioning_targets = entry.provisioning_targets

    def build_retired(self, row: Spawn) -> ScalerRuntime | None:
        labels = LabelSet(labels=row.label_set)
        return self.build(
            ScalerEntry(
                name=row.scaler,
                type=BackendType.EVENT,
                max_agents=1,
                label_sets=(labels,),
                provisioning_targets=row.provisioning_targets,
            )
        )


class _Log(logging.Handler):
    def __init__(self, bench: CloudBench) -> None:
        super().__init__(logging.DEBUG)
        self._bench = bench

    def emit(self, record: logging.LogRecord) -> None:
        self._bench.events.append((record.getMessage(), getattr(record, "kici", {})))
        if record.exc_info is not None:
            self._bench.failures.append(logging.Formatter().format(record))


@asynccontextmanager
async def a_cloud_bench(
    *, nodes: int, scalers: tuple[ScalerEntry, ...], settings: Mapping[str, int], subscribed: bool
) -> AsyncIterator[CloudBench]:
    async with a_store() as store:
        bench = CloudBench(store, scalers=scalers, settings=settings)
        handler, logger = _Log(bench), logging.getLogger("kici")
        logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.DEBUG)
        try:
            for number in range(nodes):
                node = Node(bench, f"node-{number}")
                bench.nodes.append(node)
                await node.starts()
            if subscribed:
                await bench.subscribes()
            yield bench
            assert not bench.failures, "\n".join(bench.failures)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            for node in bench.nodes:
                await node._stack.aclose()


Test = Callable[..., Awaitable[None]]


def clouded(
    *scalers: ScalerEntry, nodes: int = 1, subscribed: bool = True, **settings: int
) -> Callable[[Test], Callable[..., None]]:
    """Run the test, whose first parameter is a `CloudBench`, on virtual time."""

    def wrap(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            async def main() -> None:
                async with a_cloud_bench(
                    nodes=nodes, scalers=scalers or (a_cloud_scaler(),), settings=settings, subscribed=subscribed
                ) as bench:
                    await test(bench, *args, **kwargs)

            run_virtual(main)

        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]  # what pytest sees
        return run

    return wrap
