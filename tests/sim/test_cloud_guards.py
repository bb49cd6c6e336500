"""Each guard around machines of a cloud is worth something: with it taken away, a seed fails, and says why."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

import pytest

from kici.decide import reap
from kici.decide.elect import Term
from kici.domain import knobs
from kici.services import event_provision_reaper
from kici.stores.query import Query
from kici.testing.sim.plan import CLOUD_SETTINGS, Plan, draw
from kici.testing.sim.run import run_plan
from kici.testing.sim.world import World

Prepare = Callable[[World], None]


def clouded(*seeds: int, **fields: Any) -> list[Plan]:
    """Plans of these seeds with three coordinators, a cloud, and no faults but the given ones."""
    return [
        replace(
            draw(seed),
            **{
                "every": {},
                "odds": {},
                "coordinators": 3,
                "cloud_agents": 5,
                "is_balanced": True,
                "jobs": 40,
                "chaos_seconds": 60.0,
                "settle_seconds": 2400.0,
                "warm_agents": 0,
                "pool_cpus": 0.0,
                "settings": {**draw(seed).settings, **CLOUD_SETTINGS},
                **fields,
            },
        )
        for seed in seeds
    ]


def first_violation(plans: Iterable[Plan], prepare: Prepare | None = None) -> str:
    """The first line of what is violated first in these plans; empty: nothing is."""
    for plan in plans:
        violation = run_plan(plan, prepare=prepare).violation
        if violation is not None:
            return violation.splitlines()[0]
    return ""


def rewritten(query: Query, old: str, new: str) -> Prepare:
    """A guard taken out of a statement."""
    return lambda world: world.core.rewrite(query, old, new)


def after_chaos(world: World, script: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """What happens when everything else that the plan knows has happened."""
    chaos = world._chaos

    async def scripted() -> None:
        await chaos()
        await script()

    world._chaos = scripted  # type: ignore[method-assign] # more of it


def test_a_leader_that_stood_still_trusts_itself_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = clouded(*range(3), every={"pause": 8.0})
    assert first_violation(plans) == ""
    monkeypatch.setattr(Term, "is_trusted", lambda *_: True)
    assert "take themselves for the leader" in first_violation(plans)


def test_a_term_is_given_to_one_and_with_a_token_that_grows() -> None:
    anybody = rewritten(
        Query.ACQUIRE_LEASE,
        "WHERE leases.holder = excluded.holder OR leases.expires_at <= COALESCE(:now, now_ms())",
        "",
    )
    assert "a term began with token" in first_violation(clouded(0), anybody)


def test_the_cap_counts_the_whole_cluster() -> None:
    uncounted = rewritten(Query.INSERT_CLUSTER_SPAWN, "< :agents_max", "< 1000")
    assert "machines of the cloud, its cap is" in first_violation(clouded(*range(3), cloud_agents=2), uncounted)


def test_a_claim_code_is_consumed_before_a_token_is_made() -> None:
    plans = clouded(*range(3), odds={"cloud-boots-twice": 1.0})
    assert first_violation(plans) == ""
    again = rewritten(Query.REDEEM_CLAIM, "AND consumed_at IS NULL", "")
    assert "a claim code was good for a second token" in first_violation(plans, again)


def test_the_row_of_a_machine_stays_until_its_scale_down_is_delivered() -> None:
    at_once = rewritten(Query.DELETE_SPAWN, "AND emitted_at IS NULL", "")
    assert "nobody was told to remove its machine" in first_violation(clouded(0), at_once)


def test_a_blink_is_no_reason_to_remove_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = clouded(*range(4), every={"cut": 0.3}, link_seconds=(0.5, 1.0))
    plans = [replace(plan, settings={**plan.settings, knobs.SCALER_REAP_INTERVAL_MS.name: 5000}) for plan in plans]
    assert first_violation(plans) == ""
    monkeypatch.setattr(reap, "reap_grace_ms", lambda *_: 0)
    assert "given up while its agent was well" in first_violation(plans)


def test_an_agent_is_adopted_by_another_only_when_its_coordinator_let_it_go_or_is_gone() -> None:
    plans = clouded(*range(6), every={"half-open": 2.0, "cut": 2.0})
    assert first_violation(plans) == ""
    unheeded = rewritten(Query.REGISTER_SPAWN, "OR NOT EXISTS (", "OR TRUE OR NOT EXISTS (")
    assert "adopted from one that still has its agent" in first_violation(plans, unheeded)


def test_a_machine_that_came_is_remembered_after_it_is_gone() -> None:
    def blind(world: World) -> None:
        async def script() -> None:
            await world.sites[0].lose_store(350.0, world.trace)  # longer than a machine may take to come

        after_chaos(world, script)

    def forgetful(world: World) -> None:
        blind(world)
        statement = "WHERE agent_id = :agent_id AND"
        world.core.rewrite(Query.RECORD_ADOPTION, statement, f"WHERE FALSE AND {statement.removeprefix('WHERE ')}")

    plans = clouded(*range(4), jobs=60, odds={"slow-boot": 1.0}, chaos_seconds=30.0)
    assert first_violation(plans, blind) == ""
    assert "a machine that came was counted as one that did not" in first_violation(plans, forgetful)


def test_a_leader_that_sees_no_other_coordinator_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(world: World) -> None:
        async def script() -> None:
            for site in world.sites[1:]:
                site.coordinator.kill(400.0)
            for agent_id in list(world.cloud.machines):
                world.cloud.takes_away(agent_id)
            await asyncio.sleep(390)

        after_chaos(world, script)

    plans = clouded(*range(3))
    assert first_violation(plans, alone) == ""
    monkeypatch.setattr(event_provision_reaper, "view_suffices", lambda *_: True)
    assert "reaped by one that sees no other coordinator" in first_violation(plans, alone)
