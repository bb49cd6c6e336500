"""An agent's container gets its network while it loads, its rules after that, and its token last."""

import asyncio
from dataclasses import replace

import pytest
from tests.contract.container_benches import FakeEngineBench
from tests.unit.backends.test_container import a_bench, error_of
from tests.unit.backends.test_container_spawn import OtherEngineBench

from kici.domain.errors import DeterministicRefusal, Retryable
from kici.ports.backend import SpawnOrder
from kici.ports.engine import EngineKind, EngineRefused, Ready
from kici.testing.contracts.backend import Kind, an_id, until
from kici.testing.fake_engine import ADDRESS, FakeEngine, ImageScript
from kici.testing.virtual_time import virtual


def with_token(bench: FakeEngineBench, kind: Kind = Kind.LIVES) -> SpawnOrder:
    return replace(bench.order(an_id(1), kind), token="kat_sesame")


class Slow(FakeEngine):
    """Takes its time for the network."""

    async def connect(self, container: str, network: str) -> None:
        await asyncio.sleep(2.0)
        await super().connect(container, network)


class Eager(FakeEngine):
    """Gives a container its network back when it starts."""

    async def start(self, container: str, *, given: bytes = b"", ready: Ready | None = None) -> None:
        (await self._the(container)).is_connected = True
        await super().start(container, given=given, ready=ready)


class Broken(FakeEngine):
    """Cannot connect anybody."""

    async def connect(self, container: str, network: str) -> None:
        raise Retryable(f"cannot connect {container}: failed to add interface")


class Deadly(FakeEngine):
    """The container ends while it is being connected."""

    async def connect(self, container: str, network: str) -> None:
        self._room.end(await self._the(container), 9)
        raise EngineRefused("cannot join the network namespace of a process that is gone")


@pytest.mark.spec("D20")
@virtual
async def test_an_agent_loads_without_a_network_and_has_its_token_after_its_rules() -> None:
    bench = await a_bench(OtherEngineBench(Slow))
    spawn = asyncio.ensure_future(bench.backend.spawn(with_token(bench), bench.heard.on_event))
    await asyncio.sleep(1.0)
    one = bench.room.find(an_id(1))
    assert one is not None
    assert (one.is_running, one.is_connected, one.given) == (True, False, b"")
    assert bench.packets.addresses() == set()
    _ = await spawn
    assert (one.is_connected, one.given) == (True, b"kat_sesame\n")
    assert bench.packets.addresses() == {one.address}
    await bench.close()


@pytest.mark.spec("D20")
@pytest.mark.parametrize("kind", list(EngineKind))
@virtual
async def test_without_rules_there_is_no_token(kind: EngineKind) -> None:
    """On an engine that connects late, and on one that connects when it starts."""
    bench = FakeEngineBench()
    bench.address = replace(ADDRESS, kind=kind)
    bench = await a_bench(bench)
    _ = await bench.backend.spawn(bench.order(an_id(2), Kind.LIVES), bench.heard.on_event)  # the static rules are there
    seen = []

    def refusal() -> DeterministicRefusal:
        one = bench.room.find(an_id(1))
        assert one is not None
        seen.append((one.is_running, one.is_connected, one.given))
        return DeterministicRefusal("nft may not be used by us")

    bench.packets.refusal = refusal
    _ = await error_of(bench.backend.spawn(with_token(bench), bench.heard.on_event))
    assert seen[0] == (True, True, b"")
    bench.packets.refusal = None
    await bench.close()


@virtual
async def test_who_might_connect_before_it_has_a_token_has_its_network_from_the_start() -> None:
    """One that needs no token, and one that is not ours."""
    bench = await a_bench(OtherEngineBench(Broken))
    _ = await bench.backend.spawn(replace(with_token(bench), token=None), bench.heard.on_event)
    script = bench.room.images["ci/lives:latest"]
    bench.room.images["ci/lives:latest"] = replace(script, labels={"kici-agent": "own"})
    _ = await bench.backend.spawn(replace(with_token(bench), agent_id=an_id(2)), bench.heard.on_event)
    assert len(bench.packets.addresses()) == 2
    await bench.close()


@virtual
async def test_an_engine_that_connects_by_itself_is_as_good() -> None:
    bench = await a_bench(OtherEngineBench(Eager))
    _ = await bench.backend.spawn(with_token(bench), bench.heard.on_event)
    one = bench.room.find(an_id(1))
    assert one is not None
    assert (one.given, bench.packets.addresses()) == (b"kat_sesame\n", {one.address})
    await bench.close()


@virtual
async def test_a_network_that_cannot_be_had_fails_the_start_and_leaves_nothing() -> None:
    bench = await a_bench(OtherEngineBench(Broken))
    error = await error_of(bench.backend.spawn(with_token(bench), bench.heard.on_event))
    assert "failed to add interface" in str(error)
    assert (bench.room.agents(), bench.packets.addresses()) == (set(), set())
    await bench.close()


@virtual
async def test_one_that_ends_while_it_is_connected_is_told_of_as_any_that_ends() -> None:
    bench: FakeEngineBench = OtherEngineBench(Deadly)
    bench.room.images["ci/lives:latest"] = ImageScript(output=("no room for my modules",))
    bench = await a_bench(bench)
    _ = await bench.backend.spawn(with_token(bench), bench.heard.on_event)
    await until(lambda: bench.heard.failures(an_id(1)))
    (failure,) = bench.heard.failures(an_id(1))
    assert "ended with exit code 9 before it registered" in failure.detail
    assert "no room for my modules" in failure.detail
    await bench.close()
