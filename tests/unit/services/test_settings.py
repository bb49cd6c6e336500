from collections.abc import Mapping

import pytest

from kici.domain.errors import Misconfigured, StoreDown
from kici.domain.ids import Instant, OrgId
from kici.domain.knobs import (
    AGENT_RECONNECT_GRACE_MS,
    QUEUE_MAX_DEPTH,
    SCALER_PROVISION_BACKOFF_BASE_MS,
    SCALER_PROVISION_BACKOFF_MAX_MS,
    SCALER_REAP_INTERVAL_MS,
    SCALER_SPAWN_TIMEOUT_MS,
    UNROUTABLE_GRACE_MS,
)
from kici.services import settings as module
from kici.services.settings import CACHE_SECONDS, LiveSettings
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.sim_clock import SimClock
from kici.testing.virtual_time import virtual

ORG, OTHER = OrgId("acme"), OrgId("other")


class SettingsInMemory:
    """The settings tables, as the port describes them."""

    def __init__(self) -> None:
        self.values: dict[OrgId | None, dict[str, int]] = {}
        self.version = 1

    async def settings(self, org: OrgId | None) -> Mapping[str, int]:
        return dict(self.values.get(org, {}))

    async def settings_version(self) -> int:
        return self.version

    async def patch_settings(
        self, org: OrgId | None, changes: Mapping[str, int | None], *, now: Instant | None = None
    ) -> int:
        before = self.values.setdefault(org, {})
        after = {name: value for name, value in {**before, **changes}.items() if value is not None}
        self.version += before != after
        self.values[org] = after
        return self.version


class World:
    """One coordinator's settings on a store that may fail."""

    def __init__(self, configured: Mapping[str, int] | None = None) -> None:
        self.clock = SimClock()
        self.faults = StoreFaults()
        self.store = SettingsInMemory()
        self.settings = self.coordinator(configured)

    def coordinator(self, configured: Mapping[str, int] | None = None) -> LiveSettings:
        return LiveSettings(store=faulty(self.store, self.faults), clock=self.clock, configured=configured)


@virtual
async def test_what_is_not_set_has_the_configured_default_or_else_the_built_in_one() -> None:
    settings = World({"scaler_reap_interval_ms": 7000}).settings
    assert await settings.get(SCALER_REAP_INTERVAL_MS) == 7000
    assert await settings.get(QUEUE_MAX_DEPTH) == 100_000


@pytest.mark.spec("T8.3")
@virtual
async def test_zero_is_a_value_and_null_restores_the_default() -> None:
    settings = World().settings
    await settings.patch(None, {"unroutable_grace_ms": 0, "agent_reconnect_grace_ms": 0})
    assert await settings.get(UNROUTABLE_GRACE_MS) == 0
    assert await settings.get(AGENT_RECONNECT_GRACE_MS) == 0
    await settings.patch(None, {"unroutable_grace_ms": None})
    assert await settings.get(UNROUTABLE_GRACE_MS) == 120_000
    assert await settings.get(AGENT_RECONNECT_GRACE_MS) == 0


@virtual
async def test_a_change_is_seen_here_at_once_and_elsewhere_within_the_cache_time() -> None:
    world = World()
    elsewhere = world.coordinator()
    assert await elsewhere.get(SCALER_REAP_INTERVAL_MS) == 60_000
    await world.settings.patch(None, {"scaler_reap_interval_ms": 5000})
    assert await world.settings.get(SCALER_REAP_INTERVAL_MS) == 5000
    assert await elsewhere.get(SCALER_REAP_INTERVAL_MS) == 60_000
    await world.clock.sleep(CACHE_SECONDS)
    assert await elsewhere.get(SCALER_REAP_INTERVAL_MS) == 5000


@virtual
async def test_reading_costs_the_store_one_look_in_ten_seconds() -> None:
    world = World()
    for _ in range(1000):
        await world.settings.view()
        await world.clock.sleep(0.01)
    assert world.faults.calls["settings_version"] == 1


@pytest.mark.spec("T8.2")
@virtual
async def test_an_outage_leaves_the_last_values_in_force_and_costs_one_attempt_in_ten_seconds() -> None:
    world = World()
    await world.settings.patch(None, {"queue_max_depth": 5})
    assert await world.settings.get(QUEUE_MAX_DEPTH) == 5
    world.faults.is_down = True
    await world.clock.sleep(CACHE_SECONDS)
    before = world.faults.calls.total()
    for _ in range(5):
        assert await world.settings.get(QUEUE_MAX_DEPTH) == 5
    assert world.faults.calls.total() == before + 1
    world.faults.is_down = False
    world.store.values[None] = {"queue_max_depth": 6}
    assert await world.settings.get(QUEUE_MAX_DEPTH) == 5  # the failure is cached
    await world.clock.sleep(CACHE_SECONDS)
    assert await world.settings.get(QUEUE_MAX_DEPTH) == 6


@pytest.mark.spec("T8.2")
@virtual
async def test_before_anything_was_read_an_outage_means_the_defaults() -> None:
    world = World({"queue_max_depth": 9})
    world.faults.is_down = True
    assert await world.settings.get(QUEUE_MAX_DEPTH) == 9
    assert await world.settings.get(SCALER_SPAWN_TIMEOUT_MS, ORG) == 300_000


@virtual
async def test_an_org_that_was_never_read_falls_back_to_the_clusters_last_values() -> None:
    world = World()
    await world.settings.patch(None, {"scaler_spawn_timeout_ms": 1234})
    await world.settings.view()
    world.faults.is_down = True
    assert await world.settings.get(SCALER_SPAWN_TIMEOUT_MS, ORG) == 1234


@virtual
async def test_strict_readers_learn_that_the_values_cannot_be_read() -> None:
    world = World()
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
    world = World()
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
        world = World()
        with pytest.raises(Misconfigured, match=complaint):
            await world.settings.patch(org, {"scaler_spawn_timeout_ms": 5000, **changes})
        assert world.store.values == {}

    check()


@virtual
async def test_all_that_is_wrong_with_a_change_is_told_at_once() -> None:
    with pytest.raises(Misconfigured, match=r"queue_max_depth.*; unknown setting 'x'"):
        await World().settings.patch(None, {"queue_max_depth": -1, "x": 1})


@pytest.mark.spec("T8.4")
@virtual
async def test_a_backoff_maximum_below_its_base_is_refused_even_if_only_one_of_them_is_changed() -> None:
    world = World({"scaler_provision_backoff_base_ms": 40_000})
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
    settings = World().settings
    first = await settings.patch(None, {"queue_max_depth": 5})
    assert await settings.patch(None, {"queue_max_depth": 5}) == first
    assert await settings.patch(None, {"queue_max_depth": 6}) == first + 1
    assert (await settings.view()).version == first + 1


@virtual
async def test_rows_for_people_tell_what_is_set_and_what_is_in_force() -> None:
    world = World({"queue_timeout_ms": 500})
    await world.settings.patch(None, {"queue_max_depth": 7, "scaler_spawn_timeout_ms": 2000})
    version, rows = await world.settings.show(None)
    row = {row.name: row for row in rows}
    assert (row["queue_max_depth"].value, row["queue_max_depth"].effective) == (7, 7)
    assert (row["queue_timeout_ms"].value, row["queue_timeout_ms"].effective) == (None, 500)
    assert row["queue_timeout_ms"].default == 500
    assert version == world.store.version
    _, rows = await world.settings.show(ORG)
    assert {row.name for row in rows} == {"queue_timeout_ms", "dispatch_ack_timeout_ms", "scaler_spawn_timeout_ms"}
    assert {row.name: row.effective for row in rows}["scaler_spawn_timeout_ms"] == 2000


@virtual
async def test_values_of_a_newer_release_are_ignored() -> None:
    world = World()
    world.store.values[None] = {"knob_of_tomorrow": 5, "queue_max_depth": 3}
    view = await world.settings.view()
    assert view[QUEUE_MAX_DEPTH] == 3
    assert "knob_of_tomorrow" not in view.in_force()


@virtual
async def test_memory_is_bounded_over_orgs() -> None:
    world = World()
    for number in range(module.ORGS_CACHED_MAX + 10):
        await world.settings.view(OrgId(f"org-{number}"))
    before = world.faults.calls["settings_version"]
    await world.settings.view(OrgId(f"org-{module.ORGS_CACHED_MAX + 9}"))
    assert world.faults.calls["settings_version"] == before
    await world.settings.view(OrgId("org-0"))
    assert world.faults.calls["settings_version"] == before + 1
