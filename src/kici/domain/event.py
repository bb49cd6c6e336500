"""Events: the names and payloads that coordinators and provisioning workflows agree on, and the rows that carry them.

The one vocabulary: what emits a scale event and what answers it read these types, and the published JSON Schema is
made from them.  A field that is a secret travels apart from the payload: rows and listings show `REDACTED` in its
place, and only a delivery puts it back.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NewType

import msgspec

from kici.domain.ids import AgentId, InstanceId, Instant, RunId
from kici.domain.moves import Moves

EventId = NewType("EventId", str)

KICI_EVENT_PREFIX: Final = "kici."
INTERNAL_EVENT_PREFIX: Final = "__"
SCALE_UP: Final = "kici.scaler.scale-up"
SCALE_DOWN: Final = "kici.scaler.scale-down"
CHAIN_DEPTH_MAX: Final = 10
"""An event that follows from a run that followed from an event, and so on: so far and no further."""
PAYLOAD_BYTES_MAX: Final = 64 * 1024
ERROR_CHARS_MAX: Final = 4096
REDACTED: Final = "[redacted]"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")


class EventPayload(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of payloads: the JSON form.  A reader ignores fields that it does not know."""


class ScaleUpResources(EventPayload, frozen=True, kw_only=True):
    """What the machine should have; a hint."""

    cpus: float | None = None
    mem_bytes: int | None = None


class ScaleUp(EventPayload, frozen=True, kw_only=True, omit_defaults=False):
    """Make one machine, and start one agent on it with the claim code.

    May come more than once for one agent: make a machine only if none carries the agent's id yet.
    """

    scaler_name: str
    agent_id: str
    """Tag the machine with it before it is made: it is how the machine is found again."""
    labels: list[str]
    """All labels that the agent will carry."""
    mandatory_labels: list[str]
    """Labels that a job must name to run there."""
    orchestrator_url: str
    """WebSocket address that the agent connects to."""
    claim_code: str
    """Secret, single use and short-lived: the agent trades it for its token."""
    request_id: str
    """Of this emission; two emissions for one agent differ in it."""
    resources: ScaleUpResources | None = None
    job_id: str | None = None
    """The job that waits for it; absent for a machine without a job yet."""


class ScaleDown(EventPayload, frozen=True, kw_only=True, omit_defaults=False):
    """Remove the machine of one agent, if there is one.  A machine that is not known is no error."""

    scaler_name: str
    agent_id: str
    reason: str
    """`idle`, `job-complete`, `heartbeat-timeout`, `spawn-timeout`, `drain` or `shutdown`."""
    request_id: str


VOCABULARY: Final[Mapping[str, type[EventPayload]]] = {SCALE_UP: ScaleUp, SCALE_DOWN: ScaleDown}
SECRET_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {SCALE_UP: ("claimCode",)}
"""Fields, by event, that are kept sealed until the event is handled, and then erased."""

Payload = Mapping[str, Any]
"""A decoded JSON object: any keys."""


def is_reserved(name: str) -> bool:
    """Only coordinators emit these; they are exempt from rate limits."""
    return name.startswith((KICI_EVENT_PREFIX, INTERNAL_EVENT_PREFIX))


def is_event_name(name: str) -> bool:
    return _NAME.match(name) is not None


def to_payload(event: EventPayload) -> dict[str, Any]:
    """The JSON object of a payload."""
    plain = msgspec.to_builtins(event)
    assert isinstance(plain, dict)
    return {name: value for name, value in plain.items() if value is not None}


def split_secrets(name: str, payload: Payload) -> tuple[dict[str, Any], dict[str, str]]:
    """The payload as anybody may see it, and what was taken out."""
    secrets = {field: str(payload[field]) for field in SECRET_FIELDS.get(name, ()) if field in payload}
    return {**payload, **dict.fromkeys(secrets, REDACTED)}, secrets


def read_scale_up(payload: Payload) -> ScaleUp:
    """For consumers.  Raises `ValueError` naming what is wrong."""
    return msgspec.convert(payload, ScaleUp)


def read_scale_down(payload: Payload) -> ScaleDown:
    """For consumers.  Raises `ValueError` naming what is wrong."""
    return msgspec.convert(payload, ScaleDown)


def event_schemas() -> dict[str, Any]:
    """JSON Schema of every payload, by event name."""
    schemas, components = msgspec.json.schema_components(VOCABULARY.values(), ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "events": dict(zip(VOCABULARY, schemas, strict=True)),
        "$defs": components,
    }


# --- rows


class EventState(StrEnum):
    """Where one event is on its way to one target."""

    PENDING = "pending"
    """To be delivered, now or at its time."""
    AWAITING = "awaiting"
    """A run was started for it, and its end decides."""
    PROCESSED = "processed"
    DEAD = "dead"
    """Given up.  Stays until somebody retries or discards it."""
    UNMATCHED = "unmatched"
    """Nobody subscribed to it when it was emitted."""


EVENT_MOVES: Final[Moves[EventState]] = {
    EventState.PENDING: frozenset({EventState.AWAITING, EventState.PROCESSED, EventState.DEAD}),
    EventState.AWAITING: frozenset({EventState.PENDING, EventState.PROCESSED, EventState.DEAD}),
    EventState.PROCESSED: frozenset(),
    EventState.DEAD: frozenset({EventState.PENDING}),
    EventState.UNMATCHED: frozenset(),
}


class DeadReason(StrEnum):
    EXHAUSTED = "exhausted_retries"
    NON_RETRYABLE = "non_retryable"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    """What it asked for is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """One event about to be written, for all of its targets."""

    emission_id: EventId
    name: str
    targets: tuple[str, ...]
    """Registrations that get it; empty: written as unmatched."""
    payload: Payload
    """Without secrets."""
    sealed: bytes | None = None
    subject: AgentId | None = None
    """The agent that it is about.  Events of one subject reach one target one after the other."""
    source: str = ""
    """Who emitted it; empty: we did."""
    chain_depth: int = 0
    expires_in_ms: int | None = None
    """After that it is not delivered any more."""

    def id_for(self, place: int) -> EventId:
        return EventId(f"{self.emission_id}-{place}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """One row of `kici_events`: one event on its way to one target."""

    seq: int
    id: EventId
    emission_id: EventId
    name: str
    subject: AgentId | None
    source: str
    chain_depth: int
    target: str
    state: EventState
    payload: Payload
    sealed: bytes | None
    created_at: Instant
    expires_at: Instant | None
    due_at: Instant
    claimed_by: InstanceId | None = None
    claimed_until: Instant | None = None
    is_expired: bool = False
    """When it was claimed, by the clock of the store."""
    is_reclaimed: bool = False
    """Whoever claimed it before never said what became of it."""
    attempts: int = 0
    """Deliveries begun since it was written or revived."""
    failed_runs: int = 0
    run_id: RunId | None = None
    last_error: str | None = None
    dead_at: Instant | None = None
    dead_reason: str | None = None
    processed_at: Instant | None = None

    def without_secrets(self) -> "StoredEvent":
        return replace(self, sealed=None)


def sealing_place(emission_id: EventId) -> str:
    """What the secrets of an event are bound to."""
    return f"event:{emission_id}"
