"""Operators' routes: agents, scalers, diagnosis, the queue, draining, stopping, settings, instances, access log."""

from enum import StrEnum
from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from aiohttp import hdrs
from msgspec import Meta

from kici.domain.access import Permission
from kici.domain.errors import NotFound
from kici.domain.ids import AgentId, JobId, OrgId
from kici.domain.paging import Mark
from kici.web.admin_views import (
    AccessPage,
    AgentList,
    AgentView,
    Cleared,
    Diagnosis,
    DrainView,
    InstanceList,
    QueueView,
    ReloadResults,
    ScalerList,
    SettingsView,
    access_view,
    agent_view,
    check_view,
    instance_view,
    reload_view,
    scaler_view,
    setting_view,
    worst,
)
from kici.web.jobs import Limit, Line, viewed
from kici.web.routing import Answer, Body, Call, Route
from kici.web.surface import DrainState
from kici.web.views import API, JobView

ADMIN: Final = f"{API}/admin"


class DrainAction(StrEnum):
    DRAIN = "drain"
    RESUME = "resume"


class DrainBody(Body, frozen=True, kw_only=True):
    """`drain`: start nothing new, let running jobs finish.  `resume`: work again."""

    action: DrainAction


class StopBody(Body, frozen=True, kw_only=True):
    """How to shut down."""

    keep_agents: bool = False
    """Leave agents and their jobs running for the next start; else local ones are ended."""


class QueueQuery(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the queue to show."""

    limit: Limit = 50


class ScalerQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which scaler; absent: all, and the coordinator itself."""

    scaler: Line | None = None


class OrgQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Whose settings; absent: the cluster's."""

    org: Line | None = None


class AccessQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of the access log."""

    cursor: Annotated[str, Meta(pattern=r"^\d{1,18}\.\d{1,18}$")] | None = None
    limit: Limit = 50


async def list_agents(call: Call) -> AgentList:
    return AgentList(items=[agent_view(row) for row in await call.surface.agents.agents()])


async def show_agent(call: Call) -> AgentView:
    row = await call.surface.agents.agent(AgentId(call.part("agent_id")))
    if row is None:
        raise NotFound(f"there is no agent {call.part('agent_id')}: none is connected or starting under this id")
    return agent_view(row)


async def drain_agent(call: Call) -> AgentView:
    return agent_view(await call.surface.agents.drain(AgentId(call.part("agent_id"))))


async def list_scalers(call: Call) -> ScalerList:
    return ScalerList(items=[scaler_view(row) for row in await call.surface.scalers.status()])


async def reload_scalers(call: Call) -> Answer:
    outcomes = await call.surface.scalers.reload()
    refused = any(outcome.outcome in ("rejected", "unanswered") for outcome in outcomes)
    return Answer(
        body=ReloadResults(items=[reload_view(outcome) for outcome in outcomes]),
        status=HTTPStatus.UNPROCESSABLE_ENTITY if refused else HTTPStatus.OK,
    )


async def diagnose(call: Call) -> Diagnosis:
    checks = await call.surface.scalers.diagnose(call.query_as(ScalerQuery).scaler)
    return Diagnosis(overall=worst(checks), checks=[check_view(check) for check in checks])


async def show_queue(call: Call) -> QueueView:
    jobs = await call.surface.queue.queue(call.query_as(QueueQuery).limit)
    return QueueView(depth=await call.surface.queue.depth(), items=await viewed(call.surface, jobs))


async def show_queued(call: Call) -> JobView:
    return (await viewed(call.surface, [await call.surface.queue.show(JobId(call.part("job_id")))]))[0]


async def clear_queue(call: Call) -> Cleared:
    return Cleared(cancelled=await call.surface.queue.clear(reason=f"queue cleared by {call.actor.name}"))


def _drain_view(state: DrainState) -> DrainView:
    return DrainView(draining=state.draining, jobs_running=state.jobs_running)


async def show_drain(call: Call) -> DrainView:
    return _drain_view(await call.surface.coordinator.drain_state())


async def set_drain(call: Call) -> DrainView:
    draining = call.body_as(DrainBody).action is DrainAction.DRAIN
    return _drain_view(await call.surface.coordinator.set_draining(draining))


async def stop(call: Call) -> DrainView:
    state = await call.surface.coordinator.drain_state()
    call.surface.coordinator.stop(keep_agents=call.body_as(StopBody).keep_agents)
    return _drain_view(state)


async def list_instances(call: Call) -> InstanceList:
    rows = await call.surface.coordinator.instances()
    leader = await call.surface.coordinator.leader()
    return InstanceList(items=[instance_view(row, self_id=call.surface.instance_id, leader=leader) for row in rows])


def _org(call: Call) -> OrgId | None:
    org = call.query_as(OrgQuery).org
    return None if org is None else OrgId(org)


async def show_settings(call: Call) -> SettingsView:
    version, rows = await call.surface.settings.show(_org(call))
    return SettingsView(version=version, items=[setting_view(row) for row in rows])


async def patch_settings(call: Call) -> SettingsView:
    changes = call.body_as(dict)
    await call.surface.settings.patch(_org(call), changes)
    return await show_settings(call)


async def read_access_log(call: Call) -> AccessPage:
    query = call.query_as(AccessQuery)
    before = None if query.cursor is None else Mark.of_cursor(query.cursor)
    rows = await call.surface.access_log.read(before=before, limit=query.limit + 1)
    page = rows[: query.limit]
    return AccessPage(
        items=[access_view(record) for record in page],
        next_cursor=Mark(page[-1].at, str(page[-1].id)).cursor if len(rows) > len(page) and page else None,
    )


_TAG: Final = "admin"
_POST, _GET = hdrs.METH_POST, hdrs.METH_GET
SettingValue = Annotated[int, Meta(ge=-(2**53), le=2**53)]
ROUTES: Final = (
    Route(
        method=_GET,
        path=f"{ADMIN}/agents",
        needs=Permission.SCALER_READ,
        act=list_agents,
        summary="Agents of all instances, with those that are being made.",
        tag=_TAG,
        answer=AgentList,
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/agents/{{agent_id}}",
        needs=Permission.SCALER_READ,
        act=show_agent,
        summary="One agent.",
        tag=_TAG,
        answer=AgentView,
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=_POST,
        path=f"{ADMIN}/agents/{{agent_id}}/drain",
        needs=Permission.SCALER_MANAGE,
        act=drain_agent,
        summary="Let an agent finish its job and leave.",
        tag=_TAG,
        answer=AgentView,
        status=HTTPStatus.ACCEPTED,
        audit="agent.drain",
        refusals=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/scalers",
        needs=Permission.SCALER_READ,
        act=list_scalers,
        summary="Scalers of all instances, and what they hold.",
        tag=_TAG,
        answer=ScalerList,
    ),
    Route(
        method=_POST,
        path=f"{ADMIN}/scalers/reload",
        needs=Permission.SCALER_MANAGE,
        act=reload_scalers,
        summary="Read the scalers' configuration anew; 422 with the same answer when an instance rejects it.",
        tag=_TAG,
        answer=ReloadResults,
        audit="scaler.reload",
        also=(HTTPStatus.UNPROCESSABLE_ENTITY,),
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/diagnose",
        needs=Permission.SCALER_READ,
        act=diagnose,
        summary="Is everything well?  One check for each part and each scaler.",
        tag=_TAG,
        query=ScalerQuery,
        answer=Diagnosis,
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/queue",
        needs=Permission.RUN_READ,
        act=show_queue,
        summary="The queue, first in line first.",
        tag=_TAG,
        query=QueueQuery,
        answer=QueueView,
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/queue/{{job_id}}",
        needs=Permission.RUN_READ,
        act=show_queued,
        summary="One waiting job.",
        tag=_TAG,
        answer=JobView,
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=_POST,
        path=f"{ADMIN}/queue/clear",
        needs=Permission.SCALER_MANAGE,
        act=clear_queue,
        summary="Cancel every job that waits.",
        tag=_TAG,
        answer=Cleared,
        audit="queue.clear",
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/drain",
        needs=Permission.ORCHESTRATOR_DRAIN,
        act=show_drain,
        summary="Whether this coordinator drains, and how many jobs still run.",
        tag=_TAG,
        answer=DrainView,
    ),
    Route(
        method=_POST,
        path=f"{ADMIN}/drain",
        needs=Permission.ORCHESTRATOR_DRAIN,
        act=set_drain,
        summary="Start nothing new on this coordinator, or work again.",
        tag=_TAG,
        body=DrainBody,
        answer=DrainView,
        audit="orchestrator.drain",
    ),
    Route(
        method=_POST,
        path=f"{ADMIN}/stop",
        needs=Permission.ORCHESTRATOR_DRAIN,
        act=stop,
        summary="Shut this coordinator down in order.",
        tag=_TAG,
        body=StopBody,
        body_is_optional=True,
        answer=DrainView,
        status=HTTPStatus.ACCEPTED,
        audit="orchestrator.stop",
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/instances",
        needs=Permission.SCALER_READ,
        act=list_instances,
        summary="Coordinators that share the store.",
        tag=_TAG,
        answer=InstanceList,
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/settings",
        needs=Permission.SETTINGS_READ,
        act=show_settings,
        summary="Live settings of the cluster, or of one organisation.",
        tag=_TAG,
        query=OrgQuery,
        answer=SettingsView,
    ),
    Route(
        method=hdrs.METH_PATCH,
        path=f"{ADMIN}/settings",
        needs=Permission.SETTINGS_MANAGE,
        unscoped=True,
        act=patch_settings,
        summary="Change settings: name -> value, null for the default.  All or none are changed.",
        tag=_TAG,
        query=OrgQuery,
        body=dict[str, SettingValue | None],
        answer=SettingsView,
        audit="settings.patch",
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/access-log",
        needs=Permission.ACCESS_LOG_READ,
        act=read_access_log,
        summary="Who changed what, newest first.",
        tag=_TAG,
        query=AccessQuery,
        answer=AccessPage,
    ),
)
