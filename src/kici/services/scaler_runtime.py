"""One configured scaler at work: its backend, limits and place in the configuration."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from kici.config.model import WarmPool
from kici.decide.admit import Book, HostCaps, ScalerCaps, Usage
from kici.decide.route import Router
from kici.domain.ids import ScalerName
from kici.domain.resources import NOTHING, Amount
from kici.domain.verdict import AtCap
from kici.observe.metrics import ReservedBy
from kici.ports.backend import Backend
from kici.ports.clock import Clock

COUNT_SECONDS: Final = 0.02


class Elsewhere(Protocol):
    """The host of a worker: its scalers are under its caps, and other coordinators may have agents there."""

    @property
    def worker_id(self) -> str: ...

    @property
    def caps(self) -> HostCaps: ...

    @property
    def names(self) -> frozenset[ScalerName]:
        """Its scalers, as they are called here."""
        ...

    def others(self, scaler: ScalerName | None) -> Usage:
        """What agents of other coordinators hold, of one scaler or (None) of the whole host."""
        ...

    def had_no_room(self, scaler: ScalerName, verdict: AtCap) -> None:
        """It refused a spawn that we thought there was room for."""
        ...

    def has_no_room(self, scaler: ScalerName) -> AtCap | None:
        """What it said a moment ago when it refused one, if nothing has changed there since."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class ScalerRuntime:
    """What the manager needs of one entry of the configuration."""

    name: ScalerName
    backend: Backend
    caps: ScalerCaps
    orchestrator_url: str
    spawns_at_once: int = 8
    machine_pool: str | None = None
    provisioning_targets: tuple[str, ...] = ()
    reuse_idle_seconds: float | None = None
    reuse_max_jobs: int | None = None
    warm_pool: WarmPool = field(default_factory=WarmPool)
    """Idle agents that its file wants for each label set."""
    elsewhere: Elsewhere | None = None
    """The worker whose host it is on; None: this host."""
    gateway: asyncio.Semaphore = field(init=False)
    """Lets `spawns_at_once` spawns run, first come first served."""

    def __post_init__(self) -> None:
        self.gateway = asyncio.Semaphore(max(1, self.spawns_at_once))

    def widen(self, spawns_at_once: int) -> None:
        """A reload changed the width: spawns in line keep their old semaphore."""
        if spawns_at_once != self.spawns_at_once:
            self.spawns_at_once = spawns_at_once
            self.gateway = asyncio.Semaphore(max(1, spawns_at_once))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All scalers of one configuration, as one value: a reload makes a new one."""

    runtimes: Mapping[ScalerName, ScalerRuntime]
    router: Router
    caps: HostCaps

    remote: frozenset[ScalerName] = frozenset()
    """Those that are on the hosts of workers."""

    def active_total(self) -> int:
        """Computes of this host's scalers."""
        return sum(runtime.backend.active_count() for runtime in self.runtimes.values() if runtime.elsewhere is None)


class ActiveTotal:
    """Computes over all scalers, as counted within the last moment: asking a thousand backends at each request would
    cost more than the rest of it.  Spawns since then are in the book; a refusal must count anew."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._fleet: Fleet | None = None
        self._total = 0
        self._until = 0.0

    def read(self, fleet: Fleet) -> int:
        now = self._clock.monotonic()
        if fleet is not self._fleet or now >= self._until:
            self._fleet, self._total, self._until = fleet, fleet.active_total(), now + COUNT_SECONDS
        return self._total

    def forget(self) -> None:
        self._fleet = None


def reserved(book: Book, fleet: Fleet) -> dict[ReservedBy, Amount]:
    """What the reservations hold, by whom they are shown for."""
    used: dict[ReservedBy, Amount] = {}
    for reservation in book.reservations.values():
        runtime = fleet.runtimes.get(reservation.scaler)
        by = ReservedBy(reservation.scaler, runtime.backend.type if runtime else "", reservation.machine_pool or "")
        before, more = used.get(by, NOTHING), reservation.shape.requests
        used[by] = Amount(cpus=before.cpus + more.cpus, memory_bytes=before.memory_bytes + more.memory_bytes)
    return used
