"""Event scalers in a world where everything fails now and then, by seeds: nothing is lost, doubled or left behind.

`KICI_CLOUD_SEEDS=100-400` runs others than the few of every day.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from kici.domain.errors import KiciError, NoCapacity, Permanent, Retryable
from kici.domain.event import SCALE_DOWN, EventState
from kici.domain.ids import JobId
from kici.domain.job import TERMINAL, Job, JobStatus
from kici.kit.finish import finish
from kici.ports.event_store import EventFilter
from kici.testing.cloud_bench import CloudBench, Node, Trouble, a_cloud_scaler, clouded
from kici.testing.cloud_machine import CloudMachine
from kici.testing.seeded_entropy import SeededEntropy

FIRST, _, LAST = os.environ.get("KICI_CLOUD_SEEDS", "1-5").partition("-")
JOBS = 25
CAP = 4
CHAOS_SECONDS = 900.0
SETTLE_SECONDS = 6 * 3600.0
FAULTS = ("kill", "cut", "dead-machine", "no-boot", "cloud", "store", "outage", "cancel")


class World:
    def __init__(self, bench: CloudBench, seed: int) -> None:
        self.bench = bench
        self.entropy = SeededEntropy(f"cloud world {seed}")
        self.faults = {name for name in FAULTS if self.entropy.chance(0.5)}
        self.machines: dict[str, CloudMachine] = {}
        self.steps: Counter[JobId] = Counter()
        self.excused: set[JobId] = set()
        """Jobs that need not succeed: cancelled, or their machine died."""
        self.jobs: list[Job] = []
        self.complaints: list[str] = []
        self.is_calm = False
        bench.cloud.seconds = lambda: self.entropy.uniform(0.01, 0.1 if self.entropy.chance(0.5) else 15)
        bench.cloud.made_one = self._made
        bench.cloud.removed_one = self._removed

    def has(self, fault: str, chance: float) -> bool:
        return not self.is_calm and fault in self.faults and self.entropy.chance(chance)

    def _made(self, up: Mapping[str, Any]) -> None:
        machine = CloudMachine(
            self.bench, up, self.entropy.fork(up["agentId"]), started=lambda job: self.steps.update((job,))
        )
        if machine.agent_id in self.machines:
            self.complaints.append(f"{machine.agent_id} was made again after it was removed")
        self.machines[machine.agent_id] = machine
        self.bench.others.append(machine)
        if len(self.bench.cloud.machines) > CAP:
            self.complaints.append(f"{len(self.bench.cloud.machines)} machines, {CAP} allowed")
        if not self.has("no-boot", 0.2):
            machine.boots(self.entropy.uniform(1, 60))

    def _removed(self, agent_id: str) -> None:
        machine = self.machines[agent_id]
        if machine.job is not None and machine.job not in self.excused:
            down = self.bench.cloud.told(SCALE_DOWN)[-1]
            self.complaints.append(f"{agent_id} was removed ({down['reason']}) while it ran {machine.job}")
        machine.ends()

    async def submits(self) -> None:
        for _ in range(JOBS):
            await asyncio.sleep(self.entropy.uniform(0, 2 * CHAOS_SECONDS / JOBS))
            up = [number for number, node in enumerate(self.bench.nodes) if node.is_up]
            if up:
                # Whoever submits is told, or loses the connection to one that is killed.
                with contextlib.suppress(KiciError, asyncio.CancelledError):
                    self.jobs.append(await self.bench.submits(by=self.entropy.choice(up)))

    async def hurts(self) -> None:
        """Now and then something happens, until it is over."""
        while True:
            await asyncio.sleep(self.entropy.uniform(1, 30))
            if self.has("cut", 0.5) and self.machines:
                self.entropy.choice(list(self.machines.values())).cut()
            if self.has("dead-machine", 0.2):
                self._kills_a_machine()
            if self.has("cloud", 0.5):
                error = self.entropy.choice((Retryable("busy"), Permanent("refused"), NoCapacity("none left")))
                self.bench.cloud.troubles.append(Trouble(error, after_the_deed=self.entropy.chance(0.5)))
            if self.has("cancel", 0.2) and self.jobs:
                await self._cancels(self.entropy.choice(self.jobs))
            if self.has("outage", 0.1):
                await self._outage()
            if self.has("kill", 0.2):
                await self._kills()

    def _kills_a_machine(self) -> None:
        alive = [machine for machine in self.machines.values() if machine.is_alive]
        if alive:
            machine = self.entropy.choice(alive)
            if machine.last_job is not None:
                self.excused.add(machine.last_job)
            machine.ends()

    async def _cancels(self, job: Job) -> None:
        self.excused.add(job.id)
        up = [node for node in self.bench.nodes if node.is_up]
        with contextlib.suppress(KiciError):
            if up:
                await self.entropy.choice(up).coordinator.jobs.cancel_run(job.run_id, force=False, reason="unwanted")

    async def _outage(self) -> None:
        node = self.entropy.choice(self.bench.nodes)
        node.faults.is_down = True
        await asyncio.sleep(self.entropy.uniform(1, 40))
        node.faults.is_down = False

    async def _kills(self) -> None:
        up = [node for node in self.bench.nodes if node.is_up]
        if up:
            node = self.entropy.choice(up)
            await node.is_killed()
            await asyncio.sleep(self.entropy.uniform(1, 60))
            await self.starts(node)

    async def starts(self, node: Node) -> None:
        """With a store that answers: without, the program would end and be started again."""
        well, ill = (0.0, 0.0), (node.faults.chance_before, node.faults.chance_after)
        node.faults.is_down = False
        node.faults.chance_before, node.faults.chance_after = well
        await node.starts()
        node.faults.chance_before, node.faults.chance_after = ill

    def calms(self) -> None:
        self.is_calm = True
        self.bench.cloud.troubles.clear()
        for node in self.bench.nodes:
            node.faults.is_down = False
            node.faults.chance_before = node.faults.chance_after = 0.0

    async def is_settled(self) -> bool:
        for job in self.jobs:
            if (await self.bench.job(job)).status not in TERMINAL:
                return False
        return not self.bench.cloud.machines and not await self.bench.spawns()


@pytest.mark.spec("scaler 51.2", "scaler 23.7.1", "T5.3", "T5.6")
@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST or FIRST) + 1))
@clouded(a_cloud_scaler(max_agents=CAP), nodes=3)
async def test_nothing_is_lost_doubled_or_left_behind(bench: CloudBench, seed: int) -> None:
    world = World(bench, seed)
    if "store" in world.faults:
        for node in bench.nodes:
            node.faults.chance_before = node.faults.chance_after = 0.01
    chaos = asyncio.create_task(world.hurts())
    await world.submits()
    world.is_calm = True
    await bench.passes(120)  # what is under way comes to its end
    chaos.cancel()
    await finish(asyncio.wait([chaos]), seconds=60, what="the chaos")
    for node in bench.nodes:
        if not node.is_up:
            await world.starts(node)
    world.calms()
    await bench.eventually(world.is_settled, within=SETTLE_SECONDS)
    assert world.complaints == []
    for job in world.jobs:
        found = await bench.job(job)
        assert world.steps[job.id] <= 1, f"{job.id} was run {world.steps[job.id]} times"
        if job.id not in world.excused:
            assert found.status is JobStatus.SUCCESS, f"{job.id}: {found.status} {found.reason}"
    for state in (EventState.PENDING, EventState.AWAITING):
        assert await bench.store.events(EventFilter(state=state)) == []
