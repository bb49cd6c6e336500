"""Contract cases of `ports.event_store`: claim codes, event spawns and what became of them, shared backoff."""

from dataclasses import replace
from typing import Any, Final

from kici.domain.claim import PendingClaim
from kici.domain.event import SCALE_DOWN, DeadReason, EventId, EventState
from kici.domain.ids import AgentId, RunId, ScalerName, TokenId
from kici.domain.provision import ScaleDownOrder, SlotRefused
from kici.domain.spawn import SERVING, Spawn, SpawnState
from kici.domain.verdict import AtCap, InBackoff
from kici.ports.event_store import EventFilter
from kici.ports.store import Store
from kici.testing.builders import HERE, an_agent_token, an_instance
from kici.testing.contracts.store_events import (
    BACKOFF,
    CLOUD,
    RULES,
    a_session_of,
    adopt,
    an_event_spawn,
    an_order,
    asked_for,
    claim,
    row_of,
    scale_down,
    scale_up,
    slot,
)
from kici.testing.contracts.store_rules import (
    ALL,
    THERE,
    Case,
    after,
    agent,
    given,
    queued,
    shows,
    together,
)

# --- claim codes


def a_pending_claim(number: int = 1) -> PendingClaim:
    return PendingClaim(
        hash=f"{number:064x}",
        prefix="0123456789ab",
        agent_id=agent(number),
        scaler=CLOUD,
        labels=("b", "a"),
        gate=frozenset({"g"}),
        agent_token_ttl_ms=600_000,
        orchestrator_url="ws://x/ws",
        expires_at=after(1000),
        created_at=after(0),
    )


@shows("scaler 24.7.2", "scaler 24.7.3")
async def redeems_a_claim_once(store: Store) -> None:
    pending = a_pending_claim()
    await store.register_claim(pending, ttl_ms=1000, now=after(0))
    answers = await together(store.redeem_claim(pending.hash, now=after(999)) for _ in range(6))
    assert [each for each in answers if each is not None] == [replace(pending, consumed_at=after(999))]
    fate = given(await store.describe_claim(pending.hash, now=after(1000)))
    assert (fate.consumed, fate.expired) == (True, True)
    other = a_pending_claim(2)
    await store.register_claim(other, ttl_ms=1000, now=after(0))
    assert await store.redeem_claim(other.hash, now=after(1000)) is None
    fate = given(await store.describe_claim(other.hash, now=after(1000)))
    assert (fate.consumed, fate.expired) == (False, True)
    assert await store.purge_claims(expired_before=after(1000)) == 0
    assert await store.purge_claims(expired_before=after(1001)) == 2
    assert await store.describe_claim(other.hash, now=after(1001)) is None


@shows("scaler 24.7.7")
async def invalidates_claims(store: Store) -> None:
    await store.register_claim(a_pending_claim(), ttl_ms=1000, now=after(0))
    assert await store.invalidate_claims(agent(1)) == 1
    assert await store.invalidate_claims(agent(1)) == 0
    assert await store.redeem_claim(a_pending_claim().hash, now=after(0)) is None


async def gives_a_token_to_a_booting_spawn_only(store: Store) -> None:
    await asked_for(store)
    token = an_agent_token(agent_id=agent(1))
    assert await store.give_token(token)
    assert given(await store.spawn(agent(1))).token_id == token.id
    assert await store.agent_token(token.hash) == token
    await store.end_spawn(agent(1), reason="x", from_states=SERVING, now=after(1))
    late = replace(token, id=TokenId("late"), hash="9" * 64)
    assert not await store.give_token(late)
    assert await store.agent_token(late.hash) is None


# --- provisions


@shows("scaler 23.7.1", "scaler 23.7.2")
async def counts_event_spawns_cluster_wide(store: Store) -> None:
    spawns = [an_event_spawn(number, owner_instance_id=(HERE, THERE)[number % 2]) for number in range(8)]
    answers = await together(slot(store, spawn) for spawn in spawns)
    assert sum(answer is None for answer in answers) == 2
    refused = next(answer for answer in answers if answer is not None)
    assert isinstance(refused, SlotRefused)
    assert isinstance(refused.verdict, AtCap)
    assert (refused.verdict.used, refused.verdict.limit, refused.verdict.scaler) == (2, 2, CLOUD)
    assert len(await store.spawns(owner=None, limit=ALL)) == 2
    other = replace(an_event_spawn(9), scaler=ScalerName("other"))
    assert await slot(store, other) is None
    assert (
        len(await store.reservations(owner=HERE, limit=ALL)) + len(await store.reservations(owner=THERE, limit=ALL))
        == 3
    )


async def names_the_spawn_that_serves_the_job_already(store: Store) -> None:
    (job,) = await queued(store, "a")
    first = an_event_spawn(1, bound_job_id=job.id)
    assert await slot(store, first) is None
    answer = await slot(store, an_event_spawn(2, bound_job_id=job.id))
    assert isinstance(answer, Spawn)
    assert answer.agent_id == agent(1)


async def sends_a_scale_up_of_booting_spawns_only(store: Store) -> None:
    await slot(store, an_event_spawn())
    await store.end_spawn(agent(1), reason="x", from_states=SERVING, now=after(1))
    assert not await store.emit_scale_up(scale_up(), now=after(2))
    assert await store.events(EventFilter()) == []
    assert await store.delete_spawn(agent(1))


@shows("T5.8")
async def keeps_the_row_until_its_scale_down_is_delivered(store: Store) -> None:
    await asked_for(store)
    (up,) = await claim(store)
    await store.process_event(up, now=after(1))
    assert not await store.delete_spawn(agent(1))
    ended_ = given(await store.end_provision(an_order(), scale_down(targets=("t", "u")), now=after(2)))
    assert (ended_.emitted, ended_.runs) == (2, ())
    assert (
        given(await store.end_provision(an_order(), scale_down(suffix="b", targets=("t", "u")), now=after(3))).emitted
        == 0
    )
    one, other = await claim(store, now=4)
    await store.process_event(one, now=after(5))
    assert given(await store.spawn(agent(1))).state is SpawnState.ENDING
    await store.process_event(other, now=after(6))
    assert await store.spawn(agent(1)) is None
    assert await store.reservations(owner=HERE, limit=ALL) == []
    assert await store.end_provision(an_order(), scale_down(suffix="c"), now=after(7)) is None


async def withdraws_a_scale_up_that_still_waits(store: Store) -> None:
    await asked_for(store)
    await store.end_provision(an_order(), scale_down(), now=after(1))
    up = await row_of(store, "up-1-0")
    assert (up.state, up.dead_reason) == (EventState.DEAD, "withdrawn")
    assert await store.sealed_fields(EventId("up-1")) is None
    assert not await store.revive_event(up.id, now=after(2))
    assert [each.name for each in await claim(store, now=2)] == [SCALE_DOWN]


async def lets_a_scale_down_wait_for_its_scale_up(store: Store) -> None:
    await asked_for(store)
    (up,) = await claim(store)
    await store.await_run(up.id, HERE, RunId("run-up"))
    ended_ = given(await store.end_provision(an_order(), scale_down(), now=after(1)))
    assert ended_.runs == ("run-up",)
    await store.release_event(up.id, HERE)
    assert await claim(store, now=2) == []
    await store.process_event(up, now=after(3))
    assert [each.name for each in await claim(store, now=4)] == [SCALE_DOWN]


async def waits_for_a_delivery_under_way(store: Store) -> None:
    await asked_for(store)
    (up,) = await claim(store)
    await store.end_provision(an_order(), scale_down(), now=after(1))
    assert await claim(store, THERE, now=2) == []
    assert not await store.process_event(up, now=after(3))
    await store.release_event(up.id, HERE)
    assert [each.name for each in await claim(store, now=4)] == [SCALE_DOWN]


@shows("scaler 21.6.3", "scaler 21.6.4", "scaler 23.7.4", "scaler 23.7.5", "scaler 23.7.6", "scaler 23.7.7")
async def lets_one_coordinator_adopt(store: Store) -> None:
    for instance in (HERE, THERE):
        await store.beat(an_instance(id=instance), now=after(0))
    await asked_for(store, owner_instance_id=HERE)
    assert await adopt(store, by=THERE, now=10)
    assert not await adopt(store, by=HERE, now=20)
    assert await adopt(store, by=THERE, now=30)
    assert given(await store.spawn(agent(1))).adopted_by == THERE
    assert not await store.end_spawn(agent(1), reason="x", from_states=SERVING, by=HERE, now=after(40))
    assert await store.end_provision(an_order(by=HERE), scale_down(), now=after(40)) is None
    assert not await store.delete_spawn(agent(1))
    assert await store.has_adopted_provisions(THERE)
    assert not await store.has_adopted_provisions(HERE)
    assert [each.agent_id for each in await store.spawns(owner=THERE, limit=ALL)] == [agent(1)]
    assert await store.spawns(owner=HERE, limit=ALL) == []
    given(await store.end_provision(an_order(by=THERE), scale_down(), now=after(50)))
    for event in await claim(store, now=60):
        await store.process_event(event, now=after(61))
    assert await store.spawn(agent(1)) is None
    assert await store.provision_adopter(agent(1)) == THERE


async def passes_an_adoption_on_when_it_is_released_or_stale(store: Store) -> None:
    for instance in (HERE, THERE):
        await store.beat(an_instance(id=instance), now=after(0))
    for number in (1, 2):
        await asked_for(store, number)
        assert await adopt(store, number, by=HERE)
    await store.release_agent(agent(1), a_session_of().connection_id)
    assert await adopt(store, 1, by=THERE, now=10)
    assert not await adopt(store, 2, by=THERE, now=10)
    assert not await adopt(store, 2, by=THERE, now=44_999)
    assert await adopt(store, 2, by=THERE, now=45_000)
    assert await store.provision_adopter(agent(2)) == THERE


async def clears_the_deferral_when_an_agent_comes(store: Store) -> None:
    await store.count_provision_failure(CLOUD, agent(9), error="x", settings=BACKOFF, now=after(0))
    await slot(store, an_event_spawn(), now=30_000)
    assert await adopt(store, now=30_001)
    assert await store.deferrals(limit=ALL) == []


async def counts_no_failure_of_a_machine_that_came(store: Store) -> None:
    await asked_for(store)
    assert await adopt(store, now=1)
    counted = await store.count_provision_failure(CLOUD, agent(), error="late", settings=BACKOFF, now=after(2))
    assert counted is None
    assert await store.deferrals(limit=ALL) == []


@shows("scaler 13.9.1", "scaler 13.9.2", "scaler 13.9.3", "scaler 13.9.4", "scaler 13.9.10")
async def counts_failures_of_a_scaler_once_for_each_agent(store: Store) -> None:
    windows = []
    for number in range(1, 11):
        counted = given(
            await store.count_provision_failure(
                CLOUD, agent(number), error=f"e{number}", settings=BACKOFF, now=after(0)
            )
        )
        windows.append(counted.deferral.until - after(0))
    assert windows == [30_000, 60_000, 120_000, 240_000, 480_000] + [900_000] * 5
    again = await store.count_provision_failure(CLOUD, agent(3), error="again", settings=BACKOFF, now=after(1))
    assert again is None
    (deferral,) = await store.deferrals(limit=ALL)
    assert (deferral.scaler, deferral.deferral.failures, deferral.deferral.last_error) == (CLOUD, 10, "e10")
    for number in range(100, 180):
        await store.count_provision_failure(CLOUD, agent(number), error="", settings=BACKOFF, now=after(number))
    assert (await store.deferrals(limit=ALL))[0].deferral.failures == 90
    both = await together(
        store.count_provision_failure(ScalerName("b"), agent(number), error="", settings=BACKOFF, now=after(0))
        for number in (1, 2, 1)
    )
    assert sum(each is not None for each in both) == 2
    assert (await store.deferrals(limit=1))[0].deferral.failures == 2


async def lets_one_probe_through(store: Store) -> None:
    await store.count_provision_failure(CLOUD, agent(9), error="no quota", settings=BACKOFF, now=after(0))
    refused = await slot(store, an_event_spawn(1), now=29_999)
    assert isinstance(refused, SlotRefused)
    assert isinstance(refused.verdict, InBackoff)
    assert (refused.verdict.failures, refused.verdict.until, refused.verdict.last_error) == (
        1,
        after(30_000),
        "no quota",
    )
    answers = await together(slot(store, an_event_spawn(number), now=30_000) for number in (1, 2, 3))
    assert sum(answer is None for answer in answers) == 1
    (deferral,) = await store.deferrals(limit=ALL)
    assert deferral.is_probing
    probe = next(number for number, answer in zip((1, 2, 3), answers, strict=True) if answer is None)
    await store.end_spawn(agent(probe), reason="x", from_states=SERVING, now=after(30_001))
    await store.count_provision_failure(CLOUD, agent(probe), error="still", settings=BACKOFF, now=after(30_001))
    assert isinstance(await slot(store, an_event_spawn(4), now=60_000), SlotRefused)
    assert await slot(store, an_event_spawn(4), replace(RULES, may_probe=True), now=60_000) is None
    assert isinstance(
        await slot(store, an_event_spawn(5), replace(RULES, may_probe=True, agents_max=9), now=60_000), SlotRefused
    )


# --- the reaper's


async def candidates(store: Store, now: int, spawned_before: int | None = None) -> dict[AgentId, Any]:
    found = await store.reap_candidates(
        spawned_before=after(now if spawned_before is None else spawned_before),
        present_ms=60_000,
        after=None,
        limit=ALL,
        now=after(now),
    )
    return {each.agent_id: each for each in found}


@shows("scaler 26.9.2")
async def lists_what_may_need_an_end(store: Store) -> None:
    await store.beat(an_instance(), now=after(0))
    (job,) = await queued(store, "a")
    await asked_for(store, 1, now=0, bound_job_id=job.id, run_id=job.run_id)
    await asked_for(store, 2, now=500)
    await asked_for(store, 3, now=900)
    await adopt(store, 3, now=950)
    await slot(store, an_event_spawn(4), replace(RULES, agents_max=9), now=0)
    found = await candidates(store, 1000, spawned_before=500)
    assert set(found) == {agent(1), agent(4)}, "2 may still boot, 3 is there"
    one, four = found[agent(1)], found[agent(4)]
    assert (one.state, one.was_sent, one.job_over, one.bound_job_id) == (SpawnState.BOOTING, True, False, job.id)
    assert (one.targets, one.adopted_by) == (("t",), None)
    assert (four.was_sent, four.adopter_beat_at, four.owner_instance_id) == (False, None, HERE)
    three = (await candidates(store, 70_000))[agent(3)]
    assert (three.adopted_by, three.adopter_beat_at) == (HERE, after(0))
    await store.cancel(job.run_id, None, reason="x", now=after(1001))
    assert (await candidates(store, 1000))[agent(1)].job_over
    page = await store.reap_candidates(
        spawned_before=after(999_999), present_ms=1, after=(CLOUD, agent(1)), limit=2, now=after(1000)
    )
    assert [each.agent_id for each in page] == [agent(2), agent(3)]


@shows("scaler 22.5.7", "scaler 23.7.8", "scaler 23.7.9")
async def condemns_only_what_was_seen(store: Store) -> None:
    lease = given(await store.acquire_lease("leader", HERE, ttl_ms=1_000_000, now=after(0)))
    await store.beat(an_instance(), now=after(0))
    await asked_for(store, 1)
    seen = (await candidates(store, 10))[agent(1)]

    def order(reason: str = "spawn-timeout", **fields: Any) -> ScaleDownOrder:
        fields = {"over": seen, "term": lease.token, **fields}
        return ScaleDownOrder(agent_id=agent(1), reason=reason, by=HERE, **fields)

    assert await store.end_provision(order(term=lease.token + 1), scale_down(), now=after(10)) is None
    assert await adopt(store, 1, now=10)
    assert await store.end_provision(order(), scale_down(), now=after(11)) is None
    seen = (await candidates(store, 70_000))[agent(1)]
    assert await store.end_provision(order("heartbeat-timeout", over=seen), scale_down(), now=after(21)) is None
    assert (
        given(await store.end_provision(order("heartbeat-timeout", over=seen), scale_down(), now=after(70_001))).emitted
        == 1
    )
    assert (await candidates(store, 70_002))[agent(1)].is_ending_sent
    assert await store.purge_outcomes(updated_before=after(999_999), limit=ALL) == 0
    assert await store.provision_adopter(agent(1)) == HERE
    (up,) = await claim(store, now=70_003)
    await store.bury_event(up.id, error="x", reason=DeadReason.EXHAUSTED, now=after(70_004))
    again = (await candidates(store, 70_005))[agent(1)]
    assert (again.is_ending_sent, again.undelivered_at, again.end_reason) == (False, after(70_004), "heartbeat-timeout")
    for number in range(2):
        _ = await store.end_provision(order("x", over=again), scale_down(suffix=str(number)), now=after(70_006))
    for event in await claim(store, now=70_007):
        await store.process_event(event, now=after(70_008))
    assert await store.spawn(agent(1)) is None
    assert await store.purge_outcomes(updated_before=after(999_999), limit=ALL) == 1
    assert await store.provision_adopter(agent(1)) is None


async def tells_owners_what_became_of_their_spawns(store: Store) -> None:
    (job,) = await queued(store, "a")
    await asked_for(store, 1, bound_job_id=job.id, run_id=job.run_id)
    await asked_for(store, 2)
    await asked_for(store, 3)
    one, two, three = await claim(store)
    await store.bury_event(two.id, error="no quota", reason=DeadReason.NON_RETRYABLE, now=after(1))
    await adopt(store, 3, by=THERE, now=2)
    await store.cancel(job.run_id, None, reason="x", now=after(3))
    news = {each.agent_id: each for each in await store.provision_news([agent(number) for number in (1, 2, 3, 7)])}
    assert (news[agent(1)].job_over, news[agent(1)].failure) == (True, None)
    assert (news[agent(2)].failure, news[agent(2)].state) == ("no quota", SpawnState.BOOTING)
    assert (news[agent(3)].adopted_by, news[agent(3)].state) == (THERE, SpawnState.REGISTERED)
    assert news[agent(7)].state is None
    assert (one.id, three.id) == ("up-1-0", "up-3-0")


CASES: Final[tuple[Case, ...]] = (
    redeems_a_claim_once,
    invalidates_claims,
    gives_a_token_to_a_booting_spawn_only,
    counts_event_spawns_cluster_wide,
    names_the_spawn_that_serves_the_job_already,
    sends_a_scale_up_of_booting_spawns_only,
    keeps_the_row_until_its_scale_down_is_delivered,
    withdraws_a_scale_up_that_still_waits,
    lets_a_scale_down_wait_for_its_scale_up,
    waits_for_a_delivery_under_way,
    lets_one_coordinator_adopt,
    passes_an_adoption_on_when_it_is_released_or_stale,
    clears_the_deferral_when_an_agent_comes,
    counts_no_failure_of_a_machine_that_came,
    counts_failures_of_a_scaler_once_for_each_agent,
    lets_one_probe_through,
    lists_what_may_need_an_end,
    condemns_only_what_was_seen,
    tells_owners_what_became_of_their_spawns,
)
