"""The database, as services see it: one protocol for each group of tables, and the contract in prose.

Rules for every method:
- A move is one guarded write: its condition names the state it leaves (and the agent or owner it was decided
  on).  A stale decision changes nothing and returns None, False or an empty list; it never raises.
- Each method is one unit: all of it happens or none.
- `StoreDown` is raised when the store did not answer or a commit failed: then the unit may or may not have
  happened.  A cancelled caller's write may have happened too.
- `now` is the time to write and to compare with.  None lets the database use its own clock, which is what
  production does for everything that coordinators compare with each other; simulation and contract tests pass it.
- Limits bound every list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kici.domain.access import AccessRecord, ApiToken
from kici.domain.agent import AgentSession, AgentToken
from kici.domain.ids import AgentId, ClassId, ConnectionId, InstanceId, Instant, JobId, OrgId, RunId, TokenId
from kici.domain.instance import Instance, Lease
from kici.domain.job import Job, JobStatus, NewJob, NewRun, Outcome, Run, WaitingClass
from kici.domain.logs import LogChunk, NewChunk, Stream
from kici.domain.paging import Mark
from kici.domain.secret import SealedSecret, SecretRef
from kici.domain.spawn import Reservation, Spawn, SpawnState
from kici.ports.addresses import AddressStore
from kici.ports.event_store import ClaimRows, EventStore, ProvisionStore
from kici.ports.peers import PeerStore
from kici.ports.retention import Prunable
from kici.ports.workers import WorkerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Who claims work: an agent connected to an instance, which must acknowledge within `ack_ms` of now."""

    agent_id: AgentId
    instance_id: InstanceId
    ack_ms: int
    scaler: str | None = None
    """Scaler of the agent, kept on the job for people."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One claim of a job: the agent may have claimed it before, and again since."""

    job_id: JobId
    agent_id: AgentId
    number: int | None = None
    """`Job.offers` as of that claim; None: whichever claim stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    run_id: RunId
    jobs: tuple[Job, ...]
    created: bool
    """False: the idempotency key was seen before, and this is what it made then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What the end of a job moved."""

    job: Job
    released: tuple[JobId, ...] = ()
    """Jobs that needed it and are now queued."""
    skipped: tuple[JobId, ...] = ()
    run_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    job: Job
    """`queued` again, or `failed` when its attempts are used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """What a cancel request moved."""

    ended: tuple[Job, ...]
    """Were pending, queued or dispatched: over now.  A dispatched one names the agent that must drop it."""
    told: tuple[Job, ...]
    """Were running or recovering: `cancelling` now; their agents must be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    status: JobStatus | None = None
    run_id: RunId | None = None
    org: OrgId | None = None
    before_seq: int | None = None
    """Page cursor: only rows older than this."""
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """Answer of a registration that was accepted."""

    spawn: Spawn | None
    """The spawn row of a scaler-made agent, as it is now."""
    job: Job | None
    """The bound job, if this registration claimed it."""


class JobStore(Protocol):
    """Runs, jobs, the queue and demand classes.

    Claims never give a job whose status is not `queued`, whose run is over or being cancelled, or that has
    expired.  Among what may be claimed the lowest `seq` goes first.  A claim writes status `dispatched`, agent,
    owner, time, `ack_deadline`, scaler, and clears `last_provisioning_error`.  A requeue keeps `seq`.
    """

    async def submit(
        self,
        run: NewRun,
        jobs: Sequence[NewJob],
        *,
        claim: Claim | None = None,
        idempotency_key: str | None = None,
        now: Instant | None = None,
    ) -> Submitted:
        """Insert a run with its jobs.  A job with `claimed_by` is inserted as claimed by `claim`."""
        ...

    async def job(self, job_id: JobId) -> Job | None: ...

    async def run(self, run_id: RunId) -> Run | None: ...

    async def jobs(self, which: JobFilter) -> list[Job]:
        """Newest first, as `runs`."""
        ...

    async def runs(self, *, before: Mark | None, limit: int) -> list[Run]: ...

    async def waiting_classes(self, *, limit: int) -> list[WaitingClass]:
        """Demand classes that have queued jobs, by their oldest job.  Cost grows with classes, not with jobs."""
        ...

    async def queued_of_class(
        self, class_id: ClassId, *, limit: int, unserved: bool = False, now: Instant | None = None
    ) -> list[Job]:
        """Oldest queued, unexpired jobs of a class; `unserved`: only those that no live spawn is bound to."""
        ...

    async def queued_count(self) -> int: ...

    async def counts_by_status(self) -> Mapping[JobStatus, int]: ...

    async def claim_oldest(
        self, class_ids: Sequence[ClassId], claim: Claim, *, now: Instant | None = None
    ) -> Job | None:
        """Claim the oldest job of these classes.  Cost grows with the classes given, not with the backlog."""
        ...

    async def claim_job(self, job_id: JobId, claim: Claim, *, now: Instant | None = None) -> Job | None: ...

    async def start_job(
        self,
        job_id: JobId,
        agent_id: AgentId,
        *,
        offer: int | None = None,
        instance_id: InstanceId | None = None,
        now: Instant | None = None,
    ) -> Job | None:
        """`dispatched -> running`, only if this agent holds it; also answers an acknowledgement recorded before.

        `offer`: `Job.offers` of the acknowledged claim; None: whichever stands.  `instance_id`: who looks after the job
        from here on; None: whoever offered it.
        """
        ...

    async def requeue_job(
        self,
        offer: Offer,
        *,
        reason: str,
        attempts_max: int,
        count_attempt: bool = True,
        now: Instant | None = None,
    ) -> Requeued | None:
        """`dispatched -> queued` at its old place, or `failed` when attempts reach the maximum.

        Only if the agent holds it by this claim: who returns an earlier one late takes nothing from a later one.  If
        the run is being cancelled the job ends `cancelled` instead.  A live spawn row of this agent that is bound to
        the job becomes `ending` in the same unit, so that another spawn may serve the job.
        """
        ...

    async def offer_again(self, offer: Offer, *, ack_ms: int, now: Instant | None = None) -> Job | None:
        """The agent of an offered job is told of it once more: `ack_deadline` counts from now.  None: it holds it no
        more by this claim.
        """
        ...

    async def finish_job(
        self,
        job_id: JobId,
        outcome: Outcome,
        *,
        agent_id: AgentId | None = None,
        from_statuses: frozenset[JobStatus],
        seen: Job | None = None,
        now: Instant | None = None,
    ) -> Finished | None:
        """End a job, release or skip (transitively) what needs it, and end the run when nothing is left.

        `agent_id`, where given, must hold the job.  `from_statuses` must be legal sources of the outcome.
        `seen`, where given, is the job as it was read: nobody may have taken it up, or lost its agent, since.
        A `needs` that ended other than `success` skips its dependents.  A run ends `success` when all jobs did
        (skipped ones aside), `cancelled` when it was being cancelled and one was, else `failed`.
        """
        ...

    async def recover_job(
        self, job_id: JobId, agent_id: AgentId, *, deadline: Instant, seen: Job | None = None
    ) -> bool:
        """`running -> recovering` until `deadline`; a `cancelling` job stays so and gets it.  `seen`: as above."""
        ...

    async def resume_job(
        self, job_id: JobId, agent_id: AgentId, instance_id: InstanceId, *, now: Instant | None = None
    ) -> Job | None:
        """`recovering -> running` (or `running`/`cancelling` stays), owner becomes `instance_id`."""
        ...

    async def cancel(
        self, run_id: RunId, job_id: JobId | None, *, reason: str, now: Instant | None = None
    ) -> Cancelled:
        """Cancel one job, or the whole run when `job_id` is None (the run becomes `cancelling`)."""
        ...

    async def held_jobs(self, agent_id: AgentId) -> list[Job]:
        """Jobs that this agent holds: dispatched, running, recovering or cancelling."""
        ...

    async def jobs_owned_by(self, instance_id: InstanceId, *, limit: int) -> list[Job]:
        """Held jobs whose claim was made by this instance: what its boot recovery looks at."""
        ...

    async def overdue_acks(self, *, limit: int, now: Instant | None = None) -> list[Job]: ...

    async def overdue_recoveries(self, *, limit: int, now: Instant | None = None) -> list[Job]: ...

    async def expire_queued(self, *, limit: int, now: Instant | None = None) -> list[Finished]:
        """End queued and pending jobs past `expires_at` as `timed_out`; the reason carries the last provisioning
        error where there is one."""
        ...

    async def set_provisioning_error(self, job_id: JobId, text: str) -> bool: ...

    async def mark_unroutable(self, class_id: ClassId, *, now: Instant | None = None) -> int:
        """Stamp `unroutable_since` on queued jobs of a class that have neither a stamp nor a provisioning error."""
        ...

    async def clear_unroutable(self, class_id: ClassId) -> int: ...

    async def expire_unroutable(
        self, class_id: ClassId, *, grace_ms: int, reason: str, limit: int, now: Instant | None = None
    ) -> list[Finished]:
        """End as `unroutable` the jobs of a class stamped longer ago than `grace_ms`."""
        ...

    async def ended_jobs(self, job_ids: Sequence[JobId]) -> frozenset[JobId]:
        """Which of these are over."""
        ...


class LogStorage(Protocol):
    async def append_log(
        self, chunks: Sequence[NewChunk], *, now: Instant | None = None
    ) -> Mapping[JobId, Mapping[Stream, int]]:
        """Store chunks in order, and tell where the streams of their jobs end then (see `log_ends`).

        A chunk of stdout or stderr that does not start at the end of its stream is not stored: it is there already,
        or somebody else stored other chunks meanwhile.  So streams never have a gap or an overlap.
        """
        ...

    async def log_ends(self, job_id: JobId) -> Mapping[Stream, int]:
        """Offset after the last stored byte of each stream."""
        ...

    async def read_log(self, job_id: JobId, *, after: int, bytes_max: int) -> list[LogChunk]:
        """Chunks after a position in order, as many whole ones as fit `bytes_max` but at least one."""
        ...


class SpawnStore(Protocol):
    async def insert_spawn(
        self, spawn: Spawn, reservation: Reservation, token: AgentToken | None, *, now: Instant | None = None
    ) -> Spawn | None:
        """Write spawn, reservation and token in one unit, before anything is made.

        None: written.  Else the live spawn that already serves the bound job: nothing was written.
        Raises `Conflict` when the agent id is taken (mint another).
        """
        ...

    async def spawn(self, agent_id: AgentId) -> Spawn | None: ...

    async def spawn_for_job(self, job_id: JobId) -> Spawn | None:
        """The booting or registered spawn bound to this job."""
        ...

    async def spawns(self, *, owner: InstanceId | None, limit: int) -> list[Spawn]:
        """Those that `owner` made or adopted, and nobody else has adopted; None: all."""
        ...

    async def reservations(self, *, owner: InstanceId, limit: int) -> list[Reservation]: ...

    async def end_spawn(
        self,
        agent_id: AgentId,
        *,
        reason: str,
        from_states: frozenset[SpawnState],
        by: InstanceId | None = None,
        now: Instant | None = None,
    ) -> bool:
        """`-> ending`: its job, if any, may be served by another spawn from now on.

        `by`: not if another coordinator has adopted it.
        """
        ...

    async def delete_spawn(self, agent_id: AgentId) -> bool:
        """Teardown is confirmed: delete spawn and reservation, revoke its token.

        Not of an event spawn whose scale-up left: that one goes with its delivered scale-down.
        """
        ...

    async def delete_reservation(self, agent_id: AgentId) -> bool: ...


class AgentStore(Protocol):
    async def register_agent(
        self,
        session: AgentSession,
        *,
        needs_spawn: bool,
        bound: Claim | None,
        now: Instant | None = None,
    ) -> Registered | None:
        """Record a registered agent; in the same unit move its spawn to `registered` and claim its bound job.

        `needs_spawn`: refuse (None, nothing written) unless a booting or registered spawn row exists.
        `bound`: claim the spawn's bound job for it, if that is still queued and claimable.
        The newest connection of an agent id wins.
        """
        ...

    async def release_agent(self, agent_id: AgentId, connection_id: ConnectionId) -> bool:
        """Delete the session row, if it is still of this connection."""
        ...

    async def session(self, agent_id: AgentId) -> AgentSession | None: ...

    async def sessions(self, *, instance_id: InstanceId | None, limit: int) -> list[AgentSession]: ...

    async def delete_sessions_of(self, instance_id: InstanceId) -> int:
        """At boot: the sockets of the previous process are gone."""
        ...


class TokenStore(Protocol):
    async def create_agent_token(self, token: AgentToken) -> None: ...

    async def agent_token(self, token_hash: str) -> AgentToken | None:
        """By hash, whatever its state: the caller judges expiry and revocation."""
        ...

    async def agent_tokens(self, *, limit: int) -> list[AgentToken]: ...

    async def revoke_agent_token(self, token_id: TokenId, *, now: Instant | None = None) -> bool: ...

    async def purge_agent_tokens(self, *, expired_before: Instant, limit: int) -> int:
        """Delete expired or revoked ephemeral tokens, except those whose agent holds a job or has a spawn row."""
        ...

    async def create_api_token(self, token: ApiToken) -> None: ...

    async def api_token(self, token_hash: str) -> ApiToken | None: ...

    async def api_tokens(self, *, limit: int) -> list[ApiToken]: ...

    async def revoke_api_token(self, token_id: TokenId, *, now: Instant | None = None) -> bool: ...


class InstanceStore(Protocol):
    async def beat(self, instance: Instance, *, now: Instant | None = None) -> None:
        """Insert or refresh the instance's row."""
        ...

    async def remove_instance(self, instance_id: InstanceId) -> None: ...

    async def instances(self, *, limit: int) -> list[Instance]: ...

    async def database_now(self) -> Instant: ...

    async def acquire_lease(
        self, name: str, holder: InstanceId, *, ttl_ms: int, now: Instant | None = None
    ) -> Lease | None:
        """Take a free or expired lease (token + 1) or renew one's own (same token).  None: another holds it."""
        ...

    async def lease(self, name: str) -> Lease | None:
        """As it stands, run out or not.  None: nobody ever held it."""
        ...

    async def release_lease(self, lease: Lease) -> bool: ...


class SettingsStore(Protocol):
    async def settings(self, org: OrgId | None) -> Mapping[str, int]:
        """Set values only; org None is the cluster's."""
        ...

    async def settings_version(self) -> int: ...

    async def patch_settings(
        self, org: OrgId | None, changes: Mapping[str, int | None], *, now: Instant | None = None
    ) -> int:
        """None clears.  Returns the version, which rises only when something changed."""
        ...


class SecretStore(Protocol):
    async def put_secret(self, secret: SealedSecret) -> None: ...

    async def secret(self, org: OrgId, ref: SecretRef) -> SealedSecret | None: ...

    async def secrets(self, org: OrgId, *, limit: int) -> list[SealedSecret]: ...

    async def secrets_of_all(self, *, after: SealedSecret | None, limit: int) -> list[SealedSecret]:
        """Of every organisation, in the order of their names, those behind `after`."""
        ...

    async def reseal_secret(self, before: SealedSecret, sealed: bytes, *, key_version: int) -> bool:
        """Replace how the same value is sealed.  False: it is another value by now, or gone."""
        ...

    async def delete_secret(self, org: OrgId, ref: SecretRef) -> bool: ...


class AccessLogStore(Protocol):
    async def record_access(self, record: AccessRecord) -> None: ...

    async def access_log(self, *, before: Mark | None, limit: int) -> list[AccessRecord]: ...


class MetaStore(Protocol):
    """Small facts of the installation, such as the fingerprint of the secret key."""

    async def meta(self, name: str) -> str | None: ...

    async def set_meta(self, name: str, value: str) -> None: ...


class Store(
    JobStore,
    LogStorage,
    SpawnStore,
    AgentStore,
    TokenStore,
    InstanceStore,
    PeerStore,
    WorkerStore,
    EventStore,
    ClaimRows,
    ProvisionStore,
    AddressStore,
    SettingsStore,
    SecretStore,
    AccessLogStore,
    Prunable,
    MetaStore,
    Protocol,
):
    """Everything, as composition roots and the contract suite see it.  Services name only the parts they use."""

    async def migrate(self) -> list[int]:
        """Bring the schema up to date; safe when several start at once.  Numbers that were applied."""
        ...

    async def ping(self) -> None:
        """Return when the store answers; `StoreDown` otherwise."""
        ...

    async def close(self) -> None: ...
