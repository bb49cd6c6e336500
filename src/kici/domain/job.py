"""Jobs and runs: states, legal moves, what a job asks for, and the rows that carry them."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kici.domain.ids import DEFAULT_ORG, AgentId, ClassId, InstanceId, Instant, JobId, OrgId, RunId, ScalerName
from kici.domain.moves import Moves
from kici.domain.resources import UNDECLARED, ResourceRequest


class JobStatus(StrEnum):
    """Where a job is.  `dispatched` is shown to people as `queued`: nobody has started it yet."""

    PENDING = "pending"
    """Waits for the jobs that it needs."""
    QUEUED = "queued"
    """Waits for an agent."""
    DISPATCHED = "dispatched"
    """Offered to one agent, which has not acknowledged yet.  Not started: may return to the queue."""
    RUNNING = "running"
    """Acknowledged by its agent, and told to start.  Never offered again."""
    RECOVERING = "recovering"
    """Was running when its agent's connection was lost; the agent may return with it until a deadline."""
    CANCELLING = "cancelling"
    """Running, and told to stop."""
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    """Ran longer than allowed, or waited longer than allowed (then it has no start time)."""
    UNROUTABLE = "unroutable"
    SKIPPED = "skipped"


class RunStatus(StrEnum):
    """A run is over when all its jobs are."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = JobStatus
_TERMINAL: Final = frozenset({_S.SUCCESS, _S.FAILED, _S.CANCELLED, _S.TIMED_OUT, _S.UNROUTABLE, _S.SKIPPED})
_ENDS_BY_AGENT: Final = frozenset({_S.SUCCESS, _S.FAILED, _S.CANCELLED, _S.TIMED_OUT})

JOB_MOVES: Final[Moves[JobStatus]] = {
    _S.PENDING: frozenset({_S.QUEUED, _S.SKIPPED, _S.CANCELLED, _S.TIMED_OUT}),
    _S.QUEUED: frozenset({_S.DISPATCHED, _S.CANCELLED, _S.TIMED_OUT, _S.UNROUTABLE}),
    _S.DISPATCHED: frozenset({_S.QUEUED, _S.RUNNING, _S.CANCELLED, _S.FAILED}),
    _S.RUNNING: frozenset({_S.RECOVERING, _S.CANCELLING}) | _ENDS_BY_AGENT,
    _S.RECOVERING: frozenset({_S.RUNNING, _S.CANCELLING}) | _ENDS_BY_AGENT,
    _S.CANCELLING: _ENDS_BY_AGENT,
    **{state: frozenset() for state in _TERMINAL},
}
TERMINAL: Final = _TERMINAL
HELD_BY_AGENT: Final = frozenset({_S.DISPATCHED, _S.RUNNING, _S.RECOVERING, _S.CANCELLING})
STARTED: Final = frozenset({_S.RUNNING, _S.RECOVERING, _S.CANCELLING})

_R = RunStatus
RUN_MOVES: Final[Moves[RunStatus]] = {
    _R.RUNNING: frozenset({_R.CANCELLING, _R.SUCCESS, _R.FAILED, _R.CANCELLED}),
    _R.CANCELLING: frozenset({_R.SUCCESS, _R.FAILED, _R.CANCELLED}),
    _R.SUCCESS: frozenset(),
    _R.FAILED: frozenset(),
    _R.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a job asks of an agent.  Jobs with equal demands are one class: judged once, for all of them."""

    labels: frozenset[str] = frozenset()
    exclude: frozenset[str] = frozenset()
    resources: ResourceRequest = UNDECLARED
    image: str | None = None
    """Image of the job's own container; `dockerfile:<path>` where it is built from one."""
    org: OrgId = DEFAULT_ORG


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBuild:
    """What the image of a job is built from, beside the Dockerfile that its image names."""

    context: dict[str, str] = field(default_factory=dict)
    """Files by their path, the Dockerfile among them."""
    target: str | None = None
    """Stage to stop at; None: the last."""
    args: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What to run: the part of a job document that the agent executes.  Secrets are references only."""

    command: tuple[str, ...]
    """The argument vector; a shell script is `("/bin/sh", "-e", "-c", script)`."""
    env: dict[str, str] = field(default_factory=dict)
    timeout_ms: int | None = None
    """Longest running time; None: the agent's default."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Environment name -> `<context>:<key>`."""
    image: str | None = None
    registry: dict[str, str] = field(default_factory=dict)
    """Registry credential references: username, password, registry."""
    build: JobBuild = JobBuild()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job about to be inserted.  With `needs` it starts `pending`, else `queued`."""

    id: JobId
    name: str
    demand: Demand
    spec: JobSpec
    needs: tuple[JobId, ...] = ()
    expires_at: Instant | None = None
    """When a job that still waits is given up; None: never.  Counts from submission."""
    claimed_by: AgentId | None = None
    """An idle agent that this job goes to at once: inserted as `dispatched`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    id: RunId
    name: str
    org: OrgId
    submitted_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row of the job table."""

    seq: int
    """Place in the queue: rises with submission, kept for ever."""
    id: JobId
    run_id: RunId
    name: str
    org: OrgId
    status: JobStatus
    class_id: ClassId
    spec: JobSpec
    demand: Demand
    needs: tuple[JobId, ...]
    created_at: Instant
    queued_at: Instant | None
    expires_at: Instant | None
    agent_id: AgentId | None
    owner_instance_id: InstanceId | None
    dispatched_at: Instant | None
    ack_deadline: Instant | None
    attempts: int
    recovery_deadline: Instant | None
    started_at: Instant | None
    finished_at: Instant | None
    exit_code: int | None
    signal: int | None
    reason: str | None
    scaler: ScalerName | None
    cancel_requested_at: Instant | None
    last_provisioning_error: str | None
    unroutable_since: Instant | None
    offers: int
    """How often it was claimed, also where that counts as no attempt: tells one claim from a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    id: RunId
    name: str
    org: OrgId
    status: RunStatus
    submitted_by: str
    created_at: Instant
    finished_at: Instant | None
    cancel_requested_at: Instant | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended."""

    status: JobStatus
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingClass:
    """A demand class that has queued jobs right now."""

    class_id: ClassId
    demand: Demand
    oldest_seq: int
    oldest_job: JobId
