"""Spawns and reservations: `ports.store.SpawnStore`."""

from typing import Final

from kici.domain.agent import AgentToken
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId, InstanceId, Instant, JobId
from kici.domain.moves import check_move
from kici.domain.spawn import SPAWN_MOVES, Reservation, Spawn, SpawnState
from kici.stores.database import Part, Value
from kici.stores.query import Query
from kici.stores.rows import (
    clean_text,
    json_or_none,
    names_json,
    reservation_from,
    spawn_from,
    to_json,
)

INSERT_TRIES_MAX: Final = 3

_TOKEN_PARAMETERS: Final = (
    "new_token_id",
    "token_hash",
    "token_prefix",
    "token_kind",
    "token_labels",
    "token_gate",
    "token_agent_id",
    "token_created_at",
    "token_expires_at",
    "token_name",
)


class Spawns(Part):
    async def insert_spawn(
        self, spawn: Spawn, reservation: Reservation, token: AgentToken | None, *, now: Instant | None = None
    ) -> Spawn | None:
        params = spawn_row_params(spawn, reservation, token, now)
        for _ in range(INSERT_TRIES_MAX):
            if await self._write(Query.INSERT_SPAWN, params, told_apart_by="agent_id"):
                return None
            assert spawn.bound_job_id is not None, f"spawn {spawn.agent_id} can only collide by its bound job"
            serving = await self.spawn_for_job(spawn.bound_job_id)
            if serving is not None:
                return serving
        raise Retryable(f"spawns of job {spawn.bound_job_id} come and go; {spawn.agent_id} was not written, ask again")

    async def spawn(self, agent_id: AgentId) -> Spawn | None:
        row = await self._one(Query.SPAWN, {"agent_id": agent_id}, told_apart_by="agent_id")
        return None if row is None else spawn_from(row)

    async def spawn_for_job(self, job_id: JobId) -> Spawn | None:
        row = await self._one(Query.SPAWN_FOR_JOB, {"job_id": job_id})
        return None if row is None else spawn_from(row)

    async def spawns(self, *, owner: InstanceId | None, limit: int) -> list[Spawn]:
        rows = await self._database.read(Query.SPAWNS, {"owner": owner, "limit": limit})
        return [spawn_from(row) for row in rows]

    async def reservations(self, *, owner: InstanceId, limit: int) -> list[Reservation]:
        rows = await self._database.read(Query.RESERVATIONS, {"owner": owner, "limit": limit})
        return [reservation_from(row) for row in rows]

    async def end_spawn(
        self,
        agent_id: AgentId,
        *,
        reason: str,
        from_states: frozenset[SpawnState],
        by: InstanceId | None = None,
        now: Instant | None = None,
    ) -> bool:
        for state in from_states:
            check_move(SPAWN_MOVES, state, SpawnState.ENDING, what=f"spawn {agent_id}")
        params = {
            "agent_id": agent_id,
            "reason": clean_text(reason),
            "from_states": to_json(sorted(from_states)),
            "by": by,
            "now": now,
        }
        return bool(await self._write(Query.END_SPAWN, params))

    async def delete_spawn(self, agent_id: AgentId) -> bool:
        return bool(await self._write(Query.DELETE_SPAWN, {"agent_id": agent_id}))

    async def delete_reservation(self, agent_id: AgentId) -> bool:
        return bool(await self._write(Query.DELETE_RESERVATION, {"agent_id": agent_id}))


def spawn_row_params(
    spawn: Spawn, reservation: Reservation, token: AgentToken | None, now: Instant | None = None
) -> dict[str, Value]:
    """What `insert_spawn` writes."""
    return {**spawn_params(spawn), **reservation_params(reservation), **_token_params(token), "now": now}


def spawn_params(spawn: Spawn) -> dict[str, Value]:
    return {
        "agent_id": spawn.agent_id,
        "scaler_name": spawn.scaler,
        "backend_type": spawn.backend_type,
        "state": spawn.state,
        "label_set": to_json(spawn.label_set),
        "labels": to_json(spawn.labels),
        "mandatory_labels": names_json(spawn.gate),
        "shape": to_json(spawn.shape),
        "machine_pool": spawn.machine_pool,
        "provisioning_targets": to_json(spawn.provisioning_targets),
        "roles": json_or_none(spawn.roles),
        "token_id": spawn.token_id,
        "owner_instance_id": spawn.owner_instance_id,
        "worker_id": spawn.worker_id,
        "bound_job_id": spawn.bound_job_id,
        "run_id": spawn.run_id,
        "org": spawn.org,
        "job_image": spawn.job_image,
        "reuse_idle_seconds": spawn.reuse_idle_seconds,
        "reuse_max_jobs": spawn.reuse_max_jobs,
    }


def reservation_params(reservation: Reservation) -> dict[str, Value]:
    return {
        "reserved_scaler": reservation.scaler,
        "reserved_shape": to_json(reservation.shape),
        "reserved_pool": reservation.machine_pool,
        "reserved_owner": reservation.owner_instance_id,
    }


def _token_params(token: AgentToken | None) -> dict[str, Value]:
    if token is None:
        return dict.fromkeys(_TOKEN_PARAMETERS)
    return {
        "new_token_id": token.id,
        "token_hash": token.hash,
        "token_prefix": token.prefix,
        "token_kind": token.kind,
        "token_labels": None if token.labels is None else names_json(token.labels),
        "token_gate": names_json(token.gate),
        "token_agent_id": token.agent_id,
        "token_created_at": token.created_at,
        "token_expires_at": token.expires_at,
        "token_name": token.name,
    }
