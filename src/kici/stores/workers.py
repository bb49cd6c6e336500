"""Workers, how hosts become one, and which coordinators look after their agents: `ports.workers.WorkerStore`."""

from collections.abc import Sequence
from typing import Final

from kici.domain.ids import InstanceId, Instant
from kici.domain.spawn import Spawn
from kici.domain.worker import JoinToken, Worker
from kici.stores.database import Params, Part, Row, Step
from kici.stores.query import Query
from kici.stores.rows import clean_text, spawn_from, to_json

LINKS_MAX: Final = 100_000


class Workers(Part):
    async def create_join_token(self, token: JoinToken) -> None:
        await self._write(
            Query.CREATE_JOIN_TOKEN,
            {
                "id": token.id,
                "token_hash": token.hash,
                "role": token.role,
                "created_by": token.created_by,
                "created_at": token.created_at,
                "expires_at": token.expires_at,
            },
        )

    async def join_tokens(self, *, limit: int, now: Instant | None = None) -> list[JoinToken]:
        rows = await self._database.read(Query.JOIN_TOKENS, {"limit": limit, "now": now})
        return [_join_token(row) for row in rows]

    async def revoke_join_token(self, token_id: str, *, now: Instant | None = None) -> bool:
        return bool(await self._write(Query.REVOKE_JOIN_TOKEN, {"id": token_id, "now": now}))

    async def join_worker(
        self, worker: Worker, *, token_hash: str, role: str, credential_hash: str, now: Instant | None = None
    ) -> bool:
        token = {"worker_id": worker.id, "token_hash": token_hash, "role": role, "now": now}
        made = {
            "worker_id": worker.id,
            "name": clean_text(worker.name),
            "version": clean_text(worker.version),
            "credential_hash": credential_hash,
            "now": now,
        }
        steps = (Step(Query.USE_JOIN_TOKEN, token, guard=True), Step(Query.PUT_WORKER, made))
        return await self._database.unit(steps) is not None

    async def worker(self, worker_id: str) -> Worker | None:
        row = await self._one(Query.WORKER, {"worker_id": worker_id})
        return None if row is None else _worker(row, ())

    async def workers(self, *, limit: int) -> list[Worker]:
        links: dict[str, list[Row]] = {}
        for link in await self._database.read(Query.WORKER_LINKS, {"limit": LINKS_MAX}):
            links.setdefault(link["worker_id"], []).append(link)
        rows = await self._database.read(Query.WORKERS, {"limit": limit})
        return [_worker(row, links.get(row["worker_id"], ())) for row in rows]

    async def revoke_worker(self, worker_id: str, *, now: Instant | None = None) -> bool:
        steps = (
            Step(Query.REVOKE_WORKER, {"worker_id": worker_id, "now": now}, guard=True),
            Step(Query.VOID_JOIN_TOKENS, {"worker_id": worker_id}),
            Step(Query.UNLINK_WORKER, {"worker_id": worker_id, "instance_id": None}),
        )
        return await self._database.unit(steps) is not None

    async def link_workers(
        self, worker_ids: Sequence[str], instance_id: InstanceId, *, now: Instant | None = None
    ) -> frozenset[str]:
        params = {"worker_ids": to_json(sorted(worker_ids)), "instance_id": instance_id, "now": now}
        return frozenset(row["worker_id"] for row in await self._write(Query.LINK_WORKERS, params))

    async def unlink_worker(self, worker_id: str, instance_id: InstanceId) -> None:
        await self._write(Query.UNLINK_WORKER, {"worker_id": worker_id, "instance_id": instance_id})

    async def take_over_worker_spawns(
        self, worker_id: str, to: InstanceId, *, fresh_ms: int, now: Instant | None = None
    ) -> list[Spawn]:
        spawns: Params = {"worker_id": worker_id, "to": to, "fresh_ms": fresh_ms, "now": now}
        steps = (
            Step(Query.LOCK_WORKER, {"worker_id": worker_id}),
            Step(Query.TAKE_OVER_WORKER_SPAWNS, spawns),
            Step(Query.TAKE_OVER_WORKER_RESERVATIONS, {"worker_id": worker_id, "to": to}),
        )
        results = await self._database.unit(steps)
        assert results is not None
        return [spawn_from(row) for row in results[1]]

    async def purge_join_tokens(self, *, now: Instant | None = None) -> int:
        return len(await self._write(Query.PURGE_JOIN_TOKENS, {"now": now}))


def _join_token(row: Row) -> JoinToken:
    return JoinToken(
        id=row["id"],
        hash=row["token_hash"],
        role=row["role"],
        created_by=row["created_by"],
        created_at=Instant(row["created_at"]),
        expires_at=Instant(row["expires_at"]),
        used_by=row["used_by"],
    )


def _worker(row: Row, links: Sequence[Row]) -> Worker:
    seen = [Instant(link["seen_at"]) for link in links]
    return Worker(
        id=row["worker_id"],
        name=row["name"],
        version=row["version"],
        credential_hash=row["credential_hash"],
        joined_at=Instant(row["joined_at"]),
        revoked_at=None if row["revoked_at"] is None else Instant(row["revoked_at"]),
        linked_to=tuple(InstanceId(link["instance_id"]) for link in links),
        last_seen_at=max(seen, default=None),
    )
