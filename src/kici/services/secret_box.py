"""Secrets: sealed on their way into the store, opened only for a job that names them or a person who may see them.

A sealed value is bound to its org, context and key, so a row that is moved to another place does not open.
Errors name the reference, never the value.
"""

from collections.abc import Iterable
from typing import Final

from kici.domain.errors import Denied, Misconfigured, NotFound
from kici.domain.ids import OrgId
from kici.domain.secret import SealedSecret, SecretRef, SecretRow
from kici.ports.clock import Clock
from kici.ports.sealer import Sealer, Unreadable
from kici.ports.store import MetaStore, SecretStore

VALUE_BYTES_MAX: Final = 64 * 1024
LISTED_MAX: Final = 10_000
FINGERPRINT: Final = "secret-key-fingerprint"


class SecretMissing(NotFound):
    """A job or scaler names a secret that nobody stored."""


class SecretUnreadable(Unreadable):
    """A stored secret does not open with this coordinator's key."""


class SecretReserved(Denied):
    """Contexts of the form `__name__` are not for people and their jobs."""


async def check_key(store: MetaStore, sealer: Sealer) -> None:
    """At start: refuse a key that is not the one this store's secrets were sealed with.

    Raises `Misconfigured`; the first key that comes is remembered.
    """
    known = await store.meta(FINGERPRINT)
    if known is None:
        await store.set_meta(FINGERPRINT, sealer.fingerprint)
        known = await store.meta(FINGERPRINT)  # of two first starts at once, one wins and the other is told
    if known != sealer.fingerprint:
        raise Misconfigured(
            f"this secret key ({sealer.fingerprint[:8]}) is not the one that the secrets in this database were "
            f"sealed with ({str(known)[:8]}); start with that one: KICI_SECRET_KEY, or the file secret-key of the "
            "data directory that was used before"
        )


class SecretBox:
    def __init__(self, *, store: SecretStore, sealer: Sealer, clock: Clock) -> None:
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
