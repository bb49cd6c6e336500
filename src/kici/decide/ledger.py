"""The ledger of a machine pool: what several coordinators of one host hold of it, and whether one more agent fits.

A row lives as long as its agent, not as long as whoever wrote it.  For a process the host itself tells, by a lock
that the agent holds; a container or a machine is believed until its owner takes the row back or the host is
started anew.  What the host tells is an input here (`Life`), so every rule is a plain function of a snapshot.

Each instance declares its own cap for a pool.  The smallest among those that run now is in force: whoever allows
less knows of something that the others do not.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeVar

from kici.decide.admit import NO_CAP, NO_USAGE, Cap, Usage, over
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.resources import Amount
from kici.domain.verdict import AtCap, CapName

N = TypeVar("N", int, float)

BOOT_TIME: Final = "boot-time:"
"""Begins the name of a boot that is only known by its moment, in seconds."""
BOOT_TIME_DRIFT_SECONDS: Final = 60
"""By how much that moment may move while the clock of the host is being set."""


class Kind(StrEnum):
    """How a compute proves that it lives."""

    PROCESS = "process"
    """By a lock on its file, which it inherited."""
    CONTAINER = "container"
    VM = "vm"
    """As a container: not at all, so its owner is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one agent holds of a pool."""

    instance_id: InstanceId
    """Who made it, and takes the row back."""
    agent_id: AgentId
    requests: Amount
    reserved_at: Instant
    boot: str
    """Which run of the host it belongs to."""
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One pool at one moment."""

    caps: Mapping[InstanceId, Cap]
    """What each instance declares."""
    rows: tuple[Row, ...] = ()

    @property
    def cap(self) -> Cap:
        """The one in force."""
        return smallest(self.caps.values())

    @property
    def is_disputed(self) -> bool:
        return len(set(self.caps.values())) > 1

    @property
    def usage(self) -> Usage:
        used = NO_USAGE
        for row in self.rows:
            used = used.plus(row.requests)
        return used


EMPTY: Final = Ledger(caps={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of an attempt to reserve."""

    ledger: Ledger
    """As it is afterwards."""
    refused: AtCap | None = None
    """None: reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What the host tells."""

    boot: str
    instances: Set[InstanceId]
    """Those that run."""
    agents: Set[AgentId]
    """Those whose lock is held."""


def kind_of(backend_type: str, *, runs_job_image: bool) -> Kind:
    """What a scaler of this type makes.  `runs_job_image`: from a label set whose agents are containers."""
    if backend_type == "bare-metal" and not runs_job_image:
        return Kind.PROCESS
    return Kind.CONTAINER if backend_type in ("bare-metal", "container") else Kind.VM


def living(ledger: Ledger, life: Life) -> Ledger:
    """Without rows of agents that are gone and caps of instances that do not run."""
    return Ledger(
        caps={instance: cap for instance, cap in ledger.caps.items() if instance in life.instances},
        rows=tuple(row for row in ledger.rows if is_alive(row, life)),
    )


def is_alive(row: Row, life: Life) -> bool:
    if row.kind is Kind.PROCESS:
        return row.agent_id in life.agents
    return is_same_boot(row.boot, life.boot)


def is_same_boot(one: str, other: str) -> bool:
    if one.startswith(BOOT_TIME) and other.startswith(BOOT_TIME):
        moments = [int(boot.removeprefix(BOOT_TIME)) for boot in (one, other)]
        return abs(moments[0] - moments[1]) <= BOOT_TIME_DRIFT_SECONDS
    return one == other


def declare(ledger: Ledger, instance: InstanceId, cap: Cap | None) -> Ledger:
    """With this cap of an instance, in place of the one it declared before; None: it shares the pool no longer."""
    others = {other: declared for other, declared in ledger.caps.items() if other != instance}
    return replace(ledger, caps=others if cap is None else {**others, instance: cap})


def add(ledger: Ledger, row: Row) -> Ledger:
    """With a row, whatever the cap says.  One row for each agent of an instance."""
    return replace(ledger, rows=(*without(ledger, row.instance_id, {row.agent_id}).rows, row))


def reserve(ledger: Ledger, row: Row, *, cap: Cap, pool: str, scaler: ScalerName) -> Outcome:
    """With one more row, or why it does not fit; `cap` is what its instance declares.  Reaching a cap is allowed."""
    declared = declare(ledger, row.instance_id, cap)
    others = without(declared, row.instance_id, {row.agent_id})
    refused = refusal(others, row.requests, pool=pool, scaler=scaler)
    return Outcome(ledger=add(declared, row)) if refused is None else Outcome(ledger=declared, refused=refused)


def restore(ledger: Ledger, instance: InstanceId, rows: Sequence[Row]) -> Ledger:
    """With these rows of an instance that was started anew, whatever the cap says.

    Of its others only those stay that prove by themselves that they live.
    """
    kept = only(ledger, instance, {row.agent_id for row in rows})
    there = {row.agent_id for row in kept.rows if row.instance_id == instance}
    for row in rows:
        if row.agent_id not in there:
            kept = add(kept, row)
    return kept


def refusal(
    ledger: Ledger, requests: Amount, *, pool: str, scaler: ScalerName, under_way: Usage = NO_USAGE
) -> AtCap | None:
    """Why so much more does not fit; `under_way` is being reserved and not in the ledger yet."""
    used = ledger.usage
    together = Usage(
        agents=used.agents + under_way.agents,
        cpu_micros=used.cpu_micros + under_way.cpu_micros,
        memory_bytes=used.memory_bytes + under_way.memory_bytes,
    )
    return over(CapName.MACHINE_POOL, ledger.cap, together, requests, scaler, pool)


def without(ledger: Ledger, instance: InstanceId, agents: Set[AgentId]) -> Ledger:
    """Without these agents of an instance; those of others are not its to take back."""
    rows = tuple(row for row in ledger.rows if row.instance_id != instance or row.agent_id not in agents)
    return replace(ledger, rows=rows)


def only(ledger: Ledger, instance: InstanceId, agents: Set[AgentId]) -> Ledger:
    """Of the rows of an instance only those of these agents, and those that prove by themselves that they live."""
    rows = tuple(
        row for row in ledger.rows if row.instance_id != instance or row.agent_id in agents or row.kind is Kind.PROCESS
    )
    return replace(ledger, rows=rows)


def smallest(caps: Iterable[Cap]) -> Cap:
    """In each dimension the smallest; one that nobody caps is not capped."""
    cap = NO_CAP
    for other in caps:
        cap = Cap(cpus=_less(cap.cpus, other.cpus), memory_bytes=_less(cap.memory_bytes, other.memory_bytes))
    return cap


def _less(one: N | None, other: N | None) -> N | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
