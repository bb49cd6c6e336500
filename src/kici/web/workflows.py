"""Event-driven workflows and webhooks: who gets which events, and what they do then."""

from datetime import datetime
from http import HTTPStatus
from typing import Any, Final

from aiohttp import hdrs

from kici.domain.access import Permission
from kici.domain.errors import NotFound
from kici.domain.workflow import Registration, WorkflowDocument
from kici.web.routing import Call, Route
from kici.web.views import API, View, moment

_TAG: Final = "workflows"
_ONE: Final = f"{API}/workflows/{{ref}}"


class WorkflowView(View, frozen=True, kw_only=True):
    """One registration."""

    ref: str
    kind: str
    """`workflow` or `webhook`."""
    events: list[str]
    document: dict[str, Any]
    applied_by: str
    updated_at: datetime


class WorkflowList(View, frozen=True, kw_only=True):
    items: list[WorkflowView]


def workflow_view(registration: Registration) -> WorkflowView:
    return WorkflowView(
        ref=registration.ref,
        kind=registration.kind,
        events=list(registration.events),
        document=dict(registration.document),
        applied_by=registration.applied_by,
        updated_at=moment(registration.updated_at),
    )


async def apply_workflow(call: Call) -> WorkflowView:
    return workflow_view(await call.surface.workflows.apply(call.body, call.actor))


async def list_workflows(call: Call) -> WorkflowList:
    return WorkflowList(items=[workflow_view(each) for each in await call.surface.workflows.workflows()])


async def show_workflow(call: Call) -> WorkflowView:
    for each in await call.surface.workflows.workflows():
        if each.ref == call.part("ref"):
            return workflow_view(each)
    raise NotFound(f"no workflow {call.part('ref')}")


async def delete_workflow(call: Call) -> None:
    await call.surface.workflows.delete(call.part("ref"))


def _as_it_is(raw: object) -> object:
    """Judged by the service, which reads the whole document."""
    return raw


ROUTES: Final = (
    Route(
        method=hdrs.METH_POST,
        path=f"{API}/workflows",
        needs=Permission.SCALER_MANAGE,
        act=apply_workflow,
        summary="Apply a workflow or webhook, in place of the one with the same ref.",
        tag=_TAG,
        body=WorkflowDocument,
        reads=_as_it_is,
        answer=WorkflowView,
        audit="workflow.apply",
    ),
    Route(
        method=hdrs.METH_GET,
        path=f"{API}/workflows",
        needs=Permission.SCALER_READ,
        act=list_workflows,
        summary="All workflows and webhooks.",
        tag=_TAG,
        answer=WorkflowList,
    ),
    Route(
        method=hdrs.METH_GET,
        path=_ONE,
        needs=Permission.SCALER_READ,
        act=show_workflow,
        summary="One workflow or webhook; a slash in its ref is written %2F.",
        tag=_TAG,
        answer=WorkflowView,
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=hdrs.METH_DELETE,
        path=_ONE,
        needs=Permission.SCALER_MANAGE,
        act=delete_workflow,
        summary="Delete a workflow or webhook.",
        tag=_TAG,
        audit="workflow.delete",
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
)
