"""Agents of all coordinators, as operators see them: one's own from memory, the others' from the store."""

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from kici.domain.agent import AgentSession
from kici.domain.ids import AgentId, InstanceId, JobId
from kici.domain.job import Job
from kici.domain.spawn import Spawn, SpawnState
from kici.web.surface import AgentRow

ROWS_MAX: Final = 100_000


class Store(Protocol):
    async def sessions(self, *, instance_id: InstanceId | None, limit: int) -> list[AgentSession]: ...

    async def spawns(self, *, owner: InstanceId | None, limit: int) -> list[Spawn]: ...

    async def jobs_owned_by(self, instance_id: InstanceId, *, limit: int) -> list[Job]: ...


async def elsewhere(store: Store, me: InstanceId, known: Iterable[AgentId]) -> list[AgentRow]:
    """Rows of agents that are connected to other coordinators, or were made by them, and are not `known` here."""
    mine = set(known)
    spawns = {row.agent_id: row for row in await store.spawns(owner=None, limit=ROWS_MAX)}
    sessions = {row.agent_id: row for row in await store.sessions(instance_id=None, limit=ROWS_MAX)}
    held: dict[AgentId, list[JobId]] = {}
    for instance in sorted({row.instance_id for row in sessions.values()} - {me}):
        for job in await store.jobs_owned_by(instance, limit=ROWS_MAX):
            if job.agent_id is not None:
                held.setdefault(job.agent_id, []).append(job.id)
    connected = [
        _connected(row, spawns.get(row.agent_id), held)
        for row in sessions.values()
        if row.agent_id not in mine and row.instance_id != me
    ]
    made = [
        _made(row)
        for row in spawns.values()
        if row.agent_id not in mine and row.agent_id not in sessions and row.owner_instance_id not in (None, me)
    ]
    return [*connected, *made]


def _connected(session: AgentSession, spawn: Spawn | None, held: Mapping[AgentId, list[JobId]]) -> AgentRow:
    jobs = tuple(held.get(session.agent_id, ()))
    is_ending = spawn is not None and spawn.state is SpawnState.ENDING
    return AgentRow(
        agent_id=session.agent_id,
        state="ending" if is_ending else "busy" if jobs else "idle",
        instance_id=session.instance_id,
        labels=session.labels,
        gate=session.gate,
        scaler=session.scaler,
        backend_type=session.backend_type,
        warm=session.warm,
        job_ids=jobs,
        since=session.registered_at,
        facts=session.facts,
    )


def _made(spawn: Spawn) -> AgentRow:
    states = {SpawnState.BOOTING: "booting", SpawnState.REGISTERED: "away", SpawnState.ENDING: "ending"}
    assert spawn.owner_instance_id is not None, spawn
    return made_row(spawn, state=states[spawn.state], instance_id=spawn.owner_instance_id)


def made_row(spawn: Spawn, *, state: str, instance_id: InstanceId) -> AgentRow:
    """The row of an agent that was made, and is not connected."""
    return AgentRow(
        agent_id=spawn.agent_id,
        state=state,
        instance_id=instance_id,
        labels=frozenset(spawn.labels),
        gate=spawn.gate,
        scaler=spawn.scaler,
        backend_type=spawn.backend_type,
        warm=spawn.bound_job_id is None,
        job_ids=() if spawn.bound_job_id is None else (spawn.bound_job_id,),
        since=spawn.spawned_at,
    )
