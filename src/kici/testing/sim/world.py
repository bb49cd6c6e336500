"""A whole installation in one process on virtual time, made from one seed.

A store, a coordinator with the host that its scalers make agents on, agents, clients, and faults at every seam.

First everything happens at once: jobs are submitted, and whatever the plan knows goes wrong.  Then faults stop, and
within bounded time all must come to rest (`settle`).  Every commit and every act of agents and machines is checked.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kici.apps.assembly import Coordinator
from kici.config.model import ScalersConfig
from kici.domain import knobs
from kici.domain.agent import AgentKind
from kici.domain.errors import StoreDown
from kici.domain.ids import DEFAULT_ORG, AgentId, ScalerName
from kici.domain.secret import parse_secret_ref
from kici.services.tokens import Tokens
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.agent import AgentPlace, SimAgent
from kici.testing.sim.chaos import Chaos
from kici.testing.sim.checkers import Checkers
from kici.testing.sim.coordinator import Files, Machine, SimCoordinator
from kici.testing.sim.fleet import scalers, with_pool
from kici.testing.sim.hosts import SimHost
from kici.testing.sim.ledger import SELF_LABELS, AgentTruth, Caps, Ledger
from kici.testing.sim.network import Network
from kici.testing.sim.plan import Plan, draw
from kici.testing.sim.seam import Weather
from kici.testing.sim.settle import Settlement
from kici.testing.sim.trace import WORLD, LogTap, Trace
from kici.testing.sim.watched import Change, WatchedCore, watched_store
from kici.testing.sim.workload import SECRET, Workload
from kici.testing.sim_clock import SimClock
from kici.testing.virtual_time import SimStuck, run_virtual
from kici.wire.agent_settings import AgentSettings
from kici.wire.messages import AgentRegister

T = TypeVar("T")
STATIC_GRACE_SECONDS: Final = 120.0
SURELY_SECONDS: Final = 15.0
"""Present for so long, an agent is beyond every race with its return."""
SLACK_SECONDS: Final = 2.0
LIMIT_SECONDS: Final = 3 * 3600.0
WATCH_SECONDS: Final = 0.5
STATIC_KINDS: Final = (
    (("linux", "metal"), ()),
    (("linux", "x64"), ()),
    (("linux", "metal", "heavy"), ("heavy",)),
)
"""Labels and gates of agents that people started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How one seed went."""

    seed: int
    digest: str
    """Equal for equal runs."""
    violation: str | None
    counts: Counter[str]
    virtual_seconds: float
    cpu_seconds: float


def run_seed(seed: int) -> Report:
    """Run the world of a seed to its end."""
    return run_plan(draw(seed))


def run_plan(plan: Plan) -> Report:
    begun = time.process_time()
    world: World | None = None
    seconds = 0.0

    async def main() -> None:
        nonlocal world, seconds
        world = World(plan)
        try:
            await world.run()
        finally:
            seconds = asyncio.get_running_loop().time()

    stuck = None
    try:
        run_virtual(main, limit_seconds=LIMIT_SECONDS)
    except SimStuck as error:
        stuck = str(error)
    assert world is not None
    violations = [*world.trace.violations, *([stuck] if stuck else [])]
    return Report(
        seed=plan.seed,
        digest=world.trace.digest,
        violation=violations[0] if violations else None,
        counts=world.trace.counts,
        virtual_seconds=seconds,
        cpu_seconds=time.process_time() - begun,
    )


class World:
    """Make it on the running loop."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        entropy = SeededEntropy(plan.seed)
        self._entropy = entropy.fork("world")
        self.trace = Trace()
        self.ledger = Ledger()
        self.checkers = Checkers(self.ledger, self.trace)
        self.clock = SimClock()
        self.core = WatchedCore(self.clock.now)
        self.core.on_commit = self._committed
        self.store = watched_store(self.core)
        self.weather = Weather(plan=plan, entropy=entropy.fork("weather"))
        self.network = Network(self.trace, entropy.fork("network"), delay_seconds=plan.link_seconds)
        self._place = AgentPlace(
            network=self.network,
            trace=self.trace,
            ledger=self.ledger,
            checkers=self.checkers,
            entropy=entropy.fork("agents"),
        )
        config = scalers(plan)
        self._first_config = with_pool(config, plan.warm_agents) if plan.warm_agents else config
        self.files = Files(self._first_config)
        self._note_caps()
        self.host = SimHost(plan, entropy.fork("host"), self._place)
        self.coordinator = SimCoordinator(
            "coordinator-a",
            Machine(
                plan=plan,
                entropy=entropy.fork("coordinator"),
                trace=self.trace,
                ledger=self.ledger,
                store=self.store,
                weather=self.weather,
                host=self.host,
                network=self.network,
                clock=self.clock,
                files=self.files,
            ),
        )
        self.workload = Workload(plan, entropy.fork("workload"), self.trace, self.ledger, self.coordinator)
        self._well_seconds = 0.0
        self._skew_ms_max = 0
        self._tokens = Tokens(store=self.store, clock=self.clock, entropy=entropy.fork("tokens"))
        self._static: dict[AgentId, SimAgent] = {}
        self._static_settings: dict[AgentId, AgentSettings] = {}
        self.checkers.may_lose = self._may_lose
        self.ledger.jobs_max = {
            entry.name: 1 if entry.reuse is None else entry.reuse.max_jobs for entry in config.scalers
        }

    # ------------------------------------------------------------------ what others ask

    def reach(self) -> Coordinator | None:
        """The coordinator, as a client reaches it."""
        return self.coordinator.program if self.coordinator.is_up else None

    def statics(self) -> list[SimAgent]:
        return [agent for agent in self._static.values() if agent.is_alive]

    def agents(self) -> list[SimAgent]:
        return [*self.statics(), *(agent for agent in self.host.agents.values() if agent.is_alive)]

    def jump(self, ms: int) -> None:
        """Wall time jumps.  What waits for a moment that was set before waits so much longer."""
        self.clock.skew_ms += ms
        self._skew_ms_max = max(self._skew_ms_max, self.clock.skew_ms)

    @property
    def set_back_seconds(self) -> float:
        """How far wall time is behind what it has shown before."""
        return (self._skew_ms_max - self.clock.skew_ms) / 1000

    async def reload(self, config: ScalersConfig) -> bool:
        """Change the scalers files and have them taken over.  Whether they were."""
        self.files.config = config
        self._note_caps()
        try:
            report = await self.coordinator.ask(lambda it: it.reload_scalers())
        except ConnectionError:
            return False
        self.trace.tell(f"reload: {report}", WORLD)
        self.trace.count(f"reload {report.outcome}")
        return report.outcome != "rejected"

    async def reload_surely(self, config: ScalersConfig) -> None:
        while not await self.reload(config):  # noqa: ASYNC110 - it knows no simulation that it could tell
            await asyncio.sleep(1)

    def _note_caps(self) -> None:
        """A cap is exceeded if it would have been at any time: a lower one ends nothing that runs."""
        config, caps = self.files.config, self.ledger.caps
        for name, agents, cap in (
            ("", config.global_max_agents, config.global_resource_cap),
            *((entry.name, entry.max_agents, entry.resource_cap) for entry in config.scalers),
        ):
            caps.setdefault(name, Caps(0, 0, 0)).widen(agents, cap.max_cpu, cap.max_memory_bytes)

    def doom_all(self, why: str) -> None:
        """Somebody ends everything that scalers made."""
        for agent_id in self.host.alive:
            self.ledger.agents[agent_id].doomed = why

    async def patiently(self, work: Callable[[Coordinator], Coroutine[Any, Any, T]]) -> None:
        """What an operator does until it works."""
        while True:
            try:
                _ = await self.coordinator.ask(work)
            except (StoreDown, ConnectionError):
                await asyncio.sleep(1)
            else:
                return

    # ------------------------------------------------------------------ the run

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        with LogTap(self.trace):
            await self._prepare()
            life = loop.create_task(self._live(), name="world")
            violated = loop.create_task(self.trace.violated.wait(), name="violated")
            await asyncio.wait({life, violated}, return_when=asyncio.FIRST_COMPLETED)
            self.coordinator.kill(0.0)  # what a broken run would still do is of no interest
            violated.cancel()
            life.cancel()
            await asyncio.wait({life})
            if not life.cancelled() and (error := life.exception()) is not None:
                raise error

    async def _prepare(self) -> None:
        await self.store.migrate()
        self.core.watch()

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(self.coordinator.keep_running(), name="keep running")
            watcher = group.create_task(self._watch(), name="watch")
            await self._first_start()
            await self._chaos()
            self._end_faults()
            settlement = Settlement(self)
            await self.reload_surely(self._first_config)
            await settlement.come_to_rest()
            if self.plan.warm_agents:
                await settlement.empty_pools()
                await settlement.come_to_rest()
            await settlement.shut_down()
            keeper.cancel()
            watcher.cancel()

    async def _first_start(self) -> None:
        await self.patiently(lambda it: it.secrets.put(DEFAULT_ORG, parse_secret_ref(SECRET), "hush"))
        for number in range(self.plan.static_agents):
            await self._add_static(number)

    async def _chaos(self) -> None:
        loop = asyncio.get_running_loop()
        chaos = loop.create_task(Chaos(self, self._entropy.fork("chaos")).run(), name="chaos")
        submitting = loop.create_task(self.workload.submit_all(), name="submit")
        await asyncio.sleep(self.plan.chaos_seconds)
        chaos.cancel()
        await asyncio.wait({chaos, submitting})

    def _end_faults(self) -> None:
        self.trace.tell("faults have stopped", WORLD)
        self.weather.is_fair = self.host.is_kind = True
        if (program := self.reach()) is not None:
            program.drain.draining = False

    async def _watch(self) -> None:
        """Look at memory, and at who is well, every half second."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._look()

    def _look(self) -> None:
        """Who is well, by a stopwatch that stands still while nobody could be."""
        if self.reach() is not None and not self.weather.is_down:
            self._well_seconds += WATCH_SECONDS
        for agent in self.agents():
            if agent.is_present:
                agent.present_at = self._well_seconds
                if agent.present_since is None:
                    agent.present_since = self._well_seconds
            else:
                agent.present_since = None
        self._check_memory()

    def _committed(self, changes: list[Change]) -> None:
        self.checkers.committed(changes)
        self._check_memory()

    def _check_memory(self) -> None:
        """Usage is what the reservations add up to, in all and for each scaler."""
        program = self.coordinator.program
        if program is None:
            return
        sums = {"": (0, 0, 0)}
        for held in program.book.reservations.values():
            amount = held.shape.requests
            for name in ("", held.scaler):
                agents, micros, memory = sums.get(name, (0, 0, 0))
                sums[name] = (agents + 1, micros + round(amount.cpus * 1_000_000), memory + amount.memory_bytes)
        for name, expected in sums.items():
            usage = program.book.of(ScalerName(name)) if name else program.book.total
            found = (usage.agents, usage.cpu_micros, usage.memory_bytes)
            self.trace.check(found == expected, f"usage of {name or 'all'} is {found}, reserved is {expected}", WORLD)

    def _may_lose(self, agent: AgentTruth) -> str | None:
        """Why the program may give up an agent: it is dead, somebody ended it, or it is away for too long."""
        process = agent.process
        if agent.doomed is not None or process is None:
            return agent.doomed or "it is dead"
        knob = self.plan.settings[knobs.AGENT_RECONNECT_GRACE_MS.name]
        grace_seconds = STATIC_GRACE_SECONDS if agent.order is None else knob / 1000
        if process.was_turned_away:
            return "the store could not be asked when it came back"
        if process.is_present and process.present_since is not None:
            is_well = self._well_seconds - process.present_since > SURELY_SECONDS
            return None if is_well else "it came back just now"
        away_seconds = self._well_seconds - process.present_at
        return None if away_seconds + SLACK_SECONDS < grace_seconds else f"it is away for {away_seconds:.0f} s"

    # ------------------------------------------------------------------ static agents

    async def _add_static(self, number: int) -> None:
        agent_id = AgentId(f"static-{number}")
        labels, gate = STATIC_KINDS[number % len(STATIC_KINDS)]
        own = (*SELF_LABELS, f"kici:host:{agent_id}")
        token, plain = self._tokens.new_agent_token(
            kind=AgentKind.STATIC, labels=frozenset(labels), gate=frozenset(gate), name=agent_id
        )
        await self.store.create_agent_token(token)
        self._static_settings[agent_id] = AgentSettings(
            url=self.coordinator.url,
            register=AgentRegister(agent_id=agent_id, labels=[*labels, *own]),
            token=plain,
        )
        self.ledger.agents[agent_id] = AgentTruth(
            agent_id=agent_id, labels=frozenset((*labels, *own)), gate=frozenset(gate)
        )
        self._start_static(agent_id)

    def _start_static(self, agent_id: AgentId) -> None:
        agent = SimAgent(
            self.ledger.agents[agent_id],
            self._static_settings[agent_id],
            self._place,
            on_exit=lambda how: self._static_again(agent_id, 1.0),
        )
        self._static[agent_id] = agent
        agent.start()

    def restart_static(self, agent: SimAgent, seconds: float) -> None:
        """It crashes, and is started again after a while."""
        agent.crash("killed")
        self._static_again(agent.id, seconds)

    def _static_again(self, agent_id: AgentId, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._start_static, agent_id)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.trace.violate(f"an exception was not handled: {context.get('message')} {context.get('exception')!r}")
