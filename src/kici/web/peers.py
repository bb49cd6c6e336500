"""Operators' routes: forgetting coordinators and workers that are gone for good."""

from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import hdrs

from kici.decide.forget import ForgetOutcome
from kici.domain.access import Permission
from kici.web.routing import Answer, Call, Route
from kici.web.views import API, View

_STATUS: Final = {
    ForgetOutcome.FORGOTTEN: HTTPStatus.OK,
    ForgetOutcome.NOT_FOUND: HTTPStatus.NOT_FOUND,
    ForgetOutcome.CONNECTED: HTTPStatus.CONFLICT,
    ForgetOutcome.RECENT: HTTPStatus.CONFLICT,
    ForgetOutcome.ACKNOWLEDGEMENT_REQUIRED: HTTPStatus.CONFLICT,
    ForgetOutcome.ERROR: HTTPStatus.SERVICE_UNAVAILABLE,
}


class ForgetQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`acknowledge`: it may be the last other coordinator, and this is meant."""

    acknowledge: bool = False


class ForgottenView(View, frozen=True, kw_only=True):
    outcome: ForgetOutcome
    detail: str
    """Why, and what to do."""


async def forget(call: Call) -> Answer:
    acknowledged = call.query_as(ForgetQuery).acknowledge
    found = await call.surface.coordinator.forget_peer(call.part("peer_id"), is_acknowledged=acknowledged)
    return Answer(body=ForgottenView(outcome=found.outcome, detail=found.detail), status=_STATUS[found.outcome])


ROUTES: Final = (
    Route(
        method=hdrs.METH_DELETE,
        path=f"{API}/admin/peers/{{peer_id}}",
        needs=Permission.PEER_MANAGE,
        act=forget,
        summary="Forget a coordinator or worker that will never come back: its rows and addresses are freed.",
        tag="admin",
        query=ForgetQuery,
        answer=ForgottenView,
        also=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.SERVICE_UNAVAILABLE),
        audit="peer.forget",
    ),
)
