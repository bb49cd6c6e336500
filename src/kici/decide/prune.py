"""Stale spawns: agents that were asked for and never came, so that their capacity is not lost for ever.

A spawn still in line for its scaler's semaphore is not stale, however old.  What ends is the spawn; whether that
is also a failure of the scaler is a second question, which needs to know what became of the job and whether
another coordinator adopted the agent meanwhile.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kici.domain.ids import AgentId, InstanceId, Instant, JobId, ScalerName

WINDOW_MS_MIN: Final = 300_000
"""A shorter spawn deadline does not shorten the wait: an agent boots and registers well after `spawn` returned."""
EVENT: Final = "event"


@dataclass(frozen=True, slots=True, kw_only=True)
class BootingSpawn:
    """A spawn whose agent has not registered."""

    agent_id: AgentId
    scaler: ScalerName
    backend_type: str
    """As recorded at the spawn: the scaler may be gone from the configuration."""
    started_at: Instant | None
    """When the semaphore let it start; None: still in line."""
    is_settled: bool
    """The backend's `spawn` returned."""
    bound_job_id: JobId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """End this spawn: mark it `ending`, drop it from memory, release what it reserved."""

    agent_id: AgentId
    scaler: ScalerName
    destroys: bool
    """Destroy the compute, reason `spawn-timeout`.  False for a local spawn under way, which undoes itself when it
    comes back to no record, and for event provisions, whose end is the reaper's."""
    is_event: bool
    """The backend forgets it, the row stays (nothing else remembers the machine), and `counts_as_failure` decides."""
    frees_pool_slot: bool
    """It was to be a warm agent."""
    age_ms: int


def prune_window_ms(spawn_timeout_ms: int) -> int:
    return max(spawn_timeout_ms, WINDOW_MS_MIN)


def stale_spawns(spawns: Iterable[BootingSpawn], *, now: Instant, spawn_timeout_ms: int) -> list[Prune]:
    """What to end now."""
    window_ms = prune_window_ms(spawn_timeout_ms)
    return [
        Prune(
            agent_id=spawn.agent_id,
            scaler=spawn.scaler,
            destroys=spawn.is_settled and spawn.backend_type != EVENT,
            is_event=spawn.backend_type == EVENT,
            frees_pool_slot=spawn.bound_job_id is None,
            age_ms=now - spawn.started_at,
        )
        for spawn in spawns
        if spawn.started_at is not None and now - spawn.started_at >= window_ms
    ]


def counts_as_failure(*, job_ended: bool | None, adopted_by: InstanceId | None) -> bool:
    """Whether a pruned provision speaks against its scaler.

    `job_ended` None: there is no job, or it could not be asked.  `adopted_by` None: nobody, or it could not be
    asked.  What is not known counts as a failure: silence would hide an outage.
    """
    return not job_ended and adopted_by is None
