"""How a running microVM is related to what we know: tracked, orphaned, or not to be told.

Anything that tracks a machine makes it tracked.  Of the rest, one that is provably our VMM is an orphan, which an
operator may stop; one that only looks like it is listed and never stopped.  While a coordinator that we know of is
away, nobody is an orphan: the missing one may be who knows its agent.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from kici.domain.ids import AgentId, Instant, ScalerName

ORPHANED: Final = (
    "no backend tracks it, no spawn is under way for it, no agent of it is registered, no job is bound to it"
)
ABSENT: Final = "coordinators that may know it are away: {names}; `kici-admin peer forget` if they are gone for good"


class VmStatus(StrEnum):
    TRACKED = "tracked"
    ORPHANED = "orphaned"
    """Nobody owns it, and it is provably ours: it may be stopped."""
    UNVERIFIED = "unverified"
    """It cannot be proven that it is nobody's, or that it is ours."""


class Tracker(StrEnum):
    """Who knows a machine."""

    BACKEND = "backend"
    SPAWNING = "spawning"
    REGISTERED = "registered"
    BOUND_JOB = "bound-job"


class StopOutcome(StrEnum):
    STOPPED = "stopped"
    TRACKED = "tracked"
    UNVERIFIED = "unverified"
    NOT_LIVE = "not-live"
    NOT_FOUND = "not-found"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveVmSeen:
    """A machine whose process runs on this host."""

    vm_id: AgentId
    scaler: ScalerName
    pid: int
    started_at: Instant
    folder: str
    is_confirmed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveVm:
    """The same, and what we make of it."""

    seen: LiveVmSeen
    status: VmStatus
    trackers: tuple[Tracker, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    vm_id: AgentId
    outcome: StopOutcome
    detail: str = ""
    pid: int | None = None


def classify(seen: LiveVmSeen, trackers: Iterable[Tracker]) -> LiveVm:
    known = tuple(dict.fromkeys(trackers))
    if known:
        return LiveVm(seen=seen, status=VmStatus.TRACKED, trackers=known, why=f"tracked: {', '.join(known)}")
    if seen.is_confirmed:
        return LiveVm(seen=seen, status=VmStatus.ORPHANED, trackers=(), why=ORPHANED)
    return LiveVm(seen=seen, status=VmStatus.UNVERIFIED, trackers=(), why=seen.detail or "its identity is not proven")


def with_absent(vm: LiveVm, absent: Iterable[str]) -> LiveVm:
    """The same while these coordinators are away."""
    names = ", ".join(sorted(absent))
    if not names or vm.status is not VmStatus.ORPHANED:
        return vm
    return replace(vm, status=VmStatus.UNVERIFIED, why=ABSENT.format(names=names))


def once(found: Iterable[LiveVmSeen]) -> list[LiveVmSeen]:
    """Each directory once: scalers that share a base all list what is in it."""
    return list({each.folder: each for each in found}.values())


def is_name(vm_id: str) -> bool:
    """Whether an id that somebody typed can be the name of one directory."""
    return vm_id not in ("", ".", "..") and "/" not in vm_id and "\0" not in vm_id
