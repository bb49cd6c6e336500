"""Contract cases of `ports.event_store`: events on their way, registrations, claim codes, provisions, deferrals."""

from dataclasses import replace
from typing import Any, Final

from kici.decide.backoff import BackoffSettings
from kici.decide.prune import EVENT
from kici.domain.agent import AgentSession
from kici.domain.event import SCALE_DOWN, SCALE_UP, DeadReason, EventId, EventState, NewEvent, StoredEvent
from kici.domain.ids import InstanceId, RunId, ScalerName
from kici.domain.job import RunStatus
from kici.domain.provision import ScaleDownOrder, SlotAnswer, SlotRules
from kici.domain.spawn import Spawn
from kici.domain.workflow import Registration, RegistrationKind
from kici.ports.event_store import EventFilter
from kici.ports.store import Store
from kici.testing.builders import HERE, a_new_job, a_reservation, a_session, a_spawn
from kici.testing.contracts.store_rules import (
    ALL,
    THERE,
    Case,
    after,
    agent,
    ended,
    given,
    shows,
    submit,
    together,
)

CLOUD: Final = ScalerName("cloud")
LEASE: Final = 60_000
RULES: Final = SlotRules(agents_max=2, lock_wait_ms=5000)
BACKOFF: Final = BackoffSettings(base_ms=30_000, max_ms=900_000)


def an_event(id: str = "evt-1", **fields: Any) -> NewEvent:
    event = NewEvent(
        emission_id=EventId(id), name="deployed", targets=("acme/a",), payload={"a": 1, "ä": [True]}, source="ci"
    )
    return replace(event, **fields)


def an_event_spawn(number: int = 1, **fields: Any) -> Spawn:
    return a_spawn(agent_id=agent(number), scaler=CLOUD, backend_type=EVENT, provisioning_targets=("t",), **fields)


def scale_up(number: int = 1) -> NewEvent:
    return NewEvent(
        emission_id=EventId(f"up-{number}"),
        name=SCALE_UP,
        targets=("t",),
        payload={"agentId": agent(number), "claimCode": "[redacted]"},
        sealed=b"\x00sealed",
        subject=agent(number),
        expires_in_ms=300_000,
    )


def scale_down(number: int = 1, suffix: str = "", targets: tuple[str, ...] = ("t",)) -> NewEvent:
    return NewEvent(
        emission_id=EventId(f"down-{number}{suffix}"),
        name=SCALE_DOWN,
        targets=targets,
        payload={"agentId": agent(number)},
        subject=agent(number),
    )


def an_order(number: int = 1, by: InstanceId = HERE, reason: str = "idle") -> ScaleDownOrder:
    return ScaleDownOrder(agent_id=agent(number), reason=reason, by=by)


async def slot(store: Store, spawn: Spawn, rules: SlotRules = RULES, now: int = 0) -> SlotAnswer:
    return await store.insert_cluster_spawn(spawn, a_reservation(spawn), rules, now=after(now))


async def asked_for(store: Store, number: int = 1, now: int = 0, **fields: Any) -> None:
    """An event spawn whose scale-up left."""
    assert await slot(store, an_event_spawn(number, **fields), replace(RULES, agents_max=ALL), now) is None
    assert await store.emit_scale_up(scale_up(number), now=after(now))


def a_session_of(number: int = 1, by: InstanceId = HERE) -> AgentSession:
    return a_session(agent_id=agent(number), instance_id=by, scaler=CLOUD, backend_type=EVENT)


async def adopt(store: Store, number: int = 1, by: InstanceId = HERE, now: int = 0) -> bool:
    return (
        await store.register_agent(a_session_of(number, by), needs_spawn=True, bound=None, now=after(now)) is not None
    )


async def claim(store: Store, by: InstanceId = HERE, now: int = 0, limit: int = ALL) -> list[StoredEvent]:
    return await store.claim_events(by, lease_ms=LEASE, limit=limit, now=after(now))


async def row_of(store: Store, id: str) -> StoredEvent:
    return given(await store.event(EventId(id)))


# --- events


async def keeps_events_for_each_target(store: Store) -> None:
    assert await store.emit_event(an_event(targets=("acme/a", "acme/b"), chain_depth=3), now=after(5))
    b, a = await store.events(EventFilter())
    assert (a.id, a.target, b.id, b.target) == ("evt-1-0", "acme/a", "evt-1-1", "acme/b")
    assert (a.payload, a.chain_depth, a.source) == ({"a": 1, "ä": [True]}, 3, "ci")
    assert a.created_at == a.due_at == after(5)
    assert (a.state, a.attempts, a.expires_at, a.emission_id) == (EventState.PENDING, 0, None, "evt-1")
    assert await store.events(EventFilter(before_seq=b.seq)) == [a]
    assert await store.events(EventFilter(name="other")) == []


@shows("H9")
async def keeps_events_that_nobody_wants(store: Store) -> None:
    assert await store.emit_event(an_event(targets=()), now=after(0))
    (event,) = await store.events(EventFilter(state=EventState.UNMATCHED))
    assert event.target == ""
    assert await claim(store) == []


@shows("T5.1", "T5.3")
async def claims_what_is_due_under_a_lease(store: Store) -> None:
    await store.emit_event(an_event("evt-1"), now=after(0))
    await store.emit_event(an_event("evt-2"), now=after(1))
    (first,) = await claim(store, now=1, limit=1)
    assert (first.id, first.attempts, first.claimed_by, first.is_reclaimed) == ("evt-1-0", 1, HERE, False)
    assert first.claimed_until == after(1 + LEASE)
    assert [each.id for each in await claim(store, THERE, now=2)] == ["evt-2-0"]
    assert await claim(store, now=LEASE) == []
    (again,) = await claim(store, THERE, now=LEASE + 1)
    assert (again.id, again.attempts, again.claimed_by, again.is_reclaimed) == ("evt-1-0", 2, THERE, True)


async def gives_an_event_claimed_by_many_to_one(store: Store) -> None:
    for number in range(6):
        await store.emit_event(an_event(f"evt-{number}"), now=after(0))
    found = await together(claim(store, instance, now=1, limit=3) for instance in (HERE, THERE, HERE, THERE))
    claimed = [each.id for events in found for each in events]
    assert len(claimed) == len(set(claimed)) <= 6
    claimed += [each.id for each in await claim(store, now=1)]
    assert len(claimed) == len(set(claimed)) == 6


@shows("T5.2")
async def retries_and_gives_up(store: Store) -> None:
    await store.emit_event(an_event(), now=after(0))
    (event,) = await claim(store)
    assert await store.retry_event(event.id, error="no\0", delay_ms=100, now=after(10))
    assert await claim(store, now=109) == []
    (event,) = await claim(store, now=110)
    assert (event.attempts, event.last_error, event.is_reclaimed) == (2, "no\ufffd", False)
    assert await store.bury_event(event.id, error="x" * 9000, reason=DeadReason.EXHAUSTED, now=after(111))
    assert not await store.retry_event(event.id, error="", delay_ms=0, now=after(112))
    (dead,) = await store.events(EventFilter(state=EventState.DEAD))
    assert (dead.dead_at, dead.dead_reason, len(given(dead.last_error))) == (after(111), "exhausted_retries", 4096)
    assert await store.dead_events_count() == 1
    assert await store.revive_event(event.id, now=after(200))
    assert not await store.revive_event(event.id, now=after(200))
    (event,) = await claim(store, now=200)
    assert (event.attempts, event.dead_at) == (1, None)
    assert not await store.discard_event(event.id)
    await store.bury_event(event.id, error="", reason=DeadReason.NON_RETRYABLE, now=after(201))
    assert await store.discard_event(event.id)
    assert await store.event(event.id) is None


@shows("H11")
async def erases_secrets_once_handled(store: Store) -> None:
    await asked_for(store)
    assert await store.sealed_fields(EventId("up-1")) == b"\x00sealed"
    (event,) = await claim(store)
    assert event.sealed == b"\x00sealed"
    assert (await store.events(EventFilter()))[0].sealed is None
    assert await store.process_event(event, now=after(1))
    assert not await store.process_event(event, now=after(1))
    assert await store.sealed_fields(EventId("up-1")) is None
    assert (await row_of(store, "up-1-0")).state is EventState.PROCESSED


async def tells_at_the_claim_what_expired(store: Store) -> None:
    await asked_for(store)
    assert await store.emit_event(an_event(), now=after(1))
    (early,) = await claim(store, now=200_000, limit=1)
    assert (early.name, early.is_expired) == (SCALE_UP, False)
    late = {event.name: event.is_expired for event in await claim(store, now=300_000)}
    assert late == {SCALE_UP: True, an_event().name: False}


@shows("H11")
async def refuses_to_revive_what_expired_and_erases_it(store: Store) -> None:
    await asked_for(store)
    (event,) = await claim(store)
    await store.bury_event(event.id, error="", reason=DeadReason.NON_RETRYABLE, now=after(1))
    assert await store.erase_expired_secrets(now=after(299_999)) == 0
    assert not await store.revive_event(event.id, now=after(300_000))
    assert await store.erase_expired_secrets(now=after(300_000)) == 1
    assert await store.sealed_fields(EventId("up-1")) is None


async def waits_for_the_run_of_an_event(store: Store) -> None:
    await store.emit_event(an_event(), now=after(0))
    (event,) = await claim(store)
    assert not await store.await_run(event.id, THERE, RunId("run-of-a"))
    assert await store.await_run(event.id, HERE, RunId("run-of-a"))
    assert not await store.await_run(event.id, HERE, RunId("run-of-b"))
    assert await store.awaited_events(limit=ALL, now=after(1)) == []
    (lost,) = await store.awaited_events(limit=ALL, now=after(LEASE))
    assert (lost.event.id, lost.status) == (event.id, None)
    await submit(store, a_new_job("a"))
    assert await store.release_event(event.id, HERE)
    assert await store.awaited_events(limit=ALL, now=after(LEASE)) == []
    assert given(await store.event_of_run(RunId("run-of-a"))).id == event.id
    await ended(store, "a")
    (over,) = await store.awaited_events(limit=ALL, now=after(2))
    assert (over.event.id, over.status) == (event.id, RunStatus.SUCCESS)
    assert await store.retry_event(event.id, error="x", delay_ms=0, run_failed=True, now=after(3))
    (again,) = await claim(store, now=3)
    assert (again.failed_runs, again.run_id) == (1, None)


async def keeps_the_order_of_a_subject(store: Store) -> None:
    """What is about one agent reaches one target one after the other."""
    await store.emit_event(an_event("evt-1", subject=agent(1), name="a"), now=after(0))
    await store.emit_event(an_event("evt-2", subject=agent(1), name="b", targets=("acme/a", "acme/b")), now=after(1))
    await store.emit_event(an_event("evt-3", subject=agent(2), name="b"), now=after(2))
    first = await claim(store, now=3)
    assert [each.id for each in first] == ["evt-1-0", "evt-2-1", "evt-3-0"]
    await store.await_run(first[0].id, HERE, RunId("r"))
    await store.process_event(first[0], now=after(4))
    assert "evt-2-0" in {each.id for each in await claim(store, THERE, now=5)}


@shows("T5.7")
async def limits_the_rate_of_a_source(store: Store) -> None:
    for number in range(3):
        assert await store.emit_event(an_event(f"evt-{number}", targets=("a", "b")), rate_max=3, now=after(number))
    assert not await store.emit_event(an_event("evt-9"), rate_max=3, now=after(10))
    assert await store.emit_event(an_event("evt-10", name="other"), rate_max=3, now=after(10))
    assert await store.emit_event(an_event("evt-11", source="else"), rate_max=3, now=after(10))
    assert await store.emit_event(an_event("evt-12"), rate_max=3, now=after(60_000))
    assert not await store.emit_event(an_event("evt-13"), rate_max=3, now=after(60_000))


async def forgets_old_events(store: Store) -> None:
    for number in range(4):
        await store.emit_event(an_event(f"evt-{number}"), now=after(number))
    a, b, c, _ = await claim(store, now=9)
    for event in (a, b):
        await store.process_event(event, now=after(9))
    await store.bury_event(c.id, error="", reason=DeadReason.EXHAUSTED, now=after(9))
    assert await store.purge_events(created_before=after(1), limit=ALL) == 1
    assert await store.purge_events(created_before=after(99), limit=ALL) == 1
    assert {each.state for each in await store.events(EventFilter())} == {EventState.DEAD, EventState.PENDING}


async def keeps_registrations(store: Store) -> None:
    one = Registration(
        ref="acme/a",
        kind=RegistrationKind.WORKFLOW,
        events=("b", "a"),
        document={"on": {"b": {}}, "ref": "acme/a"},
        applied_by="ann",
        updated_at=after(1),
    )
    other = replace(one, ref="acme/0", kind=RegistrationKind.WEBHOOK, events=("a",), document={})
    for each in (one, other):
        await store.put_registration(each)
    assert await store.registrations(limit=ALL) == [other, one]
    assert await store.registrations(limit=1) == [other]
    await store.put_registration(replace(one, events=("c",), updated_at=after(2)))
    assert given(await store.registration("acme/a")).events == ("c",)
    assert await store.delete_registration("acme/a")
    assert not await store.delete_registration("acme/a")
    assert await store.registration("acme/a") is None


CASES: Final[tuple[Case, ...]] = (
    keeps_events_for_each_target,
    keeps_events_that_nobody_wants,
    claims_what_is_due_under_a_lease,
    gives_an_event_claimed_by_many_to_one,
    retries_and_gives_up,
    erases_secrets_once_handled,
    tells_at_the_claim_what_expired,
    refuses_to_revive_what_expired_and_erases_it,
    waits_for_the_run_of_an_event,
    keeps_the_order_of_a_subject,
    limits_the_rate_of_a_source,
    forgets_old_events,
    keeps_registrations,
)
