"""Provisions: event spawns as the reaper, the owner's watch and the shared backoff see them."""

from dataclasses import dataclass

from kici.domain.ids import AgentId, InstanceId, Instant, JobId, RunId, ScalerName
from kici.domain.spawn import Spawn, SpawnState
from kici.domain.verdict import AtCap, InBackoff


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRefused:
    """Why a scaler may have no further agent in the whole cluster just now."""

    verdict: AtCap | InBackoff


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRules:
    """Under what one more event spawn is admitted; judged where it is written, under the scaler's lock."""

    agents_max: int
    lock_wait_ms: int
    may_probe: bool = False
    """A fresh process may try once although the scaler is deferred."""


SlotAnswer = Spawn | SlotRefused | None
"""None: written.  A spawn: that one serves the job already.  Else why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapCandidate:
    """An event spawn that may need an end, with all that the verdict rests on.

    No coordinator that beats has a session of its agent: one that is seen needs nothing.
    """

    agent_id: AgentId
    scaler: ScalerName
    state: SpawnState
    owner_instance_id: InstanceId
    adopted_by: InstanceId | None
    spawned_at: Instant
    was_sent: bool
    """Its scale-up left."""
    is_ending_sent: bool
    """A scale-down is under way."""
    undelivered_at: Instant | None = None
    """When its last scale-down was given up."""
    adopter_beat_at: Instant | None = None
    """None: no such coordinator is known."""
    job_over: bool = False
    """The job that it was made for is over."""
    bound_job_id: JobId | None = None
    run_id: RunId | None = None
    end_reason: str | None = None
    targets: tuple[str, ...] = ()
    """Registrations that its scale-up went to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionNews:
    """What became of an event spawn that its owner still takes for booting."""

    agent_id: AgentId
    state: SpawnState | None
    """None: its row is gone."""
    adopted_by: InstanceId | None = None
    job_over: bool = False
    failure: str | None = None
    """Its scale-up will reach nobody any more: why."""
    end_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDownOrder:
    """An end of an event spawn to be written together with its scale-down."""

    agent_id: AgentId
    reason: str
    by: InstanceId
    """Who ends it: refused when another coordinator has adopted it, unless `over` says otherwise."""
    over: ReapCandidate | None = None
    """The reaper's: what it saw, which must still hold."""
    term: int | None = None
    """The reaper's: the leader's fencing token."""
    present_ms: int = 60_000
    """How old the beat of a coordinator may be that holds the agent."""
