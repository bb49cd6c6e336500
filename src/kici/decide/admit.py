"""Admission: may one more agent of a scaler start, under the caps of the scaler and of the host.

Counts compare with the larger of two numbers, never their sum: an agent has a reservation from its request to
its release, and an active record in the backend from the start of its spawn to its end, so the two overlap.  The
sum would count it twice; active records alone would let a burst through, since a spawn counts there only after
the decision.

Usage is exact: cpus are whole millionths, so that adding and taking away in any order ends at zero.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from kici.domain.ids import AgentId, ScalerName
from kici.domain.resources import Amount
from kici.domain.spawn import Reservation
from kici.domain.verdict import AtCap, CapName, Dimension

MICROS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """Most that may be in use at once.  None: this dimension never refuses."""

    cpus: float | None = None
    memory_bytes: int | None = None


NO_CAP: Final = Cap()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCaps:
    """Caps over all scalers of this instance."""

    agents_max: int
    resources: Cap = NO_CAP
    machine_pools: Mapping[str, Cap] = field(default_factory=dict)
    """What this instance declares for each pool that it shares with others of its host; see `decide.ledger`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerCaps:
    scaler: ScalerName
    agents_max: int
    resources: Cap = NO_CAP
    is_cluster_counted: bool = False
    """The store counts this scaler's agents over all instances under its own lock; the count here decides nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """Computes that the backends track, retiring scalers included."""

    here: int
    """Of the scaler in question."""
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a number of reservations hold together."""

    agents: int = 0
    cpu_micros: int = 0
    memory_bytes: int = 0

    def plus(self, amount: Amount) -> "Usage":
        return Usage(
            agents=self.agents + 1,
            cpu_micros=self.cpu_micros + _micros(amount.cpus),
            memory_bytes=self.memory_bytes + amount.memory_bytes,
        )

    def with_others(self, agents: int) -> "Usage":
        """Beside agents that exist without a reservation."""
        return replace(self, agents=self.agents + agents) if agents else self

    def minus(self, amount: Amount) -> "Usage":
        """Never below zero."""
        return Usage(
            agents=max(0, self.agents - 1),
            cpu_micros=max(0, self.cpu_micros - _micros(amount.cpus)),
            memory_bytes=max(0, self.memory_bytes - amount.memory_bytes),
        )


NO_USAGE: Final = Usage()


def admit(
    requests: Amount, *, scaler: ScalerCaps, host: HostCaps, here: Usage, total: Usage, active: Active
) -> AtCap | None:
    """The first cap that one more agent with these requests would exceed; None: admitted.

    `here` and `total` are what the reservations of the scaler and of the host hold.  Reaching a cap exactly is allowed.
    """
    in_host = max(active.total, total.agents)
    if in_host >= host.agents_max:
        return _at_count(CapName.GLOBAL_MAX_AGENTS, in_host, host.agents_max, scaler.scaler)
    in_scaler = max(active.here, here.agents)
    if not scaler.is_cluster_counted and in_scaler >= scaler.agents_max:
        return _at_count(CapName.MAX_AGENTS, in_scaler, scaler.agents_max, scaler.scaler)
    return over(CapName.RESOURCE_CAP, scaler.resources, here, requests, scaler.scaler) or over(
        CapName.GLOBAL_RESOURCE_CAP, host.resources, total, requests, scaler.scaler
    )


def fits_alone(requests: Amount, *, scaler: ScalerCaps, host: HostCaps, machine_pool: str | None) -> bool:
    """Whether an agent with these requests would be admitted if there were no other: making room can help."""
    pool = NO_CAP if machine_pool is None else host.machine_pools.get(machine_pool, NO_CAP)
    none = Active(here=0, total=0)
    refused = admit(requests, scaler=scaler, host=host, here=NO_USAGE, total=NO_USAGE, active=none)
    return refused is None and over(CapName.MACHINE_POOL, pool, NO_USAGE, requests, scaler.scaler) is None


def is_burst_refusal(refusal: AtCap, active: Active, *, here: Usage, total: Usage) -> bool:
    """Whether reservations not yet active made the difference: worth a warning; a plainly full pool is not."""
    match refusal.cap:
        case CapName.MAX_AGENTS:
            return here.agents > active.here
        case CapName.GLOBAL_MAX_AGENTS:
            return total.agents > active.total
        case _:
            return False


class Book:
    """The reservations of one instance, and what they add up to.  Every call is one step and safe to repeat."""

    def __init__(self, reservations: Iterable[Reservation] = ()) -> None:
        self._reservations: dict[AgentId, Reservation] = {}
        self._usage: dict[ScalerName, Usage] = {}
        self._total = NO_USAGE
        for reservation in reservations:
            self.reserve(reservation)

    @property
    def total(self) -> Usage:
        return self._total

    @property
    def reservations(self) -> Mapping[AgentId, Reservation]:
        return MappingProxyType(self._reservations)

    def of(self, scaler: ScalerName) -> Usage:
        return self._usage.get(scaler, NO_USAGE)

    def reserve(self, reservation: Reservation) -> bool:
        """False: this agent has one already, and it stands."""
        if reservation.agent_id in self._reservations:
            return False
        self._reservations[reservation.agent_id] = reservation
        self._usage[reservation.scaler] = self.of(reservation.scaler).plus(reservation.shape.requests)
        self._total = self._total.plus(reservation.shape.requests)
        return True

    def release(self, agent_id: AgentId) -> Reservation | None:
        """What the agent held; None: nothing (any more)."""
        reservation = self._reservations.pop(agent_id, None)
        if reservation is None:
            return None
        self._usage[reservation.scaler] = self.of(reservation.scaler).minus(reservation.shape.requests)
        self._total = self._total.minus(reservation.shape.requests)
        return reservation


def _at_count(cap: CapName, used: int, limit: int, scaler: ScalerName) -> AtCap:
    return AtCap(cap=cap, dimension=Dimension.AGENTS, used=used, requested=1, limit=limit, scaler=scaler)


def over(
    name: CapName, cap: Cap, used: Usage, requests: Amount, scaler: ScalerName, pool: str | None = None
) -> AtCap | None:
    """The dimension in which so much more would exceed a cap; None: it fits.  Reaching it exactly is allowed."""
    if cap.cpus is not None and used.cpu_micros + _micros(requests.cpus) > _micros(cap.cpus):
        return AtCap(
            cap=name,
            dimension=Dimension.CPUS,
            used=used.cpu_micros / MICROS,
            requested=requests.cpus,
            limit=cap.cpus,
            scaler=scaler,
            pool=pool,
        )
    if cap.memory_bytes is not None and used.memory_bytes + requests.memory_bytes > cap.memory_bytes:
        return AtCap(
            cap=name,
            dimension=Dimension.MEMORY,
            used=used.memory_bytes,
            requested=requests.memory_bytes,
            limit=cap.memory_bytes,
            scaler=scaler,
            pool=pool,
        )
    return None


def _micros(cpus: float) -> int:
    return round(cpus * MICROS)
