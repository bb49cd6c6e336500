"""Whether a coordinator or worker that seems to be gone for good may be forgotten, and why not.

Forgetting is a person's word that something will not come back.  It lets the reaper act where it stood down for want
of a view, so it is refused wherever the cluster itself can still tell better, or needs more time to settle.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kici.domain.ids import InstanceId, Instant
from kici.domain.instance import Instance

PRESENT_MS: Final = 60_000
RECENT_MS: Final = 90_000
"""Silent for less, it may be settling still."""


class ForgetOutcome(StrEnum):
    FORGOTTEN = "forgotten"
    NOT_FOUND = "not-found"
    CONNECTED = "connected"
    """It is there."""
    RECENT = "recent"
    """It was heard of too lately, or what it left is not settled."""
    ACKNOWLEDGEMENT_REQUIRED = "acknowledgement-required"
    """It is the last other coordinator that is known: forgetting it lets the reaper act on one view alone."""
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    outcome: ForgetOutcome
    detail: str
    """One sentence for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetCase:
    """A coordinator that somebody wants forgotten, as the store has it now."""

    peer: InstanceId
    me: InstanceId
    known: tuple[Instance, ...]
    now: Instant
    """The store's."""
    has_adopted: bool
    """Machines of clouds are its own."""
    jobs: int
    """That it held and that nobody has settled."""
    grace_ms: int
    """The reaper's."""
    is_acknowledged: bool


def judge(case: ForgetCase) -> Forgotten:
    """`forgotten` means that it may be."""
    peer = case.peer
    others = {one.id: one for one in case.known if one.id != case.me}
    row = others.get(peer)
    if peer == case.me:
        return Forgotten(outcome=ForgetOutcome.CONNECTED, detail="this is the coordinator that answers")
    if row is None:
        return Forgotten(outcome=ForgetOutcome.NOT_FOUND, detail=f"no coordinator {peer} is known")
    silent_ms = case.now - row.last_beat_at
    if silent_ms < PRESENT_MS:
        return Forgotten(outcome=ForgetOutcome.CONNECTED, detail=f"{peer} was heard of {_seconds(silent_ms)} ago")
    recent_ms = max(RECENT_MS, case.grace_ms) if case.has_adopted else RECENT_MS
    if silent_ms < recent_ms:
        why = ", and machines of a cloud are in its care" if case.has_adopted else ""
        left = _seconds(recent_ms - silent_ms)
        detail = f"{peer} was heard of {_seconds(silent_ms)} ago{why}; it can be forgotten in {left}"
        return Forgotten(outcome=ForgetOutcome.RECENT, detail=detail)
    if case.jobs:
        detail = f"{case.jobs} jobs of {peer} are being settled; try again in a minute"
        return Forgotten(outcome=ForgetOutcome.RECENT, detail=detail)
    if len(others) == 1 and not case.is_acknowledged:
        detail = (
            f"{peer} is the last other coordinator that is known: without it, machines whose agents are not seen from "
            "here are torn down; say --acknowledge if that is meant"
        )
        return Forgotten(outcome=ForgetOutcome.ACKNOWLEDGEMENT_REQUIRED, detail=detail)
    return Forgotten(outcome=ForgetOutcome.FORGOTTEN, detail=f"{peer} is forgotten")


def _seconds(ms: int) -> str:
    return f"{-(-ms // 1000)} s"
