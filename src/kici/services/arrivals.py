"""What becomes known of an agent that registers."""

from kici.decide.fit import AgentShape
from kici.domain.agent import AgentSession
from kici.domain.spawn import Spawn, SpawnState
from kici.services.agent_connection import AgentConnection
from kici.services.registry import ConnectedAgent, shape_without_host
from kici.wire.messages import AgentRegister


def connected_agent(
    connection: AgentConnection, message: AgentRegister, session: AgentSession, spawn: Spawn | None, *, given: int
) -> ConnectedAgent:
    """Whom a registration brings; `given` jobs it had before.  It is free once `is_settling` is taken back."""
    shape = AgentShape(
        labels=session.labels,
        gate=session.gate,
        job_image=spawn is not None and spawn.job_image,
        prespawned=spawn is not None,
        resources=None if spawn is None else spawn.shape,
    )
    return ConnectedAgent(
        agent_id=session.agent_id,
        seat=connection,
        shape=shape_without_host(shape),
        labels=session.labels,
        registered_at=session.registered_at,
        token_id=session.token_id,
        spawn=spawn,
        facts=session.facts,
        slots=1 if spawn is not None else max(1, message.max_concurrency),
        jobs_left=_jobs_left(spawn, given),
        is_settling=True,
    )


def _jobs_left(spawn: Spawn | None, given: int) -> int | None:
    """A scaler-made agent runs one job, unless its scaler allows reuse."""
    if spawn is None:
        return None
    if spawn.reuse_idle_seconds is not None:
        return None if spawn.reuse_max_jobs is None else max(0, spawn.reuse_max_jobs - given)
    is_back = spawn.state is SpawnState.REGISTERED and spawn.bound_job_id is not None
    return 0 if is_back or given else 1
