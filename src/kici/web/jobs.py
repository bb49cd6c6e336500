"""Jobs: submit, list, look at, wait for, cancel, explain."""

from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from aiohttp import hdrs
from msgspec import Meta

from kici.domain.access import Permission
from kici.domain.document import SubmitRun, read_job
from kici.domain.document_model import JobDocument
from kici.domain.errors import NotFound
from kici.domain.ids import JobId, OrgId, RunId
from kici.domain.job import TERMINAL, Job, JobStatus
from kici.domain.say import say
from kici.ports.store import JobFilter
from kici.web.replays import IDEMPOTENCY_HEADER
from kici.web.routing import Answer, Body, Call, Route
from kici.web.surface import Surface
from kici.web.views import (
    API,
    ExplanationView,
    FindingView,
    JobPage,
    JobView,
    ShownStatus,
    job_view,
    job_views,
    sentence,
    shown,
)

PAGE_MAX: Final = 500
WAIT_SECONDS_MAX: Final = 60

Limit = Annotated[int, Meta(ge=1, le=PAGE_MAX)]
Line = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\u0000-\u001f\u007f]+$")]
"""One line of text, as a parameter."""


class JobsQuery(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Which jobs to list."""

    status: ShownStatus | None = None
    run_id: Line | None = None
    org: Line | None = None
    cursor: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    limit: Limit = 50


class JobQuery(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How to look at one job."""

    wait_seconds: Annotated[float, Meta(ge=0, le=WAIT_SECONDS_MAX)] = 0.0
    """Answer when the job is over, or as it is after this many seconds."""


class CancelBody(Body, frozen=True, kw_only=True):
    """How to cancel."""

    force: bool = False
    """Kill at once, without the job's grace."""
    reason: Annotated[str, Meta(max_length=200, pattern=r"^[^\u0000-\u001f\u007f]*$")] = ""


def cancel_reason(call: Call, body: CancelBody) -> str:
    return body.reason or f"cancelled by {call.actor.name}"


async def viewed(surface: Surface, jobs: list[Job]) -> list[JobView]:
    verdicts = await surface.jobs.verdicts(jobs) if any(job.status not in TERMINAL for job in jobs) else {}
    return job_views(jobs, verdicts, now=surface.clock.now())


async def found_job(call: Call) -> Job:
    return _found(await call.surface.jobs.job(JobId(call.part("job_id"))), call)


def _found(job: Job | None, call: Call) -> Job:
    if job is None:
        raise NotFound(f"there is no job {call.part('job_id')}; it may have been removed after its retention time")
    return job


async def submit_job(call: Call) -> Answer:
    request = call.body_as(SubmitRun)
    submitted = await call.surface.jobs.submit(request, call.actor, call.idempotency_key)
    (view,) = await viewed(call.surface, list(submitted.jobs[:1]))
    status = HTTPStatus.CREATED if submitted.created else HTTPStatus.OK
    return Answer(body=view, status=status, headers=((hdrs.LOCATION, view.links.self),))


async def list_jobs(call: Call) -> JobPage:
    query = call.query_as(JobsQuery)
    statuses: list[JobStatus | None] = [None if query.status is None else JobStatus(query.status.value)]
    if query.status is ShownStatus.QUEUED:
        statuses.append(JobStatus.DISPATCHED)
    rows: list[Job] = []
    for status in statuses:
        which = JobFilter(
            status=status,
            run_id=None if query.run_id is None else RunId(query.run_id),
            org=None if query.org is None else OrgId(query.org),
            before_seq=query.cursor,
            limit=query.limit + 1,
        )
        rows += await call.surface.jobs.jobs(which)
    rows.sort(key=lambda job: job.seq, reverse=True)
    page = rows[: query.limit]
    return JobPage(
        items=await viewed(call.surface, page),
        next_cursor=str(page[-1].seq) if len(rows) > len(page) and page else None,
    )


async def show_job(call: Call) -> JobView:
    job = await found_job(call)
    clock, seconds = call.surface.clock, call.query_as(JobQuery).wait_seconds
    deadline = clock.monotonic() + seconds
    while job.status not in TERMINAL and (left := deadline - clock.monotonic()) > 0:
        job = _found(await call.surface.jobs.wait(job.id, left, unlike=job.status), call)
    return (await viewed(call.surface, [job]))[0]


async def cancel_job(call: Call) -> JobView:
    body = call.body_as(CancelBody)
    job = await call.surface.jobs.cancel_job(
        JobId(call.part("job_id")), force=body.force, reason=cancel_reason(call, body)
    )
    return job_view(job, None, now=call.surface.clock.now())


async def explain_job(call: Call) -> ExplanationView:
    explanation = await call.surface.jobs.explain(JobId(call.part("job_id")))
    now, job = call.surface.clock.now(), explanation.job
    nearest = explanation.findings[0].verdict if explanation.findings else None
    return ExplanationView(
        job_id=job.id,
        status=shown(job.status),
        verdict=sentence(job, nearest, now=now),
        why=[
            FindingView(
                instance=finding.instance_id,
                kind=str(finding.verdict.__struct_config__.tag),
                sentence=say(finding.verdict, now=now),
            )
            for finding in explanation.findings
        ],
    )


_TAG: Final = "jobs"
_ONE: Final = f"{API}/jobs/{{job_id}}"
ROUTES: Final = (
    Route(
        method=hdrs.METH_POST,
        path=f"{API}/jobs",
        needs=Permission.RUN_SUBMIT,
        act=submit_job,
        summary="Submit one job, as a run of its own.",
        tag=_TAG,
        body=JobDocument,
        reads=read_job,
        answer=JobView,
        status=HTTPStatus.CREATED,
        headers=(IDEMPOTENCY_HEADER,),
        also=(HTTPStatus.OK,),
        refusals=(HTTPStatus.TOO_MANY_REQUESTS,),
    ),
    Route(
        method=hdrs.METH_GET,
        path=f"{API}/jobs",
        needs=Permission.RUN_READ,
        act=list_jobs,
        summary="List jobs, newest first.",
        tag=_TAG,
        query=JobsQuery,
        answer=JobPage,
    ),
    Route(
        method=hdrs.METH_GET,
        path=_ONE,
        needs=Permission.RUN_READ,
        act=show_job,
        summary="One job; with waitSeconds, once it is over.",
        tag=_TAG,
        query=JobQuery,
        answer=JobView,
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=hdrs.METH_POST,
        path=f"{_ONE}/cancel",
        needs=Permission.RUN_CANCEL,
        act=cancel_job,
        summary="Cancel a job: at once if it waits, else its agent is told to stop it.",
        tag=_TAG,
        body=CancelBody,
        body_is_optional=True,
        answer=JobView,
        status=HTTPStatus.ACCEPTED,
        audit="job.cancel",
        refusals=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
    Route(
        method=hdrs.METH_GET,
        path=f"{_ONE}/explain",
        needs=Permission.RUN_READ,
        act=explain_job,
        summary="Why a job is where it is, as every instance sees it.",
        tag=_TAG,
        answer=ExplanationView,
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
)
