"""What the API answers about jobs and runs, and how rows become answers.

Names are camelCase, times ISO 8601 in UTC.  A job that is offered to an agent but not yet acknowledged shows as
`queued`: nobody has started it.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

import msgspec

from kici.domain.ids import Instant, JobId
from kici.domain.job import Job, JobStatus, Run, RunStatus
from kici.domain.say import say
from kici.domain.verdict import Verdict

API: Final = "/api/v1"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class View(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of all answers."""


class ShownStatus(StrEnum):
    """Statuses of jobs as people see them."""

    PENDING = "pending"
    QUEUED = "queued"
    RUNNING = "running"
    RECOVERING = "recovering"
    CANCELLING = "cancelling"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    UNROUTABLE = "unroutable"
    SKIPPED = "skipped"


class JobLinks(View, frozen=True, kw_only=True):
    """Paths of what belongs to a job."""

    self: str
    run: str
    logs: str
    cancel: str
    explain: str
    page: str
    """For people."""


class JobView(View, frozen=True, kw_only=True):
    """One job as it is now."""

    id: str
    run_id: str
    name: str
    org: str
    status: ShownStatus
    verdict: str | None
    """Why it is where it is, in one sentence."""
    runs_on: list[str]
    exclude: list[str]
    needs: list[str]
    image: str | None
    created_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    agent_id: str | None
    scaler: str | None
    exit_code: int | None
    signal: int | None
    reason: str | None
    attempts: int
    links: JobLinks


class JobPage(View, frozen=True, kw_only=True):
    """Newest first.  `nextCursor` as `cursor` gives the next page; null: this is the last."""

    items: list[JobView]
    next_cursor: str | None = None


class RunLinks(View, frozen=True, kw_only=True):
    self: str
    cancel: str


class RunView(View, frozen=True, kw_only=True):
    """One run.  A listing leaves `jobs` out (null)."""

    id: str
    name: str
    org: str
    status: RunStatus
    submitted_by: str
    created_at: datetime
    finished_at: datetime | None
    links: RunLinks
    jobs: list[JobView] | None = None


class RunPage(View, frozen=True, kw_only=True):
    """Newest first.  `nextCursor` as `cursor` gives the next page; null: this is the last."""

    items: list[RunView]
    next_cursor: str | None = None


class FindingView(View, frozen=True, kw_only=True):
    """What one instance makes of a job."""

    instance: str | None
    kind: str
    """Kind of the verdict, for programs."""
    sentence: str


class ExplanationView(View, frozen=True, kw_only=True):
    """Why a job is where it is.  `why` has the nearest to running first."""

    job_id: str
    status: ShownStatus
    verdict: str | None
    why: list[FindingView]


def moment(instant: Instant) -> datetime:
    return _EPOCH + timedelta(milliseconds=instant)


def moment_or_none(instant: Instant | None) -> datetime | None:
    return None if instant is None else moment(instant)


def shown(status: JobStatus) -> ShownStatus:
    return ShownStatus.QUEUED if status is JobStatus.DISPATCHED else ShownStatus(status.value)


def sentence(job: Job, verdict: Verdict | None, *, now: Instant) -> str | None:
    """The latest explanation of where a job is; None when there is nothing to say yet."""
    match job.status:
        case JobStatus.PENDING | JobStatus.QUEUED if verdict is not None:
            return say(verdict, now=now)
        case JobStatus.PENDING:
            return f"Waits for the jobs that it needs: {', '.join(job.needs[:8])}."
        case JobStatus.QUEUED:
            return job.last_provisioning_error
        case JobStatus.DISPATCHED:
            return f"Offered to agent {job.agent_id}; it starts when the agent acknowledges."
        case JobStatus.RUNNING:
            return f"Runs on agent {job.agent_id}."
        case JobStatus.RECOVERING:
            return f"The connection to agent {job.agent_id} is lost; the agent may return with the job."
        case JobStatus.CANCELLING:
            return f"Agent {job.agent_id} was told to stop it."
        case _:
            return job.reason or _ending(job)


def _ending(job: Job) -> str:
    if job.signal is not None:
        return f"Ended by signal {job.signal}."
    if job.exit_code is not None:
        return f"Ended with exit code {job.exit_code}."
    return f"Over: {job.status.value}."


def job_view(job: Job, verdict: Verdict | None, *, now: Instant) -> JobView:
    at = f"{API}/jobs/{job.id}"
    return JobView(
        id=job.id,
        run_id=job.run_id,
        name=job.name,
        org=job.org,
        status=shown(job.status),
        verdict=sentence(job, verdict, now=now),
        runs_on=sorted(job.demand.labels),
        exclude=sorted(job.demand.exclude),
        needs=list(job.needs),
        image=job.demand.image,
        created_at=moment(job.created_at),
        queued_at=moment_or_none(job.queued_at),
        started_at=moment_or_none(job.started_at),
        finished_at=moment_or_none(job.finished_at),
        agent_id=job.agent_id,
        scaler=job.scaler,
        exit_code=job.exit_code,
        signal=job.signal,
        reason=job.reason,
        attempts=job.attempts,
        links=JobLinks(
            self=at,
            run=f"{API}/runs/{job.run_id}",
            logs=f"{at}/logs",
            cancel=f"{at}/cancel",
            explain=f"{at}/explain",
            page=f"/jobs/{job.id}",
        ),
    )


def job_views(jobs: Sequence[Job], verdicts: Mapping[JobId, Verdict], *, now: Instant) -> list[JobView]:
    return [job_view(job, verdicts.get(job.id), now=now) for job in jobs]


def run_view(run: Run, jobs: list[JobView] | None = None) -> RunView:
    at = f"{API}/runs/{run.id}"
    return RunView(
        id=run.id,
        name=run.name,
        org=run.org,
        status=run.status,
        submitted_by=run.submitted_by,
        created_at=moment(run.created_at),
        finished_at=moment_or_none(run.finished_at),
        links=RunLinks(self=at, cancel=f"{at}/cancel"),
        jobs=jobs,
    )
