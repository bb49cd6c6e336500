"""Contract cases of `ports.store`: instances, leases, settings, secrets, the access log, and the store itself."""

from dataclasses import replace
from typing import Final

from kici.domain.access import AccessRecord
from kici.domain.errors import StoreDown
from kici.domain.ids import Instant, JobId, OrgId
from kici.domain.instance import Lease
from kici.domain.paging import Mark
from kici.domain.peer import Capacity
from kici.domain.secret import SealedSecret, SecretRef
from kici.ports.store import Store
from kici.testing.builders import HERE, a_new_job, a_new_run, a_reservation, a_spawn, an_instance
from kici.testing.contracts.store_rules import (
    ALL,
    THERE,
    Case,
    a_claim,
    after,
    agent,
    error_of,
    given,
    shows,
    together,
)

ACME: Final = OrgId("acme")
DEFAULT: Final = OrgId("default")


async def keeps_the_beats_of_instances(store: Store) -> None:
    a, b = an_instance(), an_instance(id=THERE, address="", draining=True)
    await store.beat(a, now=after(1))
    await store.beat(b, now=after(2))
    assert await store.instances(limit=ALL) == [replace(a, last_beat_at=after(1)), replace(b, last_beat_at=after(2))]
    await store.beat(replace(a, version="2", draining=True), now=after(9))
    first = (await store.instances(limit=1))[0]
    assert first == replace(a, version="2", draining=True, last_beat_at=after(9))
    await store.remove_instance(HERE)
    assert [each.id for each in await store.instances(limit=ALL)] == [THERE]
    await store.remove_instance(HERE)


@shows("scaler 44")
async def forgets_an_instance_that_is_silent_still(store: Store) -> None:
    for instance in (HERE, THERE):
        await store.beat(an_instance(id=instance), now=after(0))
        await store.put_capacity(instance, Capacity(address=instance), now=after(0))
    spawn = a_spawn(agent_id=agent(1), owner_instance_id=THERE)
    await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(0))
    assert not await store.forget_instance(THERE, heard_before=after(59_999), now=after(59_999))
    assert len(await store.spawns(owner=THERE, limit=ALL)) == 1
    assert await store.forget_instance(THERE, heard_before=after(60_000), now=after(60_000))
    assert not await store.forget_instance(THERE, heard_before=after(90_000), now=after(90_000))
    assert [each.id for each in await store.instances(limit=ALL)] == [HERE]
    assert await store.spawns(owner=THERE, limit=ALL) == []
    assert await store.reservations(owner=THERE, limit=ALL) == []


async def gives_a_lease_to_one_holder(store: Store) -> None:
    first = given(await store.acquire_lease("leader", HERE, ttl_ms=100, now=after(0)))
    assert first == Lease(name="leader", holder=HERE, token=1, expires_at=after(100))
    assert await store.acquire_lease("leader", THERE, ttl_ms=100, now=after(99)) is None
    renewed = given(await store.acquire_lease("leader", HERE, ttl_ms=100, now=after(99)))
    assert renewed == replace(first, expires_at=after(199))
    assert given(await store.acquire_lease("other", THERE, ttl_ms=100, now=after(99))).token == 1


async def raises_the_token_with_each_term(store: Store) -> None:
    await store.acquire_lease("leader", HERE, ttl_ms=100, now=after(0))
    taken = given(await store.acquire_lease("leader", THERE, ttl_ms=100, now=after(100)))
    assert (taken.holder, taken.token) == (THERE, 2)
    assert await store.acquire_lease("leader", HERE, ttl_ms=100, now=after(150)) is None
    again = given(await store.acquire_lease("leader", THERE, ttl_ms=100, now=after(300)))
    assert (again.holder, again.token) == (THERE, 3)


async def releases_a_lease_of_the_running_term_only(store: Store) -> None:
    assert await store.lease("leader") is None
    lease = given(await store.acquire_lease("leader", HERE, ttl_ms=100, now=after(0)))
    assert await store.lease("leader") == lease
    assert not await store.release_lease(replace(lease, token=2))
    assert not await store.release_lease(replace(lease, holder=THERE))
    assert await store.release_lease(lease)
    assert not await store.release_lease(lease)
    assert await store.lease("leader") == replace(lease, expires_at=Instant(0))
    taken = given(await store.acquire_lease("leader", THERE, ttl_ms=100, now=after(1)))
    assert (taken.holder, taken.token) == (THERE, 2)


async def gives_a_lease_asked_by_many_to_one(store: Store) -> None:
    holders = [HERE, THERE] * 5
    leases = await together(store.acquire_lease("leader", holder, ttl_ms=100, now=after(0)) for holder in holders)
    won = [lease for lease in leases if lease is not None]
    assert len({(lease.holder, lease.token) for lease in won}) == 1
    assert len(won) == 5


async def uses_its_own_clock_when_given_none(store: Store) -> None:
    before = await store.database_now()
    await store.submit(a_new_run(), [a_new_job("a")])
    claimed = given(await store.claim_job(JobId("a"), a_claim()))
    running = given(await store.start_job(JobId("a"), agent()))
    lease = given(await store.acquire_lease("leader", HERE, ttl_ms=1000))
    afterwards = await store.database_now()
    assert before <= claimed.created_at <= given(claimed.dispatched_at) <= given(running.started_at) <= afterwards
    assert before + 1000 <= lease.expires_at <= afterwards + 1000


@shows("T8.3", "T8.5")
async def keeps_settings(store: Store) -> None:
    assert (await store.settings(None), await store.settings_version()) == ({}, 0)
    assert await store.patch_settings(None, {"a": 0, "b": 2**40}, now=after(0)) == 1
    assert await store.settings(None) == {"a": 0, "b": 2**40}
    assert await store.patch_settings(None, {"a": 0}, now=after(1)) == 1
    assert await store.patch_settings(None, {"c": None}, now=after(1)) == 1
    assert await store.patch_settings(None, {}, now=after(1)) == 1
    assert await store.patch_settings(None, {"a": None, "b": 3, "d": 4}, now=after(2)) == 2
    assert await store.settings(None) == {"b": 3, "d": 4}
    assert await store.settings_version() == 2


async def keeps_settings_of_orgs_apart(store: Store) -> None:
    await store.patch_settings(None, {"a": 1}, now=after(0))
    assert await store.patch_settings(ACME, {"a": 1, "b": 2}, now=after(0)) == 2
    assert await store.patch_settings(DEFAULT, {"a": 3}, now=after(0)) == 3
    assert await store.patch_settings(ACME, {"a": None}, now=after(0)) == 4
    assert await store.patch_settings(ACME, {"a": None, "b": 2}, now=after(0)) == 4
    assert [await store.settings(org) for org in (None, ACME, DEFAULT)] == [{"a": 1}, {"b": 2}, {"a": 3}]


async def counts_each_change_of_settings_once(store: Store) -> None:
    versions = await together(store.patch_settings(None, {"a": number // 2}, now=after(0)) for number in range(20))
    changes = await store.settings_version()
    assert max(versions) == changes
    assert 10 <= changes <= 20
    identical = await together(store.patch_settings(None, {"b": 1}, now=after(0)) for _ in range(8))
    assert set(identical) == {changes + 1}


async def keeps_sealed_secrets(store: Store) -> None:
    secret = SealedSecret(
        org=DEFAULT, ref=SecretRef("deploy", "token"), sealed=b"\x00\xff sealed", key_version=1, updated_at=after(0)
    )
    others = [
        replace(secret, ref=SecretRef("deploy", "key"), sealed=b"2"),
        replace(secret, ref=SecretRef("build", "token"), sealed=b"3"),
        replace(secret, org=ACME, sealed=b"4"),
    ]
    for each in (secret, *others):
        await store.put_secret(each)
    assert [await store.secret(each.org, each.ref) for each in others] == others
    resealed = replace(secret, sealed=b"new", key_version=2, updated_at=after(1))
    await store.put_secret(resealed)
    assert await store.secrets(DEFAULT, limit=ALL) == [others[1], others[0], resealed]
    assert await store.secrets(DEFAULT, limit=1) == [others[1]]
    everywhere = [others[2], others[1], others[0], resealed]
    assert await store.secrets_of_all(after=None, limit=ALL) == everywhere
    assert await store.secrets_of_all(after=None, limit=2) == everywhere[:2]
    assert await store.secrets_of_all(after=everywhere[1], limit=ALL) == everywhere[2:]
    assert not await store.reseal_secret(secret, b"by another key", key_version=3)  # its value is another by now
    assert await store.reseal_secret(resealed, b"by another key", key_version=3)
    assert await store.secret(DEFAULT, secret.ref) == replace(resealed, sealed=b"by another key", key_version=3)
    assert await store.delete_secret(DEFAULT, secret.ref)
    assert not await store.delete_secret(DEFAULT, secret.ref)
    assert await store.secret(DEFAULT, secret.ref) is None
    assert await store.secret(ACME, secret.ref) == others[2]


@shows("T6.4")
async def keeps_the_access_log(store: Store) -> None:
    records = [
        AccessRecord(at=after(number), actor="ann", action="scaler.stop", target=f"vm-{number}", outcome="ok")
        for number in (1, 2, 2, 3)
    ]
    for record in records:
        await store.record_access(record)
    await store.record_access(replace(records[0], at=after(4), detail="why \0"))
    pages, mark = [], None
    while page := await store.access_log(before=mark, limit=2):
        pages.append([replace(each, id=0) for each in page])
        mark = Mark(page[-1].at, str(page[-1].id))
    newest = replace(records[0], at=after(4), detail="why \ufffd")
    # The second page ends between two of one millisecond.
    assert pages == [[newest, records[3]], [records[2], records[1]], [records[0]]]
    assert await store.prune_access_log(older_than=after(3), limit=2) == 2
    assert await store.prune_access_log(older_than=after(3), limit=2) == 1
    assert await store.prune_access_log(older_than=after(3), limit=2) == 0
    assert [each.at for each in await store.access_log(before=None, limit=9)] == [after(4), after(3)]


async def keeps_small_facts(store: Store) -> None:
    assert await store.meta("fingerprint") is None
    await store.set_meta("fingerprint", "a")
    await store.set_meta("fingerprint", "b")
    assert await store.meta("fingerprint") == "b"


@shows("scaler 23.7.10")
async def migrates_once(store: Store) -> None:
    assert await store.migrate() == []
    assert await together(store.migrate() for _ in range(3)) == [[], [], []]


async def tells_that_it_is_closed(store: Store) -> None:
    await store.ping()
    await store.close()
    await store.close()
    for call in (store.ping(), store.beat(an_instance()), store.migrate()):
        assert isinstance(await error_of(call), StoreDown)


CASES: Final[tuple[Case, ...]] = (
    keeps_the_beats_of_instances,
    forgets_an_instance_that_is_silent_still,
    gives_a_lease_to_one_holder,
    raises_the_token_with_each_term,
    releases_a_lease_of_the_running_term_only,
    gives_a_lease_asked_by_many_to_one,
    uses_its_own_clock_when_given_none,
    keeps_settings,
    keeps_settings_of_orgs_apart,
    counts_each_change_of_settings_once,
    keeps_sealed_secrets,
    keeps_the_access_log,
    keeps_small_facts,
    migrates_once,
)
LAST_CASES: Final[tuple[Case, ...]] = (tells_that_it_is_closed,)
"""After these a store is of no more use."""
