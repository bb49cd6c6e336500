"""Starting microVMs from the memory of one that was warmed up: when that may be done, and what makes each its own.

A snapshot is made of a guest that knows nothing yet.  Whoever is restored from it renews what all of them would share
otherwise (`RENEWALS`) before its agent reads a credential.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final

from kici.decide.disk import FREE_BYTES_MIN, size
from kici.decide.microvm import Bridge, Guest, Machine
from kici.domain.ids import AgentId, Instant, ScalerName

FOLDER: Final = ".snapshots"
"""Of all scalers that share a base."""
FORMAT: Final = 1
"""Of what a guest is told and of what lies in a snapshot's folder; another one makes all snapshots anew."""
RENEWALS: Final = frozenset({"address", "clock", "entropy", "mac"})
WARM: Final = "kici-init: warm"
"""What a guest that waits to be stopped prints, and then what it can renew."""
WARM_DOCUMENT: Final[dict[str, object]] = {"latest": {"meta-data": {"kici-warm": "1"}}}
"""All that such a guest is told."""
ADDRESS: Final = IPv4Address("169.254.1.2")
"""Of a guest that is warmed up: enough to reach the metadata service, and on a link that is down."""
ENTROPY_BYTES: Final = 64
ABANDONED_MS: Final = 86_400_000
"""Age of a scaler's folder that nobody has touched at which it is nobody's; each sweep touches its own."""
SPOILED_MAX: Final = 2
"""Snapshots of the same make that may go wrong before none is made any more."""
_KEY_DIGITS: Final = 16
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """All that a snapshot depends on."""

    labels: tuple[str, ...]
    images: tuple[str, ...]
    """Which files they are and when they were written: kernel, initial RAM disk, root file system."""
    vmm: str
    """Which program it is, and which run of the host's kernel."""
    machine: Machine
    version: str
    """Ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """What a restored guest gets that no other has."""

    entropy: bytes
    now: Instant


def make_key(make: Make) -> str:
    """The same for the same make only."""
    machine = (make.machine.vcpus, make.machine.mem_mib, make.machine.overlay_mib)
    return _digest(FORMAT, make.labels, make.images, make.vmm, machine, make.version)[:_KEY_DIGITS]


def owner_key(scaler: ScalerName, data_dir: str) -> str:
    """Name of the folder of one scaler of one installation; others may share its base."""
    return _digest(scaler, data_dir)[:_KEY_DIGITS]


def template_id(owner: str, key: str) -> AgentId:
    """The machine that a snapshot is made of."""
    return AgentId(f"scaler-firecracker-{_digest(owner, key)[:8]}")


def renewed(document: Mapping[str, object], renewal: Renewal, guest: Guest, bridge: Bridge) -> dict[str, object]:
    """The boot data of a guest that is restored: that of any other, and what it has to renew."""
    latest = document["latest"]
    assert isinstance(latest, dict), document.keys()
    more = {
        "kici-address": str(guest.address),
        "kici-gateway": str(bridge.gateway),
        "kici-netmask": str(bridge.netmask),
        "kici-mac": guest.mac,
        "kici-entropy": renewal.entropy.hex(),
        "kici-now-ms": str(renewal.now),
    }
    return {"latest": {"meta-data": latest["meta-data"] | more}}


def told_warm(lines: Iterable[str]) -> frozenset[str] | None:
    """What a guest that waits can renew; None while it does not wait yet."""
    for line in lines:
        if line.startswith(WARM):
            return frozenset(line.removeprefix(WARM).split())
    return None


def renewal_problem(can: Collection[str]) -> str | None:
    """Why a guest that can renew this much must not be copied."""
    missing = sorted(RENEWALS - set(can))
    return f"its guest cannot renew: {', '.join(missing)}" if missing else None


def hardware_problem(wanted: Machine, snapshot: Machine) -> str | None:
    """Why an order is not served by the snapshot of its label set."""
    if (wanted.vcpus, wanted.mem_mib) == (snapshot.vcpus, snapshot.mem_mib):
        return None
    return (
        f"the job asks for {wanted.vcpus} processors and {wanted.mem_mib} MiB, "
        f"and the snapshot has {snapshot.vcpus} and {snapshot.mem_mib}"
    )


def space_problem(machine: Machine, free_bytes: int) -> str | None:
    """Why there is no room for another snapshot.  Its drive takes room only where it was written on."""
    needed = machine.mem_mib * _MIB + FREE_BYTES_MIN
    return f"{size(needed)} are needed on the disk, {size(free_bytes)} are free" if free_bytes < needed else None


def abandoned(folders: Mapping[str, Instant], mine: str, now: Instant) -> tuple[str, ...]:
    """Folders of scalers that are gone."""
    return tuple(sorted(name for name, at in folders.items() if name != mine and now - at > ABANDONED_MS))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
