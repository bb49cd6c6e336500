"""One whole coordinator on a bench: real services and statements, virtual time, machines and agents by hand.

`@benched(...)` runs a test with a `Bench` on a fresh virtual-time loop, and checks at the end what always holds:
no task failed, usage is the sum of the reservations, the index of agents agrees with the agents.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kici.adapters.sealer import AesGcmSealer
from kici.apps.assembly import Coordinator
from kici.apps.given import Configuration, Given
from kici.config.model import BackendType, Cap, Defaults, LabelSet, MachinePool, ScalerEntry, ScalersConfig
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.route import Router
from kici.domain.access import Actor, Role
from kici.domain.document import JobRequest, SubmitRun
from kici.domain.errors import Misconfigured
from kici.domain.ids import DEFAULT_ORG, AgentId, JobId, OrgId, RunId, ScalerName
from kici.domain.job import Job, JobStatus, Run
from kici.domain.platform import Host
from kici.domain.resources import UNDECLARED
from kici.domain.spawn import Spawn
from kici.domain.verdict import Verdict
from kici.kit.finish import finish
from kici.kit.supervise import Supervisor
from kici.observe.events import Event
from kici.ports.backend import SpawnOrder
from kici.ports.store import JobFilter, Store
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.testing.bench_agent import MEANWHILE_SECONDS, BenchAgent
from kici.testing.builders import HERE, a_demand, a_spec, an_instance
from kici.testing.fake_backend import FakeBackend, FakeMachines
from kici.testing.fake_ledger import FakeLedger, PooledHost
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SimClock
from kici.testing.sim_link import ABNORMAL, LinkClosed, SimEnd
from kici.testing.sim_store import a_store
from kici.testing.store_traps import Traps, trapped
from kici.testing.virtual_time import run_virtual
from kici.wire.messages import CloseCode

HOST: Final = Host("linux", "x86_64")
KEY: Final = bytes(32)
URL: Final = "ws://coordinator/ws"
SOMEBODY: Final = Actor(name="somebody", role=Role.OWNER)
PATIENCE_SECONDS: Final = 3600.0


def a_scaler(name: str = "local", *sets: tuple[str, ...], max_agents: int = 16, **fields: Any) -> ScalerEntry:
    """A bare-metal scaler if no `type` is given; without `sets` one of label set linux, x64."""
    return ScalerEntry(
        name=ScalerName(name),
        type=fields.pop("type", BackendType.BARE_METAL),
        max_agents=max_agents,
        label_sets=fields.pop("label_sets", tuple(LabelSet(labels=labels) for labels in sets or (("linux", "x64"),))),
        **fields,
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the coordinator of a bench is like."""

    scalers: Sequence[ScalerEntry] = ()
    max_agents: int = 100
    """Over all scalers."""
    machine_pools: Sequence[MachinePool] = ()
    defaults: Defaults = field(default_factory=Defaults)
    cap: Cap = field(default_factory=Cap)
    settings: Mapping[str, int] = field(default_factory=dict)
    sweep_seconds: float = 10.0


class Bench:
    def __init__(self, layout: Layout, store: Store, entropy: SeededEntropy) -> None:
        self.layout = layout
        self.entropy = entropy
        self.clock = SimClock()
        self.store = store
        """The truth, past all faults."""
        self.faults = StoreFaults(entropy=entropy.fork("faults"))
        self.traps = Traps()
        self.machines = FakeMachines(on_made=self._made, on_gone=self._gone)
        self.pooled = PooledHost()
        """Whose machine pools the coordinator shares; `ledger` is its own view of them."""
        self.orders: list[SpawnOrder] = []
        """Every machine that was made."""
        self.backends: dict[str, FakeBackend] = {}
        self.agents: dict[AgentId, BenchAgent] = {}
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        """What was logged: name and fields."""
        self.unbuildable: set[str] = set()
        """Scalers that this host cannot serve."""
        self.file: ScalersConfig | tuple[str, ...] = ()
        """What a reload reads: a configuration, or the problems of an invalid one."""
        self.failures: list[str] = []
        """Exceptions that reached the log."""
        self._stack = AsyncExitStack()
        self._machine_made = asyncio.Event()

    # --- life

    async def starts(self) -> None:
        """As the program does: recover, accept agents, start."""
        await self.boots_up()
        await self.coordinator.start()

    async def boots_up(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Everything before agents are accepted.  `prepare` is called before anything is recovered."""
        self.supervisor = await self._stack.enter_async_context(Supervisor("bench"))
        self.coordinator = self._coordinator()
        prepare()
        await self.coordinator.recover()

    async def is_killed(self) -> None:
        """As kill -9: nothing of it acts any more; the store and the machines stay, agents lose their connections."""
        self.traps.is_dead = True
        self.machines.watchers.clear()
        self.ledger.is_dead = True
        self.pooled.is_killed(HERE)
        for backend in self.backends.values():
            backend.machines = FakeMachines()
        for agent in self.agents.values():
            for wire in agent.wires:
                wire.cut()
        await self._leaves()

    async def stops(self, *, keep_agents: bool = False) -> None:
        await self.coordinator.shutdown(keep_agents=keep_agents)
        await self._leaves()

    async def _leaves(self) -> None:
        await self._stack.aclose()
        self.traps = Traps()

    def _coordinator(self) -> Coordinator:
        def ended(agent_id: AgentId, how: str) -> None:
            coordinator.sessions.compute_ended(agent_id, how)

        entropy = self.entropy.fork(f"coordinator at {self.clock.monotonic()}")
        self.ledger = FakeLedger(self.pooled, HERE)
        self.file = config = self._config()
        builder = BenchBuilder(self, ended)
        coordinator = Coordinator(
            Given(
                store=trapped(faulty(self.store, self.faults), self.traps),
                clock=self.clock,
                entropy=entropy,
                supervisor=self.supervisor,
                sealer=AesGcmSealer(KEY, entropy),
                instance=an_instance(id=HERE),
                fleet=builder.fleet(config),
                ledger=self.ledger,
                configuration=Configuration(config=config, read=self._read, builder=builder, host=HOST),
                configured=self.layout.settings,
                sweep_seconds=self.layout.sweep_seconds,
                addresses=(URL,),
            )
        )
        return coordinator

    def _config(self) -> ScalersConfig:
        layout = self.layout
        return ScalersConfig(
            scalers=tuple(layout.scalers),
            global_max_agents=layout.max_agents,
            global_resource_cap=layout.cap,
            machine_pools=tuple(layout.machine_pools),
            defaults=layout.defaults,
        )

    async def _read(self) -> ScalersConfig | tuple[str, ...]:
        """The scalers file: whatever a test has put into `file`."""
        return self.file

    # --- time

    async def passes(self, seconds: float = MEANWHILE_SECONDS) -> None:
        """Let time pass: by default enough for whatever is under way to arrive."""
        await asyncio.sleep(seconds)

    async def until(self, holds: Callable[[], bool], *, within: float = PATIENCE_SECONDS) -> None:
        async with asyncio.timeout(within):
            while not holds():  # noqa: ASYNC110 (whatever it is, the test waits for it)
                await asyncio.sleep(0.01)

    # --- agents

    async def an_agent(
        self, name: str = "agent-1", *labels: str, gate: Sequence[str] = (), slots: int = 1
    ) -> BenchAgent:
        """A static agent, registered; without `labels` one of linux, x64."""
        agent = await self.a_program(name, *labels, gate=gate, slots=slots)
        await agent.registers()
        return agent

    async def a_program(
        self, name: str = "agent-1", *labels: str, gate: Sequence[str] = (), slots: int = 1
    ) -> BenchAgent:
        """A static agent that has not connected yet."""
        _, token = await self.coordinator.tokens.create_agent_token(
            name=name, labels=None, gate=frozenset(gate), expires_in_ms=None
        )
        return self.program(AgentId(name), labels or ("linux", "x64"), token, slots=slots)

    async def machine(self, number: int = 0) -> SpawnOrder:
        """The order of a machine, by the order in which they are made; waits until it is made."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.orders) <= number:
                self._machine_made.clear()
                await self._machine_made.wait()
        return self.orders[number]

    async def booted(self, number: int = 0) -> BenchAgent:
        """The agent program of a machine, which has not connected yet."""
        order = await self.machine(number)
        return self.agents.get(order.agent_id) or self.program(order.agent_id, order.labels, order.token)

    async def made(self, number: int = 0) -> BenchAgent:
        """The agent of a machine, registered."""
        agent = await self.booted(number)
        await agent.registers()
        return agent

    def dies(self, agent: BenchAgent, how: str = "was killed by signal 9") -> None:
        """Its machine ends by itself, and its connection with it."""
        self.machines.die(agent.agent_id, how)
        agent.cut()

    def program(self, agent_id: AgentId, labels: Sequence[str], token: str | None, *, slots: int = 1) -> BenchAgent:
        """An agent program that has not connected yet."""
        agent = BenchAgent(
            agent_id,
            labels=labels,
            token=token,
            entropy=self.entropy.fork(f"wire/{agent_id}"),
            accept=self._accept,
            slots=slots,
        )
        self.agents[agent_id] = agent
        return agent

    def _accept(self, end: SimEnd) -> None:
        self.supervisor.start(f"link.{end.remote}", self._serve(end))

    async def _serve(self, end: SimEnd) -> None:
        """One connection, as the gateway serves it."""
        session = self.coordinator.sessions.connected(end)
        code = ABNORMAL
        try:
            while True:
                frame = await end.receive()
                try:
                    await session.received(frame)
                except Exception:
                    logging.getLogger("kici.bench").exception("connection.failed")
                    end.close(CloseCode.INTERNAL, "internal error")
                    return
        except LinkClosed as closed:
            code = closed.code
        finally:
            if not self.traps.is_dead:
                await finish(session.closed(code), seconds=60, what=f"the end of a link of {end.remote}")

    def _gone(self, agent_id: AgentId) -> None:
        self.pooled.agent_ended(agent_id)

    def _made(self, order: SpawnOrder) -> None:
        self.orders.append(order)
        if order.proof is not None:
            self.pooled.inherits(order.agent_id)
        self._machine_made.set()

    # --- jobs

    async def submits(self, *labels: str, **fields: Any) -> Job:
        """One job; without `labels` for linux."""
        run = await self.submits_run({"job": a_request("job", *labels, **fields)})
        return run[0]

    async def submits_run(self, jobs: Mapping[str, JobRequest], *, org: OrgId = DEFAULT_ORG) -> list[Job]:
        """One run; its jobs in order."""
        request = SubmitRun(name="test", org=org, jobs=tuple(jobs.values()))
        return list((await self.coordinator.jobs.submit(request, SOMEBODY, None)).jobs)

    async def job(self, job: Job | JobId) -> Job:
        """As it is in the store now."""
        found = await self.store.job(job.id if isinstance(job, Job) else job)
        assert found is not None
        return found

    async def status(self, job: Job | JobId) -> JobStatus:
        return (await self.job(job)).status

    async def run(self, run_id: RunId) -> Run:
        found = await self.store.run(run_id)
        assert found is not None
        return found

    async def ended(self, job: Job, *, within: float = PATIENCE_SECONDS) -> Job:
        """The job once it is over."""
        async with asyncio.timeout(within):
            while (found := await self.job(job)).finished_at is None:  # noqa: ASYNC110 (asks the truth, not the program)
                await asyncio.sleep(0.05)
        return found

    async def cancels(self, job: Job, *, force: bool = False) -> Job:
        return await self.coordinator.jobs.cancel_job(job.id, force=force, reason="somebody changed their mind")

    async def verdict(self, job: Job) -> Verdict:
        """Why it is where it is: the nearest reason."""
        return (await self.coordinator.explain.verdicts(await self.job(job)))[0]

    async def jobs(self) -> list[Job]:
        return await self.store.jobs(JobFilter(limit=1000))

    # --- what there is

    async def spawns(self) -> list[Spawn]:
        """Rows of spawns."""
        return await self.store.spawns(owner=None, limit=1000)

    def dump(self) -> list[str]:
        """Every row of the database, as statements; bytes are in hexadecimal."""
        store: Any = self.store  # past the port: what is asked is what is on the disk
        return list(store._database._core._writer.iterdump())

    def told(self, event: Event) -> list[Mapping[str, Any]]:
        """The fields of each such event so far."""
        return [fields for name, fields in self.events if name == event]

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, as it would be scraped now; 0 where it was never touched."""
        self.coordinator.render_metrics()
        return self.coordinator.metrics.registry.get_sample_value(name, labels) or 0.0

    async def is_clean(self) -> None:
        """Assert that nothing is left of any scaler-made agent."""
        assert not self.machines.alive
        assert not await self.spawns()
        assert not await self.store.reservations(owner=HERE, limit=1000)
        assert len(self.coordinator.spawns) == 0
        assert self.coordinator.book.total.agents == 0
        assert self.coordinator.book.total.cpu_micros == 0
        assert self.coordinator.book.total.memory_bytes == 0
        assert not [row for pool in self.pooled.ledgers for row in self.pooled.rows(pool) if row.instance_id == HERE]

    def checks(self) -> None:
        """What holds at every moment."""
        book = self.coordinator.book
        assert book.total.agents == len(book.reservations)
        assert book.total.memory_bytes == sum(r.shape.requests.memory_bytes for r in book.reservations.values())
        assert book.total.cpu_micros == sum(round(r.shape.requests.cpus * 1e6) for r in book.reservations.values())
        assert set(book.reservations) <= {tracked.agent_id for tracked in self.coordinator.spawns}
        for agent in self.coordinator.registry:
            held = [job_id for job_id in agent.jobs if not job_id.startswith("(")]
            assert len(held) <= agent.slots, f"{agent.agent_id} has {held} in {agent.slots} slots"


def a_request(key: str, *labels: str, needs: Sequence[str] = (), **fields: Any) -> JobRequest:
    """One job of a run.  Fields of its demand and its spec may be given, too."""
    demand = {name: fields.pop(name) for name in ("cpus", "memory", "exclude", "image", "org") if name in fields}
    timeout_ms = fields.pop("queue_timeout_ms", None)
    return JobRequest(
        key=key,
        name=key,
        demand=a_demand(*(labels or ("linux",)), **demand),
        spec=a_spec(image=demand.get("image"), **fields),
        needs=tuple(needs),
        queue_timeout_ms=timeout_ms,
    )


class _Log(logging.Handler):
    """Keeps the events, and the exceptions that reached the log: nothing of the program may end that way."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(logging.DEBUG)
        self._bench = bench

    def emit(self, record: logging.LogRecord) -> None:
        self._bench.events.append((record.getMessage(), getattr(record, "kici", {})))
        if record.exc_info is not None:
            self._bench.failures.append(logging.Formatter().format(record))


@asynccontextmanager
async def a_bench(layout: Layout, *, is_started: bool = True) -> AsyncIterator[Bench]:
    async with a_store() as store:
        bench = Bench(layout, store, SeededEntropy(1))
        handler = _Log(bench)
        logger = logging.getLogger("kici")
        logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.DEBUG)
        try:
            if is_started:
                await bench.starts()
            yield bench
            if is_started:
                await bench.passes()
                bench.checks()
            assert not bench.failures, "\n".join(bench.failures)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            await bench._leaves()


Test = Callable[..., Awaitable[None]]


def benched(*scalers: ScalerEntry, is_started: bool = True, **layout: Any) -> Callable[[Test], Callable[..., None]]:
    """Run the test, whose first parameter is a `Bench`, on virtual time.  `layout`: fields of `Layout`."""

    def wrap(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            async def main() -> None:
                async with a_bench(Layout(scalers=scalers, **layout), is_started=is_started) as bench:
                    await test(bench, *args, **kwargs)

            run_virtual(main)

        first, *others = inspect.signature(test).parameters.values()
        assert first.name == "bench", f"the first parameter of {test} is its bench"
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]  # what pytest sees
        return run

    return wrap


class BenchBuilder:
    """Makes and changes fake backends for entries of the configuration."""

    def __init__(self, bench: Bench, ended: Callable[[AgentId, str], None]) -> None:
        self._bench = bench
        self._ended = ended
        self.defaults = UNDECLARED

    def fleet(self, config: ScalersConfig) -> Fleet:
        return Fleet(
            runtimes={entry.name: self.build(entry) for entry in config.scalers},
            router=Router(routables(config, HOST)),
            caps=host_caps(config),
        )

    def build(self, entry: ScalerEntry) -> ScalerRuntime:
        self.check(entry)
        backend = FakeBackend(
            scaler=entry.name,
            machines=self._bench.machines,
            clock=self._bench.clock,
            on_exit=self._ended,
            sets=tuple(chosen.labels for chosen in entry.label_sets),
            max_agents=entry.max_agents,
        )
        self._bench.backends[entry.name] = backend
        runtime = ScalerRuntime(
            name=entry.name, backend=backend, caps=scaler_caps(entry), orchestrator_url=URL, spawns_at_once=8
        )
        self.apply(runtime, entry)
        return runtime

    def check(self, entry: ScalerEntry) -> None:
        if entry.name in self._bench.unbuildable:
            raise Misconfigured(f"scaler {entry.name}: this host cannot serve it")

    def apply(self, runtime: ScalerRuntime, entry: ScalerEntry) -> None:
        backend = self._bench.backends[entry.name]
        backend.configure(sets=tuple(chosen.labels for chosen in entry.label_sets), max_agents=entry.max_agents)
        runtime.caps = scaler_caps(entry)
        runtime.widen(entry.max_concurrent_spawns)
        runtime.machine_pool = entry.machine_pool
        runtime.reuse_idle_seconds = entry.reuse.idle_seconds if entry.reuse else None
        runtime.reuse_max_jobs = entry.reuse.max_jobs if entry.reuse else None

    def build_retired(self, row: Spawn) -> ScalerRuntime | None:
        return self.build(a_scaler(row.scaler, row.label_set, max_agents=1))
