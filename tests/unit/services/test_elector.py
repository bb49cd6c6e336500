"""Leadership: one trusted leader at a time, tokens that only grow, and no trust beyond the term."""

import asyncio

import pytest

from kici.decide.elect import pause_seconds, term_of
from kici.domain.ids import InstanceId, Instant
from kici.domain.instance import Lease
from kici.ports.store import Store
from kici.services.elector import TTL_SECONDS, Elector
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SimClock
from kici.testing.sim_store import a_store
from kici.testing.store_traps import Traps, trapped
from kici.testing.virtual_time import virtual


def elector(store: Store, name: str, clock: SimClock) -> Elector:
    return Elector(store=store, clock=clock, entropy=SeededEntropy(1), instance_id=InstanceId(name))


def test_trust_counts_from_before_the_question() -> None:
    lease = Lease(name="leader", holder=InstanceId("a"), token=1, expires_at=Instant(0))
    term = term_of(lease, asked_at=10.0, ttl_seconds=3.0, margin_seconds=0.5)
    assert term.is_trusted(12.4)
    assert not term.is_trusted(12.5)


def test_a_leader_renews_well_within_its_term() -> None:
    assert pause_seconds(3.0, is_leader=True, jitter=0.5) <= 1.0
    assert 1.2 <= pause_seconds(3.0, is_leader=False, jitter=0.0) < pause_seconds(3.0, is_leader=False, jitter=1.0)


@virtual
async def test_one_leads_and_the_other_takes_over_with_a_higher_token() -> None:
    clock = SimClock()
    async with a_store(clock) as store:
        first, second = elector(store, "a", clock), elector(store, "b", clock)
        assert await first.tick()
        assert not await second.tick()
        term = first.term()
        assert term is not None
        await clock.sleep(TTL_SECONDS + 0.1)
        assert first.term() is None
        assert await second.tick()
        later = second.term()
        assert later is not None
        assert later.token > term.token
        assert not await first.tick()


@virtual
async def test_resigning_lets_another_lead_at_once() -> None:
    clock = SimClock()
    async with a_store(clock) as store:
        first, second = elector(store, "a", clock), elector(store, "b", clock)
        await first.tick()
        await first.resign()
        assert not first.is_leader
        assert await second.tick()


@virtual
async def test_who_resigned_takes_no_lease_that_it_had_asked_for() -> None:
    clock = SimClock()
    async with a_store(clock) as store:
        traps = Traps()
        first, second = elector(trapped(store, traps), "a", clock), elector(store, "b", clock)
        assert await first.tick()
        gate = traps.hold("acquire_lease", done=True)
        async with asyncio.TaskGroup() as group:
            late = group.create_task(first.tick())
            await gate.reached()
            await first.resign()
            gate.open()
        assert not late.result()
        assert not await first.tick()
        assert not first.is_leader
        assert await second.tick()


@virtual
async def test_a_leader_that_cannot_renew_stops_by_itself() -> None:
    clock = SimClock()
    async with a_store(clock) as store:
        faults = StoreFaults()
        leader = elector(faulty(store, faults), "a", clock)
        assert await leader.tick()
        faults.is_down = True
        await clock.sleep(1)
        assert await leader.tick()
        await clock.sleep(TTL_SECONDS)
        assert not leader.is_leader
        assert not await leader.tick()


@pytest.mark.parametrize("skew_ms", [-3_600_000, 3_600_000])
@virtual
async def test_the_wall_clock_of_a_coordinator_does_not_matter(skew_ms: int) -> None:
    clock, skewed = SimClock(), SimClock(skew_ms=skew_ms)
    async with a_store(clock) as store:
        first, second = elector(store, "a", skewed), elector(store, "b", clock)
        assert await first.tick()
        assert not await second.tick()
