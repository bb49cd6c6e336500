"""Events: emitted by jobs and people, and looked at by operators.  Secrets of events are never shown."""

from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from aiohttp import hdrs
from msgspec import Meta

from kici.domain.access import Permission
from kici.domain.errors import Conflict, NotFound
from kici.domain.event import EventId, EventState, StoredEvent, event_schemas
from kici.domain.spawn import Spawn
from kici.ports.event_store import EventFilter
from kici.web.routing import Access, Body, Call, Route
from kici.web.views import API, View, moment, moment_or_none

_TAG: Final = "events"
ADMIN_EVENTS: Final = f"{API}/admin/events"
_ONE: Final = f"{ADMIN_EVENTS}/{{event_id}}"


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Which events to list."""

    state: EventState | None = None
    name: Annotated[str, Meta(max_length=128)] | None = None
    cursor: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    limit: Annotated[int, Meta(ge=1, le=500)] = 50


class EmitBody(Body, frozen=True, kw_only=True):
    """An event of your own."""

    name: Annotated[str, Meta(max_length=128)]
    payload: dict[str, Any] = msgspec.field(default_factory=dict)
    targets: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=50)] | None = None
    """Only these of those who subscribed; absent: all."""
    caused_by: Annotated[str, Meta(max_length=100)] | None = None
    """The event that started the run which emits this one (`KICI_EVENT_ID` in its jobs)."""


class EmittedView(View, frozen=True, kw_only=True):
    id: str
    targets: list[str]
    """Who gets it; empty: nobody subscribed."""


class EventView(View, frozen=True, kw_only=True):
    """One event on its way to one target."""

    id: str
    emission_id: str
    name: str
    target: str
    state: str
    payload: dict[str, Any]
    subject: str | None
    source: str
    chain_depth: int
    attempts: int
    created_at: datetime
    due_at: datetime
    expires_at: datetime | None
    processed_at: datetime | None
    dead_at: datetime | None
    dead_reason: str | None
    last_error: str | None
    run_id: str | None


class EventPage(View, frozen=True, kw_only=True):
    items: list[EventView]
    next_cursor: str | None


def event_view(event: StoredEvent) -> EventView:
    return EventView(
        id=event.id,
        emission_id=event.emission_id,
        name=event.name,
        target=event.target,
        state=event.state,
        payload=dict(event.payload),
        subject=event.subject,
        source=event.source,
        chain_depth=event.chain_depth,
        attempts=event.attempts,
        created_at=moment(event.created_at),
        due_at=moment(event.due_at),
        expires_at=moment_or_none(event.expires_at),
        processed_at=moment_or_none(event.processed_at),
        dead_at=moment_or_none(event.dead_at),
        dead_reason=event.dead_reason,
        last_error=event.last_error,
        run_id=event.run_id,
    )


class ProvisionView(View, frozen=True, kw_only=True):
    """One machine that an event scaler asked for, as long as its row lives."""

    agent_id: str
    scaler: str
    state: str
    """`booting`, `registered` or `ending`."""
    owner: str
    adopted_by: str | None
    job_id: str | None
    targets: list[str]
    spawned_at: datetime
    registered_at: datetime | None
    end_reason: str | None


class ProvisionList(View, frozen=True, kw_only=True):
    items: list[ProvisionView]


def provision_view(spawn: Spawn) -> ProvisionView:
    return ProvisionView(
        agent_id=spawn.agent_id,
        scaler=spawn.scaler,
        state=spawn.state,
        owner=spawn.owner_instance_id,
        adopted_by=spawn.adopted_by,
        job_id=spawn.bound_job_id,
        targets=list(spawn.provisioning_targets),
        spawned_at=moment(spawn.spawned_at),
        registered_at=moment_or_none(spawn.registered_at),
        end_reason=spawn.end_reason,
    )


async def list_provisions(call: Call) -> ProvisionList:
    return ProvisionList(items=[provision_view(each) for each in await call.surface.events.provisions()])


async def emit_event(call: Call) -> EmittedView:
    body = call.body_as(EmitBody)
    emitted = await call.surface.events.emit(
        body.name,
        body.payload,
        source=call.actor.name,
        targets=body.targets,
        caused_by=None if body.caused_by is None else EventId(body.caused_by),
    )
    return EmittedView(id=emitted.emission_id, targets=list(emitted.targets))


async def list_events(call: Call) -> EventPage:
    query = call.query_as(EventsQuery)
    which = EventFilter(state=query.state, name=query.name, before_seq=query.cursor, limit=query.limit + 1)
    rows = await call.surface.events.events(which)
    page = rows[: query.limit]
    return EventPage(
        items=[event_view(event) for event in page],
        next_cursor=str(page[-1].seq) if len(rows) > len(page) and page else None,
    )


async def show_event(call: Call) -> EventView:
    return event_view(await _found(call))


async def retry_event(call: Call) -> EventView:
    event = await _found(call)
    if not await call.surface.events.revive(event.id):
        raise Conflict(_why_not(event))
    return event_view(await _found(call))


async def discard_event(call: Call) -> None:
    event = await _found(call)
    if not await call.surface.events.discard(event.id):
        raise Conflict(f"event {event.id} was not given up: it is {event.state}")


async def schemas(call: Call) -> dict[str, Any]:
    return event_schemas()


async def _found(call: Call) -> StoredEvent:
    event_id = EventId(call.part("event_id"))
    event = await call.surface.events.event(event_id)
    if event is None:
        raise NotFound(f"no event {event_id}")
    return event


def _why_not(event: StoredEvent) -> str:
    if event.state is not EventState.DEAD:
        return f"event {event.id} was not given up: it is {event.state}"
    if event.dead_reason == "withdrawn":
        return f"event {event.id} was withdrawn: what it asked for is not wanted any more"
    return f"event {event.id} has expired: what it asked for cannot be used any more"


ROUTES: Final = (
    Route(
        method=hdrs.METH_POST,
        path=f"{API}/events",
        needs=Permission.RUN_SUBMIT,
        act=emit_event,
        summary="Emit an event; names that begin with kici. or __ are reserved.",
        tag=_TAG,
        body=EmitBody,
        answer=EmittedView,
        status=HTTPStatus.ACCEPTED,
        audit="event.emit",
        refusals=(HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS),
    ),
    Route(
        method=hdrs.METH_GET,
        path=f"{API}/events/schema",
        needs=Access.AUTHENTICATED,
        act=schemas,
        summary="JSON Schema of the payloads of scale events.",
        tag=_TAG,
        answer=dict[str, Any],
    ),
    Route(
        method=hdrs.METH_GET,
        path=f"{API}/admin/provisions",
        needs=Permission.SCALER_READ,
        act=list_provisions,
        summary="Machines that event scalers of all coordinators asked for and have not given back.",
        tag=_TAG,
        answer=ProvisionList,
    ),
    Route(
        method=hdrs.METH_GET,
        path=ADMIN_EVENTS,
        needs=Permission.EVENT_DLQ_READ,
        act=list_events,
        summary="Events, newest first; state=dead lists those that were given up.",
        tag=_TAG,
        query=EventsQuery,
        answer=EventPage,
    ),
    Route(
        method=hdrs.METH_GET,
        path=_ONE,
        needs=Permission.EVENT_DLQ_READ,
        act=show_event,
        summary="One event on its way to one target.",
        tag=_TAG,
        answer=EventView,
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=hdrs.METH_POST,
        path=f"{_ONE}/retry",
        needs=Permission.EVENT_DLQ_MANAGE,
        act=retry_event,
        summary="Deliver an event that was given up after all.",
        tag=_TAG,
        answer=EventView,
        audit="event.retry",
        refusals=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
    Route(
        method=hdrs.METH_DELETE,
        path=_ONE,
        needs=Permission.EVENT_DLQ_MANAGE,
        act=discard_event,
        summary="Forget an event that was given up.",
        tag=_TAG,
        audit="event.discard",
        refusals=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
)
