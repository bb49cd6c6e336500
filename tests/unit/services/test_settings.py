import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from kici.domain.errors import Misconfigured, StoreDown
from kici.domain.ids import OrgId
from kici.domain.knobs import (
    AGENT_RECONNECT_GRACE_MS,
    QUEUE_MAX_DEPTH,
    SCALER_PROVISION_BACKOFF_BASE_MS,
    SCALER_PROVISION_BACKOFF_MAX_MS,
    SCALER_REAP_INTERVAL_MS,
    SCALER_SPAWN_TIMEOUT_MS,
    UNROUTABLE_GRACE_MS,
)
from kici.ports.store import Store
from kici.services import settings as module
from kici.services.settings import CACHE_SECONDS, LiveSettings, SettingsRefresh
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.sim_clock import SimClock
from kici.testing.sim_store import a_store
from kici.testing.virtual_time import virtual

ORG, OTHER = OrgId("acme"), OrgId("other")


class World:
    """One coordinator's settings on a store that may fail."""

    def __init__(self, store: Store, configured: Mapping[str, int] | None) -> None:
        self.clock = SimClock()
        self.faults = StoreFaults()
        self.store = store
        self.settings = self.coordinator(configured)

    def coordinator(self, configured: Mapping[str, int] | None = None) -> LiveSettings:
        return LiveSettings(store=faulty(self.store, self.faults), clock=self.clock, configured=configured)


@asynccontextmanager
async def a_world(configured: Mapping[str, int] | None = None) -> AsyncIterator[World]:
    async with a_store() as store:
        yield World(store, configured)


@virtual
async def test_what_is_not_set_has_the_configured_default_or_else_the_built_in_one() -> None:
    async with a_world({"scaler_reap_interval_ms": 7000}) as world:
        settings = world.settings
        assert await settings.get(SCALER_REAP_INTERVAL_MS) == 7000
        assert await settings.get(QUEUE_MAX_DEPTH) == 100_000


@pytest.mark.spec("T8.3")
@virtual
async def test_zero_is_a_value_and_null_restores_the_default() -> None:
    async with a_world() as world:
        settings = world.settings
        await settings.patch(None, {"unroutable_grace_ms": 0, "agent_reconnect_grace_ms": 0})
        assert await settings.get(UNROUTABLE_GRACE_MS) == 0
        assert await settings.get(AGENT_RECONNECT_GRACE_MS) == 0
        await settings.patch(None, {"unroutable_grace_ms": None})
        assert await settings.get(UNROUTABLE_GRACE_MS) == 120_000
        assert await settings.get(AGENT_RECONNECT_GRACE_MS) == 0


@virtual
async def test_a_change_is_seen_here_at_once_and_elsewhere_within_the_cache_time() -> None:
    async with a_world() as world:
        elsewhere = world.coordinator()
        assert await elsewhere.get(SCALER_REAP_INTERVAL_MS) == 60_000
        await world.settings.patch(None, {"scaler_reap_interval_ms": 5000})
        assert await world.settings.get(SCALER_REAP_INTERVAL_MS) == 5000
        assert await elsewhere.get(SCALER_REAP_INTERVAL_MS) == 60_000
        await world.clock.sleep(CACHE_SECONDS)
        assert await elsewhere.get(SCALER_REAP_INTERVAL_MS) == 5000


@virtual
async def test_reading_costs_the_store_one_look_in_ten_seconds() -> None:
    async with a_world() as world:
        for _ in range(1000):
            await world.settings.view()
            await world.clock.sleep(0.01)
        assert world.faults.calls["settings_version"] == 1


@pytest.mark.spec("T8.2")
@virtual
async def test_an_outage_leaves_the_last_values_in_force_and_costs_one_attempt_in_ten_seconds() -> None:
    async with a_world() as world:
        await world.settings.patch(None, {"queue_max_depth": 5})
        assert await world.settings.get(QUEUE_MAX_DEPTH) == 5
        world.faults.is_down = True
        await world.clock.sleep(CACHE_SECONDS)
        before = world.faults.calls.total()
        for _ in range(5):
            assert await world.settings.get(QUEUE_MAX_DEPTH) == 5
        assert world.faults.calls.total() == before + 1
        world.faults.is_down = False
        await world.store.patch_settings(None, {"queue_max_depth": 6})
        assert await world.settings.get(QUEUE_MAX_DEPTH) == 5  # the failure is cached
        await world.clock.sleep(CACHE_SECONDS)
        assert await world.settings.get(QUEUE_MAX_DEPTH) == 6


@pytest.mark.spec("T8.2")
@virtual
async def test_before_anything_was_read_an_outage_means_the_defaults() -> None:
    async with a_world({"queue_max_depth": 9}) as world:
        world.faults.is_down = True
        assert await world.settings.get(QUEUE_MAX_DEPTH) == 9
        assert await world.settings.get(SCALER_SPAWN_TIMEOUT_MS, ORG) == 300_000


@virtual
async def test_an_org_that_was_never_read_falls_back_to_the_clusters_last_values() -> None:
    async with a_world() as world:
        await world.settings.patch(None, {"scaler_spawn_timeout_ms": 1234})
        await world.settings.view()
        world.faults.is_down = True
        assert await world.settings.get(SCALER_SPAWN_TIMEOUT_MS, ORG) == 1234


@virtual
async def test_strict_readers_learn_that_the_values_cannot_be_read() -> None:
    async with a_world() as world:
        await world.settings.strict()
        world.faults.is_down = True
        assert (await world.settings.strict())[QUEUE_MAX_DEPTH] == 100_000  # read less than ten seconds ago
        await world.clock.sleep(CACHE_SECONDS)
        for _ in range(2):
            with pytest.raises(StoreDown):
                await world.settings.strict()
        with pytest.raises(StoreDown):
            await world.settings.show(None)


@virtual
async def test_a_value_of_an_org_beats_the_clusters_for_that_org_alone() -> None:
    async with a_world() as world:
        await world.settings.patch(None, {"scaler_spawn_timeout_ms": 2000})
        await world.settings.patch(ORG, {"scaler_spawn_timeout_ms": 3000})
        assert await world.settings.get(SCALER_SPAWN_TIMEOUT_MS, ORG) == 3000
        assert await world.settings.get(SCALER_SPAWN_TIMEOUT_MS, OTHER) == 2000
        assert await world.settings.get(SCALER_SPAWN_TIMEOUT_MS) == 2000


@pytest.mark.parametrize(
    ("org", "changes", "complaint"),
    [
        (None, {"queue_max_dept": 5}, "unknown setting 'queue_max_dept'; did you mean queue_max_depth"),
        (None, {"queue_max_depth": 0}, "queue_max_depth must be from 1"),
        (None, {"scaler_reap_interval_ms": 4999}, "from 5000"),
        (None, {"queue_max_depth": 2**60}, "queue_max_depth must be from 1"),
        (None, {"queue_max_depth": "5"}, "whole number of jobs, not '5'"),
        (None, {"queue_max_depth": True}, "whole number"),
        (None, {"queue_max_depth": 1.5}, "whole number"),
        (ORG, {"queue_max_depth": 5}, "cannot be set for one org"),
    ],
)
def test_a_bad_change_is_refused_whole(org: OrgId | None, changes: dict[str, object], complaint: str) -> None:
    @virtual
    async def check() -> None:
        async with a_world() as world:
            with pytest.raises(Misconfigured, match=complaint):
                await world.settings.patch(org, {"scaler_spawn_timeout_ms": 5000, **changes})
            assert await world.store.settings(org) == {}

    check()


@virtual
async def test_all_that_is_wrong_with_a_change_is_told_at_once() -> None:
    async with a_world() as world:
        with pytest.raises(Misconfigured, match=r"queue_max_depth.*; unknown setting 'x'"):
            await world.settings.patch(None, {"queue_max_depth": -1, "x": 1})


@pytest.mark.spec("T8.4")
@virtual
async def test_a_backoff_maximum_below_its_base_is_refused_even_if_only_one_of_them_is_changed() -> None:
    async with a_world({"scaler_provision_backoff_base_ms": 40_000}) as world:
        with pytest.raises(Misconfigured, match="below scaler_provision_backoff_base_ms at 40000"):
            await world.settings.patch(None, {"scaler_provision_backoff_max_ms": 39_999})
        await world.settings.patch(
            None, {"scaler_provision_backoff_base_ms": 1000, "scaler_provision_backoff_max_ms": 2000}
        )
        with pytest.raises(Misconfigured, match="change both"):
            await world.settings.patch(None, {"scaler_provision_backoff_base_ms": 2001})
        with pytest.raises(Misconfigured, match="change both"):
            await world.settings.patch(None, {"scaler_provision_backoff_base_ms": None})
        view = await world.settings.view()
        assert (view[SCALER_PROVISION_BACKOFF_BASE_MS], view[SCALER_PROVISION_BACKOFF_MAX_MS]) == (1000, 2000)


@pytest.mark.spec("T8.5")
@virtual
async def test_the_version_rises_with_real_changes_only() -> None:
    async with a_world() as world:
        settings = world.settings
        first = await settings.patch(None, {"queue_max_depth": 5})
        assert await settings.patch(None, {"queue_max_depth": 5}) == first
        assert await settings.patch(None, {"queue_max_depth": 6}) == first + 1
        assert (await settings.view()).version == first + 1


@virtual
async def test_rows_for_people_tell_what_is_set_and_what_is_in_force() -> None:
    async with a_world({"queue_timeout_ms": 500}) as world:
        await world.settings.patch(None, {"queue_max_depth": 7, "scaler_spawn_timeout_ms": 2000})
        version, rows = await world.settings.show(None)
        row = {row.name: row for row in rows}
        assert (row["queue_max_depth"].value, row["queue_max_depth"].effective) == (7, 7)
        assert (row["queue_timeout_ms"].value, row["queue_timeout_ms"].effective) == (None, 500)
        assert row["queue_timeout_ms"].default == 500
        assert version == await world.store.settings_version()
        _, rows = await world.settings.show(ORG)
        assert {row.name for row in rows} == {"queue_timeout_ms", "dispatch_ack_timeout_ms", "scaler_spawn_timeout_ms"}
        assert {row.name: row.effective for row in rows}["scaler_spawn_timeout_ms"] == 2000


@virtual
async def test_values_of_a_newer_release_are_ignored() -> None:
    async with a_world() as world:
        await world.store.patch_settings(None, {"knob_of_tomorrow": 5, "queue_max_depth": 3})
        view = await world.settings.view()
        assert view[QUEUE_MAX_DEPTH] == 3
        assert "knob_of_tomorrow" not in view.in_force()


@virtual
async def test_memory_is_bounded_over_orgs() -> None:
    async with a_world() as world:
        for number in range(module.ORGS_CACHED_MAX + 10):
            await world.settings.view(OrgId(f"org-{number}"))
        before = world.faults.calls["settings_version"]
        await world.settings.view(OrgId(f"org-{module.ORGS_CACHED_MAX + 9}"))
        assert world.faults.calls["settings_version"] == before
        await world.settings.view(OrgId("org-0"))
        assert world.faults.calls["settings_version"] == before + 1


@virtual
async def test_those_who_only_peek_see_changes_within_ten_seconds_and_orgs_at_once() -> None:
    async with a_world() as world:
        elsewhere = world.coordinator()
        running = asyncio.create_task(SettingsRefresh(settings=elsewhere).run())
        await world.settings.patch(None, {"scaler_spawn_timeout_ms": 2000})
        await world.settings.patch(ORG, {"scaler_spawn_timeout_ms": 3000})
        await world.clock.sleep(0.1)
        assert elsewhere.peek(SCALER_SPAWN_TIMEOUT_MS) == 2000
        assert elsewhere.peek(SCALER_SPAWN_TIMEOUT_MS, ORG) == 2000  # not read yet: this very call asks for it
        await world.clock.sleep(0.1)
        assert elsewhere.peek(SCALER_SPAWN_TIMEOUT_MS, ORG) == 3000
        await world.settings.patch(None, {"scaler_spawn_timeout_ms": 4000})
        await world.settings.patch(ORG, {"scaler_spawn_timeout_ms": 5000})
        await world.clock.sleep(CACHE_SECONDS)
        assert elsewhere.peek(SCALER_SPAWN_TIMEOUT_MS) == 4000
        assert elsewhere.peek(SCALER_SPAWN_TIMEOUT_MS, ORG) == 5000
        running.cancel()


@virtual
async def test_orgs_that_nobody_asks_for_are_not_read() -> None:
    async with a_world() as world:
        refresh = SettingsRefresh(settings=world.settings)
        world.settings.peek(SCALER_SPAWN_TIMEOUT_MS, ORG)
        await refresh.tick()
        reads = world.faults.calls["settings"]
        await refresh.tick()
        assert world.faults.calls["settings"] == reads + 1
        world.faults.is_down = True
        await world.clock.sleep(CACHE_SECONDS)
        await refresh.tick()
        assert world.settings.peek(SCALER_SPAWN_TIMEOUT_MS) == 300_000
