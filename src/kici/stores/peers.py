"""What coordinators tell and ask each other: `ports.peers.PeerStore`."""

from collections.abc import Mapping

import msgspec

from kici.domain.ids import AgentId, ConnectionId, InstanceId, Instant, TokenId
from kici.domain.peer import Capacity, PeerRequest, RequestKind
from kici.stores.database import Params, Part, Step
from kici.stores.query import Query


class Peers(Part):
    async def put_capacity(self, instance_id: InstanceId, capacity: Capacity, *, now: Instant | None = None) -> None:
        payload = msgspec.json.encode(capacity, order="deterministic").decode()
        await self._write(Query.PUT_CAPACITY, {"instance_id": instance_id, "payload": payload, "now": now})

    async def capacities(
        self, *, except_instance_id: InstanceId, present_ms: int, limit: int, now: Instant | None = None
    ) -> Mapping[InstanceId, Capacity]:
        rows = await self._database.read(
            Query.CAPACITIES,
            {"except_instance_id": except_instance_id, "present_ms": present_ms, "limit": limit, "now": now},
        )
        return {InstanceId(row["instance_id"]): msgspec.json.decode(row["payload"], type=Capacity) for row in rows}

    async def ask_peer(self, request: PeerRequest, *, ttl_ms: int, now: Instant | None = None) -> None:
        await self._write(
            Query.ASK_PEER,
            {
                "id": request.id,
                "target": request.target,
                "kind": request.kind,
                "payload": request.payload,
                "ttl_ms": ttl_ms,
                "now": now,
            },
        )

    async def peer_requests(self, target: InstanceId, *, limit: int, now: Instant | None = None) -> list[PeerRequest]:
        rows = await self._database.read(Query.PEER_REQUESTS, {"target": target, "limit": limit, "now": now})
        return [
            PeerRequest(id=row["id"], target=target, kind=RequestKind(row["kind"]), payload=row["payload"])
            for row in rows
            if row["kind"] in set(RequestKind)
        ]

    async def answer_peer(self, request_id: str, answer: str, *, now: Instant | None = None) -> bool:
        return bool(await self._write(Query.ANSWER_PEER, {"id": request_id, "answer": answer, "now": now}))

    async def peer_answer(self, request_id: str) -> str | None:
        row = await self._one(Query.PEER_ANSWER, {"id": request_id})
        return None if row is None else row["answer"]

    async def purge_peer_requests(self, *, now: Instant | None = None) -> int:
        return len(await self._write(Query.PURGE_PEER_REQUESTS, {"now": now}))

    async def revoked_session_tokens(self, instance_id: InstanceId, *, limit: int) -> list[TokenId]:
        rows = await self._database.read(Query.REVOKED_SESSION_TOKENS, {"instance_id": instance_id, "limit": limit})
        return [TokenId(row["id"]) for row in rows]

    async def connections_of(self, instance_id: InstanceId) -> dict[AgentId, ConnectionId]:
        rows = await self._database.read(Query.CONNECTIONS_OF, {"instance_id": instance_id})
        return {AgentId(row["agent_id"]): ConnectionId(row["connection_id"]) for row in rows}

    async def strays(self, instance_id: InstanceId, *, limit: int, now: Instant | None = None) -> list[AgentId]:
        rows = await self._database.read(Query.STRAYS, {"instance_id": instance_id, "limit": limit, "now": now})
        return [AgentId(row["agent_id"]) for row in rows]

    async def forget_spawns_of(self, instance_id: InstanceId, *, now: Instant | None = None) -> int:
        params: Params = {"instance_id": instance_id, "now": now}
        results = await self._database.unit(
            (Step(Query.FORGET_RESERVATIONS_OF, params), Step(Query.FORGET_SPAWNS_OF, params))
        )
        assert results is not None
        return len(results[1])

    async def forget_instance(
        self, instance_id: InstanceId, *, heard_before: Instant, now: Instant | None = None
    ) -> bool:
        params: Params = {"instance_id": instance_id, "now": now}
        gone: Params = {"instance_id": instance_id}
        steps = (
            Step(Query.FORGET_INSTANCE, {**gone, "heard_before": heard_before}, guard=True),
            Step(Query.DELETE_SESSIONS_OF, gone),
            Step(Query.FORGET_RESERVATIONS_OF, params),
            Step(Query.FORGET_SPAWNS_OF, params),
            Step(Query.FORGET_ADDRESSES_OF, gone),
            Step(Query.FORGET_CAPACITY_OF, gone),
            Step(Query.FORGET_LINKS_OF, gone),
        )
        return await self._database.unit(steps) is not None
