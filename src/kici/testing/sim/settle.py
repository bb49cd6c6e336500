"""After the last fault: everything must come to rest within bounded time, and nothing may be left."""

import asyncio
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Final

from kici.domain.ids import AgentId
from kici.domain.job import TERMINAL, RunStatus
from kici.domain.say import say
from kici.testing.sim.fleet import POOL, scalers
from kici.testing.sim.trace import WORLD

if TYPE_CHECKING:
    from kici.testing.sim.world import World

LOOK_SECONDS: Final = 2.0
SHUTDOWN_SECONDS_MAX: Final = 40.0


class Settlement:
    def __init__(self, world: "World") -> None:
        self._world = world

    async def come_to_rest(self) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._world.plan.settle_seconds + self._world.set_back_seconds
        while unrest := self._unrest():
            if loop.time() >= ends_at:
                what, objects = unrest
                seconds = self._world.plan.settle_seconds
                self._world.trace.violate(f"{seconds:g} s after the last fault: {what}{await self._why()}", *objects)
            await asyncio.sleep(LOOK_SECONDS)

    async def empty_pools(self) -> None:
        """The last reload of all: the pools are closed, and what was kept warm goes."""
        await self._world.reload_surely(scalers(self._world.plan))

    async def shut_down(self) -> None:
        """An orderly end takes bounded time and leaves no row of any instance."""
        world = self._world
        await asyncio.sleep(max(site.coordinator.frozen_seconds for site in world.sites))
        for site in world.sites:
            site.coordinator.stop(keep_agents=False, down_seconds=3600)
        await asyncio.sleep(SHUTDOWN_SECONDS_MAX)
        up = [site.name for site in world.sites if site.coordinator.program is not None]
        world.trace.check(not up, f"{up} did not stop", WORLD)
        world.trace.check(not world.ledger.sessions, "sessions are left after an orderly stop", *world.ledger.sessions)
        rows = self._pool_rows()
        world.trace.check(not rows, "rows of the machine pool are left after an orderly stop", *rows)
        instances = await world.store.instances(limit=10)
        world.trace.check(not instances, "an instance row is left after an orderly stop", WORLD)

    async def _why(self) -> str:
        """What the program itself says of the first job that waits."""
        program = self._world.sites[0].coordinator.program
        waiting = [job.job_id for job in self._world.ledger.jobs.values() if job.status not in TERMINAL]
        job = await self._world.store.job(waiting[0]) if waiting else None
        if program is None or job is None:
            return ""
        now = self._world.sites[0].clock.now()
        return "; ".join(["", *(say(verdict, now=now) for verdict in await program.explain.verdicts(job))])

    def _warm(self) -> int:
        """How many idle agents may be kept."""
        entries = [entry for entry in self._world.files.config.scalers if entry.warm_pool.enabled]
        return sum(entry.warm_pool.size * len(entry.label_sets) for entry in entries)

    def _pooled(self, machines: Iterable[AgentId]) -> list[AgentId]:
        """Those that are billed to the machine pool."""
        ledger = self._world.ledger
        return [agent_id for agent_id in machines if ledger.machines[agent_id].scaler in ledger.pooled]

    def _pool_rows(self) -> list[AgentId]:
        pooled = self._world.pooled
        return [] if pooled is None else [row.agent_id for row in pooled.rows(POOL)]

    def _unrest(self) -> tuple[str, tuple[str, ...]] | None:
        """What is not at rest yet."""
        world, ledger = self._world, self._world.ledger
        programs = [site.coordinator.program for site in world.sites if site.coordinator.program is not None]
        if len(programs) < len(world.sites):
            return "a coordinator is not up", (WORLD,)
        live = [job for job in ledger.jobs.values() if job.status not in TERMINAL]
        if live:
            objects = [*(job.job_id for job in live[:3]), *(job.agent_id for job in live[:3] if job.agent_id)]
            return f"{len(live)} jobs are not over, the first is {live[0].status}", tuple(objects)
        runs = [run for run, status in ledger.runs.items() if status in {RunStatus.RUNNING, RunStatus.CANCELLING}]
        machines = list(ledger.machines)
        most = self._warm() * len(world.sites)
        if len(machines) > most:
            return f"{len(machines)} machines exist, at most {most} are wanted", tuple(machines[:3])
        kept = frozenset(machines)
        registered = kept | {agent.id for agent in world.statics.alive()}
        left: tuple[tuple[str, Iterable[str], frozenset[str]], ...] = (
            ("runs that are not over", runs, frozenset()),
            ("spawn rows", ledger.spawns, kept),
            ("reservations in the store", ledger.reservations, kept),
            ("rows of the machine pool", self._pool_rows(), frozenset(self._pooled(machines))),
            ("reservations in memory", chain(*(program.book.reservations for program in programs)), kept),
            ("spawns in memory", (one.agent_id for program in programs for one in program.spawns), kept),
            ("machines of the cloud", world.cloud.machines, frozenset()),
            ("events on their way", world.checkers.cloud.on_their_way, frozenset()),
            ("agent processes", chain(*(host.agents for host in world.hosts())), kept),
            ("records of workers", (str(path) for one in world.workers for path in one.disk.contents), frozenset()),
            ("registered agents", (one.agent_id for program in programs for one in program.registry), registered),
            ("sessions", ledger.sessions, registered),
        )
        for what, found, wanted in left:
            if differing := sorted(wanted.symmetric_difference(found)):
                return f"{what} and what there should be differ by {len(differing)}", tuple(differing[:3])
        absent = sum(len(program.absences) for program in programs)
        return (f"{absent} absences are left", (WORLD,)) if absent else None
