"""Encryption of what must be kept but not be readable from the store alone."""

from typing import Protocol

from kici.domain.errors import Permanent


class Unreadable(Permanent):
    """Sealed bytes that do not open: another key, another place, or damage.  Never says what was inside."""


class Sealer(Protocol):
    """Authenticated encryption with one key.  What is sealed for one place does not open at another."""

    @property
    def fingerprint(self) -> str:
        """Tells keys apart and gives nothing away; kept in the store."""
        ...

    @property
    def former_fingerprint(self) -> str | None:
        """Of the key that was used before and still opens; None: there is only one key."""
        ...

    @property
    def key_version(self) -> int: ...

    def seal(self, plain: bytes, *, place: str) -> bytes: ...

    def open(self, sealed: bytes, *, place: str) -> bytes:
        """Raises `Unreadable` unless it was sealed by this key, or the former one, for this place."""
        ...

    def reseal(self, sealed: bytes, *, place: str) -> bytes | None:
        """The same by the key of today; None: it is already.  Raises `Unreadable`."""
        ...
