"""What the API answers about agents, scalers, the queue, instances and the access log."""

from datetime import datetime

from kici.domain.access import AccessRecord
from kici.domain.ids import Instant
from kici.domain.instance import Instance
from kici.domain.knobs import SettingRow
from kici.web.surface import AgentRow, Check, CheckStatus, PoolUse, ReloadOutcome, ScalerRow
from kici.web.views import JobView, View, moment, moment_or_none


class AgentView(View, frozen=True, kw_only=True):
    """A connected agent, or one that is being made."""

    id: str
    state: str
    """`booting`, `idle`, `busy`, `draining`, `away` (registered, not connected now) or `ending`."""
    instance: str
    labels: list[str]
    gate: list[str]
    scaler: str | None
    backend_type: str | None
    warm: bool
    job_ids: list[str]
    since: datetime | None
    platform: str
    arch: str
    version: str
    hostname: str
    cpu_count: int
    memory_mb: int
    user: str


class AgentList(View, frozen=True, kw_only=True):
    items: list[AgentView]


class PoolView(View, frozen=True, kw_only=True):
    """What all coordinators of a host hold together of a machine pool."""

    name: str
    cpus_used: float
    cpus_max: float | None
    memory_bytes_used: int
    memory_bytes_max: int | None


class ScalerView(View, frozen=True, kw_only=True):
    """One scaler on one instance."""

    name: str
    type: str
    instance: str
    state: str
    """`ready`, `backoff`, `draining` or `retiring`."""
    label_sets: list[list[str]]
    max_agents: int | None
    active: int
    booting: int
    warm_ready: int
    warm_target: int
    cpus_used: float
    memory_bytes_used: int
    machine_pool: PoolView | None
    backoff_until: datetime | None
    last_error: str | None


class ScalerList(View, frozen=True, kw_only=True):
    items: list[ScalerView]


class ReloadView(View, frozen=True, kw_only=True):
    instance: str
    outcome: str
    """`applied`, `unchanged`, `rejected`, or `unanswered` by another coordinator."""
    added: list[str]
    updated: list[str]
    retired: list[str]
    problems: list[str]


class ReloadResults(View, frozen=True, kw_only=True):
    items: list[ReloadView]


class CheckView(View, frozen=True, kw_only=True):
    name: str
    status: CheckStatus
    message: str
    duration_ms: int


class Diagnosis(View, frozen=True, kw_only=True):
    """`overall` is the worst of all checks."""

    overall: CheckStatus
    checks: list[CheckView]


class QueueView(View, frozen=True, kw_only=True):
    """Waiting jobs, first in line first; `depth` counts them all."""

    depth: int
    items: list[JobView]


class Cleared(View, frozen=True, kw_only=True):
    cancelled: int


class DrainView(View, frozen=True, kw_only=True):
    draining: bool
    jobs_running: int


class InstanceView(View, frozen=True, kw_only=True):
    """A coordinator or worker that shares the store."""

    id: str
    role: str
    version: str
    address: str
    started_at: datetime
    last_beat_at: datetime
    draining: bool
    is_self: bool
    """The one that answers."""
    leads: bool
    """It does the chores that one coordinator does for all."""


class InstanceList(View, frozen=True, kw_only=True):
    items: list[InstanceView]


class SettingView(View, frozen=True, kw_only=True):
    name: str
    value: int | None
    """As set; null: not set."""
    effective: int
    default: int
    minimum: int
    unit: str
    description: str


class SettingsView(View, frozen=True, kw_only=True):
    """`version` rises whenever a value changes."""

    version: int
    items: list[SettingView]


class AccessView(View, frozen=True, kw_only=True):
    at: datetime
    actor: str
    action: str
    target: str
    outcome: str
    detail: str


class AccessPage(View, frozen=True, kw_only=True):
    """Newest first.  `nextCursor` as `cursor` gives the next page; null: this is the last."""

    items: list[AccessView]
    next_cursor: str | None = None


def agent_view(row: AgentRow) -> AgentView:
    return AgentView(
        id=row.agent_id,
        state=row.state,
        instance=row.instance_id,
        labels=sorted(row.labels),
        gate=sorted(row.gate),
        scaler=row.scaler,
        backend_type=row.backend_type,
        warm=row.warm,
        job_ids=list(row.job_ids),
        since=moment_or_none(row.since),
        platform=row.facts.platform,
        arch=row.facts.arch,
        version=row.facts.version,
        hostname=row.facts.hostname,
        cpu_count=row.facts.cpu_count,
        memory_mb=row.facts.memory_mb,
        user=row.facts.user,
    )


def scaler_view(row: ScalerRow) -> ScalerView:
    return ScalerView(
        name=row.name,
        type=row.type,
        instance=row.instance_id,
        state=row.state,
        label_sets=[list(labels) for labels in row.label_sets],
        max_agents=row.max_agents,
        active=row.active,
        booting=row.booting,
        warm_ready=row.warm_ready,
        warm_target=row.warm_target,
        cpus_used=row.cpus_used,
        memory_bytes_used=row.memory_bytes_used,
        machine_pool=None if row.machine_pool is None else pool_view(row.machine_pool),
        backoff_until=moment_or_none(row.backoff_until),
        last_error=row.last_error,
    )


def pool_view(pool: PoolUse) -> PoolView:
    return PoolView(
        name=pool.name,
        cpus_used=pool.cpus_used,
        cpus_max=pool.cpus_max,
        memory_bytes_used=pool.memory_bytes_used,
        memory_bytes_max=pool.memory_bytes_max,
    )


def reload_view(outcome: ReloadOutcome) -> ReloadView:
    return ReloadView(
        instance=outcome.instance_id,
        outcome=outcome.outcome,
        added=list(outcome.added),
        updated=list(outcome.updated),
        retired=list(outcome.retired),
        problems=list(outcome.problems),
    )


def check_view(check: Check) -> CheckView:
    return CheckView(name=check.name, status=check.status, message=check.message, duration_ms=check.duration_ms)


def worst(checks: list[Check]) -> CheckStatus:
    order = (CheckStatus.PASS, CheckStatus.WARN, CheckStatus.FAIL)
    return max((check.status for check in checks), key=order.index, default=CheckStatus.PASS)


def instance_view(instance: Instance, *, self_id: str, leader: str | None) -> InstanceView:
    return InstanceView(
        id=instance.id,
        role=instance.role,
        version=instance.version,
        address=instance.address,
        started_at=moment(instance.started_at),
        last_beat_at=moment(instance.last_beat_at),
        draining=instance.draining,
        is_self=instance.id == self_id,
        leads=instance.id == leader,
    )


def setting_view(row: SettingRow) -> SettingView:
    return SettingView(
        name=row.name,
        value=row.value,
        effective=row.effective,
        default=row.default,
        minimum=row.minimum,
        unit=row.unit,
        description=row.description,
    )


def access_view(record: AccessRecord) -> AccessView:
    return AccessView(
        at=moment(Instant(record.at)),
        actor=record.actor,
        action=record.action,
        target=record.target,
        outcome=record.outcome,
        detail=record.detail,
    )
