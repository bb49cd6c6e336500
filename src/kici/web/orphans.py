"""Operators' routes: microVMs that run on a node, and stopping those that nobody tracks."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from aiohttp import hdrs
from msgspec import Meta

from kici.decide.classify import LiveVm, StopOutcome, StopResult, Tracker, VmStatus
from kici.domain.access import Permission
from kici.domain.ids import AgentId, InstanceId
from kici.domain.strict import Fault, Faulty, read
from kici.ports.live_vms import NodeFailed, NodeSilent
from kici.web.problems import ProblemError
from kici.web.routing import Body, Call, Route
from kici.web.views import API, View

IDS_MAX: Final = 100
VmName = Annotated[str, Meta(min_length=1, max_length=256)]
Target = Annotated[str, Meta(min_length=1, max_length=256)]
TimeoutMs = Annotated[int, Meta(ge=1000, le=240_000)]


class OrphansQuery(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Which node's microVMs; absent: this one's."""

    target: Target | None = None
    timeout_ms: TimeoutMs = 30_000
    """How long another node may take to answer."""


class StopVmsBody(Body, frozen=True, kw_only=True):
    """Which microVMs to stop.  One that anything tracks is left alone."""

    vm_ids: Annotated[list[VmName], Meta(min_length=1, max_length=IDS_MAX)]
    target: Target | None = None
    """The node that they run on; absent: this one."""
    timeout_ms: TimeoutMs = 30_000


class LiveVmView(View, frozen=True, kw_only=True):
    id: str
    scaler: str
    pid: int
    started_at: datetime
    status: VmStatus
    """`orphaned`: nobody tracks it and it is provably ours, so it may be stopped."""
    trackers: list[Tracker]
    why: str
    folder: str


class LiveVmList(View, frozen=True, kw_only=True):
    instance: str
    scalers: list[str]
    """Scalers of microVMs on that node."""
    items: list[LiveVmView]


class StopResultView(View, frozen=True, kw_only=True):
    id: str
    outcome: StopOutcome
    detail: str
    pid: int | None


class StopResults(View, frozen=True, kw_only=True):
    items: list[StopResultView]


def read_stop(raw: object) -> StopVmsBody:
    body = read(raw, StopVmsBody)
    if not 1 <= len(body.vm_ids) <= IDS_MAX:
        raise Faulty([Fault("$.vmIds", f"expected 1 to {IDS_MAX} ids, found {len(body.vm_ids)}")])
    return body


async def list_orphans(call: Call) -> LiveVmList:
    query = call.query_as(OrphansQuery)
    try:
        listing = await call.surface.live_vms.listing(_node(query.target), seconds=query.timeout_ms / 1000)
    except (NodeSilent, NodeFailed) as error:
        raise _problem(error) from error
    return LiveVmList(
        instance=listing.instance_id, scalers=list(listing.scalers), items=[_vm_view(vm) for vm in listing.vms]
    )


async def stop_orphans(call: Call) -> StopResults:
    body = call.body_as(StopVmsBody)
    vm_ids = [AgentId(vm_id) for vm_id in body.vm_ids]
    try:
        results = await call.surface.live_vms.stop(_node(body.target), vm_ids, seconds=body.timeout_ms / 1000)
    except (NodeSilent, NodeFailed) as error:
        raise _problem(error) from error
    return StopResults(items=[_result_view(result) for result in results])


def _node(target: str | None) -> InstanceId | None:
    return None if target is None else InstanceId(target)


def _problem(error: NodeSilent | NodeFailed) -> ProblemError:
    is_silent = isinstance(error, NodeSilent)
    return ProblemError(HTTPStatus.GATEWAY_TIMEOUT if is_silent else HTTPStatus.BAD_GATEWAY, str(error))


def _vm_view(vm: LiveVm) -> LiveVmView:
    return LiveVmView(
        id=vm.seen.vm_id,
        scaler=vm.seen.scaler,
        pid=vm.seen.pid,
        started_at=datetime.fromtimestamp(vm.seen.started_at / 1000, UTC),
        status=vm.status,
        trackers=list(vm.trackers),
        why=vm.why,
        folder=vm.seen.folder,
    )


def _result_view(result: StopResult) -> StopResultView:
    return StopResultView(id=result.vm_id, outcome=result.outcome, detail=result.detail, pid=result.pid)


_PATH: Final = f"{API}/admin/scaler/orphans"
_REFUSALS: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
ROUTES: Final = (
    Route(
        method=hdrs.METH_GET,
        path=_PATH,
        needs=Permission.SCALER_READ,
        unscoped=True,
        act=list_orphans,
        summary="microVMs that run on a node, and who tracks them.",
        tag="admin",
        query=OrphansQuery,
        answer=LiveVmList,
        audit="scaler.orphans.read",
        refusals=_REFUSALS,
    ),
    Route(
        method=hdrs.METH_POST,
        path=f"{_PATH}/stop",
        needs=Permission.SCALER_MANAGE,
        unscoped=True,
        act=stop_orphans,
        summary="Stop microVMs that nobody tracks.",
        tag="admin",
        body=StopVmsBody,
        reads=read_stop,
        answer=StopResults,
        audit="scaler.orphan.stop",
        refusals=_REFUSALS,
    ),
)
