"""Events and who gets them: `ports.event_store.EventStore`."""

import json
from dataclasses import replace
from typing import Final

from kici.domain.event import ERROR_CHARS_MAX, SCALE_DOWN, EventId, EventState, NewEvent, StoredEvent
from kici.domain.ids import InstanceId, Instant, RunId
from kici.domain.job import RunStatus
from kici.domain.workflow import Registration, RegistrationKind
from kici.ports.event_store import Awaited, EventFilter
from kici.stores.database import Params, Part, Row, Step
from kici.stores.query import Query
from kici.stores.rows import clean_text, to_json

RATE_LOCK_WAIT_MS: Final = 5000


class Events(Part):
    async def emit_event(self, event: NewEvent, *, rate_max: int | None = None, now: Instant | None = None) -> bool:
        steps = [emit_step(event, now, rate_max=rate_max)]
        if rate_max is not None:
            steps = [*lock_steps(f"kici:events|{event.source}|{event.name}", RATE_LOCK_WAIT_MS), *steps]
        results = await self._database.unit(steps)
        return results is not None and bool(results[-1])

    async def claim_events(
        self, instance_id: InstanceId, *, lease_ms: int, limit: int, now: Instant | None = None
    ) -> list[StoredEvent]:
        params: Params = {"instance_id": instance_id, "lease_ms": lease_ms, "limit": limit, "now": now}
        rows = await self._write(Query.CLAIM_EVENTS, params)
        return sorted((_claimed_from(row) for row in rows), key=lambda event: (event.due_at, event.seq))

    async def await_run(self, event_id: EventId, instance_id: InstanceId, run_id: RunId) -> bool:
        params: Params = {"event_id": event_id, "instance_id": instance_id, "run_id": run_id}
        return bool(await self._write(Query.AWAIT_EVENT, params))

    async def release_event(self, event_id: EventId, instance_id: InstanceId) -> bool:
        params: Params = {"event_id": event_id, "instance_id": instance_id}
        return bool(await self._write(Query.RELEASE_EVENT, params))

    async def process_event(self, event: StoredEvent, *, now: Instant | None = None) -> bool:
        done: Params = {"event_id": event.id, "now": now}
        steps = [Step(Query.PROCESS_EVENT, done, guard=True, told_apart_by="event_id")]
        if event.name == SCALE_DOWN:
            about: Params = {"agent_id": event.subject, "emission_id": event.emission_id}
            steps.append(Step(Query.DELETE_ENDED_PROVISION, about, told_apart_by="agent_id"))
        return await self._database.unit(steps) is not None

    async def retry_event(
        self, event_id: EventId, *, error: str, delay_ms: int, run_failed: bool = False, now: Instant | None = None
    ) -> bool:
        params: Params = {
            "event_id": event_id,
            "error": _error(error),
            "delay_ms": delay_ms,
            "failed_runs": int(run_failed),
            "now": now,
        }
        return bool(await self._write(Query.RETRY_EVENT, params))

    async def bury_event(self, event_id: EventId, *, error: str, reason: str, now: Instant | None = None) -> bool:
        params: Params = {"event_id": event_id, "error": _error(error), "dead_reason": reason, "now": now}
        return bool(await self._write(Query.BURY_EVENT, params))

    async def awaited_events(self, *, limit: int, now: Instant | None = None) -> list[Awaited]:
        rows = await self._database.read(Query.AWAITED_EVENTS, {"limit": limit, "now": now})
        return [
            Awaited(
                event=event_from(row),
                status=None if row["run_status"] is None else RunStatus(row["run_status"]),
            )
            for row in rows
        ]

    async def event(self, event_id: EventId) -> StoredEvent | None:
        row = await self._one(Query.EVENT, {"event_id": event_id})
        return None if row is None else event_from(row).without_secrets()

    async def event_of_run(self, run_id: RunId) -> StoredEvent | None:
        row = await self._one(Query.EVENT_OF_RUN, {"run_id": run_id})
        return None if row is None else event_from(row).without_secrets()

    async def sealed_fields(self, emission_id: EventId) -> bytes | None:
        row = await self._one(Query.SEALED_FIELDS, {"emission_id": emission_id})
        return None if row is None else bytes(row["sealed"])

    async def events(self, which: EventFilter) -> list[StoredEvent]:
        params: Params = {"before_seq": which.before_seq, "limit": which.limit}
        if which.state is EventState.DEAD and which.name is None:
            rows = await self._database.read(Query.DEAD_EVENTS, params)
        else:
            rows = await self._database.read(Query.EVENTS, {**params, "state": which.state, "name": which.name})
        return [event_from(row).without_secrets() for row in rows]

    async def dead_events_count(self) -> int:
        (row,) = await self._database.read(Query.COUNT_DEAD_EVENTS, {})
        return int(row["events"])

    async def revive_event(self, event_id: EventId, *, now: Instant | None = None) -> bool:
        return bool(await self._write(Query.REVIVE_EVENT, {"event_id": event_id, "now": now}))

    async def discard_event(self, event_id: EventId) -> bool:
        return bool(await self._write(Query.DISCARD_EVENT, {"event_id": event_id}))

    async def purge_events(self, *, created_before: Instant, limit: int) -> int:
        return len(await self._write(Query.PURGE_EVENTS, {"created_before": created_before, "limit": limit}))

    async def erase_expired_secrets(self, *, now: Instant | None = None) -> int:
        return len(await self._write(Query.ERASE_EXPIRED_SECRETS, {"now": now}))

    async def put_registration(self, registration: Registration) -> None:
        await self._write(
            Query.PUT_REGISTRATION,
            {
                "ref": registration.ref,
                "kind": registration.kind,
                "events": to_json(registration.events),
                "document": json.dumps(registration.document),
                "applied_by": clean_text(registration.applied_by),
                "updated_at": registration.updated_at,
            },
        )

    async def registration(self, ref: str) -> Registration | None:
        row = await self._one(Query.REGISTRATION, {"ref": ref})
        return None if row is None else _registration_from(row)

    async def registrations(self, *, limit: int) -> list[Registration]:
        return [_registration_from(row) for row in await self._database.read(Query.REGISTRATIONS, {"limit": limit})]

    async def delete_registration(self, ref: str) -> bool:
        return bool(await self._write(Query.DELETE_REGISTRATION, {"ref": ref}))


def lock_steps(name: str, wait_ms: int) -> list[Step]:
    """Let this unit wait for others that name the same lock; 0 ms would mean: for ever."""
    return [
        Step(Query.LIMIT_LOCK_WAIT, {"lock_wait_ms": max(1, wait_ms)}),
        Step(Query.TAKE_LOCK, {"lock_name": name}),
    ]


def emit_step(event: NewEvent, now: Instant | None, *, rate_max: int | None = None) -> Step:
    """The step that writes an event.  Returns no row when a rate or another of its kind is in the way."""
    params = {**emit_params(event, now), "rate_max": rate_max}
    return Step(Query.EMIT_EVENT, params, told_apart_by="emission_id")


def emit_params(event: NewEvent, now: Instant | None) -> Params:
    rows = [
        {"id": event.id_for(place), "target": target, "state": EventState.PENDING.value}
        for place, target in enumerate(event.targets)
    ] or [{"id": event.id_for(0), "target": "", "state": EventState.UNMATCHED.value}]
    return {
        "emission_id": event.emission_id,
        "name": event.name,
        "subject": event.subject,
        "source": clean_text(event.source),
        "chain_depth": event.chain_depth,
        "payload": clean_text(json.dumps(event.payload, ensure_ascii=False)),
        "sealed": event.sealed,
        "expires_in_ms": event.expires_in_ms,
        "rows": to_json(rows),
        "now": now,
    }


def event_from(row: Row) -> StoredEvent:
    return StoredEvent(
        seq=row["seq"],
        id=row["id"],
        emission_id=row["emission_id"],
        name=row["name"],
        subject=row["subject"],
        source=row["source"],
        chain_depth=row["chain_depth"],
        target=row["target"],
        state=EventState(row["state"]),
        payload=json.loads(row["payload"]),
        sealed=None if row["sealed"] is None else bytes(row["sealed"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        due_at=row["due_at"],
        claimed_by=row["claimed_by"],
        claimed_until=row["claimed_until"],
        is_reclaimed=bool(row["is_reclaimed"]),
        attempts=row["attempts"],
        failed_runs=row["failed_runs"],
        run_id=row["run_id"],
        last_error=row["last_error"],
        dead_at=row["dead_at"],
        dead_reason=row["dead_reason"],
        processed_at=row["processed_at"],
    )


def _claimed_from(row: Row) -> StoredEvent:
    return replace(event_from(row), is_expired=bool(row["is_expired"]))


def _registration_from(row: Row) -> Registration:
    return Registration(
        ref=row["ref"],
        kind=RegistrationKind(row["kind"]),
        events=tuple(json.loads(row["events"])),
        document=json.loads(row["document"]),
        applied_by=row["applied_by"],
        updated_at=row["updated_at"],
    )


def _error(text: str) -> str:
    return clean_text(text)[:ERROR_CHARS_MAX]
