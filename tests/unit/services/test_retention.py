import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from kici.domain.access import AccessRecord
from kici.domain.ids import JobId, RunId
from kici.domain.job import JobStatus, Outcome
from kici.observe.metrics import Metrics
from kici.ports.store import Claim, JobFilter, Store
from kici.services import retention as module
from kici.services.retention import Retention
from kici.services.settings import LiveSettings
from kici.stores.sqlite.open import open_sqlite
from kici.testing.builders import AGENT, HERE, a_new_job, a_new_run
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.sim_clock import SIM_START, SimClock
from kici.testing.sim_store import a_store
from kici.testing.virtual_time import virtual

DAY_MS = 86_400_000


class World:
    def __init__(self, store: Store, clock: SimClock | None = None) -> None:
        self.clock = clock or SimClock()
        self.store = store
        self.faults = StoreFaults()
        self.metrics = Metrics()
        self.settings = LiveSettings(store=faulty(store, self.faults), clock=self.clock)
        self.is_leader = True
        self.retention = Retention(
            store=faulty(store, self.faults),
            clock=self.clock,
            settings=self.settings,
            metrics=self.metrics,
            is_leader=lambda: self.is_leader,
        )

    async def ended_run(self, number: int) -> None:
        await self.live_run(number)
        await self.store.finish_job(
            JobId(f"job-{number}"), Outcome(status=JobStatus.FAILED), from_statuses=frozenset({JobStatus.DISPATCHED})
        )

    async def live_run(self, number: int) -> None:
        job = a_new_job(f"job-{number}", f"image-{number}", claimed_by=AGENT)
        claim = Claim(agent_id=AGENT, instance_id=HERE, ack_ms=1000)
        await self.store.submit(a_new_run(id=RunId(f"run-{number}")), [job], claim=claim)

    async def acts(self, action: str) -> None:
        await self.store.record_access(
            AccessRecord(at=self.clock.now(), actor="ann", action=action, target="t", outcome="ok")
        )

    async def left(self) -> set[str]:
        return {job.id for job in await self.store.jobs(JobFilter(limit=1000))}

    def pass_days(self, days: int) -> None:
        """Let the calendar go on (the coordinator's; nothing runs meanwhile)."""
        self.clock.skew_ms += days * DAY_MS


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    async with a_store() as store:
        yield World(store)


@virtual
async def test_ended_runs_go_after_ninety_days_and_live_ones_stay() -> None:
    async with a_world() as world:
        await world.ended_run(1)
        await world.live_run(2)
        world.pass_days(90)
        assert await world.retention.tick() == 0
        world.pass_days(1)
        assert await world.retention.tick() == 1
        assert await world.left() == {"job-2"}
        assert b"rows_pruned_total 1.0" in world.metrics.render()


@virtual
async def test_demand_classes_of_deleted_jobs_go_too(tmp_path: Path) -> None:
    """Each image that was ever built and each host that was ever named is one."""
    clock = SimClock()
    store = open_sqlite(str(tmp_path / "kici.db"), clock_now=clock.now, inline=True)
    await store.migrate()
    world = World(store, clock)
    await world.live_run(0)
    most = 0
    with closing(sqlite3.connect(tmp_path / "kici.db")) as looking:
        for number in range(1, 250):
            await world.ended_run(number)
            world.pass_days(1)
            await world.retention.tick()
            ((count,),) = looking.execute("SELECT count(*) FROM demand_classes")
            most = max(most, count)
    assert 90 < most <= 95
    assert (await store.jobs(JobFilter(limit=1000)))[-1].demand.labels == {"image-0"}
    await store.close()


@virtual
async def test_zero_days_keep_everything() -> None:
    async with a_world() as world:
        await world.settings.patch(None, {"run_retention_days": 0})
        await world.ended_run(1)
        world.pass_days(10_000)
        assert await world.retention.tick() == 0
        assert world.clock.now() > SIM_START


@virtual
async def test_many_go_in_batches_with_pauses_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 3)
    async with a_world() as world:
        for number in range(10):
            await world.ended_run(number)
        world.pass_days(91)
        before = world.clock.monotonic()
        assert await world.retention.tick() == 10
        assert world.clock.monotonic() - before == pytest.approx(3 * module.PAUSE_SECONDS)


@virtual
async def test_one_pass_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 1)
    monkeypatch.setattr(module, "BATCHES_MAX", 2)
    async with a_world() as world:
        for number in range(5):
            await world.ended_run(number)
        world.pass_days(91)
        assert await world.retention.tick() == 2
        assert await world.retention.tick() == 2


@virtual
async def test_only_the_leader_deletes() -> None:
    async with a_world() as world:
        await world.ended_run(1)
        world.pass_days(91)
        world.is_leader = False
        assert await world.retention.tick() == 0
        world.is_leader = True
        assert await world.retention.tick() == 1


@virtual
async def test_nothing_is_deleted_on_remembered_settings() -> None:
    async with a_world() as world:
        await world.ended_run(1)
        world.pass_days(91)
        world.faults.is_down = True
        assert await world.retention.tick() == 0
        world.faults.is_down = False
        await world.clock.sleep(60)
        assert await world.retention.tick() == 1


async def remembered(world: World) -> list[str]:
    return [record.action for record in await world.store.access_log(before=None, limit=10)]


@virtual
async def test_the_access_log_remembers_a_year_and_no_longer() -> None:
    async with a_world() as world:
        await world.acts("token.revoke")
        world.pass_days(300)
        await world.acts("token.create")
        await world.retention.tick()
        assert await remembered(world) == ["token.create", "token.revoke"]
        world.pass_days(66)
        await world.retention.tick()
        assert await remembered(world) == ["token.create"]
        await world.settings.patch(None, {"access_log_retention_days": 0})
        world.pass_days(10_000)
        await world.retention.tick()
        assert await remembered(world) == ["token.create"]
