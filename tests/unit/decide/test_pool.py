"""Warm pools: what is missing is made within the room there is, and only surplus goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.config.model import BackendType, Defaults, LabelSet, ScalerEntry, ScalersConfig, WarmPool
from kici.decide.entries import routables
from kici.decide.pool import IdleAgent, Pool, PoolState, fill, gives_way, pools_of, shares, surplus
from kici.domain.ids import AgentId, Instant, ScalerName
from kici.domain.platform import Arch, Host, Os, Platform
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.verdict import AtCap, CapName, Dimension

HOST = Host("linux", "x86_64")
CPU = ResourceRequest(requests=Ask(cpus=1.0))


def config(*sets: LabelSet, size: int = 3, name: str = "pool", platform: Platform | None = None) -> ScalersConfig:
    entry = ScalerEntry(
        name=ScalerName(name),
        type=BackendType.BARE_METAL,
        max_agents=10,
        label_sets=sets or (LabelSet(labels=("linux",), resources=CPU),),
        warm_pool=WarmPool(enabled=True, size=size, idle_timeout_seconds=300),
        platform=platform,
    )
    return ScalersConfig(scalers=(entry,))


def pool(size: int = 3, *, name: str = "pool", platform: Platform | None = None) -> Pool:
    made = config(size=size, name=name, platform=platform)
    return pools_of(made, routables(made, HOST))[0][0]


def state(ready: int, in_flight: int, *, size: int = 3, name: str = "pool") -> PoolState:
    return PoolState(pool=pool(size, name=name), ready=ready, in_flight=in_flight)


NAME = ScalerName("pool")


@pytest.mark.spec("scaler 18.14.1", "scaler 18.14.2")
def test_starts_what_is_neither_ready_nor_under_way() -> None:
    assert [count for _, count in fill([state(1, 1)], {NAME: 10}, total=50)] == [1]
    assert fill([state(0, 3)], {NAME: 10}, total=50) == []


@pytest.mark.spec("scaler 18.14.4")
def test_stays_within_the_room_of_the_scaler_and_of_the_host() -> None:
    assert [count for _, count in fill([state(0, 0, size=5)], {NAME: 1}, total=50)] == [1]
    assert [count for _, count in fill([state(0, 0), state(0, 0)], {NAME: 1}, total=50)] == [1]
    assert [count for _, count in fill([state(0, 0)], {NAME: 10}, total=2)] == [2]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.integers(0, 12),
    st.integers(0, 20),
)
def test_never_starts_more_than_any_limit(pools: list[tuple[int, int, int]], room: int, total: int) -> None:
    states = [state(ready, flight, size=size) for size, ready, flight in pools]
    plan = fill(states, {NAME: room}, total=total)
    assert sum(count for _, count in plan) <= min(room, total)
    assert all(count > 0 for _, count in plan)


@pytest.mark.spec("scaler 18.14.10", "scaler 1.8.14")
def test_a_set_without_declared_resources_gets_no_pool_and_is_named_once() -> None:
    made = config(LabelSet(labels=("linux",)))
    pools, inert = pools_of(made, routables(made, HOST))
    assert pools == []
    assert [(each.scaler, each.label_set) for each in inert] == [(NAME, ("linux",))]
    assert "no resources" in inert[0].reason


def test_defaults_of_the_file_are_a_declaration() -> None:
    made = config(LabelSet(labels=("linux",)))
    made = ScalersConfig(scalers=made.scalers, defaults=Defaults(resources=CPU))
    assert len(pools_of(made, routables(made, HOST))[0]) == 1


@pytest.mark.spec("scaler 18.14.5")
def test_a_pool_of_a_tainted_platform_counts_with_its_taint() -> None:
    tainted = pool(platform=Platform(Os.WINDOWS, Arch.X64))
    assert tainted.demand.labels == {"linux", "windows"}
    assert tainted.routable.gate <= tainted.demand.labels


def agents(*registered_at: int) -> list[IdleAgent]:
    return [IdleAgent(agent_id=AgentId(f"a{n}"), registered_at=Instant(at)) for n, at in enumerate(registered_at)]


@pytest.mark.spec("scaler 18.14.6")
def test_agents_within_the_size_stay_however_long_they_idle() -> None:
    assert surplus(pool(size=3), agents(0, 0, 0), now=Instant(3_600_000)) == []


@pytest.mark.spec("scaler 18.14.7")
def test_surplus_goes_oldest_first_once_it_idled_long_enough() -> None:
    five = agents(5, 4, 3, 2, 1)
    assert surplus(pool(size=2), five, now=Instant(100_000)) == []
    assert surplus(pool(size=2), five, now=Instant(300_004)) == [AgentId("a4"), AgentId("a3"), AgentId("a2")]
    assert surplus(pool(size=2), five, now=Instant(100_000), at_once=True) == ["a4", "a3", "a2"]


def test_size_zero_lets_all_go_after_the_timeout() -> None:
    assert len(surplus(pool(size=0), agents(0, 0), now=Instant(300_000))) == 2


# --- jobs go first

HERE = {ScalerName("warm"): "rack", ScalerName("cold"): "rack", ScalerName("apart"): None}


def refused(cap: CapName, *, scaler: str = "cold", pool: str | None = None) -> AtCap:
    return AtCap(
        cap=cap,
        dimension=Dimension.AGENTS,
        used=1,
        requested=1,
        limit=1,
        scaler=ScalerName(scaler),
        pool=pool,
    )


@pytest.mark.parametrize(
    ("short", "concerned"),
    [
        (refused(CapName.GLOBAL_MAX_AGENTS), {"warm", "cold", "apart"}),
        (refused(CapName.GLOBAL_RESOURCE_CAP), {"warm", "cold", "apart"}),
        (refused(CapName.MACHINE_POOL, pool="rack"), {"warm", "cold"}),
        (refused(CapName.MAX_AGENTS), {"cold"}),
        (refused(CapName.RESOURCE_CAP), {"cold"}),
        (refused(CapName.GLOBAL_MAX_AGENTS, scaler="of a worker"), set()),
    ],
)
def test_a_limit_concerns_the_scalers_that_count_under_it(short: AtCap, concerned: set[str]) -> None:
    assert {name for name in HERE if shares(short, name, HERE)} == concerned


def test_a_pool_whose_room_jobs_wait_for_is_not_filled() -> None:
    assert fill([state(0, 0)], {NAME: 10}, total=50, held_back={NAME}) == []
    other = state(0, 0, name="other")
    plan = fill([state(0, 0), other], {NAME: 10, ScalerName("other"): 10}, total=50, held_back={NAME})
    assert [(pool.scaler, count) for pool, count in plan] == [("other", 3)]


def test_the_oldest_idle_agent_under_the_limit_gives_way() -> None:
    idle = {
        ScalerName("warm"): [IdleAgent(agent_id=AgentId("w"), registered_at=Instant(5))],
        ScalerName("apart"): [IdleAgent(agent_id=AgentId("a"), registered_at=Instant(1))],
    }
    assert gives_way(refused(CapName.GLOBAL_MAX_AGENTS), idle, HERE) == ("apart", "a")
    assert gives_way(refused(CapName.MACHINE_POOL, pool="rack"), idle, HERE) == ("warm", "w")
    assert gives_way(refused(CapName.MAX_AGENTS), idle, HERE) is None
