"""Contract cases of `ports.store`: spawns, reservations, agent sessions and credentials."""

from dataclasses import replace
from typing import Final

from kici.domain.access import ApiToken, Role
from kici.domain.agent import AgentFacts, AgentKind, AgentToken
from kici.domain.errors import Bug, Conflict
from kici.domain.ids import AgentId, ConnectionId, Instant, JobId, OrgId, RunId, ScalerName, TokenId
from kici.domain.job import JobStatus
from kici.domain.spawn import SERVING, Spawn, SpawnState
from kici.ports.store import Store
from kici.testing.builders import (
    HERE,
    a_new_job,
    a_reservation,
    a_session,
    a_shape,
    a_spawn,
    an_agent_token,
    an_api_token,
)
from kici.testing.contracts.store_rules import (
    ACK_MS,
    ALL,
    THERE,
    Case,
    a_claim,
    after,
    agent,
    error_of,
    given,
    job,
    offered,
    queued,
    shows,
    started,
    submit,
    together,
)

BOOTING: Final = frozenset({SpawnState.BOOTING})


async def spawned(store: Store, number: int = 1, job_id: str | None = None, **fields: object) -> Spawn:
    """A stored spawn with its reservation."""
    bound = None if job_id is None else JobId(job_id)
    spawn = a_spawn(**{"agent_id": agent(number), "bound_job_id": bound, "spawned_at": after(0), **fields})
    assert await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(0)) is None
    return spawn


@shows("scaler 23.4.3")
async def keeps_every_field_of_a_spawn(store: Store) -> None:
    spawn = await spawned(
        store,
        job_id="a",
        label_set=("b", "a", "B"),
        labels=("b", "a", "kici:agent:bare-metal"),
        gate=frozenset({"gpu", "arm64"}),
        shape=a_shape(0.5, 3 << 40),
        machine_pool="pool",
        provisioning_targets=("t2", "t1"),
        roles=(),
        token_id=TokenId("t"),
        worker_id="w",
        run_id=RunId("r"),
        org=OrgId("acme"),
        job_image=True,
        reuse_idle_seconds=2.5,
        reuse_max_jobs=3,
    )
    assert await store.spawn(spawn.agent_id) == spawn
    assert await store.spawn_for_job(JobId("a")) == spawn
    plain = await spawned(store, 2)
    assert await store.spawn(agent(2)) == plain
    assert await store.spawns(owner=None, limit=ALL) == [spawn, plain]
    assert await store.reservations(owner=HERE, limit=ALL) == [
        a_reservation(each, reserved_at=after(0)) for each in (spawn, plain)
    ]


@shows("T1.13")
async def has_one_live_spawn_for_a_job(store: Store) -> None:
    first = await spawned(store, 1, "a")
    second = a_spawn(agent_id=agent(2), bound_job_id=JobId("a"))
    token = an_agent_token(agent_id=agent(2))
    assert await store.insert_spawn(second, a_reservation(second), token, now=after(1)) == first
    assert await store.spawn(agent(2)) is None
    assert [each.agent_id for each in await store.reservations(owner=HERE, limit=ALL)] == [agent(1)]
    assert await store.agent_token(token.hash) is None
    assert await store.end_spawn(agent(1), reason="failed", from_states=BOOTING, now=after(2))
    assert await store.spawn_for_job(JobId("a")) is None
    assert await store.insert_spawn(second, a_reservation(second), token, now=after(3)) is None
    assert given(await store.spawn_for_job(JobId("a"))).agent_id == agent(2)
    assert given(await store.agent_token(token.hash)).agent_id == agent(2)


@shows("scaler 23.7.1", "scaler 23.7.2")
async def has_one_live_spawn_for_a_job_asked_by_many(store: Store) -> None:
    async def ask(number: int) -> Spawn | None:
        spawn = a_spawn(agent_id=agent(number), bound_job_id=JobId("a"))
        return await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(0))

    answers = await together(ask(number) for number in range(10))
    assert answers.count(None) == 1
    (live,) = await store.spawns(owner=None, limit=ALL)
    assert {answer.agent_id for answer in answers if answer is not None} == {live.agent_id}


async def refuses_a_taken_agent_id(store: Store) -> None:
    await spawned(store, 1)
    again = a_spawn(agent_id=agent(1), bound_job_id=JobId("a"))
    taken = store.insert_spawn(again, a_reservation(again), an_agent_token(), now=after(1))
    assert isinstance(await error_of(taken), Conflict)
    assert await store.spawn_for_job(JobId("a")) is None
    assert await store.agent_tokens(limit=ALL) == []


@shows("T4.8", "scaler 23.5")
async def lists_spawns_by_owner(store: Store) -> None:
    await spawned(store, 1)
    await spawned(store, 2, owner_instance_id=THERE)
    await spawned(store, 3)
    assert [each.agent_id for each in await store.spawns(owner=HERE, limit=ALL)] == [agent(1), agent(3)]
    assert [each.agent_id for each in await store.spawns(owner=THERE, limit=ALL)] == [agent(2)]
    assert len(await store.spawns(owner=None, limit=2)) == 2
    assert [each.agent_id for each in await store.reservations(owner=THERE, limit=ALL)] == [agent(2)]
    assert len(await store.reservations(owner=HERE, limit=1)) == 1


async def ends_a_spawn_from_the_state_it_was_decided_on(store: Store) -> None:
    await spawned(store, 1)
    registered = frozenset({SpawnState.REGISTERED})
    assert not await store.end_spawn(agent(1), reason="idle", from_states=registered, now=after(1))
    assert await store.end_spawn(agent(1), reason="spawn-timeout", from_states=SERVING, now=after(2))
    spawn = given(await store.spawn(agent(1)))
    assert (spawn.state, spawn.end_reason, spawn.destroy_requested_at) == (
        SpawnState.ENDING,
        "spawn-timeout",
        after(2),
    )
    assert not await store.end_spawn(agent(1), reason="again", from_states=SERVING, now=after(3))
    assert not await store.end_spawn(agent(9), reason="unknown", from_states=SERVING, now=after(3))
    illegal = store.end_spawn(agent(1), reason="", from_states=frozenset({SpawnState.ENDING}), now=after(3))
    assert isinstance(await error_of(illegal), Bug)


async def forgets_a_spawn_whose_compute_is_gone(store: Store) -> None:
    spawn = a_spawn(agent_id=agent(1), token_id=TokenId("t1"))
    token = an_agent_token(id=TokenId("t1"), agent_id=agent(1))
    await store.insert_spawn(spawn, a_reservation(spawn), token, now=after(0))
    other = an_agent_token(id=TokenId("t2"), hash="2" * 64, agent_id=agent(2))
    await store.create_agent_token(other)
    assert given(await store.agent_token(token.hash)).revoked_at is None
    assert await store.delete_spawn(agent(1))
    assert await store.spawn(agent(1)) is None
    assert await store.reservations(owner=HERE, limit=ALL) == []
    assert given(await store.agent_token(token.hash)).revoked_at is not None
    assert given(await store.agent_token(other.hash)).revoked_at is None
    assert not await store.delete_spawn(agent(1))


async def gives_up_a_reservation_alone(store: Store) -> None:
    await spawned(store, 1)
    assert await store.delete_reservation(agent(1))
    assert not await store.delete_reservation(agent(1))
    assert await store.spawn(agent(1)) is not None
    assert await store.delete_spawn(agent(1))


async def registers_a_static_agent(store: Store) -> None:
    facts = AgentFacts(hostname="host", cpu_count=8, memory_mb=16_000, uid=1000)
    session = a_session(gate=frozenset({"gpu"}), facts=facts, token_id=TokenId("t"), registered_at=after(3), warm=True)
    registered = given(await store.register_agent(session, needs_spawn=False, bound=None, now=after(3)))
    assert (registered.spawn, registered.job) == (None, None)
    assert await store.session(session.agent_id) == session
    assert await store.session(AgentId("unknown")) is None


async def refuses_an_agent_without_its_spawn(store: Store) -> None:
    session = a_session(agent_id=agent(1))
    assert await store.register_agent(session, needs_spawn=True, bound=None, now=after(0)) is None
    await spawned(store, 1)
    await store.end_spawn(agent(1), reason="spawn-timeout", from_states=BOOTING, now=after(1))
    assert await store.register_agent(session, needs_spawn=True, bound=a_claim(), now=after(2)) is None
    assert await store.session(agent(1)) is None
    assert given(await store.spawn(agent(1))).state is SpawnState.ENDING


@shows("T0.3")
async def registers_with_its_bound_job(store: Store) -> None:
    await queued(store, "older", "bound")
    await spawned(store, 1, "bound")
    session = a_session(agent_id=agent(1), scaler=ScalerName("local"), backend_type="bare-metal")
    claim = a_claim(agent(1), scaler="local")
    registered = given(await store.register_agent(session, needs_spawn=True, bound=claim, now=after(5)))
    spawn, claimed = given(registered.spawn), given(registered.job)
    assert (spawn.state, spawn.registered_at) == (SpawnState.REGISTERED, after(5))
    assert (claimed.id, claimed.status, claimed.agent_id, claimed.scaler) == (
        "bound",
        JobStatus.DISPATCHED,
        agent(1),
        "local",
    )
    assert claimed.ack_deadline == after(5 + ACK_MS)
    assert await store.spawn(agent(1)) == spawn


async def registers_without_a_job_that_is_taken_or_expired(store: Store) -> None:
    await queued(store, "a")
    await submit(store, a_new_job("b", expires_at=after(3)))
    for number, id in enumerate(("a", "b"), 1):
        await spawned(store, number, id)
    await offered(store, "a", to=agent(9))
    for number in (1, 2):
        session, claim = a_session(agent_id=agent(number)), a_claim(agent(number))
        registered = given(await store.register_agent(session, needs_spawn=True, bound=claim, now=after(5)))
        assert (given(registered.spawn).state, registered.job) == (SpawnState.REGISTERED, None)
    assert (await job(store, "a")).agent_id == agent(9)


@shows("T2.4")
async def lets_the_newest_connection_win(store: Store) -> None:
    await queued(store, "a")
    await spawned(store, 1, "a")
    first = a_session(agent_id=agent(1), connection_id=ConnectionId("c1"), registered_at=after(1))
    await store.register_agent(first, needs_spawn=True, bound=a_claim(), now=after(1))
    second = replace(first, connection_id=ConnectionId("c2"), instance_id=THERE, registered_at=after(2))
    again = given(await store.register_agent(second, needs_spawn=True, bound=a_claim(), now=after(2)))
    assert (given(again.spawn).registered_at, again.job) == (after(1), None)
    assert not await store.release_agent(agent(1), ConnectionId("c1"))
    assert await store.session(agent(1)) == second
    assert await store.release_agent(agent(1), ConnectionId("c2"))
    assert not await store.release_agent(agent(1), ConnectionId("c2"))
    assert await store.session(agent(1)) is None


async def knows_a_registration_that_comes_late(store: Store) -> None:
    """As from a coordinator that stood still while the agent went on to another."""
    await spawned(store, 1)
    for number, needs_spawn in ((1, True), (2, False)):
        late = a_session(agent_id=agent(number), incarnation="run-1", connection_number=5)
        there = replace(
            late, connection_number=6, connection_id=ConnectionId("c6"), instance_id=THERE, registered_at=after(1)
        )
        anew = replace(late, incarnation="run-2", connection_number=1, registered_at=after(4))
        assert await store.register_agent(there, needs_spawn=needs_spawn, bound=None, now=after(1))
        assert await store.register_agent(late, needs_spawn=needs_spawn, bound=None, now=after(2)) is None
        assert await store.session(agent(number)) == there
        assert await store.register_agent(there, needs_spawn=needs_spawn, bound=None, now=after(3))
        assert await store.register_agent(anew, needs_spawn=needs_spawn, bound=None, now=after(4))
        assert await store.session(agent(number)) == anew


async def lists_and_drops_sessions_of_an_instance(store: Store) -> None:
    for number, instance in enumerate((HERE, THERE, HERE)):
        session = a_session(agent_id=agent(number), instance_id=instance)
        await store.register_agent(session, needs_spawn=False, bound=None, now=after(0))
    assert [each.agent_id for each in await store.sessions(instance_id=None, limit=ALL)] == [agent(n) for n in range(3)]
    assert [each.agent_id for each in await store.sessions(instance_id=HERE, limit=ALL)] == [agent(0), agent(2)]
    assert len(await store.sessions(instance_id=None, limit=2)) == 2
    assert await store.delete_sessions_of(HERE) == 2
    assert [each.agent_id for each in await store.sessions(instance_id=None, limit=ALL)] == [agent(1)]


@shows("T2.10")
async def keeps_agent_tokens_by_hash(store: Store) -> None:
    any_label = an_agent_token(created_at=after(1), name="first")
    static = AgentToken(
        id=TokenId("t2"),
        hash="2" * 64,
        prefix="kat_22222222",
        kind=AgentKind.STATIC,
        labels=frozenset({"b", "a"}),
        gate=frozenset({"gpu"}),
        agent_id=None,
        created_at=after(2),
        expires_at=None,
    )
    none_allowed = replace(static, id=TokenId("t3"), hash="3" * 64, labels=frozenset(), created_at=after(3))
    for token in (any_label, static, none_allowed):
        await store.create_agent_token(token)
        assert await store.agent_token(token.hash) == token
    assert await store.agent_token("f" * 64) is None
    assert await store.agent_tokens(limit=2) == [none_allowed, static]
    assert isinstance(await error_of(store.create_agent_token(replace(static, id=TokenId("t4")))), Conflict)


async def revokes_an_agent_token_once(store: Store) -> None:
    token = an_agent_token()
    await store.create_agent_token(token)
    assert await store.revoke_agent_token(token.id, now=after(5))
    assert not await store.revoke_agent_token(token.id, now=after(6))
    assert not await store.revoke_agent_token(TokenId("unknown"), now=after(6))
    assert given(await store.agent_token(token.hash)).revoked_at == after(5)


async def purges_agent_tokens_that_nobody_needs(store: Store) -> None:
    """Kept are the tokens of agents with a job or a spawn, static ones and those that are not over."""
    await queued(store, "a", "b")
    await started(store, "a", by=agent(1))
    await started(store, "b", by=agent(2))
    await store.cancel(RunId("run-of-b"), None, reason="", now=after(1))
    await spawned(store, 3)
    for number in range(1, 9):
        await store.create_agent_token(_token(number))
    await store.create_agent_token(replace(_token(20), kind=AgentKind.STATIC))
    await store.create_agent_token(replace(_token(21), expires_at=after(200)))
    await store.create_agent_token(replace(_token(22), expires_at=None))
    await store.create_agent_token(replace(_token(23), expires_at=None))
    await store.revoke_agent_token(TokenId("t23"), now=after(10))
    assert await store.purge_agent_tokens(expired_before=after(100), limit=ALL) == 1
    assert await store.purge_agent_tokens(expired_before=after(101), limit=2) == 2
    assert await store.purge_agent_tokens(expired_before=after(101), limit=ALL) == 3
    left = {token.id for token in await store.agent_tokens(limit=ALL)}
    assert left == {"t1", "t2", "t3", "t20", "t21", "t22"}


def _token(number: int) -> AgentToken:
    return an_agent_token(
        id=TokenId(f"t{number}"), hash=f"{number:064d}", agent_id=agent(number), expires_at=Instant(after(100))
    )


async def keeps_api_tokens_by_hash(store: Store) -> None:
    submitter = ApiToken(
        id=TokenId("s"),
        hash="5" * 64,
        prefix="kici_5555555",
        name="ci",
        role=Role.SUBMITTER,
        secret_contexts=frozenset({"deploy", "registry"}),
        created_at=after(2),
        expires_at=after(99),
    )
    for token in (an_api_token(created_at=after(1)), submitter):
        await store.create_api_token(token)
        assert await store.api_token(token.hash) == token
    assert await store.api_token("f" * 64) is None
    assert [token.id for token in await store.api_tokens(limit=ALL)] == ["s", "api-token-1"]
    assert [token.id for token in await store.api_tokens(limit=1)] == ["s"]
    assert await store.revoke_api_token(TokenId("s"), now=after(5))
    assert not await store.revoke_api_token(TokenId("s"), now=after(6))
    assert given(await store.api_token(submitter.hash)).revoked_at == after(5)


CASES: Final[tuple[Case, ...]] = (
    keeps_every_field_of_a_spawn,
    has_one_live_spawn_for_a_job,
    has_one_live_spawn_for_a_job_asked_by_many,
    refuses_a_taken_agent_id,
    lists_spawns_by_owner,
    ends_a_spawn_from_the_state_it_was_decided_on,
    forgets_a_spawn_whose_compute_is_gone,
    gives_up_a_reservation_alone,
    registers_a_static_agent,
    refuses_an_agent_without_its_spawn,
    registers_with_its_bound_job,
    registers_without_a_job_that_is_taken_or_expired,
    lets_the_newest_connection_win,
    knows_a_registration_that_comes_late,
    lists_and_drops_sessions_of_an_instance,
    keeps_agent_tokens_by_hash,
    revokes_an_agent_token_once,
    purges_agent_tokens_that_nobody_needs,
    keeps_api_tokens_by_hash,
)
