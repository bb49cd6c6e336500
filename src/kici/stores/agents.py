"""Where agents are connected: `ports.store.AgentStore`."""

from kici.decide.prune import EVENT
from kici.domain.agent import AgentSession
from kici.domain.ids import AgentId, ConnectionId, InstanceId, Instant
from kici.ports.store import Claim, Registered
from kici.stores.database import Params, Part, Step
from kici.stores.jobs import claim_params, first_job
from kici.stores.query import Query
from kici.stores.rows import names_json, session_from, spawn_from, to_json


class Agents(Part):
    async def register_agent(
        self,
        session: AgentSession,
        *,
        needs_spawn: bool,
        bound: Claim | None,
        now: Instant | None = None,
    ) -> Registered | None:
        steps = [_put_session(session, now, guard=not needs_spawn)]
        if needs_spawn:
            steps.insert(0, _register_spawn(session, now))
        if bound is not None:
            steps.append(Step(Query.CLAIM_BOUND, claim_params(bound, now), told_apart_by="agent_id"))
        if session.backend_type == EVENT:
            about: Params = {"agent_id": session.agent_id}
            steps.append(Step(Query.RECORD_ADOPTION, about, told_apart_by="agent_id"))
            steps.append(Step(Query.CLEAR_DEFERRAL_OF, about, told_apart_by="agent_id"))
        results = await self._database.unit(steps)
        if results is None:
            return None
        spawns = results[0] if needs_spawn else []
        sessions, *claimed = results[1:] if needs_spawn else results
        if not sessions:  # overtaken in this very moment
            return None
        return Registered(
            spawn=spawn_from(spawns[0]) if spawns else None,
            job=first_job(claimed[0]) if bound is not None else None,
        )

    async def release_agent(self, agent_id: AgentId, connection_id: ConnectionId) -> bool:
        params = {"agent_id": agent_id, "connection_id": connection_id}
        return bool(await self._write(Query.RELEASE_AGENT, params, told_apart_by="agent_id"))

    async def session(self, agent_id: AgentId) -> AgentSession | None:
        row = await self._one(Query.SESSION, {"agent_id": agent_id}, told_apart_by="agent_id")
        return None if row is None else session_from(row)

    async def sessions(self, *, instance_id: InstanceId | None, limit: int) -> list[AgentSession]:
        rows = await self._database.read(Query.SESSIONS, {"instance_id": instance_id, "limit": limit})
        return [session_from(row) for row in rows]

    async def delete_sessions_of(self, instance_id: InstanceId) -> int:
        return len(await self._write(Query.DELETE_SESSIONS_OF, {"instance_id": instance_id}))


def _register_spawn(session: AgentSession, now: Instant | None) -> Step:
    return Step(
        Query.REGISTER_SPAWN,
        {
            "agent_id": session.agent_id,
            "instance_id": session.instance_id,
            "incarnation": session.incarnation,
            "connection_number": session.connection_number,
            "now": now,
        },
        guard=True,
        told_apart_by="agent_id",
    )


def _put_session(session: AgentSession, now: Instant | None, *, guard: bool) -> Step:
    return Step(
        Query.PUT_SESSION,
        {
            "agent_id": session.agent_id,
            "instance_id": session.instance_id,
            "connection_id": session.connection_id,
            "labels": names_json(session.labels),
            "mandatory_labels": names_json(session.gate),
            "token_id": session.token_id,
            "scaler_name": session.scaler,
            "backend_type": session.backend_type,
            "facts": to_json(session.facts),
            "warm": session.warm,
            "incarnation": session.incarnation,
            "connection_number": session.connection_number,
            "now": now,
        },
        guard=guard,
        told_apart_by="agent_id",
    )
