from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kici.adapters.sealer import AesGcmSealer
from kici.domain.errors import Misconfigured
from kici.domain.ids import DEFAULT_ORG, OrgId
from kici.domain.secret import Rotation, SecretRef, SecretRow
from kici.ports.store import Store
from kici.services.secret_box import (
    PAGE,
    VALUE_BYTES_MAX,
    SecretBox,
    SecretMissing,
    SecretReserved,
    SecretUnreadable,
    check_key,
)
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SIM_START, SimClock
from kici.testing.sim_store import a_store
from kici.testing.virtual_time import virtual

ORG, OTHER_ORG = DEFAULT_ORG, OrgId("other")
TOKEN, PASSWORD = SecretRef("deploy", "token"), SecretRef("registry", "password")
VALUE = "hunter2-ünïcode"


def a_sealer(key: bytes = b"k" * 32) -> AesGcmSealer:
    return AesGcmSealer(key, SeededEntropy("nonces"))


@asynccontextmanager
async def a_box() -> AsyncIterator[tuple[SecretBox, Store]]:
    async with a_store() as store:
        yield SecretBox(store=store, sealer=a_sealer(), clock=SimClock()), store


@virtual
async def test_jobs_get_the_values_of_the_references_they_name() -> None:
    async with a_box() as (box, _):
        await box.put(ORG, TOKEN, VALUE)
        await box.put(ORG, PASSWORD, "")
        assert await box.resolve(ORG, [TOKEN, PASSWORD, TOKEN]) == {TOKEN: VALUE, PASSWORD: ""}
        await box.put(ORG, TOKEN, "rotated")
        assert await box.resolve(ORG, [TOKEN]) == {TOKEN: "rotated"}
        assert await box.resolve(ORG, []) == {}


@virtual
async def test_values_are_not_readable_from_the_store() -> None:
    async with a_box() as (box, store):
        await box.put(ORG, TOKEN, VALUE)
        row = await store.secret(ORG, TOKEN)
        assert row is not None
        assert VALUE.encode() not in row.sealed


@pytest.mark.spec("T6.1")
@virtual
async def test_swapping_two_ciphertexts_makes_both_unreadable() -> None:
    async with a_box() as (box, store):
        await box.put(ORG, TOKEN, VALUE)
        await box.put(ORG, PASSWORD, "other")
        token, password = await store.secret(ORG, TOKEN), await store.secret(ORG, PASSWORD)
        assert token is not None
        assert password is not None
        await store.put_secret(replace(token, sealed=password.sealed))
        await store.put_secret(replace(password, sealed=token.sealed))
        for ref in (TOKEN, PASSWORD):
            with pytest.raises(SecretUnreadable, match=str(ref)):
                await box.resolve(ORG, [ref])


@virtual
async def test_a_value_of_one_org_opens_for_no_other() -> None:
    async with a_box() as (box, store):
        await box.put(ORG, TOKEN, VALUE)
        row = await store.secret(ORG, TOKEN)
        assert row is not None
        await store.put_secret(replace(row, org=OTHER_ORG))
        with pytest.raises(SecretUnreadable):
            await box.resolve(OTHER_ORG, [TOKEN])


@virtual
async def test_a_missing_secret_is_named_and_says_how_to_store_it() -> None:
    async with a_box() as (box, _):
        await box.put(ORG, TOKEN, VALUE)
        with pytest.raises(SecretMissing, match=r"registry:password does not exist; .*secrets set") as error:
            await box.resolve(ORG, [TOKEN, PASSWORD])
        assert VALUE not in str(error.value)


@virtual
async def test_reserved_contexts_are_nobodys() -> None:
    async with a_box() as (box, _):
        reserved = SecretRef("__system__", "key")
        with pytest.raises(SecretReserved):
            await box.resolve(ORG, [reserved])
        with pytest.raises(SecretReserved):
            await box.put(ORG, reserved, "x")
        with pytest.raises(SecretReserved):
            await box.delete(ORG, reserved)


@pytest.mark.spec("T6.6")
@virtual
async def test_listing_shows_names_and_never_values() -> None:
    async with a_box() as (box, _):
        await box.put(ORG, TOKEN, VALUE)
        rows = await box.secrets(ORG)
        assert rows == [SecretRow(ref=TOKEN, updated_at=SIM_START)]
        assert await box.secrets(OTHER_ORG) == []
        assert await box.reveal(ORG, TOKEN) == VALUE
        assert await box.reveal(ORG, PASSWORD) is None


@virtual
async def test_a_deleted_secret_is_gone() -> None:
    async with a_box() as (box, _):
        await box.put(ORG, TOKEN, VALUE)
        assert await box.delete(ORG, TOKEN)
        assert not await box.delete(ORG, TOKEN)
        assert await box.reveal(ORG, TOKEN) is None


@pytest.mark.parametrize("value", ["a\0b" + VALUE, VALUE + "x" * VALUE_BYTES_MAX])
def test_values_that_no_process_could_be_given_are_refused_without_showing_them(value: str) -> None:
    @virtual
    async def check() -> None:
        async with a_box() as (box, _):
            with pytest.raises(Misconfigured, match="deploy:token") as error:
                await box.put(ORG, TOKEN, value)
            assert VALUE not in str(error.value)

    check()


@virtual
async def test_another_key_refuses_the_start_and_the_right_one_is_welcome_again() -> None:
    async with a_store() as store:
        await check_key(store, a_sealer())
        await check_key(store, a_sealer())
        with pytest.raises(Misconfigured, match="KICI_SECRET_KEY"):
            await check_key(store, a_sealer(b"x" * 32))
        await check_key(store, a_sealer())


NEW, OLD = b"n" * 32, b"k" * 32


def a_turning_sealer() -> AesGcmSealer:
    return AesGcmSealer(NEW, SeededEntropy("nonces"), former=OLD)


@pytest.mark.spec("T6.2")
@virtual
async def test_a_key_is_changed_without_losing_a_secret() -> None:
    async with a_box() as (box, store):
        await check_key(store, a_sealer(OLD))
        for number in range(PAGE + 1):
            await box.put(ORG, SecretRef("many", str(number)), str(number))
        await box.put(OTHER_ORG, TOKEN, VALUE)
        await check_key(store, a_turning_sealer())  # started with both keys
        turning = SecretBox(store=store, sealer=a_turning_sealer(), clock=SimClock())
        assert await turning.resolve(OTHER_ORG, [TOKEN]) == {TOKEN: VALUE}
        await turning.put(ORG, PASSWORD, "stored by the new key")
        assert await turning.rotate() == Rotation(resealed=PAGE + 2, kept=1)
        assert await turning.rotate() == Rotation(resealed=0, kept=PAGE + 3)
        expected = {SecretRef("many", str(number)): str(number) for number in range(PAGE + 1)}
        expected[PASSWORD] = "stored by the new key"
        assert await turning.resolve(ORG, expected) == expected
        assert await turning.resolve(OTHER_ORG, [TOKEN]) == {TOKEN: VALUE}
        await check_key(store, a_sealer(NEW))  # started without the old one
        after = SecretBox(store=store, sealer=a_sealer(NEW), clock=SimClock())
        assert await after.resolve(OTHER_ORG, [TOKEN]) == {TOKEN: VALUE}
        assert await after.resolve(ORG, expected) == expected
        with pytest.raises(SecretUnreadable):
            await box.resolve(ORG, [PASSWORD])
        with pytest.raises(Misconfigured):
            await check_key(store, a_sealer(OLD))


@virtual
async def test_until_everything_is_sealed_anew_the_old_key_is_asked_for() -> None:
    async with a_box() as (box, store):
        await check_key(store, a_sealer(OLD))
        await box.put(ORG, TOKEN, VALUE)
        lost = SecretBox(store=store, sealer=a_sealer(b"x" * 32), clock=SimClock())
        await lost.put(ORG, PASSWORD, "sealed by a key that nobody has any more")
        turning = SecretBox(store=store, sealer=a_turning_sealer(), clock=SimClock())
        done = await turning.rotate()
        assert (done.resealed, done.unreadable) == (1, (f"{ORG}/{PASSWORD}",))
        with pytest.raises(Misconfigured, match="KICI_SECRET_KEY_OLD"):
            await check_key(store, a_sealer(NEW))
        await turning.delete(ORG, PASSWORD)
        assert not (await turning.rotate()).unreadable
        await check_key(store, a_sealer(NEW))


@virtual
async def test_a_value_that_is_stored_meanwhile_wins() -> None:
    async with a_box() as (box, store):
        await box.put(ORG, TOKEN, VALUE)
        before = await store.secret(ORG, TOKEN)
        assert before is not None
        turning = SecretBox(store=store, sealer=a_turning_sealer(), clock=SimClock())
        await turning.put(ORG, TOKEN, "newer")
        assert not await store.reseal_secret(before, b"older", key_version=1)
        assert await turning.resolve(ORG, [TOKEN]) == {TOKEN: "newer"}
