import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kici.ports.store import Store
from kici.services.instance_heartbeat import BEAT_SECONDS, InstanceHeartbeat
from kici.testing.builders import an_instance
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.sim_clock import SIM_START, SimClock
from kici.testing.sim_store import a_store
from kici.testing.virtual_time import virtual


class World:
    def __init__(self, store: Store) -> None:
        self.clock = SimClock()
        self.store = store
        self.faults = StoreFaults()
        self.is_draining = False
        self.heartbeat = InstanceHeartbeat(
            store=faulty(store, self.faults),
            clock=self.clock,
            me=an_instance(),
            is_draining=lambda: self.is_draining,
        )


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    async with a_store() as store:
        yield World(store)


@virtual
async def test_the_row_is_refreshed_every_ten_seconds_and_keeps_its_start() -> None:
    async with a_world() as world:
        running = asyncio.create_task(world.heartbeat.run())
        await world.clock.sleep(3 * BEAT_SECONDS + 1)
        running.cancel()
        (row,) = await world.store.instances(limit=10)
        assert row.last_beat_at == SIM_START + 30_000
        assert row.started_at == SIM_START
        assert world.faults.calls["beat"] == 4


@virtual
async def test_draining_is_told_at_once() -> None:
    async with a_world() as world:
        running = asyncio.create_task(world.heartbeat.run())
        await world.clock.sleep(1)
        world.is_draining = True
        world.heartbeat.nudge()
        await world.clock.sleep(0.1)
        running.cancel()
        (row,) = await world.store.instances(limit=10)
        assert row.draining


@virtual
async def test_it_knows_for_how_long_no_beat_could_be_written(caplog: pytest.LogCaptureFixture) -> None:
    async with a_world() as world:
        assert await world.heartbeat.tick()
        world.faults.is_down = True
        for _ in range(3):
            await world.clock.sleep(BEAT_SECONDS)
            assert not await world.heartbeat.tick()
        assert world.heartbeat.seconds_since_beat == 30
        assert [record.getMessage() for record in caplog.records] == ["beat.failed"]  # once for each outage
        world.faults.is_down = False
        assert await world.heartbeat.tick()
        assert world.heartbeat.seconds_since_beat == 0


@virtual
async def test_a_slow_beat_counts_from_when_it_was_sent() -> None:
    async with a_world() as world:
        world.faults.delay_seconds = (4.0, 4.0)
        assert await world.heartbeat.tick()
        assert world.heartbeat.seconds_since_beat == 4


@virtual
async def test_a_clean_stop_removes_the_row_and_an_outage_does_not_hold_it_up() -> None:
    async with a_world() as world:
        await world.heartbeat.tick()
        world.faults.is_down = True
        await world.heartbeat.leave()
        world.faults.is_down = False
        await world.heartbeat.leave()
        assert await world.store.instances(limit=10) == []
