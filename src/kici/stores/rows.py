"""Rows to domain values and back: which column holds which field.

Composite values are canonical JSON in text columns, so that equal values are equal text in every dialect.
"""

import hashlib
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Final

import msgspec

from kici.domain.access import AccessRecord, ApiToken, Role
from kici.domain.agent import AgentFacts, AgentKind, AgentSession, AgentToken
from kici.domain.ids import ClassId, JobId
from kici.domain.instance import Instance, Lease
from kici.domain.job import Demand, Job, JobSpec, JobStatus, Run, RunStatus, WaitingClass
from kici.domain.logs import LogChunk, Stream
from kici.domain.resources import Ask, ResourceRequest, Shape
from kici.domain.secret import SealedSecret, SecretRef
from kici.domain.spawn import Reservation, Spawn, SpawnState
from kici.stores.database import Row

DEMANDS_CACHED_MAX: Final = 4096
TEXTS_CACHED_MAX: Final = 4096
"""Label sets and shapes: few differ, and those that read them need them by the ten thousand."""

_encoder: Final = msgspec.json.Encoder(order="deterministic")
_decode_spec: Final = msgspec.json.Decoder(JobSpec).decode
_decode_demand: Final = msgspec.json.Decoder(Demand).decode
_decode_needs: Final = msgspec.json.Decoder(tuple[JobId, ...]).decode
_decode_strings: Final = lru_cache(TEXTS_CACHED_MAX)(msgspec.json.Decoder(tuple[str, ...]).decode)
_decode_shape: Final = lru_cache(TEXTS_CACHED_MAX)(msgspec.json.Decoder(Shape).decode)
_decode_facts: Final = msgspec.json.Decoder(AgentFacts).decode


def to_json(value: object) -> str:
    """Canonical JSON: keys and sets sorted."""
    return _encoder.encode(value).decode()


@lru_cache(TEXTS_CACHED_MAX)
def names_from(text: str) -> frozenset[str]:
    """What `names_json` made."""
    return frozenset(_decode_strings(text))


def json_or_none(value: object) -> str | None:
    return None if value is None else to_json(value)


def strings_from(text: str) -> tuple[str, ...]:
    """What `to_json` made of several strings."""
    return _decode_strings(text)


def names_json(names: Collection[str]) -> str:
    return to_json(sorted(names))


def clean_text(text: str) -> str:
    """Free text as both dialects can store it: no NUL, no lone surrogates."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def canonical_demand(demand: Demand) -> str:
    """JSON that is equal for equal demands: 1 cpu and 1.0 cpus are the same."""
    return to_json(replace(demand, resources=_with_floats(demand.resources)))


def class_key(demand_json: str) -> str:
    return hashlib.sha256(demand_json.encode()).hexdigest()


def class_id(key: str) -> ClassId:
    """The id of a demand class follows from its key, so that coordinators need not ask each other for it."""
    return ClassId(int(key[:16], 16) >> 1)


@lru_cache(maxsize=DEMANDS_CACHED_MAX)
def demand_from(demand_json: str) -> Demand:
    return _decode_demand(demand_json)


def job_from(row: Row, *, demand: Demand | None = None) -> Job:
    """`demand` is what the caller knows already; otherwise the row brings it along."""
    return Job(
        seq=row["seq"],
        id=row["id"],
        run_id=row["run_id"],
        name=row["name"],
        org=row["org"],
        status=JobStatus(row["status"]),
        class_id=row["class_id"],
        spec=_decode_spec(row["spec"]),
        demand=demand or demand_from(row["demand"]),
        needs=_decode_needs(row["needs"]),
        created_at=row["created_at"],
        queued_at=row["queued_at"],
        expires_at=row["expires_at"],
        agent_id=row["agent_id"],
        owner_instance_id=row["owner_instance_id"],
        dispatched_at=row["dispatched_at"],
        ack_deadline=row["ack_deadline"],
        attempts=row["attempts"],
        recovery_deadline=row["recovery_deadline"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        exit_code=row["exit_code"],
        signal=row["signal"],
        reason=row["reason"],
        scaler=row["scaler"],
        cancel_requested_at=row["cancel_requested_at"],
        last_provisioning_error=row["last_provisioning_error"],
        unroutable_since=row["unroutable_since"],
        offers=row["offers"],
    )


def run_from(row: Row) -> Run:
    return Run(
        id=row["id"],
        name=row["name"],
        org=row["org"],
        status=RunStatus(row["status"]),
        submitted_by=row["submitted_by"],
        created_at=row["created_at"],
        finished_at=row["finished_at"],
        cancel_requested_at=row["cancel_requested_at"],
    )


def waiting_class_from(row: Row) -> WaitingClass:
    return WaitingClass(
        class_id=row["class_id"],
        demand=demand_from(row["demand"]),
        oldest_seq=row["seq"],
        oldest_job=row["id"],
    )


def chunk_from(row: Row) -> LogChunk:
    return LogChunk(
        position=row["position"],
        stream=Stream(row["stream"]),
        offset=row["byte_offset"],
        data=row["data"],
        received_at=row["received_at"],
    )


def spawn_from(row: Row) -> Spawn:
    return Spawn(
        agent_id=row["agent_id"],
        scaler=row["scaler_name"],
        backend_type=row["backend_type"],
        state=SpawnState(row["state"]),
        label_set=_decode_strings(row["label_set"]),
        labels=_decode_strings(row["labels"]),
        gate=names_from(row["mandatory_labels"]),
        shape=_decode_shape(row["shape"]),
        machine_pool=row["machine_pool"],
        provisioning_targets=_decode_strings(row["provisioning_targets"]),
        roles=None if row["roles"] is None else _decode_strings(row["roles"]),
        token_id=row["token_id"],
        owner_instance_id=row["owner_instance_id"],
        worker_id=row["worker_id"],
        bound_job_id=row["bound_job_id"],
        run_id=row["run_id"],
        org=row["org"],
        job_image=bool(row["job_image"]),
        reuse_idle_seconds=row["reuse_idle_seconds"],
        reuse_max_jobs=row["reuse_max_jobs"],
        spawned_at=row["spawned_at"],
        registered_at=row["registered_at"],
        adopted_by=row["adopted_by"],
        adopted_at=row["adopted_at"],
        destroy_requested_at=row["destroy_requested_at"],
        end_reason=row["end_reason"],
        emitted_at=row["emitted_at"],
    )


def reservation_from(row: Row) -> Reservation:
    return Reservation(
        agent_id=row["agent_id"],
        scaler=row["scaler_name"],
        shape=_decode_shape(row["shape"]),
        machine_pool=row["machine_pool"],
        owner_instance_id=row["owner_instance_id"],
        reserved_at=row["reserved_at"],
    )


def session_from(row: Row) -> AgentSession:
    return AgentSession(
        agent_id=row["agent_id"],
        instance_id=row["instance_id"],
        connection_id=row["connection_id"],
        labels=names_from(row["labels"]),
        gate=names_from(row["mandatory_labels"]),
        token_id=row["token_id"],
        scaler=row["scaler_name"],
        backend_type=row["backend_type"],
        facts=_decode_facts(row["facts"]),
        registered_at=row["registered_at"],
        warm=bool(row["warm"]),
        incarnation=row["incarnation"],
        connection_number=row["connection_number"],
    )


def agent_token_from(row: Row) -> AgentToken:
    return AgentToken(
        id=row["id"],
        hash=row["token_hash"],
        prefix=row["token_prefix"],
        kind=AgentKind(row["kind"]),
        labels=_names_or_none(row["labels"]),
        gate=names_from(row["mandatory_labels"]),
        agent_id=row["agent_id"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_seen_at=row["last_seen_at"],
        name=row["name"],
    )


def api_token_from(row: Row) -> ApiToken:
    return ApiToken(
        id=row["id"],
        hash=row["token_hash"],
        prefix=row["token_prefix"],
        name=row["name"],
        role=Role(row["role"]),
        secret_contexts=_names_or_none(row["secret_contexts"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_used_at=row["last_used_at"],
    )


def instance_from(row: Row) -> Instance:
    return Instance(
        id=row["instance_id"],
        role=row["role"],
        version=row["version"],
        address=row["address"],
        started_at=row["started_at"],
        last_beat_at=row["last_beat_at"],
        draining=bool(row["draining"]),
    )


def lease_from(row: Row) -> Lease:
    return Lease(name=row["name"], holder=row["holder"], token=row["token"], expires_at=row["expires_at"])


def secret_from(row: Row) -> SealedSecret:
    return SealedSecret(
        org=row["org"],
        ref=SecretRef(row["context"], row["key"]),
        sealed=row["sealed"],
        key_version=row["key_version"],
        updated_at=row["updated_at"],
    )


def access_from(row: Row) -> AccessRecord:
    return AccessRecord(
        at=row["at"],
        actor=row["actor"],
        action=row["action"],
        target=row["target"],
        outcome=row["outcome"],
        detail=row["detail"],
        id=row["id"],
    )


def _with_floats(resources: ResourceRequest) -> ResourceRequest:
    return ResourceRequest(requests=_ask_with_floats(resources.requests), limits=_ask_with_floats(resources.limits))


def _ask_with_floats(ask: Ask) -> Ask:
    return ask if ask.cpus is None else replace(ask, cpus=float(ask.cpus))


def _names_or_none(text: str | None) -> frozenset[str] | None:
    return None if text is None else names_from(text)
