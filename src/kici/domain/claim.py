"""Claim codes: how a provisioned machine gets its agent's token without anybody in between seeing it.

A code is made for one agent before its machine is asked for, works once and not for long.  Only its hash is kept.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from kici.domain.ids import AgentId, Instant, ScalerName

CODE_BYTES: Final = 32
PREFIX_CHARS: Final = 12

INVALID: Final = "invalid claim code"
CONSUMED: Final = "claim code already consumed"
EXPIRED: Final = "claim code expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingClaim:
    """One row of `scaler_pending_claims`: what a code is good for."""

    hash: str
    """SHA-256 of the code, hex."""
    prefix: str
    """First characters of the code, for logs."""
    agent_id: AgentId
    scaler: ScalerName
    labels: tuple[str, ...]
    gate: frozenset[str]
    agent_token_ttl_ms: int
    orchestrator_url: str
    expires_at: Instant
    consumed_at: Instant | None = None
    created_at: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimFate:
    """Why a code cannot be redeemed."""

    consumed: bool
    expired: bool


def hash_code(code: str) -> str:
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()


def refusal_of(fate: ClaimFate | None) -> str:
    """What to tell whoever offered the code."""
    if fate is None:
        return INVALID
    return CONSUMED if fate.consumed else EXPIRED
