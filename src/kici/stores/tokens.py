"""Credentials of agents and of the HTTP interface: `ports.store.TokenStore`.  Only hashes come here."""

from kici.domain.access import ApiToken
from kici.domain.agent import AgentToken
from kici.domain.ids import Instant, TokenId
from kici.stores.database import Params, Part
from kici.stores.query import Query
from kici.stores.rows import agent_token_from, api_token_from, names_json


class Tokens(Part):
    async def create_agent_token(self, token: AgentToken) -> None:
        await self._write(Query.CREATE_AGENT_TOKEN, agent_token_params(token))

    async def agent_token(self, token_hash: str) -> AgentToken | None:
        row = await self._one(Query.AGENT_TOKEN, {"token_hash": token_hash}, told_apart_by="token_hash")
        return None if row is None else agent_token_from(row)

    async def agent_tokens(self, *, limit: int) -> list[AgentToken]:
        return [agent_token_from(row) for row in await self._database.read(Query.AGENT_TOKENS, {"limit": limit})]

    async def revoke_agent_token(self, token_id: TokenId, *, now: Instant | None = None) -> bool:
        return bool(await self._write(Query.REVOKE_AGENT_TOKEN, {"token_id": token_id, "now": now}))

    async def purge_agent_tokens(self, *, expired_before: Instant, limit: int) -> int:
        params = {"expired_before": expired_before, "limit": limit}
        return len(await self._write(Query.PURGE_AGENT_TOKENS, params))

    async def create_api_token(self, token: ApiToken) -> None:
        await self._write(
            Query.CREATE_API_TOKEN,
            {
                "id": token.id,
                "token_hash": token.hash,
                "token_prefix": token.prefix,
                "name": token.name,
                "role": token.role,
                "secret_contexts": None if token.secret_contexts is None else names_json(token.secret_contexts),
                "created_at": token.created_at,
                "expires_at": token.expires_at,
            },
        )

    async def api_token(self, token_hash: str) -> ApiToken | None:
        row = await self._one(Query.API_TOKEN, {"token_hash": token_hash})
        return None if row is None else api_token_from(row)

    async def api_tokens(self, *, limit: int) -> list[ApiToken]:
        return [api_token_from(row) for row in await self._database.read(Query.API_TOKENS, {"limit": limit})]

    async def revoke_api_token(self, token_id: TokenId, *, now: Instant | None = None) -> bool:
        return bool(await self._write(Query.REVOKE_API_TOKEN, {"token_id": token_id, "now": now}))


def agent_token_params(token: AgentToken) -> Params:
    """What `create_agent_token` writes."""
    return {
        "id": token.id,
        "token_hash": token.hash,
        "token_prefix": token.prefix,
        "kind": token.kind,
        "labels": None if token.labels is None else names_json(token.labels),
        "mandatory_labels": names_json(token.gate),
        "agent_id": token.agent_id,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "name": token.name,
    }
