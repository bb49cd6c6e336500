"""What becomes of jobs at agents: who gets one, and what happens to it when its agent is lost or comes back.

One rule carries all others: a job starts once.  An agent starts a job only after `running` is committed, so one
that is `dispatched` was started by nobody and may return to the queue, and one that is `running` never does.
A lost connection is not a lost agent: what runs gets a grace in which its agent may return, unless there is
proof that it cannot.  So does what was only offered, if the agent was made by a scaler: making another takes longer.

Answers are commands for guarded writes; one that finds the job moved on meanwhile changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kici.domain.ids import AgentId, Instant, JobId
from kici.domain.job import STARTED, JobStatus
from kici.domain.spawn import ScaleDownReason

ATTEMPTS_MAX: Final = 5
"""Offers of one job.  So many agents that never took it say more about the job than about them."""


class LossCause(StrEnum):
    """How an agent was lost."""

    CONNECTION_CLOSED = "connection-closed"
    HEARTBEAT_TIMEOUT = "heartbeat-timeout"
    ACK_TIMEOUT = "ack-timeout"
    """It did not acknowledge an offer; we closed its connection."""
    LEFT = "left"
    """It said that it exits."""
    TOKEN_REVOKED = "token-revoked"
    DISMISSED = "dismissed"
    """Refused after it had registered."""
    COMPUTE_ENDED = "compute-ended"
    """Its backend saw it end."""
    GRACE_OVER = "grace-over"
    HANDED_OVER = "handed-over"
    """We lost the database and sent it to another coordinator."""
    STOPPING = "stopping"
    """We are stopping and closed its connection: no loss of the agent at all."""


MAY_RETURN: Final = frozenset(
    {LossCause.CONNECTION_CLOSED, LossCause.HEARTBEAT_TIMEOUT, LossCause.ACK_TIMEOUT, LossCause.HANDED_OVER}
)
"""Causes after which the agent may still live.  After all others waiting is in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldJob:
    """A job that the store says an agent holds."""

    job_id: JobId
    status: JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """`dispatched -> queued`, at its old place; counts one attempt."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover:
    """`running -> recovering` until `deadline` (a `cancelling` job stays so and gets the deadline)."""

    job_id: JobId
    deadline: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    job_id: JobId
    status: JobStatus
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Teardown:
    """Destroy the compute now."""

    reason: ScaleDownReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Keep the compute until `deadline`: its agent may return."""

    deadline: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """What follows from the loss of an agent, after it was taken out of the registry."""

    jobs: tuple[Requeue | Recover | End, ...] = ()
    may_return: bool = False
    """A job waits for it, until the grace is over."""
    compute: Teardown | Await | None = None
    """None: there is none, or it is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostAgent:
    agent_id: AgentId
    jobs: tuple[HeldJob, ...]
    scaler_managed: bool
    grace_ms: int
    """How long it may stay away with a job; 0: not at all."""


def triage(agent: LostAgent, *, cause: LossCause, how: str, now: Instant) -> LossPlan:
    """`how` ends the sentence "agent x was lost: ..."."""
    if cause is LossCause.STOPPING:
        return LossPlan()
    deadline = Instant(now + agent.grace_ms) if cause in MAY_RETURN and agent.grace_ms > 0 else None
    worth_waiting = frozenset() if deadline is None else _worth_waiting(agent, cause)
    what = f"agent {agent.agent_id} was lost: {how}"
    commands = tuple(
        command
        for job in agent.jobs
        if (command := _triage_job(job, deadline, waits=job.status in worth_waiting, what=what)) is not None
    )
    may_return = any(job.status in worth_waiting for job in agent.jobs)
    compute = _compute_plan(agent, cause, deadline if may_return else None)
    return LossPlan(jobs=commands, may_return=may_return, compute=compute)


def _worth_waiting(agent: LostAgent, cause: LossCause) -> frozenset[JobStatus]:
    """Jobs for which an agent that may return is waited for.

    A machine that was made for a job is worth more than an offer, unless it let the offer lie.
    """
    if agent.scaler_managed and cause is not LossCause.ACK_TIMEOUT:
        return STARTED | {JobStatus.DISPATCHED}
    return STARTED


def _triage_job(job: HeldJob, deadline: Instant | None, *, waits: bool, what: str) -> Requeue | Recover | End | None:
    match job.status:
        case JobStatus.DISPATCHED if waits:
            return None
        case JobStatus.DISPATCHED:
            return Requeue(job_id=job.job_id, reason=f"{what}, before it started the job")
        case JobStatus.RECOVERING if deadline is not None:
            return None  # the deadline that it has stands: blinking must not prolong it
        case JobStatus.RUNNING | JobStatus.RECOVERING | JobStatus.CANCELLING:
            if deadline is not None:
                return Recover(job_id=job.job_id, deadline=deadline)
            return End(job_id=job.job_id, status=_end_of(job.status), reason=what)
        case _:
            return None


def _compute_plan(agent: LostAgent, cause: LossCause, deadline: Instant | None) -> Teardown | Await | None:
    """`deadline`: until when it is waited for; None: not at all."""
    if not agent.scaler_managed:
        return None
    if deadline is not None:
        return Await(deadline=deadline)
    missed_beats = cause is LossCause.HEARTBEAT_TIMEOUT
    return Teardown(reason=ScaleDownReason.HEARTBEAT_TIMEOUT if missed_beats else ScaleDownReason.SHUTDOWN)


class Phase(StrEnum):
    """How far an agent is with a job that it lists when it registers."""

    ACKED = "acked"
    """Not told to start."""
    RUNNING = "running"
    FINISHED = "finished"
    """Its final status is not acknowledged yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedJob:
    job_id: JobId
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Commit `running`, if it is not yet, and tell the agent to start."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """The agent goes on: `recovering -> running`, and its output continues where the stored one ends."""

    job_id: JobId
    cancels: bool = False
    """Tell it again to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """The agent kills and forgets it; the store is left as it is."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferAgain:
    """The offer did not reach the agent: tell it once more."""

    job_id: JobId


ReturnCommand = Start | Resume | Drop | OfferAgain | Requeue | End


def reconcile(
    agent_id: AgentId, *, scaler_managed: bool, listed: Sequence[ListedJob], held: Sequence[HeldJob]
) -> list[ReturnCommand]:
    """What to do with each job that a registering agent lists, or is held to have.  Listed ones first."""
    statuses = {job.job_id: job.status for job in held}
    phases = {job.job_id: job.phase for job in listed}
    commands: list[ReturnCommand] = []
    for job_id, phase in phases.items():
        commands.extend(_listed(job_id, phase, statuses.get(job_id)))
    for job_id, status in statuses.items():
        if job_id not in phases:
            commands.append(_not_listed(job_id, status, agent_id, scaler_managed=scaler_managed))
    return commands


def _listed(job_id: JobId, phase: Phase, status: JobStatus | None) -> tuple[ReturnCommand, ...]:
    """`status` None: this agent does not hold the job (any more)."""
    match status, phase:
        case JobStatus.CANCELLING, Phase.ACKED:
            # It never started, so there is nothing to wait for.
            return Drop(job_id=job_id), End(
                job_id=job_id, status=JobStatus.CANCELLED, reason="cancelled before it began"
            )
        case JobStatus.CANCELLING, _:
            return (Resume(job_id=job_id, cancels=True),)
        case JobStatus.DISPATCHED | JobStatus.RUNNING | JobStatus.RECOVERING, Phase.ACKED:
            return (Start(job_id=job_id),)
        case JobStatus.DISPATCHED | JobStatus.RUNNING | JobStatus.RECOVERING, _:
            return (Resume(job_id=job_id),)
        case _:
            return (Drop(job_id=job_id),)


def _not_listed(
    job_id: JobId, status: JobStatus, agent_id: AgentId, *, scaler_managed: bool
) -> OfferAgain | Requeue | End:
    what = f"agent {agent_id} came back without the job"
    if status is JobStatus.DISPATCHED:
        return OfferAgain(job_id=job_id) if scaler_managed else Requeue(job_id=job_id, reason=what)
    return End(job_id=job_id, status=_end_of(status), reason=what)


def _end_of(status: JobStatus) -> JobStatus:
    """How a job ends whose agent is gone for good."""
    return JobStatus.CANCELLED if status is JobStatus.CANCELLING else JobStatus.FAILED
