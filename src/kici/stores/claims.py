"""Claim codes: `ports.event_store.ClaimRows`."""

from kici.domain.agent import AgentToken
from kici.domain.claim import ClaimFate, PendingClaim
from kici.domain.ids import AgentId, Instant
from kici.stores.database import Params, Part, Row
from kici.stores.query import Query
from kici.stores.rows import names_json, strings_from, to_json
from kici.stores.tokens import agent_token_params


class Claims(Part):
    async def register_claim(self, claim: PendingClaim, *, ttl_ms: int, now: Instant | None = None) -> None:
        await self._write(
            Query.REGISTER_CLAIM,
            {
                "claim_hash": claim.hash,
                "claim_prefix": claim.prefix,
                "agent_id": claim.agent_id,
                "scaler_name": claim.scaler,
                "labels": to_json(claim.labels),
                "mandatory_labels": names_json(claim.gate),
                "agent_token_ttl_ms": claim.agent_token_ttl_ms,
                "orchestrator_url": claim.orchestrator_url,
                "ttl_ms": ttl_ms,
                "now": now,
            },
            told_apart_by="claim_hash",
        )

    async def redeem_claim(self, claim_hash: str, *, now: Instant | None = None) -> PendingClaim | None:
        params: Params = {"claim_hash": claim_hash, "now": now}
        rows = await self._write(Query.REDEEM_CLAIM, params, told_apart_by="claim_hash")
        return _claim_from(rows[0]) if rows else None

    async def describe_claim(self, claim_hash: str, *, now: Instant | None = None) -> ClaimFate | None:
        row = await self._one(Query.DESCRIBE_CLAIM, {"claim_hash": claim_hash, "now": now})
        return None if row is None else ClaimFate(consumed=bool(row["consumed"]), expired=bool(row["expired"]))

    async def give_token(self, token: AgentToken) -> bool:
        return bool(await self._write(Query.GIVE_TOKEN, agent_token_params(token), told_apart_by="agent_id"))

    async def invalidate_claims(self, agent_id: AgentId) -> int:
        return len(await self._write(Query.INVALIDATE_CLAIMS, {"agent_id": agent_id}))

    async def purge_claims(self, *, expired_before: Instant) -> int:
        return len(await self._write(Query.PURGE_CLAIMS, {"expired_before": expired_before}))


def _claim_from(row: Row) -> PendingClaim:
    return PendingClaim(
        hash=row["claim_hash"],
        prefix=row["claim_prefix"],
        agent_id=row["agent_id"],
        scaler=row["scaler_name"],
        labels=strings_from(row["labels"]),
        gate=frozenset(strings_from(row["mandatory_labels"])),
        agent_token_ttl_ms=row["agent_token_ttl_ms"],
        orchestrator_url=row["orchestrator_url"],
        expires_at=row["expires_at"],
        consumed_at=row["consumed_at"],
        created_at=row["created_at"],
    )
