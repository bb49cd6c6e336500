"""Secrets: references that jobs carry, and the sealed rows they name."""

import re
from dataclasses import dataclass
from typing import Final

from kici.domain.ids import Instant, OrgId

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class SecretRef:
    """`<context>:<key>`."""

    context: str
    key: str

    def __str__(self) -> str:
        return f"{self.context}:{self.key}"

    @property
    def is_reserved(self) -> bool:
        """Contexts like `__internal__` are not for people and their jobs."""
        return self.context.startswith("__") and self.context.endswith("__")


def parse_secret_ref(text: str) -> SecretRef:
    """Raises `ValueError` unless the text is `<context>:<key>`, both of letters, digits, dot, underscore, hyphen."""
    context, colon, key = text.partition(":")
    if not colon or not _NAME.match(context) or not _NAME.match(key):
        raise ValueError(f"secret reference {text!r} is not <context>:<key>")
    return SecretRef(context, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSecret:
    """One row of `scoped_secrets`: nonce and ciphertext, bound to org, context and key."""

    org: OrgId
    ref: SecretRef
    sealed: bytes
    key_version: int
    updated_at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRow:
    """A secret as listings show it: never its value."""

    ref: SecretRef
    updated_at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What sealing all secrets by another key came to."""

    resealed: int
    kept: int
    """Sealed by the key of today before."""
    unreadable: tuple[str, ...] = ()
    """`<org>/<context>:<key>` of those that neither key opens: the former key must be kept for them."""
