"""Runs: jobs that belong together."""

from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from aiohttp import hdrs
from msgspec import Meta

from kici.domain.access import Permission
from kici.domain.document import JOBS_MAX, SubmitRun, read_run
from kici.domain.document_model import RunDocument
from kici.domain.errors import NotFound
from kici.domain.ids import RunId
from kici.domain.job import Run
from kici.domain.paging import Mark
from kici.ports.store import JobFilter
from kici.web.jobs import CancelBody, Limit, cancel_reason, viewed
from kici.web.replays import IDEMPOTENCY_HEADER
from kici.web.routing import Answer, Call, Route
from kici.web.views import API, RunPage, RunView, run_view

RUN_FILE_BYTES_MAX: Final = 8 * 1024 * 1024


class RunsQuery(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Which runs to list."""

    cursor: Annotated[str, Meta(pattern=r"^\d{1,18}\.[\w-]{1,64}$")] | None = None
    limit: Limit = 50


async def _found_run(call: Call, run_id: RunId) -> Run:
    run = await call.surface.jobs.run(run_id)
    if run is None:
        raise NotFound(f"there is no run {run_id}; it may have been removed after its retention time")
    return run


async def submit_run(call: Call) -> Answer:
    submitted = await call.surface.jobs.submit(call.body_as(SubmitRun), call.actor, call.idempotency_key)
    run = await _found_run(call, submitted.run_id)
    view = run_view(run, await viewed(call.surface, list(submitted.jobs)))
    status = HTTPStatus.CREATED if submitted.created else HTTPStatus.OK
    return Answer(body=view, status=status, headers=((hdrs.LOCATION, view.links.self),))


async def list_runs(call: Call) -> RunPage:
    query = call.query_as(RunsQuery)
    before = None if query.cursor is None else Mark.of_cursor(query.cursor)
    rows = await call.surface.jobs.runs(before=before, limit=query.limit + 1)
    page = rows[: query.limit]
    return RunPage(
        items=[run_view(run) for run in page],
        next_cursor=Mark(page[-1].created_at, page[-1].id).cursor if len(rows) > len(page) and page else None,
    )


async def show_run(call: Call) -> RunView:
    run = await _found_run(call, RunId(call.part("run_id")))
    jobs = await call.surface.jobs.jobs(JobFilter(run_id=run.id, limit=JOBS_MAX))
    return run_view(run, await viewed(call.surface, sorted(jobs, key=lambda job: job.seq)))


async def cancel_run(call: Call) -> RunView:
    body = call.body_as(CancelBody)
    run = await call.surface.jobs.cancel_run(
        RunId(call.part("run_id")), force=body.force, reason=cancel_reason(call, body)
    )
    return run_view(run)


_TAG: Final = "runs"
_ONE: Final = f"{API}/runs/{{run_id}}"
ROUTES: Final = (
    Route(
        method=hdrs.METH_POST,
        path=f"{API}/runs",
        needs=Permission.RUN_SUBMIT,
        act=submit_run,
        summary="Submit a run file: jobs that may need each other.",
        tag=_TAG,
        body=RunDocument,
        reads=read_run,
        body_bytes_max=RUN_FILE_BYTES_MAX,
        answer=RunView,
        status=HTTPStatus.CREATED,
        headers=(IDEMPOTENCY_HEADER,),
        also=(HTTPStatus.OK,),
        refusals=(HTTPStatus.TOO_MANY_REQUESTS,),
    ),
    Route(
        method=hdrs.METH_GET,
        path=f"{API}/runs",
        needs=Permission.RUN_READ,
        act=list_runs,
        summary="List runs, newest first.",
        tag=_TAG,
        query=RunsQuery,
        answer=RunPage,
    ),
    Route(
        method=hdrs.METH_GET,
        path=_ONE,
        needs=Permission.RUN_READ,
        act=show_run,
        summary="One run and its jobs.",
        tag=_TAG,
        answer=RunView,
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=hdrs.METH_POST,
        path=f"{_ONE}/cancel",
        needs=Permission.RUN_CANCEL,
        act=cancel_run,
        summary="Cancel all jobs of a run.",
        tag=_TAG,
        body=CancelBody,
        body_is_optional=True,
        answer=RunView,
        status=HTTPStatus.ACCEPTED,
        audit="run.cancel",
        refusals=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
)
