"""Spawns: one row for each compute that a scaler makes, from before it exists until it is known to be gone."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kici.domain.ids import DEFAULT_ORG, AgentId, InstanceId, Instant, JobId, OrgId, RunId, ScalerName, TokenId
from kici.domain.moves import Moves
from kici.domain.resources import Shape


class SpawnState(StrEnum):
    """Where a spawn is.  It serves its job, and counts for it, until it is `ending`."""

    BOOTING = "booting"
    """Written before anything was made; its agent has not registered."""
    REGISTERED = "registered"
    ENDING = "ending"
    """Being torn down.  No longer counts as serving its job.  Deleted only when teardown is confirmed."""


SPAWN_MOVES: Final[Moves[SpawnState]] = {
    SpawnState.BOOTING: frozenset({SpawnState.REGISTERED, SpawnState.ENDING}),
    SpawnState.REGISTERED: frozenset({SpawnState.ENDING}),
    SpawnState.ENDING: frozenset(),
}
SERVING: Final = frozenset({SpawnState.BOOTING, SpawnState.REGISTERED})
"""States in which a spawn serves its bound job: at most one such row for each job, cluster-wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a spawn holds of the caps, from admission until its compute is gone."""

    agent_id: AgentId
    scaler: ScalerName
    shape: Shape
    machine_pool: str | None
    owner_instance_id: InstanceId
    reserved_at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """One row of `scaler_spawning_agents`.  Everything needed to act without the configuration entry."""

    agent_id: AgentId
    scaler: ScalerName
    backend_type: str
    state: SpawnState
    label_set: tuple[str, ...]
    """Declared labels, in the order of the file: how a backend finds its settings."""
    labels: tuple[str, ...]
    """The full labels that the agent carries; what its token is bound to."""
    gate: frozenset[str]
    shape: Shape
    machine_pool: str | None
    provisioning_targets: tuple[str, ...]
    roles: tuple[str, ...] | None
    token_id: TokenId | None
    owner_instance_id: InstanceId
    worker_id: str | None = None
    bound_job_id: JobId | None = None
    """None: a warm spawn, for whichever job comes."""
    run_id: RunId | None = None
    org: OrgId = DEFAULT_ORG
    job_image: bool = False
    """The agent runs inside its job's own image, and takes no other job."""
    reuse_idle_seconds: float | None = None
    reuse_max_jobs: int | None = None
    spawned_at: Instant
    registered_at: Instant | None = None
    adopted_by: InstanceId | None = None
    adopted_at: Instant | None = None
    destroy_requested_at: Instant | None = None
    end_reason: str | None = None
    emitted_at: Instant | None = None
    """When its scale-up left, of an event spawn: from then on there may be a machine."""


class ScaleDownReason(StrEnum):
    """Why a compute is torn down."""

    IDLE = "idle"
    JOB_COMPLETE = "job-complete"
    HEARTBEAT_TIMEOUT = "heartbeat-timeout"
    SPAWN_TIMEOUT = "spawn-timeout"
    DRAIN = "drain"
    SHUTDOWN = "shutdown"
