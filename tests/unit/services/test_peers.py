"""Coordinators on one store: what they tell each other, ask of each other, and do about the dead."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kici.adapters.no_peers import NoPeers
from kici.decide.peers import could_serve, has_idle
from kici.domain.errors import NotFound
from kici.domain.ids import InstanceId
from kici.domain.job import Demand
from kici.domain.peer import Capacity, Offer, RequestKind
from kici.ports.store import Store
from kici.services.peers import PeerRequests
from kici.testing.builders import an_instance
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SimClock
from kici.testing.sim_store import a_store
from kici.testing.virtual_time import virtual

A, B = InstanceId("a"), InstanceId("b")


def demand(*labels: str, exclude: str | None = None) -> Demand:
    return Demand(labels=frozenset(labels), exclude=frozenset({exclude} if exclude else ()))


def test_an_offer_serves_by_labels_excludes_and_gate() -> None:
    there = Capacity(scalers=(Offer(labels=frozenset({"linux", "gpu"}), gate=frozenset({"gpu"})),))
    assert could_serve([there], demand("linux", "gpu"))
    assert not could_serve([there], demand("linux"))
    assert not could_serve([there], demand("linux", "gpu", exclude="linux"))
    assert not could_serve([], demand())


def test_only_agents_that_wait_count_as_idle() -> None:
    busy = Capacity(agents=(Offer(labels=frozenset({"linux"})),))
    waiting = Capacity(agents=(Offer(labels=frozenset({"linux"}), idle=2),))
    scaler = Capacity(scalers=(Offer(labels=frozenset({"linux"})),))
    assert not has_idle([busy, scaler], demand("linux"))
    assert has_idle([busy, waiting], demand("linux"))


@dataclass
class Two:
    store: Store
    clock: SimClock

    def requests(self, instance_id: InstanceId, acts: Mapping[RequestKind, object] | None = None) -> PeerRequests:
        return PeerRequests(
            store=self.store,
            notifier=NoPeers(),
            clock=self.clock,
            entropy=SeededEntropy(instance_id),
            instance_id=instance_id,
            acts=acts or {},  # type: ignore[arg-type]  # acts of a test
        )


@asynccontextmanager
async def two() -> AsyncIterator[Two]:
    clock = SimClock()
    async with a_store(clock) as store:
        for each in (A, B):
            await store.beat(an_instance(id=each))
        yield Two(store, clock)


@virtual
async def test_what_a_present_coordinator_could_serve_is_seen_until_it_is_absent() -> None:
    async with two() as world:
        mine = Capacity(scalers=(Offer(labels=frozenset({"linux"})),))
        await world.store.put_capacity(B, mine)
        assert await world.store.capacities(except_instance_id=A, present_ms=60_000, limit=9) == {B: mine}
        assert await world.store.capacities(except_instance_id=B, present_ms=60_000, limit=9) == {}
        await world.clock.sleep(61)
        assert await world.store.capacities(except_instance_id=A, present_ms=60_000, limit=9) == {}


@virtual
async def test_a_request_is_answered_once_by_the_one_it_is_put_before() -> None:
    asked: list[Mapping[str, object]] = []

    async def act(payload: Mapping[str, object]) -> object:
        asked.append(payload)
        return {"done": True}

    async with two() as world:
        request = await world.requests(A).tell(B, RequestKind.CANCEL, {"runId": "r"})
        other = world.requests(B, {RequestKind.CANCEL: act})
        assert await world.requests(A).tick() == 0
        assert await other.tick() == 1
        assert await other.tick() == 0
        assert asked == [{"runId": "r"}]
        assert await world.store.peer_answer(request) == '{"done":true}'


@virtual
async def test_an_act_that_fails_or_is_unknown_answers_why() -> None:
    async def act(payload: Mapping[str, object]) -> object:
        raise NotFound("no such job")

    async with two() as world:
        mine = world.requests(A)
        first = await mine.tell(B, RequestKind.CANCEL, {})
        second = await mine.tell(B, RequestKind.RELOAD, {})
        await world.requests(B, {RequestKind.CANCEL: act}).tick()
        assert await world.store.peer_answer(first) == '{"error":"no such job"}'
        assert "does not serve reload" in str(await world.store.peer_answer(second))


@virtual
async def test_asking_gives_up_at_its_deadline() -> None:
    async with two() as world:
        began = world.clock.monotonic()
        assert await world.requests(A).ask(B, RequestKind.RELOAD, {}, seconds=5) is None
        assert world.clock.monotonic() - began == pytest.approx(5, abs=0.5)


@virtual
async def test_requests_expire_and_are_purged() -> None:
    async with two() as world:
        await world.requests(A).tell(B, RequestKind.RELOAD, {})
        await world.clock.sleep(241)
        assert await world.store.peer_requests(B, limit=9) == []
        assert await world.store.purge_peer_requests() == 1
