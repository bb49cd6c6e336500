"""The tables of events, claim codes and provisions; the rules of `ports.store` hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kici.decide.backoff import BackoffSettings, Deferral
from kici.domain.agent import AgentToken
from kici.domain.claim import ClaimFate, PendingClaim
from kici.domain.event import EventId, EventState, NewEvent, StoredEvent
from kici.domain.ids import AgentId, InstanceId, Instant, RunId, ScalerName
from kici.domain.job import RunStatus
from kici.domain.provision import ProvisionNews, ReapCandidate, ScaleDownOrder, SlotAnswer, SlotRules
from kici.domain.spawn import Reservation, Spawn
from kici.domain.workflow import Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """An event whose run needs a look."""

    event: StoredEvent
    status: RunStatus | None
    """How its run ended; None: it was never made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What the end of an event spawn moved."""

    emitted: int
    """Scale-downs written; 0 when some are under way already."""
    runs: tuple[RunId, ...]
    """Runs that are at work on its scale-up, and have lost their purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    state: EventState | None = None
    name: str | None = None
    before_seq: int | None = None
    limit: int = 50


class EventStore(Protocol):
    """`kici_events`, one row for each event and target, and `workflow_registrations`."""

    async def emit_event(self, event: NewEvent, *, rate_max: int | None = None, now: Instant | None = None) -> bool:
        """Write it for all of its targets.  False: its source emitted `rate_max` of this name within a minute."""
        ...

    async def claim_events(
        self, instance_id: InstanceId, *, lease_ms: int, limit: int, now: Instant | None = None
    ) -> list[StoredEvent]:
        """Take what is due, oldest first, and count one attempt.

        Of one subject and target an event is due only when the one before is handled or given up.
        """
        ...

    async def await_run(self, event_id: EventId, instance_id: InstanceId, run_id: RunId) -> bool:
        """`pending -> awaiting`: a run about to be submitted is to handle it.  Only if `instance_id` claimed it."""
        ...

    async def release_event(self, event_id: EventId, instance_id: InstanceId) -> bool: ...

    async def process_event(self, event: StoredEvent, *, now: Instant | None = None) -> bool:
        """`-> processed`, secrets erased.  The delivered scale-down of an event spawn deletes the spawn."""
        ...

    async def retry_event(
        self, event_id: EventId, *, error: str, delay_ms: int, run_failed: bool = False, now: Instant | None = None
    ) -> bool: ...

    async def bury_event(self, event_id: EventId, *, error: str, reason: str, now: Instant | None = None) -> bool: ...

    async def awaited_events(self, *, limit: int, now: Instant | None = None) -> list[Awaited]:
        """Events whose run is over, or does not exist although its maker had time to make it."""
        ...

    async def event(self, event_id: EventId) -> StoredEvent | None: ...

    async def event_of_run(self, run_id: RunId) -> StoredEvent | None: ...

    async def sealed_fields(self, emission_id: EventId) -> bytes | None: ...

    async def events(self, which: EventFilter) -> list[StoredEvent]:
        """Newest first, without secrets."""
        ...

    async def dead_events_count(self) -> int: ...

    async def revive_event(self, event_id: EventId, *, now: Instant | None = None) -> bool:
        """`dead -> pending` with new attempts, unless it was withdrawn or has expired.  `Conflict` when another of its
        kind is under way."""
        ...

    async def discard_event(self, event_id: EventId) -> bool: ...

    async def purge_events(self, *, created_before: Instant, limit: int) -> int: ...

    async def erase_expired_secrets(self, *, now: Instant | None = None) -> int: ...

    async def put_registration(self, registration: Registration) -> None: ...

    async def registration(self, ref: str) -> Registration | None: ...

    async def registrations(self, *, limit: int) -> list[Registration]: ...

    async def delete_registration(self, ref: str) -> bool: ...


class ClaimRows(Protocol):
    """`scaler_pending_claims`."""

    async def register_claim(self, claim: PendingClaim, *, ttl_ms: int, now: Instant | None = None) -> None: ...

    async def redeem_claim(self, claim_hash: str, *, now: Instant | None = None) -> PendingClaim | None:
        """Consume it, if it is neither consumed nor expired."""
        ...

    async def describe_claim(self, claim_hash: str, *, now: Instant | None = None) -> ClaimFate | None: ...

    async def give_token(self, token: AgentToken) -> bool:
        """Store a redeemed claim's token and name it on the spawn; False when that is not booting any more."""
        ...

    async def invalidate_claims(self, agent_id: AgentId) -> int: ...

    async def purge_claims(self, *, expired_before: Instant) -> int: ...


class ProvisionStore(Protocol):
    """Event spawns, what became of them, and the shared backoff of event scalers."""

    async def insert_cluster_spawn(
        self, spawn: Spawn, reservation: Reservation, rules: SlotRules, *, now: Instant | None = None
    ) -> SlotAnswer:
        """Write spawn and reservation if the scaler has room in the whole cluster, judged under the scaler's lock.

        While the scaler is deferred only one probe is let through, and only when its time has come (or `may_probe`).
        Raises `LockContended`, and `Conflict` when the agent id is taken.
        """
        ...

    async def emit_scale_up(self, event: NewEvent, *, now: Instant | None = None) -> bool:
        """Write the event and mark the spawn as asked for; False when the spawn is not booting any more."""
        ...

    async def end_provision(
        self, order: ScaleDownOrder, event: NewEvent | None, *, now: Instant | None = None
    ) -> Ended | None:
        """`-> ending` with its scale-down in one unit; None when the order does not hold (any more).

        A scale-up still waiting is withdrawn.  The reaper's orders record the outcome, and need its term.
        """
        ...

    async def provision_adopter(self, agent_id: AgentId) -> InstanceId | None: ...

    async def has_adopted_provisions(self, instance_id: InstanceId) -> bool: ...

    async def reap_candidates(
        self,
        *,
        spawned_before: Instant,
        present_ms: int,
        after: tuple[ScalerName, AgentId] | None,
        limit: int,
        now: Instant | None = None,
    ) -> list[ReapCandidate]:
        """Event spawns that are adopted, ending, or were asked for before `spawned_before`; a page in a fixed order."""
        ...

    async def provision_news(self, agent_ids: Sequence[AgentId]) -> list[ProvisionNews]: ...

    async def purge_outcomes(self, *, updated_before: Instant, limit: int) -> int:
        """Only of provisions whose spawn is gone."""
        ...

    async def deferrals(self, *, limit: int) -> list["SharedDeferral"]: ...

    async def count_provision_failure(
        self,
        scaler: ScalerName,
        agent_id: AgentId,
        *,
        error: str,
        settings: BackoffSettings,
        now: Instant | None = None,
    ) -> "SharedDeferral | None":
        """Raise the scaler's count and fix its next window; None when this agent is counted already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDeferral:
    scaler: ScalerName
    deferral: Deferral
    is_probing: bool
    """One machine is on its way, to see whether the scaler works again."""
