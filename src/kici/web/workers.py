"""Operators' routes: hosts that are workers, how one becomes one, and how it ceases to be."""

from datetime import datetime
from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Final

from aiohttp import hdrs
from msgspec import Meta

from kici.domain.access import Permission
from kici.domain.errors import NotFound
from kici.domain.ids import Instant
from kici.domain.worker import Worker
from kici.web.routing import Body, Call, Route
from kici.web.views import API, View, moment

AWAY_MS: Final = 60_000
"""A link that no coordinator has confirmed for so long is gone."""
HOUR_SECONDS: Final = 3600
DAY_SECONDS: Final = 86_400


class NewJoinToken(Body, frozen=True, kw_only=True):
    """A one-time token that makes a host a worker."""

    expires_in_seconds: Annotated[int, Meta(ge=60, le=DAY_SECONDS)] = HOUR_SECONDS


class CreatedJoinToken(View, frozen=True, kw_only=True):
    token: str
    """Shown once.  The host's `kici worker` reads it from a file."""
    id: str
    expires_at: datetime


class JoinTokenView(View, frozen=True, kw_only=True):
    """A token that has not run out; its text is not known here."""

    id: str
    created_by: str
    created_at: datetime
    expires_at: datetime
    used_by: str | None
    """The worker that joined with it; no other can."""


class JoinTokenList(View, frozen=True, kw_only=True):
    items: list[JoinTokenView]


class WorkerState(StrEnum):
    LINKED = "linked"
    AWAY = "away"
    """It is linked to no coordinator now; its agents go on."""
    REVOKED = "revoked"


class WorkerView(View, frozen=True, kw_only=True):
    """A host that makes agents for the coordinators."""

    id: str
    name: str
    """What its scalers are called by: `<name>/<scaler>`."""
    version: str
    state: WorkerState
    linked_to: list[str]
    """Coordinators that it is linked to."""
    joined_at: datetime
    last_seen_at: datetime | None


class WorkerList(View, frozen=True, kw_only=True):
    items: list[WorkerView]


def worker_view(worker: Worker, *, now: Instant) -> WorkerView:
    is_fresh = worker.last_seen_at is not None and now - worker.last_seen_at < AWAY_MS
    there = WorkerState.LINKED if worker.linked_to and is_fresh else WorkerState.AWAY
    state = there if worker.revoked_at is None else WorkerState.REVOKED
    return WorkerView(
        id=worker.id,
        name=worker.name,
        version=worker.version,
        state=state,
        linked_to=list(worker.linked_to) if state is WorkerState.LINKED else [],
        joined_at=moment(worker.joined_at),
        last_seen_at=None if worker.last_seen_at is None else moment(worker.last_seen_at),
    )


async def create_join_token(call: Call) -> CreatedJoinToken:
    ttl_ms = call.body_as(NewJoinToken).expires_in_seconds * 1000
    token, plain = await call.surface.workers.create_join_token(by=call.actor.name, ttl_ms=ttl_ms)
    return CreatedJoinToken(token=plain, id=token.id, expires_at=moment(token.expires_at))


async def list_join_tokens(call: Call) -> JoinTokenList:
    return JoinTokenList(
        items=[
            JoinTokenView(
                id=token.id,
                created_by=token.created_by,
                created_at=moment(token.created_at),
                expires_at=moment(token.expires_at),
                used_by=token.used_by,
            )
            for token in await call.surface.workers.join_tokens()
        ]
    )


async def revoke_join_token(call: Call) -> None:
    token_id = call.part("token_id")
    if not await call.surface.workers.revoke_join_token(token_id):
        raise NotFound(f"there is no join token {token_id} that is good; `kici-admin join-token list` lists them")


async def list_workers(call: Call) -> WorkerList:
    now = call.surface.clock.now()
    return WorkerList(items=[worker_view(worker, now=now) for worker in await call.surface.workers.workers()])


async def revoke_worker(call: Call) -> None:
    worker_id = call.part("worker_id")
    if not await call.surface.workers.revoke(worker_id):
        raise NotFound(f"there is no worker {worker_id}, or it was revoked before; `kici-admin peers` lists them")


_TAG: Final = "admin"
ROUTES: Final = (
    Route(
        method=hdrs.METH_POST,
        path=f"{API}/admin/join-tokens",
        needs=Permission.PEER_MANAGE,
        act=create_join_token,
        summary="A one-time token that makes a host a worker.  Its plain text is shown once.",
        tag=_TAG,
        body=NewJoinToken,
        body_is_optional=True,
        answer=CreatedJoinToken,
        status=HTTPStatus.CREATED,
        audit="join_token.create",
    ),
    Route(
        method=hdrs.METH_GET,
        path=f"{API}/admin/join-tokens",
        needs=Permission.PEER_MANAGE,
        act=list_join_tokens,
        summary="Join tokens that have not run out, and who joined with them.",
        tag=_TAG,
        answer=JoinTokenList,
    ),
    Route(
        method=hdrs.METH_DELETE,
        path=f"{API}/admin/join-tokens/{{token_id}}",
        needs=Permission.PEER_MANAGE,
        act=revoke_join_token,
        summary="Take a join token back.  A worker that has joined with it stays one.",
        tag=_TAG,
        status=HTTPStatus.NO_CONTENT,
        audit="join_token.revoke",
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=hdrs.METH_GET,
        path=f"{API}/admin/workers",
        needs=Permission.SCALER_READ,
        act=list_workers,
        summary="Hosts that are workers, and which coordinators they are linked to.",
        tag=_TAG,
        answer=WorkerList,
    ),
    Route(
        method=hdrs.METH_DELETE,
        path=f"{API}/admin/workers/{{worker_id}}",
        needs=Permission.PEER_MANAGE,
        act=revoke_worker,
        summary="Take a host's right to be a worker: it is cut off, and its agents are ended.",
        tag=_TAG,
        status=HTTPStatus.NO_CONTENT,
        audit="worker.revoke",
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
)
