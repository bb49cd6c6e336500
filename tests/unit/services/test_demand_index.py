"""Which classes have waiting jobs: a hint that may lag behind the store, but never hides what was just heard."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kici.domain.ids import AgentId, JobId, RunId
from kici.domain.job import Job
from kici.ports.store import Claim, Store
from kici.services.demand_index import DemandIndex
from kici.testing.builders import HERE, a_new_job, a_new_run
from kici.testing.sim_store import a_store
from kici.testing.store_traps import Traps, trapped
from kici.testing.virtual_time import virtual


class World:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.traps = Traps()
        self.index = DemandIndex(trapped(store, self.traps))
        self.count = 0

    async def queued(self, *labels: str) -> Job:
        self.count += 1
        job = a_new_job(f"job-{self.count}", *labels)
        return (await self.store.submit(a_new_run(id=RunId(f"run-{self.count}")), [job])).jobs[0]

    async def claimed(self, job: Job) -> None:
        claim = Claim(agent_id=AgentId("agent"), instance_id=HERE, ack_ms=1000)
        assert await self.store.claim_job(job.id, claim) is not None

    def known(self) -> set[JobId]:
        return {waiting.oldest_job for waiting in self.index}


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    async with a_store() as store:
        yield World(store)


@virtual
async def test_only_classes_that_the_agent_fits_are_given() -> None:
    async with a_world() as world:
        linux, gpu = await world.queued("linux"), await world.queued("gpu")
        world.index.note(linux)
        world.index.note(gpu)
        assert world.index.fitting(lambda demand: "gpu" in demand.labels, limit=10) == [gpu.class_id]
        assert world.index.fitting(lambda demand: True, limit=1) == [linux.class_id]


@virtual
async def test_when_there_are_too_many_classes_those_with_the_oldest_jobs_are_given() -> None:
    async with a_world() as world:
        jobs = [await world.queued(label) for label in ("a", "b", "c")]
        for job in reversed(jobs):
            world.index.note(job)
        assert world.index.fitting(lambda demand: True, limit=2) == [job.class_id for job in jobs[:2]]


@virtual
async def test_a_class_is_known_by_its_oldest_job() -> None:
    async with a_world() as world:
        old, young = await world.queued("linux"), await world.queued("linux")
        world.index.note(young)
        world.index.note(old)
        world.index.note(young)
        assert world.known() == {old.id}
        assert len(world.index) == 1


@virtual
async def test_a_class_in_which_nothing_was_found_is_forgotten() -> None:
    async with a_world() as world:
        job = await world.queued("linux")
        world.index.note(job)
        world.index.gone([job.class_id], world.index.mark())
        assert not world.known()


@virtual
async def test_a_class_that_was_heard_of_while_the_store_was_asked_stays() -> None:
    async with a_world() as world:
        job = await world.queued("linux")
        world.index.note(job)
        asked = world.index.mark()
        world.index.note(await world.queued("linux"))
        world.index.gone([job.class_id], asked)
        assert world.known() == {job.id}


@virtual
async def test_a_refresh_finds_what_nobody_told_and_drops_what_is_gone() -> None:
    async with a_world() as world:
        job, unheard = await world.queued("linux"), await world.queued("gpu")
        world.index.note(job)
        await world.claimed(job)
        await world.index.refresh()
        assert world.known() == {unheard.id}


@virtual
async def test_a_job_that_is_queued_while_a_refresh_reads_is_not_lost() -> None:
    async with a_world() as world:
        await world.queued("gpu")
        gate = world.traps.hold("waiting_classes", done=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.index.refresh())
            await gate.reached()
            late = await world.queued("linux")
            world.index.note(late)
            gate.open()
        assert late.id in world.known()
