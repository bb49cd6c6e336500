"""A worker as a coordinator knows it: its link, its scalers, its caps, and what others have there.

It outlives its connections, and what its scalers hold outlives it being there: a scaler that is not offered any
more stays until its last agent is gone.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kici.config.model import WarmPool
from kici.decide.admit import MICROS, NO_USAGE, HostCaps, ScalerCaps, Usage
from kici.decide.entries import Routable
from kici.decide.microvm import MICROVMS
from kici.decide.pool import Pool, pool_of
from kici.domain.ids import AgentId, ScalerName
from kici.domain.spawn import Spawn
from kici.domain.verdict import AtCap
from kici.domain.worker import local_name, remote_name
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.workers import RemoteScaler, WorkerChannel
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.workers_caps import plus
from kici.services.workers_channel import Channel
from kici.services.workers_offer import host_caps_of, routables_of, scaler_caps_of, warm_of
from kici.wire.worker_messages import (
    CLEARS_BOOT_DATA,
    ComputeGone,
    Held,
    ScalerOffer,
    SpawnProgress,
    WorkerInventory,
    WorkerOffer,
)

FULL_SECONDS: Final = 5.0
"""How long a refusal for want of room is believed, if the worker says nothing new."""

MakeBackend = Callable[[ScalerName, str, WorkerChannel], RemoteScaler]
"""Of the scaler, as its worker calls it, of a type, over a link."""


class RemoteHost:
    """Implements `Elsewhere` for its scalers."""

    def __init__(self, worker_id: str, *, channel: Channel, make_backend: MakeBackend, clock: Clock) -> None:
        self._worker_id = worker_id
        self.channel = channel
        self._make_backend = make_backend
        self._clock = clock
        self._caps = HostCaps(agents_max=0)
        self._runtimes: dict[ScalerName, ScalerRuntime] = {}
        """By the worker's own name of the scaler."""
        self._backends: dict[ScalerName, RemoteScaler] = {}
        self._entries: tuple[Routable, ...] = ()
        self._pools: tuple[Pool, ...] = ()
        self._loads: dict[ScalerName, Usage] = {}
        self._full: dict[ScalerName, tuple[AtCap, float]] = {}
        self.is_leaving = False
        """It is about to stop: it takes no work."""
        self.unexplained: set[AgentId] = set()
        """Agents that it holds and that are not tracked here: other coordinators' or nobody's."""
        self.settling = asyncio.Lock()
        """Held by who takes its agents over: one at a time."""

    # ------------------------------------------------------------------ for admission

    @property
    def worker_id(self) -> str:
        return self._worker_id

    @property
    def caps(self) -> HostCaps:
        return self._caps

    @property
    def names(self) -> frozenset[ScalerName]:
        return frozenset(runtime.name for runtime in self._runtimes.values())

    def others(self, scaler: ScalerName | None) -> Usage:
        if scaler is not None:
            return self._loads.get(scaler, NO_USAGE)
        total = NO_USAGE
        for load in self._loads.values():
            total = plus(total, load)
        return total

    def had_no_room(self, scaler: ScalerName, verdict: AtCap) -> None:
        self._full[scaler] = (verdict, self._clock.monotonic())

    def has_no_room(self, scaler: ScalerName) -> AtCap | None:
        verdict, at = self._full.get(scaler, (None, 0.0))
        return verdict if self._clock.monotonic() - at < FULL_SECONDS else None

    # ------------------------------------------------------------------ its scalers

    @property
    def name(self) -> str:
        return self.channel.name

    @property
    def runtimes(self) -> Iterator[ScalerRuntime]:
        yield from self._runtimes.values()

    @property
    def entries(self) -> tuple[Routable, ...]:
        """Label sets that take work now."""
        is_there = self.channel.is_linked and not self.is_leaving
        return self._entries if is_there else ()

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Warm pools that its file wants, and that can be filled now."""
        is_there = self.channel.is_linked and not self.is_leaving
        return self._pools if is_there else ()

    def offered(self, offer: WorkerOffer) -> None:
        """What it offers from now on."""
        self.is_leaving = offer.is_draining
        self._caps = host_caps_of(offer)
        entries: list[Routable] = []
        for scaler in offer.scalers:
            runtime = self._runtime(ScalerName(scaler.name), scaler.backend_type)
            runtime.name = remote_name(self.name, scaler.name)
            _settle(runtime, scaler)
            self._backends[ScalerName(scaler.name)].offered([each.label_set for each in scaler.sets], scaler.max_agents)
            if self._is_sound(scaler):
                entries.extend(routables_of(offer, scaler, runtime.name))
        self._entries = tuple(entries)
        wanted = [pool_of(entry, self._wanted(entry.scaler)) for entry in entries]
        self._pools = tuple(pool for pool in wanted if isinstance(pool, Pool))
        offered = {ScalerName(scaler.name) for scaler in offer.scalers}
        for name in [name for name in self._runtimes if name not in offered and not self._has_agents(name)]:
            del self._runtimes[name], self._backends[name]

    def loaded(self, loads: Mapping[str, Usage]) -> None:
        """What agents of other coordinators hold; and whatever was full may be so no longer."""
        self._loads = {remote_name(self.name, name): usage for name, usage in loads.items()}
        self._full.clear()

    def runtime_of(self, row: Spawn) -> ScalerRuntime:
        """The scaler that looks after a recorded agent, whether it is offered (still, or yet) or not."""
        name = local_name(row.scaler)
        if not self.channel.name:
            self.channel.name = row.scaler.partition("/")[0]
        return self._runtime(name, row.backend_type)

    def backend_of(self, row: Spawn) -> RemoteScaler:
        _ = self.runtime_of(row)
        return self._backends[local_name(row.scaler)]

    # ------------------------------------------------------------------ what it tells

    def compared(self, inventory: WorkerInventory) -> None:
        """It is back: compare what it holds with what is tracked here."""
        gone = {AgentId(one.agent_id): one.how for one in inventory.gone}
        held: dict[ScalerName, dict[AgentId, Held]] = {}
        for one in inventory.agents:
            held.setdefault(ScalerName(one.scaler), {})[AgentId(one.agent_id)] = one
        tracked: set[AgentId] = set()
        for name, backend in self._backends.items():
            backend.compared(held.get(name, {}), gone)
            tracked |= {compute.agent_id for compute in backend.computes()}
        self.unexplained = {AgentId(one.agent_id) for one in inventory.agents} - tracked

    def progressed(self, progress: SpawnProgress) -> None:
        for backend in self._backends.values():
            if backend.progressed(progress):
                return

    def ended(self, gone: ComputeGone) -> bool:
        """Whether the agent is one of ours."""
        self.unexplained.discard(AgentId(gone.agent_id))
        return any(backend.ended(AgentId(gone.agent_id), gone.how) for backend in self._backends.values())

    async def reap(self, agent_id: AgentId) -> bool:
        """End an agent that nobody owns.  Raises a `KiciError` when that could not be confirmed."""
        backend = next(iter(self._backends.values()), None)
        return backend is not None and await backend.reap_unowned(agent_id)

    # ------------------------------------------------------------------ how

    def _runtime(self, name: ScalerName, backend_type: str) -> ScalerRuntime:
        runtime = self._runtimes.get(name)
        if runtime is None:
            backend = self._backends[name] = self._make_backend(name, backend_type, self.channel)
            known = remote_name(self.name, name)
            runtime = self._runtimes[name] = ScalerRuntime(
                name=known,
                backend=backend,
                caps=ScalerCaps(scaler=known, agents_max=0),
                orchestrator_url="",
                elsewhere=self,
            )
        return runtime

    def _wanted(self, name: ScalerName) -> WarmPool:
        return self._runtimes[local_name(name)].warm_pool

    def _is_sound(self, scaler: ScalerOffer) -> bool:
        """Whether jobs may be given to agents of a scaler."""
        if scaler.backend_type != MICROVMS or self.channel.protocol >= CLEARS_BOOT_DATA:
            return True
        why = f"it does not say when the boot data of microVMs of scaler {scaler.name} is cleared; update it"
        emit(Event.WORKER_REFUSED, level=logging.WARNING, worker_id=self._worker_id, name=self.name, reason=why)
        return False

    def _has_agents(self, name: ScalerName) -> bool:
        return self._backends[name].active_count() > 0


def usage_of(*, agents: int, cpus: float, memory_bytes: int) -> Usage:
    return Usage(agents=agents, cpu_micros=round(cpus * MICROS), memory_bytes=memory_bytes)


def _settle(runtime: ScalerRuntime, offer: ScalerOffer) -> None:
    runtime.caps = scaler_caps_of(offer, runtime.name)
    runtime.widen(offer.spawns_at_once)
    runtime.reuse_idle_seconds = offer.reuse_idle_seconds
    runtime.reuse_max_jobs = offer.reuse_max_jobs
    runtime.warm_pool = warm_of(offer)
