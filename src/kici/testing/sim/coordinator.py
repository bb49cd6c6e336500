"""A simulated coordinator: the real object graph, started, killed, stopped and started again.

It is the coordinator program without sockets: recover, let agents in, start, wait, shut down.  A kill takes its
memory and its connections; the store and what runs on its host stay.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kici.adapters.sealer import AesGcmSealer
from kici.apps.assembly import Coordinator
from kici.apps.given import Configuration, Given
from kici.config.model import ScalersConfig
from kici.decide.ledger import Ledger as Pools
from kici.decide.ledger import Outcome
from kici.domain.errors import KiciError, Retryable, StoreDown
from kici.domain.ids import AgentId, InstanceId
from kici.domain.instance import Instance
from kici.kit.finish import finish
from kici.kit.supervise import Supervisor
from kici.ports.store import Store
from kici.testing.fake_ledger import FakeLedger, PooledHost
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.cloud import CloudView, SimCloud
from kici.testing.sim.fleet import HOST, SimFleetBuilder
from kici.testing.sim.hints import Hints
from kici.testing.sim.hosts import HostView, SimHost
from kici.testing.sim.ledger import Ledger
from kici.testing.sim.life import CURRENT, Life, MortalClock
from kici.testing.sim.network import WORKERS, Network
from kici.testing.sim.plan import Plan
from kici.testing.sim.seam import Weather, behind
from kici.testing.sim.trace import WORLD, Trace
from kici.testing.sim_clock import SimClock
from kici.testing.sim_link import ABNORMAL, LinkClosed, SimEnd
from kici.wire.messages import CloseCode

T = TypeVar("T")
KEY: Final = bytes(32)
PROBE_SECONDS: Final = 0.05
CLOSED_SECONDS: Final = 240.0
"""Longer than a coordinator may stand still."""
RESTART_SECONDS: Final = 2.0
"""What the service manager waits before it starts a program again that could not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a coordinator runs and what it can reach; the same for all its runs."""

    plan: Plan
    entropy: SeededEntropy
    trace: Trace
    ledger: Ledger
    store: Store
    weather: Weather
    host: SimHost
    network: Network
    clock: SimClock
    files: "Files"
    cloud: SimCloud
    hints: Hints


@dataclass(slots=True)
class Files:
    """What an operator may edit."""

    config: ScalersConfig


class SimCoordinator:
    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.url = f"ws://{name}/ws"
        self.workers_url = f"{self.url}{WORKERS}"
        self._machine = machine
        self._life = Life(name)
        self._life.is_alive = False
        self._task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Event | None = None
        self._keeps_agents = False
        self._gateway: Supervisor | None = None
        self._ledger: MortalLedger | None = None
        self._context = contextvars.copy_context()
        self._runs = 0
        self._down_seconds = 0.0
        self.program: Coordinator | None = None
        """Its object graph, while agents may connect."""

    @property
    def is_up(self) -> bool:
        return self.program is not None and self._life.is_alive and not self.program.drain.stopping

    @property
    def gateway(self) -> Supervisor:
        assert self._gateway is not None
        return self._gateway

    async def keep_running(self) -> None:
        """Start it, and start it again whenever it ended.  Leave by cancellation."""
        loop = asyncio.get_running_loop()
        while True:
            self._runs += 1
            self._machine.ledger.coordinator_runs[self.name] = self._runs
            self._down_seconds = RESTART_SECONDS
            self._task = task = loop.create_task(self._run(), name=f"{self.name} run {self._runs}")
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                self._machine.trace.violate(f"{self.name} failed: {error!r}")
            await asyncio.sleep(self._down_seconds)

    def kill(self, down_seconds: float) -> None:
        """As kill -9: nothing of it runs on, its connections are reset."""
        if self._life.is_alive and self._task is not None:
            self._machine.trace.tell(f"{self.name} is killed, down for {down_seconds:.1f} s", WORLD)
            self._machine.trace.count("coordinator killed")
            self._down_seconds = down_seconds
            self.program = None
            self._life.die()
            self._leave_pools()
            self._cut_off()
            self._task.cancel()

    async def freeze(self, seconds: float) -> None:
        """As SIGSTOP and SIGCONT: it does nothing for a while, and does not know."""
        life, network = self._life, self._machine.network
        if not life.is_alive or life.frozen_seconds > 0:
            return
        self._machine.trace.tell(f"{life.name} stands still for {seconds:.1f} s", WORLD)
        self._machine.trace.count("coordinator frozen")
        life.freeze(seconds)
        for url in (self.url, self.workers_url):
            network.darken(url, loses=False)
            asyncio.get_running_loop().call_later(seconds, network.lighten, url)  # also if nobody waits for it any more
        await asyncio.sleep(seconds)

    @property
    def is_ready(self) -> bool:
        """Whether it could take in agents now."""
        return self.is_up and not self._machine.weather.is_down and not self.is_frozen

    @property
    def frozen_seconds(self) -> float:
        """For how much longer it stands still."""
        return max(0.0, self._life.frozen_seconds) if self._life.is_alive else 0.0

    @property
    def is_frozen(self) -> bool:
        return self.frozen_seconds > 0

    def stop(self, *, keep_agents: bool, down_seconds: float) -> None:
        """As TERM, or USR2."""
        if self.is_up and self._stopping is not None:
            how = "keeping agents" if keep_agents else "ending agents"
            self._machine.trace.tell(f"{self.name} is stopped {how}, down for {down_seconds:.1f} s", WORLD)
            self._machine.trace.count(f"coordinator stopped {how}")
            self._down_seconds, self._keeps_agents = down_seconds, keep_agents
            self._stopping.set()

    async def ask(self, work: Callable[[Coordinator], Coroutine[Any, Any, T]]) -> T:
        """What a client asks over HTTP: it goes on in the program although the client waits no longer.

        Raises `ConnectionError` when the program is not there or dies over it.
        """
        if not self.is_up or self.program is None:
            raise ConnectionError(f"{self.name} cannot be reached")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._context.copy().run(self.gateway.start, "request", _answer(work(self.program), answer))
        return await answer

    def accept(self, end: SimEnd) -> None:
        """An agent connects."""
        assert self.program is not None
        self._context.copy().run(self.gateway.start, f"link.{end.remote}", self._serve(end))

    def accept_worker(self, end: SimEnd) -> None:
        """A worker connects."""
        self._context.copy().run(self.gateway.start, f"worker.{end.remote}", self._serve_worker(end))

    def _cut_off(self) -> None:
        for url in (self.url, self.workers_url):
            self._machine.network.cut_off(url)

    async def _read(self) -> ScalersConfig:
        """The scalers files as they are now."""
        return self._machine.files.config

    async def _run(self) -> None:
        """One run of the program."""
        self._life = life = Life(f"{self.name}#{self._runs}")
        _ = CURRENT.set(life)
        self._context = contextvars.copy_context()
        self._stopping = asyncio.Event()
        self._machine.trace.tell(f"{life.name} starts", WORLD)
        try:
            async with Supervisor("coordinator") as supervisor:
                program = self._program(life, supervisor)
                await program.recover()
                async with Supervisor("gateway") as self._gateway:
                    await self._listen(program, self._stopping)
        except StoreDown as error:
            self._machine.trace.tell(f"{life.name} cannot start: {error}", WORLD)
            self._machine.trace.count("coordinator could not start")
        finally:
            life.is_alive = False
            self._leave_pools()
            self._cut_off()
        self._machine.trace.tell(f"{life.name} is down", WORLD)

    def _leave_pools(self) -> None:
        """Its process ends: the kernel takes its locks."""
        pooled = self._machine.host.pooled
        if pooled is not None and self._ledger is not None:
            self._ledger.is_dead = True
            pooled.is_killed(InstanceId(self.name))

    def _pools(self) -> "MortalLedger | None":
        pooled = self._machine.host.pooled
        if pooled is not None:
            self._ledger = MortalLedger(pooled, InstanceId(self.name), self._machine.weather, self._life)
        return self._ledger

    async def _listen(self, program: Coordinator, stopping: asyncio.Event) -> None:
        """From when agents and clients are let in until the end."""
        try:
            self.program = program
            self._machine.network.listeners[self.url] = self
            self._machine.network.listeners[self.workers_url] = WorkerDoor(self)
            await program.start()
            self._machine.trace.tell(f"{self._life.name} is up", WORLD)
            await stopping.wait()
            await program.shutdown(keep_agents=self._keeps_agents)
        finally:
            self.program = None
            self._machine.host.view = None
            for url in (self.url, self.workers_url):
                self._machine.network.listeners.pop(url, None)

    def _program(self, life: Life, supervisor: Supervisor) -> Coordinator:
        machine = self._machine
        entropy = machine.entropy.fork(life.name)
        clock = MortalClock(machine.clock, life)
        now = clock.now()

        def ended(agent_id: AgentId, how: str) -> None:
            program.sessions.compute_ended(agent_id, how)

        view = HostView(machine.host, life, kills=self._kills)
        view.under_way = lambda: [tracked.agent_id for tracked in program.spawns]
        builder = SimFleetBuilder(
            machine.plan,
            view=view,
            clock=clock,
            url=self.url,
            entropy=entropy.fork("spawns"),
            on_exit=ended,
        )
        builder.program = lambda: program
        config = machine.files.config
        program = Coordinator(
            Given(
                store=behind(machine.store, machine.weather, life, machine.trace, kills=self._kills),
                clock=clock,
                entropy=entropy,
                supervisor=supervisor,
                notifier=machine.hints.of(life),
                sealer=AesGcmSealer(KEY, entropy),
                instance=Instance(
                    id=InstanceId(self.name),
                    role="coordinator",
                    version="sim",
                    address=self.url,
                    started_at=now,
                    last_beat_at=now,
                ),
                fleet=builder.fleet(config),
                configuration=Configuration(config=config, read=self._read, builder=builder, host=HOST),
                ledger=self._pools(),
                webhooks=CloudView(machine.cloud, life, site=self.name),
                configured=machine.plan.settings,
                addresses=(self.url,),
                probe=SimProbe(machine.network, life),
            )
        )
        return program

    def _kills(self, where: str) -> bool:
        """Whether it dies here."""
        if not self._machine.weather.happens(where):
            return False
        self._machine.trace.tell(f"{self.name}: {where}", WORLD)
        self.kill(self._machine.weather.entropy.uniform(0.1, 15))
        return True

    async def _serve_worker(self, end: SimEnd) -> None:
        program, life = self.program, self._life
        if program is None:
            return
        session = program.workers.links.connected(end)
        code = ABNORMAL
        try:
            while True:
                frame = await end.receive()
                await life.unfrozen()
                await session.received(frame)
        except LinkClosed as closed:
            code = closed.code
        finally:
            if life.is_alive:
                await finish(session.closed(code), seconds=CLOSED_SECONDS, what=f"the end of a link of {end.remote}")

    async def _serve(self, end: SimEnd) -> None:
        """One connection, as the gateway serves it."""
        program, life = self.program, self._life
        if program is None:
            return
        session = program.sessions.connected(end)
        code = ABNORMAL
        try:
            while True:
                frame = await end.receive()
                await life.unfrozen()
                try:
                    await session.received(frame)
                except Exception as error:  # noqa: BLE001 - as the gateway does
                    self._machine.trace.violate(f"handling a frame failed: {error!r}", end.remote)
                    end.close(CloseCode.INTERNAL, "internal error")
                    return
        except LinkClosed as closed:
            code = closed.code
        finally:
            if self._life.is_alive:
                await finish(session.closed(code), seconds=CLOSED_SECONDS, what=f"the end of a link of {end.remote}")


class WorkerDoor:
    """Where workers connect."""

    def __init__(self, coordinator: SimCoordinator) -> None:
        self._coordinator = coordinator

    def accept(self, end: SimEnd) -> None:
        self._coordinator.accept_worker(end)


class SimProbe:
    """Implements `ports.peers.PeerProbe` for one run of a coordinator."""

    def __init__(self, network: Network, life: Life) -> None:
        self._network = network
        self._life = life

    async def is_ready(self, address: str) -> bool:
        await self._life.sleep(PROBE_SECONDS)
        there = self._network.listeners.get(address)
        return isinstance(there, SimCoordinator) and there.is_ready


class MortalLedger(FakeLedger):
    """Of one run of a coordinator: it may fail, before or after the deed."""

    def __init__(self, host: PooledHost, instance_id: InstanceId, weather: Weather, life: Life) -> None:
        super().__init__(host, instance_id)
        self._life = life
        self._weather = weather

    async def _step(self, pool: str, step: Callable[[Pools], Outcome]) -> Outcome:
        await self._life.unfrozen()
        fails, is_done = self._weather.happens("ledger-fails"), self._weather.entropy.chance(0.5)
        if fails and not is_done:
            raise Retryable("the ledger could not be read")
        outcome = await super()._step(pool, step)
        if fails:
            raise Retryable("the ledger was written, and its lock could not be given back")
        return outcome


async def _answer(work: Coroutine[Any, Any, T], answer: asyncio.Future[T]) -> None:
    try:
        result = await work
    except BaseException as error:
        if not answer.done():
            is_dead = isinstance(error, asyncio.CancelledError)
            answer.set_exception(ConnectionError("the program died over it") if is_dead else error)
        if not isinstance(error, KiciError):
            raise
    else:
        if not answer.done():
            answer.set_result(result)
