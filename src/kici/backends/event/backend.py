"""Event backend: no compute of its own.  A scale-up event asks an operator's workflow for a machine, a scale-down
event gives it back; between them the agent's registration is all that is seen of it.

How many there may be is counted for the whole cluster where the spawn is written, not here: what is tracked here
also holds agents that were adopted from another coordinator.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kici.domain.errors import KiciError, Permanent, Retryable, StoreDown
from kici.domain.event import ScaleUp, ScaleUpResources
from kici.domain.ids import AgentId, ScalerName
from kici.domain.labels import canonical
from kici.domain.resources import Amount
from kici.domain.spawn import ScaleDownReason, Spawn, SpawnState
from kici.kit.finish import finish
from kici.observe.events import Event, emit
from kici.ports.backend import Compute, ComputeState, OnEvent, SpawnEvent, SpawnEventType, SpawnOrder
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.events import ClaimCodes, ScaleEvents

SEND_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSettings:
    """One event scaler, as its entry says."""

    scaler: ScalerName
    """Its name: what events and labels call it."""
    sets: tuple[tuple[str, ...], ...]
    """Declared label sets; none serve any other."""
    targets: tuple[str, ...]
    """Registrations that get its events; recorded with each spawn, so a change is for new ones."""
    claim_ttl_ms: int = 300_000
    """How long a claim code may wait for its machine: a boot takes minutes."""
    agent_token_ttl_ms: int = 600_000
    """How long a redeemed token admits its agent for the first time."""


@dataclass(slots=True, eq=False)
class _Tracked:
    compute: Compute
    targets: tuple[str, ...] = field(default=())


class EventBackend:
    def __init__(
        self, *, settings: EventSettings, events: ScaleEvents, claims: ClaimCodes, clock: Clock, entropy: Entropy
    ) -> None:
        self.settings = settings
        """Read at each spawn; a reload replaces it."""
        self._events = events
        self._claims = claims
        self._clock = clock
        self._entropy = entropy
        self._agents: dict[AgentId, _Tracked] = {}
        self._in_doubt: dict[AgentId, tuple[str, ...]] = {}
        """Failed spawns whose scale-up may have left all the same."""

    @property
    def type(self) -> str:
        return "event"

    @property
    def spawns_on_local_host(self) -> bool:
        return False

    def active_count(self) -> int:
        return len(self._agents)

    def computes(self) -> tuple[Compute, ...]:
        return tuple(tracked.compute for tracked in self._agents.values())

    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        settings = self.settings
        report = _Reports(order, on_event, self._clock)
        if not any(set(canonical(declared)) == set(canonical(order.label_set)) for declared in settings.sets):
            error = Permanent(f"scaler {settings.scaler} has no label set [{', '.join(order.label_set)}]")
            report.failed(str(error))
            raise error
        tracked = self._track(order.agent_id, order.label_set, settings.targets)
        try:
            report.tell(SpawnEventType.PROVISIONING, f"asking {', '.join(settings.targets)} for a machine")
            code = await self._claims.register(
                order,
                scaler=settings.scaler,
                ttl_ms=settings.claim_ttl_ms,
                agent_token_ttl_ms=settings.agent_token_ttl_ms,
            )
            self._in_doubt[order.agent_id] = settings.targets
            await self._events.scale_up(
                self._payload(order, code), settings.targets, expires_in_ms=settings.claim_ttl_ms
            )
        except BaseException as error:
            self._untrack(tracked)
            if isinstance(error, KiciError) and _wrote_nothing(error):
                self._in_doubt.pop(order.agent_id, None)
            report.failed(str(error) or "the spawn was called off")
            raise
        self._in_doubt.pop(order.agent_id, None)
        report.tell(SpawnEventType.CONNECTING, "a machine was asked for")
        return tracked.compute

    async def destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        """Give its machine back.  Returns when that is written; what was written will be delivered."""
        tracked = self._agents.pop(agent_id, None)
        doubtful = self._in_doubt.pop(agent_id, None)
        if tracked is None and doubtful is None:
            return
        targets = tracked.targets if tracked is not None else doubtful or ()
        sending = self._events.scale_down(
            agent_id, self.settings.scaler, reason, targets=targets or self.settings.targets
        )
        try:
            await finish(sending, seconds=SEND_SECONDS, what=f"the scale-down of {agent_id}")
        except (KiciError, TimeoutError) as error:
            if tracked is not None:
                self._agents.setdefault(agent_id, tracked)
            else:
                self._in_doubt.setdefault(agent_id, targets)
            raise Retryable(f"the scale-down of {agent_id} could not be written: {error}") from error
        try:
            await self._claims.invalidate(agent_id)
        except KiciError as error:  # the code is good for one token of an agent that is refused
            emit(Event.CLAIM_LEFT, level=logging.WARNING, agent_id=agent_id, error=str(error))

    def mark_registered(self, agent_id: AgentId) -> None:
        tracked = self._agents.get(agent_id)
        if tracked is not None:
            tracked.compute = replace(tracked.compute, registered=True, state=ComputeState.RUNNING)

    def adopt(self, spawn: Spawn) -> None:
        """Take over an agent whose machine another coordinator, or a run before this one, asked for."""
        tracked = self._agents.get(spawn.agent_id) or self._track(
            spawn.agent_id, spawn.label_set, spawn.provisioning_targets
        )
        is_registered = spawn.state is SpawnState.REGISTERED
        tracked.compute = replace(
            tracked.compute, spawned_at=spawn.spawned_at, state=ComputeState.RUNNING, registered=is_registered
        )

    def forget(self, agent_id: AgentId) -> None:
        """Somebody else looks after it now; nothing is sent."""
        self._agents.pop(agent_id, None)
        self._in_doubt.pop(agent_id, None)

    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        """Machines cannot be seen from here: every known one is taken to be alive until its agent or time tells."""
        found = [self._track(agent_id, (), ()).compute for agent_id in sorted(known) if agent_id not in self._agents]
        return tuple(found)

    async def reap_unowned(self, agent_id: AgentId) -> bool:
        return False

    async def cleanup_orphans(self, owned: frozenset[AgentId]) -> int:
        return 0

    async def shutdown_all(self) -> None:
        """A restart must not end the machines: nothing is sent, and what is tracked stays so."""

    async def release_all(self) -> None:
        self._agents.clear()

    def tail(self, agent_id: AgentId, lines: int) -> list[str]:
        return []

    def _payload(self, order: SpawnOrder, code: str) -> ScaleUp:
        return ScaleUp(
            scaler_name=self.settings.scaler,
            agent_id=order.agent_id,
            labels=list(order.labels),
            mandatory_labels=sorted(order.gate),
            resources=_resources(order.limits),
            orchestrator_url=order.orchestrator_url,
            claim_code=code,
            job_id=order.bound_job_id,
            request_id=self._entropy.hex(8),
        )

    def _track(self, agent_id: AgentId, label_set: Sequence[str], targets: tuple[str, ...]) -> _Tracked:
        compute = Compute(
            agent_id=agent_id,
            label_set=tuple(label_set),
            ref=f"machine of {agent_id}",
            spawned_at=self._clock.now(),
            state=ComputeState.SPAWNING,
        )
        self._agents[agent_id] = tracked = _Tracked(compute, targets)
        return tracked

    def _untrack(self, tracked: _Tracked) -> None:
        if self._agents.get(tracked.compute.agent_id) is tracked:
            del self._agents[tracked.compute.agent_id]


class _Reports:
    def __init__(self, order: SpawnOrder, on_event: OnEvent, clock: Clock) -> None:
        self._order = order
        self._on_event = on_event
        self._clock = clock

    def tell(self, kind: SpawnEventType, detail: str) -> None:
        self._on_event(SpawnEvent(agent_id=self._order.agent_id, type=kind, detail=detail, at=self._clock.now()))

    def failed(self, detail: str) -> None:
        self.tell(SpawnEventType.FAILED, detail)


def _wrote_nothing(error: KiciError) -> bool:
    """Whether the failure itself says that no scale-up left."""
    return not isinstance(error, StoreDown)


def _resources(limits: Amount) -> ScaleUpResources | None:
    if not limits.cpus and not limits.memory_bytes:
        return None
    return ScaleUpResources(cpus=limits.cpus or None, mem_bytes=limits.memory_bytes or None)
