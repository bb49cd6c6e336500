"""Live settings: what an operator may change while everything runs, and the rules for changing it.

A knob that is not set has its configured default (from the program's configuration, else the one given here).
Zero is a value like any other.  Some knobs may also be set for one org; that value beats the cluster's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

VALUE_MAX: Final = 2**53 - 1
"""Largest value of any knob: what every JSON reader still holds exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    name: str
    default: int
    minimum: int
    unit: str
    doc: str
    per_org: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """One knob as people see it."""

    name: str
    value: int | None
    """As set; None: not set."""
    effective: int
    default: int
    minimum: int
    unit: str
    description: str


QUEUE_MAX_DEPTH: Final = Knob(
    name="queue_max_depth",
    default=100_000,
    minimum=1,
    unit="jobs",
    doc="Submissions are refused while this many jobs wait. A limit against runaway submitters, not a tuning aid.",
)
QUEUE_TIMEOUT_MS: Final = Knob(
    name="queue_timeout_ms",
    default=3_600_000,
    minimum=0,
    unit="ms",
    per_org=True,
    doc="How long a job may wait for an agent unless it says so itself. 0: as long as it takes.",
)
DISPATCH_ACK_TIMEOUT_MS: Final = Knob(
    name="dispatch_ack_timeout_ms",
    default=10_000,
    minimum=1000,
    unit="ms",
    per_org=True,
    doc="How long an agent may take to acknowledge a job before it loses it and its connection.",
)
UNROUTABLE_GRACE_MS: Final = Knob(
    name="unroutable_grace_ms",
    default=120_000,
    minimum=0,
    unit="ms",
    doc="How long a job that nothing could serve stays queued before it ends as unroutable. 0: it is never called so.",
)
REROUTE_FLAP_GRACE_MS: Final = Knob(
    name="reroute_flap_grace_ms",
    default=120_000,
    minimum=1000,
    unit="ms",
    doc="How long an agent or coordinator may be out of sight before anything is settled in its absence. "
    "The reaper never waits less than twice the time after which a coordinator counts as absent.",
)
AGENT_RECONNECT_GRACE_MS: Final = Knob(
    name="agent_reconnect_grace_ms",
    default=60_000,
    minimum=0,
    unit="ms",
    doc="How long a scaler-made agent that lost its connection during a job may take to come back. "
    "0: the job fails and the compute goes at once.",
)
AGENT_TOKEN_TTL_MS: Final = Knob(
    name="agent_token_ttl_ms",
    default=3_600_000,
    minimum=1000,
    unit="ms",
    doc="How long the credential of a new local agent admits it. An agent with a job may still return later.",
)
SCALER_SPAWN_TIMEOUT_MS: Final = Knob(
    name="scaler_spawn_timeout_ms",
    default=300_000,
    minimum=1000,
    unit="ms",
    per_org=True,
    doc="How long making one agent may take, up to its registration.",
)
SCALER_REAP_INTERVAL_MS: Final = Knob(
    name="scaler_reap_interval_ms",
    default=60_000,
    minimum=5000,
    unit="ms",
    doc="Pause between two passes over provisioned machines that nobody hears of.",
)
SCALER_REAP_STRANDED_TIMEOUT_MS: Final = Knob(
    name="scaler_reap_stranded_timeout_ms",
    default=1_800_000,
    minimum=60_000,
    unit="ms",
    doc="How long the agent of a provisioned machine may be away while the coordinator that adopted it lives.",
)
SCALER_REAP_REATTEMPT_INTERVAL_MS: Final = Knob(
    name="scaler_reap_reattempt_interval_ms",
    default=600_000,
    minimum=60_000,
    unit="ms",
    doc="Pause before a scale-down that was not delivered is tried again.",
)
SCALER_CLAIM_RETENTION_MS: Final = Knob(
    name="scaler_claim_retention_ms",
    default=3_600_000,
    minimum=0,
    unit="ms",
    doc="How long used and expired claim codes are remembered, so that a late caller learns what happened.",
)
SCALER_PROVISION_BACKOFF_BASE_MS: Final = Knob(
    name="scaler_provision_backoff_base_ms",
    default=30_000,
    minimum=1000,
    unit="ms",
    doc="Pause after the first failed provision of an event scaler; it doubles with each further one.",
)
SCALER_PROVISION_BACKOFF_MAX_MS: Final = Knob(
    name="scaler_provision_backoff_max_ms",
    default=900_000,
    minimum=1000,
    unit="ms",
    doc="Longest pause between provisions of a failing event scaler.",
)
SCALER_PROVISION_MAX_CONSECUTIVE_FAILURES: Final = Knob(
    name="scaler_provision_max_consecutive_failures",
    default=5,
    minimum=1,
    unit="failures",
    doc="Failed provisions in a row after which an event scaler only makes single attempts.",
)
EVENT_ROUTER_EVENT_TTL_SECONDS: Final = Knob(
    name="event_router_event_ttl_seconds",
    default=604_800,
    minimum=60,
    unit="s",
    doc="How long handled events are kept.",
)
EVENT_ROUTER_MAX_DISPATCH_ATTEMPTS: Final = Knob(
    name="event_router_max_dispatch_attempts",
    default=5,
    minimum=1,
    unit="attempts",
    doc="Deliveries of one event after which it goes to the dead letters.",
)
EVENT_ROUTER_RATE_LIMIT_PER_WORKFLOW_PER_MINUTE: Final = Knob(
    name="event_router_rate_limit_per_workflow_per_minute",
    default=100,
    minimum=1,
    unit="events",
    doc="Events of one name that one source may emit in a minute. Scale events have no limit.",
)
FIRECRACKER_API_SOCKET_WAIT_MS: Final = Knob(
    name="firecracker_api_socket_wait_ms",
    default=30_000,
    minimum=100,
    unit="ms",
    doc="How long a new VMM may take to open its control socket.",
)
RUN_RETENTION_DAYS: Final = Knob(
    name="run_retention_days",
    default=90,
    minimum=0,
    unit="days",
    doc="How long finished runs are kept, with their jobs and output. 0: for ever.",
)
ACCESS_LOG_RETENTION_DAYS: Final = Knob(
    name="access_log_retention_days",
    default=365,
    minimum=0,
    unit="days",
    doc="How long the access log remembers who changed what. 0: for ever.",
)

KNOBS: Final[Mapping[str, Knob]] = {
    knob.name: knob
    for knob in (
        QUEUE_MAX_DEPTH,
        QUEUE_TIMEOUT_MS,
        DISPATCH_ACK_TIMEOUT_MS,
        UNROUTABLE_GRACE_MS,
        REROUTE_FLAP_GRACE_MS,
        AGENT_RECONNECT_GRACE_MS,
        AGENT_TOKEN_TTL_MS,
        SCALER_SPAWN_TIMEOUT_MS,
        SCALER_REAP_INTERVAL_MS,
        SCALER_REAP_STRANDED_TIMEOUT_MS,
        SCALER_REAP_REATTEMPT_INTERVAL_MS,
        SCALER_CLAIM_RETENTION_MS,
        SCALER_PROVISION_BACKOFF_BASE_MS,
        SCALER_PROVISION_BACKOFF_MAX_MS,
        SCALER_PROVISION_MAX_CONSECUTIVE_FAILURES,
        EVENT_ROUTER_EVENT_TTL_SECONDS,
        EVENT_ROUTER_MAX_DISPATCH_ATTEMPTS,
        EVENT_ROUTER_RATE_LIMIT_PER_WORKFLOW_PER_MINUTE,
        FIRECRACKER_API_SOCKET_WAIT_MS,
        RUN_RETENTION_DAYS,
        ACCESS_LOG_RETENTION_DAYS,
    )
}

Values = Mapping[str, int]
"""Knob name -> value.  What is not in it is not set."""


def effective(knob: Knob, *layers: Values) -> int:
    """The value in force: that of the first layer (strongest first) that sets it, else the default."""
    return next((layer[knob.name] for layer in layers if knob.name in layer), knob.default)


def backoff_maximum_is_not_below_its_base(*layers: Values) -> str | None:
    base = effective(SCALER_PROVISION_BACKOFF_BASE_MS, *layers)
    maximum = effective(SCALER_PROVISION_BACKOFF_MAX_MS, *layers)
    if maximum >= base:
        return None
    return (
        f"{SCALER_PROVISION_BACKOFF_MAX_MS.name} would be {maximum}, below {SCALER_PROVISION_BACKOFF_BASE_MS.name} "
        f"at {base}; change both in one request"
    )


CROSS_RULES: Final[tuple[Callable[..., str | None], ...]] = (backoff_maximum_is_not_below_its_base,)


def patch_problems(
    changes: Mapping[str, object], *, stored: Values, configured: Values, for_org: bool = False
) -> list[str]:
    """Everything that is wrong with a change of settings, a sentence each; empty: it may be written.

    None in `changes` clears a knob.  Cross-field rules look at what would be in force afterwards.
    """
    problems = [problem for name, value in changes.items() if (problem := _fault(name, value, for_org=for_org))]
    if not problems and not for_org:
        after = {name: value for name, value in {**stored, **changes}.items() if isinstance(value, int)}
        problems = [problem for rule in CROSS_RULES if (problem := rule(after, configured))]
    return problems


def _fault(name: str, value: object, *, for_org: bool) -> str | None:
    knob = KNOBS.get(name)
    if knob is None:
        near = get_close_matches(name, KNOBS, n=1)
        return f"unknown setting {name!r}" + (f"; did you mean {near[0]}?" if near else "")
    if for_org and not knob.per_org:
        return f"{name} cannot be set for one org, only for all"
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name} is a whole number of {knob.unit}, not {value!r}"
    if not knob.minimum <= value <= VALUE_MAX:
        return f"{name} must be from {knob.minimum} to {VALUE_MAX}, not {value}"
    return None
