"""Events go out: matched with who subscribed, secrets sealed, written in one unit with what they are about.

An event that is written will be delivered, also when this process ends now (`event_router`).  A scale event that
nobody subscribes to is an error of its caller at once, not a machine that never comes.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from kici.decide.events import emission_fault
from kici.domain.errors import Conflict, Denied, Misconfigured, NoCapacity, NotFound
from kici.domain.event import (
    PAYLOAD_BYTES_MAX,
    SCALE_DOWN,
    SCALE_UP,
    EventId,
    NewEvent,
    Payload,
    ScaleDown,
    ScaleUp,
    sealing_place,
    split_secrets,
    to_payload,
)
from kici.domain.ids import AgentId, InstanceId, RunId, ScalerName
from kici.domain.provision import ReapCandidate, ScaleDownOrder
from kici.domain.spawn import ScaleDownReason, Spawn
from kici.observe.events import Event, emit
from kici.observe.metrics import Metrics
from kici.ports.entropy import Entropy
from kici.ports.event_store import EventStore, ProvisionStore
from kici.ports.events import NoSubscriber
from kici.ports.sealer import Sealer

REGISTRATIONS_MAX: Final = 10_000


class Store(EventStore, ProvisionStore, Protocol):
    """What emitting reads and writes."""

    async def spawn(self, agent_id: AgentId) -> Spawn | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    emission_id: EventId
    targets: tuple[str, ...]


class EventEmitter:
    """Implements `ports.events.ScaleEvents`."""

    def __init__(
        self,
        *,
        store: Store,
        sealer: Sealer,
        entropy: Entropy,
        metrics: Metrics,
        instance_id: InstanceId,
        rate_max: Callable[[], int],
        cancel_run: Callable[[RunId, str], Awaitable[None]],
    ) -> None:
        """`cancel_run(run, why)`: a run at work on a scale-up that is not wanted any more."""
        self._store = store
        self._sealer = sealer
        self._entropy = entropy
        self._metrics = metrics
        self._instance_id = instance_id
        self._rate_max = rate_max
        self._cancel_run = cancel_run
        self.emitted: Callable[[], None] = lambda: None
        """Set by the composition root: there is something to deliver."""

    async def emit(
        self,
        name: str,
        payload: Payload,
        *,
        source: str,
        targets: Sequence[str] | None = None,
        caused_by: EventId | None = None,
    ) -> Emitted:
        """An event of a job or person; to everybody who subscribed, or only to those among `targets`.

        Raises `Denied` for reserved names and chains that are too long, `NoCapacity` above the rate, `NotFound`.
        """
        depth = 0 if caused_by is None else await self._depth_after(caused_by)
        fault = emission_fault(name, depth)
        if fault is not None:
            raise Denied(fault)
        if len(msgspec.json.encode(payload)) > PAYLOAD_BYTES_MAX:
            raise Misconfigured(f"the payload of an event may have {PAYLOAD_BYTES_MAX} bytes")
        found = await self._subscribed(name) if targets is None else await self._among(name, targets)
        event = NewEvent(
            emission_id=self._new_id(),
            name=name,
            targets=found,
            payload=payload,
            source=source,
            chain_depth=depth,
        )
        limit = self._rate_max()
        if not await self._store.emit_event(event, rate_max=limit):
            raise NoCapacity(f"{source} emitted {limit} events {name} within a minute; that is the limit")
        self._written(event)
        return Emitted(emission_id=event.emission_id, targets=found)

    async def scale_up(self, payload: ScaleUp, targets: Sequence[str], *, expires_in_ms: int) -> None:
        found = await self._among(SCALE_UP, targets)
        if not found:
            self._metrics.event_unmatched.inc()
            raise NoSubscriber(_nobody(SCALE_UP, targets))
        emission_id = self._new_id()
        shown, secrets = split_secrets(SCALE_UP, to_payload(payload))
        event = NewEvent(
            emission_id=emission_id,
            name=SCALE_UP,
            targets=found,
            payload=shown,
            sealed=self._sealer.seal(msgspec.json.encode(secrets), place=sealing_place(emission_id)),
            subject=AgentId(payload.agent_id),
            expires_in_ms=expires_in_ms,
        )
        if not await self._store.emit_scale_up(event):
            raise Conflict(f"{payload.agent_id} is not wanted any more")
        self._metrics.scale_up_emitted.labels(scaler=payload.scaler_name).inc()
        self._written(event)

    async def scale_down(
        self, agent_id: AgentId, scaler: ScalerName, reason: ScaleDownReason, *, targets: Sequence[str]
    ) -> bool:
        order = ScaleDownOrder(agent_id=agent_id, reason=reason, by=self._instance_id)
        return await self._scale_down(order, scaler, targets)

    async def condemn(
        self,
        candidate: ReapCandidate,
        reason: ScaleDownReason,
        *,
        term: int,
        present_ms: int,
        subscribed: frozenset[str],
    ) -> bool:
        """The reaper's scale-down: only if everything it saw still holds, and only in its own term."""
        order = ScaleDownOrder(
            agent_id=candidate.agent_id,
            reason=reason,
            by=self._instance_id,
            over=candidate,
            term=term,
            present_ms=present_ms,
        )
        found = tuple(ref for ref in dict.fromkeys(candidate.targets) if ref in subscribed)
        if not found:
            self._undelivered(order, candidate.targets)  # a row that ends without an event would not be tried again
            return False
        return await self._end(order, candidate.scaler, candidate.targets, found)

    async def subscribers(self, name: str) -> frozenset[str]:
        """Registrations that get such events."""
        return frozenset(await self._subscribed(name))

    async def _scale_down(self, order: ScaleDownOrder, scaler: ScalerName, targets: Sequence[str]) -> bool:
        row = await self._store.spawn(order.agent_id)
        asked = targets if row is None else row.provisioning_targets or targets
        return await self._end(order, scaler, asked, await self._among(SCALE_DOWN, asked))

    async def _end(
        self, order: ScaleDownOrder, scaler: ScalerName, asked: Sequence[str], found: tuple[str, ...]
    ) -> bool:
        """End a provision and tell those of `asked` that were found; without any, its row ends all the same."""
        event = self._scale_down_event(order, scaler, found) if found else None
        ended = await self._store.end_provision(order, event)
        if ended is None:
            return False
        for run_id in ended.runs:
            await self._cancel_run(run_id, f"{order.agent_id} is not wanted any more")
        if event is None:
            self._undelivered(order, asked)
            return False
        if ended.emitted:
            self._metrics.scale_down_emitted.labels(scaler=scaler, reason=order.reason).inc()
            self._written(event)
        return ended.emitted > 0

    def _scale_down_event(self, order: ScaleDownOrder, scaler: ScalerName, targets: tuple[str, ...]) -> NewEvent:
        emission_id = self._new_id()
        payload = ScaleDown(scaler_name=scaler, agent_id=order.agent_id, reason=order.reason, request_id=emission_id)
        return NewEvent(
            emission_id=emission_id,
            name=SCALE_DOWN,
            targets=targets,
            payload=to_payload(payload),
            subject=order.agent_id,
        )

    def _undelivered(self, order: ScaleDownOrder, targets: Sequence[str]) -> None:
        self._metrics.event_unmatched.inc()
        emit(
            Event.SCALE_DOWN_UNDELIVERED,
            level=logging.ERROR,
            agent_id=order.agent_id,
            targets=list(targets),
            error=_nobody(SCALE_DOWN, targets),
        )

    async def _among(self, name: str, targets: Sequence[str]) -> tuple[str, ...]:
        found = [await self._store.registration(ref) for ref in dict.fromkeys(targets)]
        return tuple(each.ref for each in found if each is not None and name in each.events)

    async def _subscribed(self, name: str) -> tuple[str, ...]:
        registrations = await self._store.registrations(limit=REGISTRATIONS_MAX)
        return tuple(each.ref for each in registrations if name in each.events)

    async def _depth_after(self, cause: EventId) -> int:
        event = await self._store.event(EventId(f"{cause}-0"))
        if event is None:
            raise NotFound(f"no event {cause}")
        return event.chain_depth + 1

    def _written(self, event: NewEvent) -> None:
        if not event.targets:
            self._metrics.event_unmatched.inc()
        emit(
            Event.EVENT_EMITTED,
            emission_id=event.emission_id,
            name=event.name,
            agent_id=event.subject,
            targets=list(event.targets),
        )
        self.emitted()

    def _new_id(self) -> EventId:
        return EventId(f"evt-{self._entropy.hex(8)}")


def _nobody(name: str, targets: Sequence[str]) -> str:
    return (
        f"nobody subscribes to {name} among the targets {', '.join(targets) or '(none)'}; "
        "`kici workflow list` shows who subscribes to what, `kici workflow apply` adds one"
    )
