"""What of a host's microVMs is left over and nobody's, so that it may go.

Only the dead are swept: a machine whose process runs, proven ours or not, is left to whoever tracks it, or to an
operator (`decide.classify`).  A machine has a record in our data directory from before anything of it exists, so a
directory without one was made by somebody else: another coordinator that shares the folder, or one whose data
directory is lost.  It goes once it has been dead for so long that nobody can be in the midst of making it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Final

from kici.decide.isolate import name_of
from kici.decide.microvm import is_tap, is_vm_id, tap_of
from kici.domain.ids import AgentId, Instant

FOREIGN_DEAD_MS: Final = 3_600_000
"""Age at which a dead machine without a record of ours goes; making and ending one takes minutes at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSight:
    """One look at a host, by one scaler."""

    recorded: frozenset[AgentId]
    """Machines of this scaler that have a record."""
    others: frozenset[AgentId] = frozenset()
    """Machines that have a record of another scaler of this installation."""
    folders: Mapping[AgentId, Instant] = field(default_factory=dict)
    """Machines with a directory in this scaler's folder, and when it was made."""
    rows: Mapping[AgentId, IPv4Address] = field(default_factory=dict)
    """Addresses that this scaler holds."""
    taps: Collection[str] = ()
    """Interfaces on our bridge."""
    admitted: Mapping[str, str] = field(default_factory=dict)
    """Addresses with packet filter rules on our bridge, and whose they are (as in names of chains)."""
    tracked: frozenset[AgentId] = frozenset()
    live: frozenset[AgentId] = frozenset()
    """Whose process runs, confirmed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    machines: tuple[AgentId, ...]
    """Dead machines to take down: rules, interface, directory, address, record."""
    taps: tuple[str, ...]
    """Interfaces of nobody."""
    rules: tuple[tuple[str, str], ...]
    """Addresses with rules of nobody, and whose rules they were."""


def plan_sweep(sight: HostSight, now: Instant) -> SweepPlan:
    kept = sight.tracked | sight.live | sight.others
    foreign = {
        vm_id
        for vm_id, made_at in sight.folders.items()
        if vm_id not in sight.recorded and is_vm_id(vm_id) and now - made_at > FOREIGN_DEAD_MS
    }
    dead = (sight.recorded | foreign | frozenset(sight.rows)) - kept
    named = kept | sight.recorded | frozenset(sight.rows) | frozenset(sight.folders)
    taps = {tap_of(vm_id) for vm_id in named}
    owners = {name_of(vm_id) for vm_id in named}
    return SweepPlan(
        machines=tuple(sorted(dead)),
        taps=tuple(sorted(tap for tap in sight.taps if is_tap(tap) and tap not in taps)),
        rules=tuple(sorted((address, owner) for address, owner in sight.admitted.items() if owner not in owners)),
    )
