"""After the last fault: everything must come to rest within bounded time, and nothing may be left."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kici.domain.job import TERMINAL, RunStatus
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
        ends_at = loop.time() + self._world.plan.settle_seconds
        while unrest := self._unrest():
            if loop.time() >= ends_at:
                what, objects = unrest
                self._world.trace.violate(
                    f"{self._world.plan.settle_seconds:g} s after the last fault: {what}", *objects
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def shut_down(self) -> None:
        """An orderly end takes bounded time and leaves no row of this instance."""
        world = self._world
        world.coordinator.stop(keep_agents=False, down_seconds=3600)
        await asyncio.sleep(SHUTDOWN_SECONDS_MAX)
        world.trace.check(world.coordinator.program is None, "the coordinator did not stop", WORLD)
        world.trace.check(not world.ledger.sessions, "sessions are left after an orderly stop", *world.ledger.sessions)
        instances = await world.store.instances(limit=10)
        world.trace.check(not instances, "an instance row is left after an orderly stop", WORLD)

    def _unrest(self) -> tuple[str, tuple[str, ...]] | None:
        """What is not at rest yet."""
        world, ledger = self._world, self._world.ledger
        program = world.reach()
        if program is None:
            return "the coordinator is not up", (WORLD,)
        live = [job for job in ledger.jobs.values() if job.status not in TERMINAL]
        if live:
            objects = [*(job.job_id for job in live[:3]), *(job.agent_id for job in live[:3] if job.agent_id)]
            return f"{len(live)} jobs are not over, the first is {live[0].status}", tuple(objects)
        runs = [run for run, status in ledger.runs.items() if status in {RunStatus.RUNNING, RunStatus.CANCELLING}]
        statics_away = [
            agent.id for agent in world.statics() if agent.id not in {agent.agent_id for agent in program.registry}
        ]
        left: tuple[tuple[str, Sequence[str]], ...] = (
            ("runs are not over", runs),
            ("machines are left", list(ledger.machines)),
            ("spawn rows are left", list(ledger.spawns)),
            ("reservations are left in the store", list(ledger.reservations)),
            ("reservations are left in memory", list(program.book.reservations)),
            ("spawns are left in memory", [tracked.agent_id for tracked in program.spawns]),
            ("agent processes are left", list(world.host.agents)),
            ("static agents are away", statics_away),
        )
        for what, rest in left:
            if rest:
                return f"{len(rest)} {what}", tuple(rest[:3])
        if len(program.absences):
            return "absences are left", (WORLD,)
        return None
