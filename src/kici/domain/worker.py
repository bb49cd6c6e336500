"""Workers: hosts without a database that make agents for coordinators, and how they become one."""

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Final

from kici.domain.ids import InstanceId, Instant, ScalerName

JOIN_PREFIX: Final = "kici_join_v1"
WORKER_ROLE: Final = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """A one-time token as it is stored."""

    id: str
    hash: str
    role: str
    created_by: str
    created_at: Instant
    expires_at: Instant
    used_by: str | None = None
    """The worker that traded it; that one may do it again until it expires, since an answer can be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One row of `workers`."""

    id: str
    name: str
    version: str = ""
    credential_hash: str = ""
    joined_at: Instant
    revoked_at: Instant | None = None
    linked_to: tuple[InstanceId, ...] = ()
    """Coordinators that said so last."""
    last_seen_at: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinClaim:
    """What a join token says of itself.  It grants nothing: the store decides."""

    role: str
    expires_at: Instant


def join_token_text(claim: JoinClaim, secret_hex: str) -> str:
    """The plain text: prefix, what it says of itself, and the secret."""
    payload = json.dumps({"role": claim.role, "expiry": claim.expires_at}, separators=(",", ":")).encode()
    return f"{JOIN_PREFIX}.{base64.urlsafe_b64encode(payload).decode().rstrip('=')}.{secret_hex}"


def read_join_token(text: str) -> JoinClaim:
    """What a token says of itself.  Raises `ValueError` for what is none."""
    prefix, _, rest = text.strip().partition(".")
    payload, _, secret = rest.partition(".")
    if prefix != JOIN_PREFIX or not secret:
        raise ValueError(f"a join token begins with {JOIN_PREFIX}. and has three parts")
    try:
        found = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return JoinClaim(role=str(found["role"]), expires_at=Instant(int(found["expiry"])))
    except (binascii.Error, ValueError, KeyError, TypeError) as error:
        raise ValueError("the middle part of the join token cannot be read; copy it anew") from error


def remote_name(worker: str, scaler: str) -> ScalerName:
    """What coordinators call a worker's scaler.  Always with the worker's name: hosts share files, and whoever comes
    first after a restart must not get the name of another."""
    return ScalerName(f"{worker}/{scaler}")


def local_name(scaler: ScalerName) -> ScalerName:
    """What the worker itself calls it."""
    return ScalerName(scaler.partition("/")[2])
