"""Contract cases of `ports.workers.WorkerStore`."""

from dataclasses import replace
from typing import Final

from kici.domain.ids import ConnectionId, InstanceId, JobId
from kici.domain.spawn import ScaleDownReason, SpawnState
from kici.domain.worker import JoinToken, Worker
from kici.ports.store import Store
from kici.testing.builders import HERE, a_reservation, a_session, a_spawn, an_instance
from kici.testing.contracts.store_rules import ALL, THERE, Case, a_claim, after, agent, given, queued, shows, together
from kici.testing.sim_clock import SIM_START

HOUR_MS: Final = 3_600_000
FRESH_MS: Final = 60_000
W1, W2 = "worker-1", "worker-2"


async def _a_token(store: Store, secret: str = "once", *, role: str = "worker") -> None:
    token = JoinToken(
        id=f"id of {secret}",
        hash=f"hash of {secret}",
        role=role,
        created_by="somebody",
        created_at=after(0),
        expires_at=after(HOUR_MS),
    )
    await store.create_join_token(token)


async def _joins(
    store: Store, worker_id: str = W1, *, secret: str = "once", credential: str = "c1", now: int = 1
) -> bool:
    worker = Worker(id=worker_id, name=f"name of {worker_id}", version="1", joined_at=SIM_START)
    return await store.join_worker(
        worker, token_hash=f"hash of {secret}", role="worker", credential_hash=credential, now=after(now)
    )


@shows("T4.1")
async def trades_a_join_token_once(store: Store) -> None:
    await _a_token(store)
    assert not await _joins(store, secret="made up")
    assert await _joins(store)
    assert not await _joins(store, W2, now=2)
    assert await store.worker(W2) is None
    worker = given(await store.worker(W1))
    assert (worker.name, worker.credential_hash, worker.joined_at) == (f"name of {W1}", "c1", after(1))


@shows("T4.1")
async def takes_a_join_token_back(store: Store) -> None:
    await _a_token(store)
    await _a_token(store, "twice")
    assert [token.id for token in await store.join_tokens(limit=ALL, now=after(1))] == ["id of once", "id of twice"]
    assert await store.revoke_join_token("id of once", now=after(1))
    assert not await store.revoke_join_token("id of once", now=after(1))
    assert not await store.revoke_join_token("id of nothing", now=after(1))
    assert not await _joins(store)
    assert await _joins(store, secret="twice")
    (left,) = await store.join_tokens(limit=ALL, now=after(2))
    assert (left.id, left.used_by, left.created_by) == ("id of twice", W1, "somebody")
    assert await store.revoke_join_token("id of twice", now=after(3))
    assert given(await store.worker(W1)).revoked_at is None
    assert await store.join_tokens(limit=ALL, now=after(HOUR_MS)) == []


@shows("T4.1")
async def lets_the_same_worker_try_again_until_the_token_expires(store: Store) -> None:
    await _a_token(store)
    assert await _joins(store)
    assert await _joins(store, credential="c2", now=HOUR_MS - 1)
    assert given(await store.worker(W1)).credential_hash == "c2"
    assert not await _joins(store, credential="c3", now=HOUR_MS)
    assert given(await store.worker(W1)).credential_hash == "c2"


async def lets_one_of_many_have_a_token(store: Store) -> None:
    await _a_token(store)
    assert sum(await together(_joins(store, f"worker-{number}") for number in range(8))) == 1
    assert len(await store.workers(limit=ALL)) == 1


async def refuses_tokens_of_another_role_and_late_ones(store: Store) -> None:
    await _a_token(store, "other", role="coordinator")
    assert not await _joins(store, secret="other")
    await _a_token(store)
    assert not await _joins(store, now=HOUR_MS)
    assert await store.purge_join_tokens(now=after(HOUR_MS + 24 * HOUR_MS)) == 0
    assert await store.purge_join_tokens(now=after(HOUR_MS + 24 * HOUR_MS + 1)) == 2


async def revokes_a_worker_and_what_it_joined_with(store: Store) -> None:
    await _a_token(store)
    assert await _joins(store)
    await store.link_workers([W1], HERE, now=after(2))
    assert await store.revoke_worker(W1, now=after(3))
    assert not await store.revoke_worker(W1, now=after(4))
    assert not await store.revoke_worker("stranger", now=after(4))
    (worker,) = await store.workers(limit=ALL)
    assert (worker.revoked_at, worker.linked_to) == (after(3), ())
    assert not await _joins(store, now=5), "the token that it used is good no more"
    await _a_token(store, "another")
    assert await _joins(store, secret="another", now=6)
    assert given(await store.worker(W1)).revoked_at is None


async def remembers_links(store: Store) -> None:
    for number, worker_id in enumerate((W1, W2)):
        await _a_token(store, worker_id)
        assert await _joins(store, worker_id, secret=worker_id, now=number)
    assert await store.link_workers([W2, W1, "stranger"], HERE, now=after(10)) == {W1, W2}
    assert await store.link_workers([W1], THERE, now=after(20)) == {W1}
    assert await store.link_workers([W1], HERE, now=after(30)) == {W1}
    assert await store.link_workers([], HERE, now=after(40)) == frozenset()
    first, second = await store.workers(limit=ALL)
    assert (first.linked_to, first.last_seen_at) == ((HERE, THERE), after(30))
    assert (second.linked_to, second.last_seen_at) == ((HERE,), after(10))
    await store.unlink_worker(W1, HERE)
    assert given((await store.workers(limit=1))[0]).linked_to == (THERE,)
    await store.revoke_worker(W2, now=after(50))
    assert await store.link_workers([W1, W2], HERE, now=after(60)) == {W1}


async def _spawned(store: Store, number: int, *, owner: InstanceId, worker_id: str | None = W1) -> None:
    spawn = a_spawn(agent_id=agent(number), owner_instance_id=owner, worker_id=worker_id)
    assert await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(number)) is None


async def _linked(store: Store) -> None:
    await _a_token(store)
    assert await _joins(store)


async def _owned(store: Store, owner: InstanceId) -> list[int]:
    spawns = [each.agent_id for each in await store.spawns(owner=owner, limit=ALL)]
    held = [each.agent_id for each in await store.reservations(owner=owner, limit=ALL)]
    assert sorted(spawns) == sorted(held), "a reservation goes with its spawn"
    return sorted(int(agent_id[-8:], 16) for agent_id in spawns)


@shows("D5")
async def takes_over_agents_whose_owner_is_not_linked_any_more(store: Store) -> None:
    await _linked(store)
    for number in (1, 2):
        await _spawned(store, number, owner=THERE)
    await _spawned(store, 3, owner=THERE, worker_id=W2)
    await _spawned(store, 4, owner=THERE, worker_id=None)
    await _spawned(store, 5, owner=HERE)
    await store.link_workers([W1], THERE, now=after(0))
    assert await store.take_over_worker_spawns(W1, HERE, fresh_ms=FRESH_MS, now=after(FRESH_MS + 1)) == []
    await store.link_workers([W1], HERE, now=after(FRESH_MS))
    assert await store.take_over_worker_spawns(W1, HERE, fresh_ms=FRESH_MS, now=after(FRESH_MS)) == []
    await store.end_spawn(
        agent(2), reason=ScaleDownReason.IDLE, from_states=frozenset({SpawnState.BOOTING}), now=after(9)
    )
    moved = await store.take_over_worker_spawns(W1, HERE, fresh_ms=FRESH_MS, now=after(FRESH_MS + 1))
    assert {each.agent_id: each.state for each in moved} == {
        agent(1): SpawnState.BOOTING,
        agent(2): SpawnState.ENDING,
    }
    assert await _owned(store, HERE) == [1, 2, 5]
    assert await _owned(store, THERE) == [3, 4]


async def takes_over_agents_of_an_owner_that_never_was_linked(store: Store) -> None:
    await _linked(store)
    await _spawned(store, 1, owner=THERE)
    await store.link_workers([W1], HERE, now=after(1))
    moved = await store.take_over_worker_spawns(W1, HERE, fresh_ms=FRESH_MS, now=after(2))
    assert [replace(each, owner_instance_id=THERE) for each in moved] == [
        a_spawn(agent_id=agent(1), owner_instance_id=THERE, worker_id=W1, spawned_at=after(1))
    ]


async def takes_over_agents_of_a_revoked_worker_without_a_link(store: Store) -> None:
    await _linked(store)
    await _spawned(store, 1, owner=THERE)
    await store.link_workers([W1], THERE, now=after(1))
    await store.revoke_worker(W1, now=after(2))
    assert len(await store.take_over_worker_spawns(W1, HERE, fresh_ms=FRESH_MS, now=after(3))) == 1


async def lets_one_of_many_take_over(store: Store) -> None:
    await _linked(store)
    for number in range(5):
        await _spawned(store, number, owner=THERE)
    others = [InstanceId(f"instance-{name}") for name in "cdef"]
    for other in others:
        await store.link_workers([W1], other, now=after(1))
    moved = await together(
        store.take_over_worker_spawns(W1, other, fresh_ms=FRESH_MS, now=after(2)) for other in others
    )
    assert sorted(map(len, moved)) == [0, 0, 0, 5]


async def spares_agents_of_workers_when_their_owner_is_forgotten(store: Store) -> None:
    await _linked(store)
    await _spawned(store, 1, owner=THERE)
    await _spawned(store, 2, owner=THERE, worker_id=None)
    assert await store.forget_spawns_of(THERE) == 1
    assert await _owned(store, THERE) == [1]


async def spares_agents_that_went_on_elsewhere_or_hold_jobs(store: Store) -> None:
    other = InstanceId("instance-c")
    await store.beat(an_instance(id=other), now=after(0))
    for number in range(4):
        await _spawned(store, number, owner=THERE, worker_id=None)
    for number, instance in ((1, other), (2, THERE)):
        session = a_session(agent_id=agent(number), connection_id=ConnectionId(f"c{number}"), instance_id=instance)
        assert await store.register_agent(session, needs_spawn=True, bound=None, now=after(1))
    await queued(store, "held")
    assert await store.claim_job(JobId("held"), a_claim(agent(3), THERE), now=after(1))
    assert await store.forget_spawns_of(THERE, now=after(119_999)) == 2
    assert await _owned(store, THERE) == [1, 3]
    assert {row.agent_id for row in await store.reservations(owner=THERE, limit=ALL)} == {agent(1), agent(3)}
    assert await store.forget_spawns_of(THERE, now=after(120_000)) == 1
    assert await _owned(store, THERE) == [3]


async def tells_who_is_connected_to_an_instance(store: Store) -> None:
    for number in range(3):
        session = a_session(agent_id=agent(number), connection_id=ConnectionId(f"c{number}"), instance_id=HERE)
        assert await store.register_agent(session, needs_spawn=False, bound=None, now=after(1))
    moved = a_session(agent_id=agent(1), connection_id=ConnectionId("d1"), instance_id=THERE)
    assert await store.register_agent(moved, needs_spawn=False, bound=None, now=after(2))
    assert await store.connections_of(HERE) == {agent(0): "c0", agent(2): "c2"}
    assert await store.connections_of(THERE) == {agent(1): "d1"}


async def names_agents_that_are_connected_nowhere(store: Store) -> None:
    other = InstanceId("instance-c")
    await store.beat(an_instance(id=other), now=after(0))
    for number in range(5):
        await _spawned(store, number, owner=HERE, worker_id=None if number % 2 else W1)
    for number in range(1, 5):  # the first is still booting
        session = a_session(agent_id=agent(number), connection_id=ConnectionId(f"c{number}"), instance_id=other)
        assert await store.register_agent(session, needs_spawn=True, bound=None, now=after(1))
        if number != 4:
            assert await store.release_agent(agent(number), session.connection_id)
    await queued(store, "held")
    assert await store.claim_job(JobId("held"), a_claim(agent(3), other), now=after(1))
    assert await store.strays(HERE, limit=ALL, now=after(119_999)) == [agent(1), agent(2)]
    assert await store.strays(HERE, limit=1, now=after(119_999)) == [agent(1)]
    assert await store.strays(HERE, limit=ALL, now=after(120_000)) == [agent(1), agent(2), agent(4)]
    assert await store.strays(THERE, limit=ALL, now=after(0)) == []


CASES: Final[tuple[Case, ...]] = (
    trades_a_join_token_once,
    takes_a_join_token_back,
    lets_the_same_worker_try_again_until_the_token_expires,
    lets_one_of_many_have_a_token,
    refuses_tokens_of_another_role_and_late_ones,
    revokes_a_worker_and_what_it_joined_with,
    remembers_links,
    takes_over_agents_whose_owner_is_not_linked_any_more,
    takes_over_agents_of_an_owner_that_never_was_linked,
    takes_over_agents_of_a_revoked_worker_without_a_link,
    lets_one_of_many_take_over,
    spares_agents_of_workers_when_their_owner_is_forgotten,
    spares_agents_that_went_on_elsewhere_or_hold_jobs,
    tells_who_is_connected_to_an_instance,
    names_agents_that_are_connected_nowhere,
)
