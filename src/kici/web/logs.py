"""A job's output: as text, page by page, or as server-sent events that can be resumed.

Events: `stdout`, `stderr` and `system` carry one chunk each, `{"offset": n, "text": "…"}`, or `base64` instead of
`text` where the bytes are not whole UTF-8; their ids are positions in the log, and `Last-Event-ID` resumes after
one.  `status` carries the job whenever its status or verdict changes, `end` carries it once everything was sent.
The output is bytes; readers put the chunks of a stream behind each other and get exactly what the job wrote.
"""

import asyncio
import base64
from contextlib import aclosing
from datetime import datetime
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from aiohttp import hdrs, web
from msgspec import Meta

from kici.domain.access import Permission
from kici.domain.errors import KiciError
from kici.domain.ids import JobId
from kici.domain.job import TERMINAL, Job
from kici.domain.logs import LogChunk, Stream
from kici.domain.strict import Fault
from kici.web.jobs import found_job, viewed
from kici.web.problems import ProblemError
from kici.web.routing import JSON, Call, Route
from kici.web.views import API, JobView, View, moment

READ_BYTES: Final = 1024 * 1024
STATUS_SECONDS: Final = 2.0
"""How often a follower of a job learns of a new verdict at the latest."""
PING_SECONDS: Final = 15.0
EVENT_STREAM: Final = "text/event-stream"
TEXT: Final = "text/plain"
LAST_EVENT_ID: Final = "Last-Event-ID"
POSITION_MAX: Final = 2**62


class ShownStream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"
    SYSTEM = "system"


class LogsQuery(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Which output, and how."""

    after: Annotated[int, Meta(ge=0, le=POSITION_MAX)] = 0
    """Only what came after this position."""
    stream: ShownStream | None = None
    """Only this stream; absent: for text stdout and stderr as they arrived, for events everything."""
    follow: bool = False
    """Text only: go on until the job is over."""


class LogEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Data of a chunk's event."""

    offset: int
    text: str | None = None
    base64: str | None = None


class LogItem(View, frozen=True, kw_only=True, omit_defaults=True):
    """One chunk of a page: `text`, or `base64` where the bytes are not whole UTF-8."""

    position: int
    stream: ShownStream
    offset: int
    at: datetime
    text: str | None = None
    base64: str | None = None


class LogPage(View, frozen=True, kw_only=True):
    """Chunks in order of arrival.  `next` as `after` goes on behind them; equal to what was given: nothing is left."""

    items: list[LogItem]
    next: int


def stream_name(stream: Stream) -> str:
    return stream.name.lower()


def _in_json(data: bytes) -> tuple[str | None, str | None]:
    """As text, or where that would lose something in base64."""
    try:
        return data.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(data).decode()


def chunk_event(chunk: LogChunk) -> bytes:
    text, encoded = _in_json(chunk.data)
    data = LogEvent(offset=chunk.offset, text=text, base64=encoded)
    return _event(stream_name(chunk.stream), msgspec.json.encode(data), position=chunk.position)


def _event(name: str, data: bytes, *, position: int | None = None) -> bytes:
    head = f"id: {position}\n" if position is not None else ""
    return f"{head}event: {name}\n".encode() + b"data: " + data + b"\n\n"


STREAMS: Final = web.AppKey("streams", set[asyncio.Task[object]])
"""Handlers that answer for as long as a job lives."""


async def end_streams(app: web.Application) -> None:
    """At shutdown: readers come back, to another coordinator or after the restart, and resume."""
    streams = app[STREAMS]
    for task in list(streams):
        task.cancel()


async def job_logs(call: Call) -> web.StreamResponse | LogPage:
    job = await found_job(call)
    accepted = call.request.headers.get(hdrs.ACCEPT, "")
    if JSON in accepted:
        return await _page(call, job)
    task = asyncio.current_task()
    assert task is not None
    call.request.app[STREAMS].add(task)
    try:
        if EVENT_STREAM in accepted:
            return await _events(call, job)
        return await _text(call, job)
    finally:
        call.request.app[STREAMS].discard(task)


async def _page(call: Call, job: Job) -> LogPage:
    query = call.query_as(LogsQuery)
    chunks = await call.surface.logs.read(job.id, after=query.after, bytes_max=READ_BYTES)
    items = []
    for chunk in chunks:
        text, encoded = _in_json(chunk.data)
        item = LogItem(
            position=chunk.position,
            stream=ShownStream(stream_name(chunk.stream)),
            offset=chunk.offset,
            at=moment(chunk.received_at),
            text=text,
            base64=encoded,
        )
        items.append(item)
    wanted = [item for item in items if query.stream in (None, item.stream)]
    return LogPage(items=wanted, next=chunks[-1].position if chunks else query.after)


async def _text(call: Call, job: Job) -> web.StreamResponse:
    query = call.query_as(LogsQuery)
    wanted = {ShownStream.STDOUT, ShownStream.STDERR} if query.stream is None else {query.stream}
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: f"{TEXT}; charset=utf-8"})
    await response.prepare(call.request)
    try:
        if query.follow:
            async with aclosing(call.surface.logs.follow(job.id, after=query.after)) as chunks:
                async for chunk in chunks:
                    if stream_name(chunk.stream) in wanted:
                        await response.write(chunk.data)
        else:
            await _stored(call, job.id, response, wanted)
        await response.write_eof()
    except ConnectionResetError:
        pass  # the reader went away
    except KiciError:
        _cut(call.request)
    return response


def _cut(request: web.Request) -> None:
    """Close without the end mark, so that the reader does not take what it has for the whole."""
    if request.transport is not None:
        request.transport.abort()


async def _stored(call: Call, job_id: JobId, response: web.StreamResponse, wanted: set[ShownStream]) -> None:
    after = call.query_as(LogsQuery).after
    while chunks := await call.surface.logs.read(job_id, after=after, bytes_max=READ_BYTES):
        after = chunks[-1].position
        await response.write(b"".join(chunk.data for chunk in chunks if stream_name(chunk.stream) in wanted))


async def _events(call: Call, job: Job) -> web.StreamResponse:
    query = call.query_as(LogsQuery)
    after = max(query.after, _last_event_id(call.request))
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: EVENT_STREAM, "X-Accel-Buffering": "no"})
    await response.prepare(call.request)
    follower = _Follower(call, job, response)
    try:
        async with asyncio.TaskGroup() as group:
            statuses = group.create_task(follower.statuses(), name="logs.statuses")
            async with aclosing(call.surface.logs.follow(job.id, after=after)) as chunks:
                async for chunk in chunks:
                    if query.stream is None or stream_name(chunk.stream) == query.stream:
                        await response.write(chunk_event(chunk))
            statuses.cancel()
        await follower.end()
        await response.write_eof()
    except* ConnectionResetError:
        pass  # the reader went away
    except* KiciError:
        _cut(call.request)
    return response


def _last_event_id(request: web.Request) -> int:
    text = request.headers.get(LAST_EVENT_ID, "0")
    if not text.isascii() or not text.isdigit() or int(text[:20]) > POSITION_MAX:
        fault = Fault(LAST_EVENT_ID, "expected the id of an event of this stream")
        raise ProblemError(HTTPStatus.BAD_REQUEST, str(fault), faults=(fault,))
    return int(text)


class _Follower:
    """Tells one reader how the job fares."""

    def __init__(self, call: Call, job: Job, response: web.StreamResponse) -> None:
        self._surface = call.surface
        self._job = job
        self._response = response

    async def statuses(self) -> None:
        """Send the job whenever something about it changes, and a comment when nothing does for long."""
        told: JobView | None = None
        quiet = 0.0
        while True:
            view = await self._view()
            if told is None or (view.status, view.verdict) != (told.status, told.verdict):
                await self._response.write(_event("status", msgspec.json.encode(view)))
                told, quiet = view, 0.0
            elif quiet >= PING_SECONDS:
                await self._response.write(b": still here\n\n")
                quiet = 0.0
            if self._job.status in TERMINAL:
                return
            before = self._surface.clock.monotonic()
            job = await self._surface.jobs.wait(self._job.id, STATUS_SECONDS, unlike=self._job.status)
            quiet += self._surface.clock.monotonic() - before
            self._job = job or self._job

    async def end(self) -> None:
        self._job = await self._surface.jobs.job(self._job.id) or self._job
        await self._response.write(_event("end", msgspec.json.encode(await self._view())))

    async def _view(self) -> JobView:
        return (await viewed(self._surface, [self._job]))[0]


ROUTES: Final = (
    Route(
        method=hdrs.METH_GET,
        path=f"{API}/jobs/{{job_id}}/logs",
        needs=Permission.RUN_READ,
        act=job_logs,
        summary="A job's output: text, or by the header Accept server-sent events or a page of chunks (JSON).",
        tag="jobs",
        query=LogsQuery,
        answer=LogPage,
        media=(JSON, TEXT, EVENT_STREAM),
        headers=(LAST_EVENT_ID,),
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
)
