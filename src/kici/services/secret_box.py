"""Secrets: sealed on their way into the store, opened only for a job that names them or a person who may see them.

A sealed value is bound to its org, context and key, so a row that is moved to another place does not open.
Errors name the reference, never the value.
"""

import logging
from collections.abc import Iterable
from typing import Final, Protocol

from kici.domain.errors import Denied, Misconfigured, NotFound
from kici.domain.ids import OrgId
from kici.domain.secret import Rotation, SealedSecret, SecretRef, SecretRow
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.sealer import Sealer, Unreadable
from kici.ports.store import MetaStore, SecretStore

VALUE_BYTES_MAX: Final = 64 * 1024
LISTED_MAX: Final = 10_000
PAGE: Final = 200
FINGERPRINT: Final = "secret-key-fingerprint"


class SecretMissing(NotFound):
    """A job or scaler names a secret that nobody stored."""


class SecretUnreadable(Unreadable):
    """A stored secret does not open with this coordinator's key."""


class SecretReserved(Denied):
    """Contexts of the form `__name__` are not for people and their jobs."""


async def check_key(store: MetaStore, sealer: Sealer) -> None:
    """At start: refuse a key that is neither the one this store's secrets were sealed with nor comes with that one.

    Raises `Misconfigured`; the first key that comes is remembered.
    """
    known = await store.meta(FINGERPRINT)
    if known is not None and known == sealer.former_fingerprint:
        emit(Event.SECRET_KEY_OLD, level=logging.WARNING, former=str(known)[:8], current=sealer.fingerprint[:8])
        return  # `SecretBox.rotate` takes it over
    if known is None:
        await store.set_meta(FINGERPRINT, sealer.fingerprint)
        known = await store.meta(FINGERPRINT)  # of two first starts at once, one wins and the other is told
    if known != sealer.fingerprint:
        raise Misconfigured(
            f"this secret key ({sealer.fingerprint[:8]}) is not the one that the secrets in this database were "
            f"sealed with ({str(known)[:8]}); start with that one: KICI_SECRET_KEY, or the file secret-key of the "
            "data directory that was used before; to change the key, give that one too, as KICI_SECRET_KEY_OLD"
        )


class SecretBoxStore(SecretStore, MetaStore, Protocol):
    """What a box needs of a store."""


class SecretBox:
    def __init__(self, *, store: SecretBoxStore, sealer: Sealer, clock: Clock) -> None:
        self._store = store
        self._sealer = sealer
        self._clock = clock

    async def resolve(self, org: OrgId, refs: Iterable[SecretRef]) -> dict[SecretRef, str]:
        """The values of these references.

        All or none: raises `SecretMissing`, `SecretUnreadable` or `SecretReserved` for the first that has none,
        or `StoreDown`.  Whether the caller's token may use the contexts is judged before, at submission.
        """
        values: dict[SecretRef, str] = {}
        for ref in dict.fromkeys(refs):
            value = await self.reveal(org, ref)
            if value is None:
                raise SecretMissing(f"secret {ref} does not exist; `kici-admin secrets set {ref}` stores it")
            values[ref] = value
        return values

    async def reveal(self, org: OrgId, ref: SecretRef) -> str | None:
        """One value; None: there is none."""
        _check(ref)
        secret = await self._store.secret(org, ref)
        if secret is None:
            return None
        try:
            return self._sealer.open(secret.sealed, place=_place(org, ref)).decode()
        except Unreadable as error:
            raise SecretUnreadable(f"secret {ref} cannot be read: {error}") from error

    async def put(self, org: OrgId, ref: SecretRef, value: str) -> None:
        """Store or replace a value.  Raises `Misconfigured` for one that no process could be given."""
        _check(ref)
        if "\0" in value:
            raise Misconfigured(f"secret {ref}: the value contains a NUL, which no environment variable can hold")
        plain = value.encode()
        if len(plain) > VALUE_BYTES_MAX:
            raise Misconfigured(f"secret {ref}: the value has {len(plain)} bytes, the limit is {VALUE_BYTES_MAX}")
        await self._store.put_secret(
            SealedSecret(
                org=org,
                ref=ref,
                sealed=self._sealer.seal(plain, place=_place(org, ref)),
                key_version=self._sealer.key_version,
                updated_at=self._clock.now(),
            )
        )

    async def rotate(self) -> Rotation:
        """Seal everything by the key of today.  May be repeated, and may be done beside everything else."""
        resealed = kept = 0
        unreadable: list[str] = []
        after: SealedSecret | None = None
        while page := await self._store.secrets_of_all(after=after, limit=PAGE):
            for secret in page:
                try:
                    sealed = self._sealer.reseal(secret.sealed, place=_place(secret.org, secret.ref))
                except Unreadable:
                    unreadable.append(f"{secret.org}/{secret.ref}")
                    continue
                if sealed is None:
                    kept += 1
                else:  # one that was stored anew meanwhile was sealed by the key of today
                    resealed += await self._store.reseal_secret(secret, sealed, key_version=self._sealer.key_version)
            after = page[-1]
        if not unreadable:
            await self._store.set_meta(FINGERPRINT, self._sealer.fingerprint)
        return Rotation(resealed=resealed, kept=kept, unreadable=tuple(unreadable))

    async def secrets(self, org: OrgId) -> list[SecretRow]:
        """What there is, without values."""
        found = await self._store.secrets(org, limit=LISTED_MAX)
        return [SecretRow(ref=secret.ref, updated_at=secret.updated_at) for secret in found]

    async def delete(self, org: OrgId, ref: SecretRef) -> bool:
        _check(ref)
        return await self._store.delete_secret(org, ref)


def _place(org: OrgId, ref: SecretRef) -> str:
    """Where a value belongs.  Unambiguous: neither context nor key can contain a colon."""
    return f"{org}:{ref.context}:{ref.key}"


def _check(ref: SecretRef) -> None:
    if ref.is_reserved:
        raise SecretReserved(f"secret {ref}: contexts of the form __name__ are reserved")
