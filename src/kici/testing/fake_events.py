"""Events, workflows and claim codes behind the HTTP API, in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kici.decide.events import emission_fault
from kici.domain.access import Actor
from kici.domain.claim import CONSUMED, INVALID
from kici.domain.errors import Denied, NoCapacity, NotFound
from kici.domain.event import EventId, EventState, NewEvent, Payload, StoredEvent
from kici.domain.ids import AgentId, Instant
from kici.domain.spawn import Spawn
from kici.domain.workflow import Registration, read_workflow
from kici.ports.event_store import EventFilter
from kici.services.claim_store import Redeemed
from kici.services.event_emitter import Emitted

START = Instant(1_750_000_000_000)


@dataclass
class FakeWorkflows:
    rows: dict[str, Registration] = field(default_factory=dict)

    async def apply(self, raw: object, actor: Actor) -> Registration:
        ref, kind, events = read_workflow(raw)
        assert isinstance(raw, dict)
        self.rows[ref] = Registration(
            ref=ref, kind=kind, events=events, document=raw, applied_by=actor.name, updated_at=START
        )
        return self.rows[ref]

    async def workflows(self) -> list[Registration]:
        return [self.rows[ref] for ref in sorted(self.rows)]

    async def delete(self, ref: str) -> None:
        if self.rows.pop(ref, None) is None:
            raise NotFound(f"no workflow {ref}")


@dataclass
class FakeEvents:
    workflows: FakeWorkflows
    rows: list[StoredEvent] = field(default_factory=list)
    spawns: list[Spawn] = field(default_factory=list)

    async def emit(
        self,
        name: str,
        payload: Payload,
        *,
        source: str,
        targets: Sequence[str] | None,
        caused_by: EventId | None,
    ) -> Emitted:
        fault = emission_fault(name, 0)
        if fault is not None:
            raise Denied(fault)
        found = tuple(ref for ref, row in self.workflows.rows.items() if name in row.events)
        found = tuple(ref for ref in found if targets is None or ref in targets)
        emission_id = EventId(f"evt-{len(self.rows)}")
        event = NewEvent(emission_id=emission_id, name=name, targets=found, payload=payload, source=source)
        self.rows += [self.row(event, place) for place in range(len(found) or 1)]
        return Emitted(emission_id=emission_id, targets=found)

    def row(self, event: NewEvent, place: int) -> StoredEvent:
        return StoredEvent(
            seq=len(self.rows) + place + 1,
            id=event.id_for(place),
            emission_id=event.emission_id,
            name=event.name,
            subject=event.subject,
            source=event.source,
            chain_depth=event.chain_depth,
            target=event.targets[place] if event.targets else "",
            state=EventState.PENDING if event.targets else EventState.UNMATCHED,
            payload=event.payload,
            sealed=None,
            created_at=START,
            expires_at=None,
            due_at=START,
        )

    async def events(self, which: EventFilter) -> list[StoredEvent]:
        found = [
            row
            for row in reversed(self.rows)
            if which.state in (None, row.state)
            and which.name in (None, row.name)
            and (which.before_seq is None or row.seq < which.before_seq)
        ]
        return found[: which.limit]

    async def event(self, event_id: EventId) -> StoredEvent | None:
        return next((row for row in self.rows if row.id == event_id), None)

    async def revive(self, event_id: EventId) -> bool:
        for place, row in enumerate(self.rows):
            if row.id == event_id and row.state is EventState.DEAD and row.dead_reason != "withdrawn":
                self.rows[place] = replace(row, state=EventState.PENDING, dead_reason=None)
                return True
        return False

    async def provisions(self) -> list[Spawn]:
        return self.spawns

    async def discard(self, event_id: EventId) -> bool:
        kept = [row for row in self.rows if row.id != event_id or row.state is not EventState.DEAD]
        discarded = len(kept) < len(self.rows)
        self.rows = kept
        return discarded


@dataclass
class FakeClaims:
    good: dict[str, AgentId] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    is_tired: bool = False
    """Refuse everybody, as after too many guesses."""

    async def redeem(self, code: str, *, caller: str) -> Redeemed:
        if self.is_tired:
            raise NoCapacity("too many claim codes were refused")
        if code in self.used:
            raise Denied(CONSUMED)
        if code not in self.good:
            raise Denied(INVALID)
        self.used.add(code)
        return Redeemed(agent_token="kat_1", agent_id=self.good[code], orchestrator_url="ws://x/ws", labels=("cloud",))
