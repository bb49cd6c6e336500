"""A whole installation in one process on virtual time, made from one seed.

A store, coordinators with the hosts that their scalers make agents on, agents, clients, and faults at every seam.
First everything happens at once: jobs are submitted, and whatever the plan knows goes wrong.  Then faults stop, and
within bounded time all must come to rest (`settle`).  Every commit and every act of agents and machines is checked.
"""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import chain
from math import inf
from string import ascii_lowercase
from typing import Any, Final

from kici.apps.assembly import Coordinator
from kici.config.model import ScalersConfig
from kici.domain import knobs
from kici.domain.errors import StoreDown
from kici.domain.ids import DEFAULT_ORG, AgentId
from kici.domain.secret import parse_secret_ref
from kici.stores.query import Query
from kici.testing.fake_ledger import PooledHost
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.agent import AgentPlace, SimAgent
from kici.testing.sim.chaos import Chaos
from kici.testing.sim.checkers import Checkers
from kici.testing.sim.cloud import SimCloud, registration
from kici.testing.sim.coordinator import Files, SimCoordinator
from kici.testing.sim.fleet import CLOUD_REF, POOLED, scalers, with_pool
from kici.testing.sim.hints import Hints
from kici.testing.sim.hosts import SimHost
from kici.testing.sim.ledger import Caps, Ledger
from kici.testing.sim.network import Network
from kici.testing.sim.plan import Plan
from kici.testing.sim.settle import Settlement
from kici.testing.sim.site import Common, Site
from kici.testing.sim.statics import StaticAgents
from kici.testing.sim.trace import WORLD, LogTap, Trace
from kici.testing.sim.watched import Change, WatchedCore, watched_store
from kici.testing.sim.wellness import LOOK_SECONDS, Wellness
from kici.testing.sim.worker import SimWorker, yard
from kici.testing.sim.workload import CLIENT, CLOUD_SECRET, SECRET, Workload
from kici.testing.sim_clock import SimClock

PRESENT_SECONDS: Final = 60
"""A coordinator whose beat is younger is there."""
ABSENT_SECONDS: Final = 120
"""The rows of one whose beat is older are removed by others, its computes end when it is back."""


class World:
    """Make it on the running loop."""

    def __init__(self, plan: Plan, *, keeps_lines: bool = False) -> None:
        self.plan = plan
        entropy = SeededEntropy(plan.seed)
        self._entropy = entropy.fork("world")
        self.trace = Trace(keeps_lines=keeps_lines)
        self.ledger = Ledger()
        self.checkers = Checkers(self.ledger, self.trace)
        self._wellness = Wellness(plan)
        self.checkers.may_lose = self._wellness.may_lose
        self.checkers.jumps = "jump" in plan.every
        self.checkers.backoff_seconds = plan.settings[knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name] / 1000 - 0.001
        self._store_clock = SimClock()
        self.core = WatchedCore(self._store_clock.now)
        self.core.on_commit = self._committed
        self.store = watched_store(self.core)
        self.network = Network(self.trace, entropy.fork("network"), delay_seconds=plan.link_seconds)
        place = AgentPlace(
            network=self.network,
            trace=self.trace,
            ledger=self.ledger,
            checkers=self.checkers,
            entropy=entropy.fork("agents"),
        )
        config = scalers(plan)
        self._first_config = with_pool(config, plan.warm_agents) if plan.warm_agents else config
        self.pooled = PooledHost() if plan.pool_cpus else None
        self.ledger.pooled = frozenset(POOLED if plan.pool_cpus else ())
        self.files = Files(self._first_config)
        self.checkers.cloud.sees_others = self._sees_others
        self.checkers.is_absent = self._is_absent
        self.checkers.is_ending = self._is_ending
        self.cloud = SimCloud(plan, entropy.fork("cloud"), place, self.checkers.cloud)
        self._note_config()
        self._skew_ms_max = 0
        self.sites = self._make_sites(place, entropy)
        self.workers = [self._make_worker(number, place, entropy) for number in range(plan.workers)]
        self.statics = StaticAgents(self.store, place, entropy.fork("tokens"), url=self._url)
        self.workload = Workload(plan, entropy.fork("workload"), self.trace, self.ledger, self.reach)

    def _make_sites(self, place: AgentPlace, entropy: SeededEntropy) -> list[Site]:
        names = [f"coordinator-{letter}" for letter in ascii_lowercase[: self.plan.coordinators]]
        common = Common(
            plan=self.plan,
            trace=self.trace,
            store=self.store,
            place=place,
            files=self.files,
            hints=Hints(self.plan, entropy.fork("hints")),
            pooled=self.pooled,
            cloud=self.cloud,
        )
        return [Site.make(name, common, clock=self._clock_of(name), entropy=entropy.fork(name)) for name in names]

    def _make_worker(self, number: int, place: AgentPlace, entropy: SeededEntropy) -> SimWorker:
        name = f"worker-{number}"
        own = entropy.fork(name)
        worker = SimWorker(number, self.plan, own, SimHost(name, self.plan, own, place, pooled=None), self.network)
        worker.urls = tuple(site.coordinator.workers_url for site in self.sites)
        for entry in yard(self.plan, number).scalers:
            self.ledger.caps[entry.name] = Caps(entry.max_agents, inf, inf)
            self.ledger.jobs_max[entry.name] = 1
        return worker

    def _clock_of(self, name: str) -> SimClock:
        """A single coordinator has an embedded store, which shares its clock."""
        if self.plan.coordinators == 1:
            return self._store_clock
        most = self.plan.skew_ms_max
        skew_ms = round(SeededEntropy(f"{self.plan.seed}/{name}").uniform(-most, most)) if most else 0
        return SimClock(skew_ms=skew_ms)

    # ------------------------------------------------------------------ what others ask

    def reach(self) -> SimCoordinator:
        """A coordinator that a client reaches; a dead one if there is no other."""
        up = [site.coordinator for site in self.sites if site.coordinator.is_up]
        return self._entropy.choice(up) if up else self.sites[0].coordinator

    def hosts(self) -> list[SimHost]:
        """Where local backends make agents."""
        return [*(site.host for site in self.sites), *(worker.host for worker in self.workers)]

    def agents(self) -> list[SimAgent]:
        """All that live, wherever they are."""
        made = chain(*(host.agents.values() for host in self.hosts()))
        return [*self.statics.alive(), *(agent for agent in made if agent.is_alive), *self.cloud.agents()]

    def jump(self, site: Site, ms: int) -> None:
        """Wall time jumps.  What waits for a moment that was set before waits so much longer."""
        self.trace.tell(f"{site.name}: wall time jumps by {ms / 1000:g} s", WORLD)
        site.clock.skew_ms += ms
        self._skew_ms_max = max(self._skew_ms_max, self._store_clock.skew_ms)

    @property
    def set_back_seconds(self) -> float:
        """How far the time of the store is behind what it has shown before."""
        return (self._skew_ms_max - self._store_clock.skew_ms) / 1000

    async def reload(self, config: ScalersConfig) -> bool:
        """Change the scalers files and have them taken over by all.  Whether they were."""
        self.files.config = config
        self._note_config()
        taken = [await self._reload_one(site) for site in self.sites]
        return all(taken)

    async def _reload_one(self, site: Site) -> bool:
        try:
            report = await site.coordinator.ask(lambda it: it.reload_scalers())
        except ConnectionError:
            return False
        self.trace.tell(f"{site.name}: reload: {report}", WORLD)
        self.trace.count(f"reload {report.outcome}")
        return report.outcome != "rejected"

    async def reload_surely(self, config: ScalersConfig) -> None:
        while not await self.reload(config):  # noqa: ASYNC110 - it knows no simulation that it could tell
            await asyncio.sleep(1)

    def _note_config(self) -> None:
        """A cap is exceeded if it would have been at any time: a lower one ends nothing that runs."""
        config, caps = self.files.config, self.ledger.caps
        for name, agents, cap in (
            ("", config.global_max_agents, config.global_resource_cap),
            *((entry.name, entry.max_agents, entry.resource_cap) for entry in config.scalers),
        ):
            caps.setdefault(name, Caps(0, 0, 0)).widen(agents, cap.max_cpu, cap.max_memory_bytes)
        for pool in config.machine_pools:
            self.ledger.pool_cpus = max(self.ledger.pool_cpus, pool.cap.max_cpu or inf)
        for entry in config.scalers:
            warm = entry.warm_pool.size * len(entry.label_sets) if entry.warm_pool.enabled else 0
            self.ledger.warm_max[entry.name] = max(warm, self.ledger.warm_max.get(entry.name, 0))
            self.ledger.jobs_max[entry.name] = 1 if entry.reuse is None else entry.reuse.max_jobs

    async def patiently(self, work: Callable[[Coordinator], Coroutine[Any, Any, object]]) -> None:
        """What an operator does until it works."""
        while True:
            try:
                _ = await self.reach().ask(work)
            except (StoreDown, ConnectionError):
                await asyncio.sleep(1)
            else:
                return

    # ------------------------------------------------------------------ the run

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        with LogTap(self.trace):
            await self.store.migrate()
            self.core.watch()
            life = loop.create_task(self._live(), name="world")
            violated = loop.create_task(self.trace.violated.wait(), name="violated")
            await asyncio.wait({life, violated}, return_when=asyncio.FIRST_COMPLETED)
            for worker in self.workers:
                worker.kill(0.0)
            for site in self.sites:
                site.coordinator.kill(0.0)  # what a broken run would still do is of no interest
            violated.cancel()
            life.cancel()
            await asyncio.wait({life})
            if not life.cancelled() and (error := life.exception()) is not None:
                raise error

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            eternal = [
                group.create_task(site.coordinator.keep_running(), name=f"keep {site.name}") for site in self.sites
            ]
            eternal.append(group.create_task(self._watch(), name="watch"))
            eternal += [group.create_task(one.keep_running(), name=f"keep {one.name}") for one in self.workers]
            for worker in self.workers:
                await self._let_in(worker)
            await self.patiently(lambda it: it.secrets.put(DEFAULT_ORG, parse_secret_ref(SECRET), "hush"))
            if self.plan.cloud_agents:
                await self._subscribe()
            for number in range(self.plan.static_agents):
                await self.statics.add(number)
            await self._chaos()
            await self._settle()
            for task in eternal:
                task.cancel()

    async def _let_in(self, worker: SimWorker) -> None:
        """An operator makes a join token and brings it to the host."""

        async def make(it: Coordinator) -> None:
            _, worker.keys.token = await it.workers.create_join_token(by="somebody", ttl_ms=3_600_000)

        await self.patiently(make)

    async def _subscribe(self) -> None:
        """The cloud hears of scale events."""
        await self.patiently(lambda it: it.secrets.put(DEFAULT_ORG, parse_secret_ref(CLOUD_SECRET), "whsec_aHVzaA=="))
        document = registration("http://cloud/", CLOUD_REF, CLOUD_SECRET)
        await self.patiently(lambda it: it.events.workflows.apply(document, CLIENT))

    async def _chaos(self) -> None:
        loop = asyncio.get_running_loop()
        chaos = loop.create_task(Chaos(self, self._entropy.fork("chaos")).run(), name="chaos")
        submitting = loop.create_task(self.workload.submit_all(), name="submit")
        await asyncio.sleep(self.plan.chaos_seconds)
        chaos.cancel()
        await asyncio.wait({chaos, submitting})

    async def _settle(self) -> None:
        self.trace.tell("faults have stopped", WORLD)
        self.cloud.is_kind = True
        for worker in self.workers:
            worker.host.is_kind = True
        for site in self.sites:
            site.become_fair()
        settlement = Settlement(self)
        await self.reload_surely(self._first_config)
        await settlement.come_to_rest()
        if self.plan.warm_agents:
            await settlement.empty_pools()
            await settlement.come_to_rest()
        await settlement.shut_down()

    async def _watch(self) -> None:
        """Look at memory, and at who is well."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            well = [site.coordinator.url for site in self.sites if site.is_well]
            self._wellness.look(self.agents(), well=well)
            self._check_memory()
            self._check_leaders()

    def _committed(self, changes: list[Change]) -> None:
        self.checkers.committed(changes)
        self._check_leaders()
        self._check_memory()

    def _sees_others(self) -> bool:
        """As the store shows it to whoever leads."""
        beats = self._beats()
        _ = beats.pop(self.checkers.cloud.leader or "", None)
        since = self._store_clock.now() - PRESENT_SECONDS * 1000
        return not beats or any(beat_at > since for beat_at in beats.values())

    def _is_ending(self, agent_id: AgentId) -> bool:
        programs = [site.coordinator.program for site in self.sites if site.coordinator.program is not None]
        return any(tracked.is_ending for one in programs if (tracked := one.spawns.get(agent_id)) is not None)

    def _is_absent(self, host: str) -> bool:
        worker = next((one for one in self.workers if one.name == host), None)
        if worker is not None:
            return not worker.is_up
        return self._beats().get(host, 0) <= self._store_clock.now() - ABSENT_SECONDS * 1000

    def _beats(self) -> dict[str, int]:
        """Of every coordinator that the store knows."""
        rows = self.core.read(Query.INSTANCES, {"limit": 100})
        return {row["instance_id"]: row["last_beat_at"] for row in rows if row["role"] == "coordinator"}

    def _check_leaders(self) -> None:
        """At most one coordinator takes itself for the leader, whether it stands still or not."""
        leaders = [
            site.name
            for site in self.sites
            if site.coordinator.program is not None and site.coordinator.program.elector.is_leader
        ]
        self.trace.check(len(leaders) <= 1, f"{leaders} take themselves for the leader", WORLD)

    def _check_memory(self) -> None:
        for site in self.sites:
            if site.coordinator.program is not None:
                self.checkers.usage(site.coordinator.program.book)

    def _url(self, number: int) -> str:
        return self.sites[number % len(self.sites)].coordinator.url

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.trace.violate(f"an exception was not handled: {context.get('message')} {context.get('exception')!r}")
