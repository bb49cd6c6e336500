"""Spawns and sweeps of containers, statement by statement, on a fake engine."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import ClassVar

import pytest
from tests.contract.container_benches import SCALER, FakeEngineBench
from tests.unit.backends.test_container import a_bench, error_of, in_image

from kici.backends.container.backend import SWEEP_AT_ONCE
from kici.decide.container_plan import AGENT
from kici.domain.container import NetworkSpec
from kici.domain.errors import DeterministicRefusal, Retryable
from kici.ports.engine import ContainerInfo, EngineAddress, EngineDown, EngineEvent, EngineRefused
from kici.testing.contracts.backend import Kind, an_id
from kici.testing.fake_engine import ADDRESS, EngineRoom, FakeEngine, ImageScript, InRegistry
from kici.testing.virtual_time import virtual


def silent(_: str) -> None:
    """Nobody wants to know."""


@pytest.mark.spec("scaler 27.4.3")
@pytest.mark.parametrize(("policy", "is_there", "pulls"), [("IfNotPresent", True, 0), ("IfNotPresent", False, 1)])
@virtual
async def test_a_present_image_is_pulled_only_when_it_is_asked_for(policy: str, is_there: bool, pulls: int) -> None:
    bench = await a_bench()
    bench.room.registry["r.example/tool:1"] = InRegistry()
    if is_there:
        bench.room.images["r.example/tool:1"] = ImageScript()
    images = bench.houses.at(ADDRESS).images
    _ = await images.ensure("r.example/tool:1", policy=policy, auth=None, on_progress=silent)
    assert len(bench.room.pulls) == pulls
    _ = await images.ensure("r.example/tool:1", policy="Always", auth=None, on_progress=silent)
    assert len(bench.room.pulls) == pulls + 1
    await bench.close()


@pytest.mark.spec("scaler 27.4.3")
@virtual
async def test_an_absent_image_that_may_not_be_pulled_makes_no_agent() -> None:
    bench = await a_bench()
    bench.room.registry["ci/lives:latest"] = InRegistry()
    del bench.room.images["ci/lives:latest"]
    refused = await error_of(bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event))
    assert type(refused) is DeterministicRefusal
    assert "imagePullPolicy is Never" in str(refused)
    assert (bench.room.pulls, bench.room.containers) == ([], {})
    await bench.close()


@pytest.mark.spec("scaler 29.10.1")
@virtual
async def test_a_container_that_cannot_be_started_is_removed_and_forgotten() -> None:
    bench = await a_bench()
    _ = await error_of(bench.backend.spawn(bench.order(an_id(1), Kind.REFUSED), bench.heard.on_event))
    assert bench.room.containers == {}
    assert bench.backend.active_count() == 0
    assert len(bench.heard.failures(an_id(1))) == 1
    await bench.close()


@pytest.mark.spec("scaler 29.10.2")
@pytest.mark.parametrize("seconds", [0.5, 2.2, 3.0])
@virtual
async def test_a_spawn_that_is_called_off_leaves_no_container_wherever_it_stands(seconds: float) -> None:
    """During the pull, between the making and the start, and while it starts."""
    bench = await a_bench()
    script = ImageScript(create_seconds=0.5, start_seconds=2.0)
    bench.room.registry["r.example/slow:1"] = InRegistry(script=script, seconds=2.0)
    spawn = asyncio.ensure_future(bench.backend.spawn(in_image(bench, 1, "r.example/slow:1"), bench.heard.on_event))
    await asyncio.sleep(seconds)
    made = {one.spec.name for one in bench.room.containers.values() if AGENT in one.spec.labels}
    assert bool(made) is (seconds > 2.4)
    spawn.cancel()
    with pytest.raises(asyncio.CancelledError):
        _ = await spawn
    assert not bench.room.agents()
    assert bench.backend.active_count() == 0
    assert bench.packets.addresses() == set()
    await bench.close()


@pytest.mark.spec("scaler 29.10.8")
@virtual
async def test_a_sweep_removes_what_ended_and_what_nobody_owns_and_keeps_the_rest() -> None:
    bench = await a_bench()
    for number in (1, 2, 3):
        _ = await bench.backend.spawn(bench.order(an_id(number), Kind.LIVES), bench.heard.on_event)
    await bench.restart()
    one = bench.room.find(an_id(2))
    assert one is not None
    orphan = bench.room.add(replace(one.spec, name=an_id(4), labels={**one.spec.labels, AGENT: an_id(4)}), one.script)
    bench.room.begin(orphan)
    ended = bench.room.find(an_id(1))
    assert ended is not None
    bench.room.end(ended, 1)
    assert len(await bench.backend.recover(frozenset({an_id(2)}))) == 1
    assert await bench.backend.cleanup_orphans(frozenset({an_id(3)})) == 1
    assert bench.room.agents() == {an_id(2), an_id(3)}
    await bench.close()


class Stubborn(FakeEngine):
    """Will not let go of one container, and remembers how many it was asked for at a time."""

    now = most = 0

    async def remove(self, container: str) -> bool:
        kind = type(self)
        kind.now += 1
        kind.most = max(kind.most, kind.now)
        try:
            await asyncio.sleep(1)
            found = await self.inspect(container)
            if found is not None and found.name == an_id(7):
                raise Retryable("device or resource busy")
            return await super().remove(container)
        finally:
            kind.now -= 1


@virtual
async def test_two_hundred_orphans_go_a_few_at_a_time_and_one_that_resists_holds_up_no_other() -> None:
    bench = await a_bench(OtherEngineBench(Stubborn))
    _ = await bench.backend.spawn(bench.order(an_id(999), Kind.LIVES), bench.heard.on_event)
    one = bench.room.find(an_id(999))
    assert one is not None
    for number in range(200):
        left = replace(one.spec, name=an_id(number), labels={**one.spec.labels, AGENT: an_id(number)})
        bench.room.begin(bench.room.add(left, one.script))
    error = await error_of(bench.backend.cleanup_orphans(frozenset()))
    assert "busy" in str(error)
    assert bench.room.agents() == {an_id(7), an_id(999)}
    assert Stubborn.most == SWEEP_AT_ONCE
    bench.room.remove(next(each for each in bench.room.containers.values() if each.spec.name == an_id(7)))
    await bench.close()


class Deaf(FakeEngine):
    """Takes the request for events, as a socket without an engine behind it does, and then is not there."""

    tries = 0

    async def events(self, labels: Mapping[str, str]) -> AsyncIterator[EngineEvent | None]:
        type(self).tries += 1
        yield None
        raise EngineDown("connection refused")


@virtual
async def test_an_engine_that_is_away_is_asked_ever_more_rarely_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = await a_bench(OtherEngineBench(Deaf))
    _ = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
    await asyncio.sleep(60)
    assert 10 < Deaf.tries < 25
    assert [record.message for record in caplog.records].count("engine.silent") == 1
    await bench.close()


class SlowNetworks(FakeEngine):
    """Takes the addresses of a network at once, and shows it a while later, as an engine does."""

    taken: ClassVar[set[str]] = set()

    async def create_network(self, spec: NetworkSpec) -> None:
        if spec.subnet in self.taken:
            await asyncio.sleep(2)
            raise EngineRefused("Pool overlaps with other one on this address space")
        self.taken.add(str(spec.subnet))
        await asyncio.sleep(1)
        await super().create_network(spec)


@virtual
async def test_the_first_agents_may_come_together_here_and_beside_another_orchestrator() -> None:
    SlowNetworks.taken.clear()
    one, other = OtherEngineBench(SlowNetworks), OtherEngineBench(SlowNetworks)
    other.room, other.packets = one.room, one.packets
    benches = [await a_bench(one), await a_bench(other)]
    async with asyncio.TaskGroup() as group:
        for number, bench in enumerate([*benches, *benches]):
            order = bench.order(an_id(number), Kind.LIVES)
            group.create_task(bench.backend.spawn(order, bench.heard.on_event))
    assert len(one.packets.addresses()) == 4
    for bench in benches:
        await bench.close()


class HalfBlind(FakeEngine):
    """Cannot list the containers of everybody."""

    async def containers(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        if len(labels) == 1:
            raise Retryable("the engine is too busy to say")
        return await super().containers(labels)


class Mute(FakeEngine):
    """Lets nobody read what a container prints."""

    async def follow(self, container: str, *, lines: int) -> AsyncIterator[str]:
        raise Retryable("the log driver cannot be read")
        yield ""

    async def logs(self, container: str, *, lines: int) -> list[str]:
        raise Retryable("the log driver cannot be read")


class OtherEngineBench(FakeEngineBench):
    """The same with another client of the engine."""

    def __init__(self, kind: type[FakeEngine], room: EngineRoom | None = None) -> None:
        super().__init__(room)

        def engine_at(at: EngineAddress) -> FakeEngine:
            return kind(self.room, at)

        self._engine_at = engine_at


@pytest.mark.spec("scaler 29.10.9")
@virtual
async def test_a_listing_that_fails_costs_nobody_his_rules() -> None:
    bench = await a_bench(OtherEngineBench(HalfBlind))
    _ = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
    before = bench.packets.addresses()
    await bench.restart()
    gone = bench.room.find(an_id(1))
    assert gone is not None
    bench.room.remove(gone)
    assert isinstance(await error_of(bench.backend.cleanup_orphans(frozenset())), Retryable)
    assert bench.packets.addresses() == before != set()
    sighted = await a_bench(FakeEngineBench(bench.room, bench.packets))
    assert await sighted.backend.cleanup_orphans(frozenset()) == 0
    assert bench.packets.addresses() == set()
    await sighted.close()


@pytest.mark.spec("scaler 29.10.13")
@virtual
async def test_output_that_cannot_be_read_harms_no_spawn_and_no_end() -> None:
    bench = await a_bench(OtherEngineBench(Mute))
    compute = await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
    await asyncio.sleep(5)
    assert compute.agent_id in {one.agent_id for one in bench.backend.computes()}
    assert not bench.heard.failures(an_id(1))
    await bench.close()
    assert not bench.room.agents()


@virtual
async def test_the_token_is_given_to_the_agent_and_to_nobody_who_asks_the_engine() -> None:
    bench = await a_bench()
    order = replace(bench.order(an_id(1), Kind.LIVES), token="kat_sesame")
    _ = await bench.backend.spawn(order, bench.heard.on_event)
    one = bench.room.find(an_id(1))
    assert one is not None
    assert one.given == b"kat_sesame\n"
    assert "sesame" not in repr(one.spec) + repr(one.files) + repr(bench.heard.events)
    assert one.spec.labels["kici-scaler-name"] == SCALER
    await bench.close()


@virtual
async def test_only_an_agents_own_port_sends_from_its_address_and_nothing_of_that_is_left() -> None:
    bench = FakeEngineBench()
    bench.port_of = {4711: "veth4711"}.get
    bench.room.pids = {an_id(1): 4711}
    bench = await a_bench(bench)
    for number in (1, 2):
        _ = await bench.backend.spawn(bench.order(an_id(number), Kind.LIVES), bench.heard.on_event)
    first, second = (bench.room.find(an_id(number)) for number in (1, 2))
    assert first is not None
    assert second is not None
    assert bench.packets.borrowers_of(first.address) == ['iifname != "veth4711" drop']
    assert bench.packets.borrowers_of(second.address) == []  # nobody could tell which port is its
    await bench.close()
    assert not any(name.startswith("s_") for _, name in bench.packets.chains)


@pytest.mark.parametrize("is_disturbed", [False, True])
@virtual
async def test_rules_of_many_dead_go_in_one_transaction_or_each_in_its_own(is_disturbed: bool) -> None:
    """Somebody else may take one of them away meanwhile: the others go nevertheless."""
    bench = await a_bench()
    for number in (1, 2, 3):
        _ = await bench.backend.spawn(bench.order(an_id(number), Kind.LIVES), bench.heard.on_event)
    await bench.restart()
    addresses = sorted(one.address for one in bench.room.containers.values() if AGENT in one.spec.labels)
    bench.room.containers.clear()
    if is_disturbed:
        chain = bench.packets.maps["kici_agent_net", "agents_forward"][addresses[0]]
        del bench.packets.chains["kici_agent_net", chain]
    before = len(bench.packets.scripts)
    assert await bench.backend.cleanup_orphans(frozenset()) == 0
    removals = [script for script in bench.packets.scripts[before:] if "delete element" in script]
    assert len(removals) == (2 if is_disturbed else 1)
    assert bench.packets.addresses() == ({addresses[0]} if is_disturbed else set())
    await bench.close()
