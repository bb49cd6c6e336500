"""The reaper's verdicts: which provisioned machine nobody looks after any more.

Every verdict deletes a machine that somebody pays for and may be using, so doubt means none.  Nothing is judged on
one sample: an agent must have been out of sight for a whole grace, measured by the one who looks.  How old a
provision is counts from when it was asked for and from nothing that a later adoption could refresh.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kici.domain.ids import InstanceId, Instant
from kici.domain.instance import Instance
from kici.domain.provision import ReapCandidate
from kici.domain.spawn import ScaleDownReason, SpawnState

PRESENT_MS: Final = 60_000
"""A coordinator whose beat is younger is there, and so are its agents."""
OUTCOME_RETENTION_MS: Final = 86_400_000


def reap_grace_ms(flap_grace_ms: int) -> int:
    """How long an agent, or its coordinator, may be out of sight before anything is concluded from it."""
    return max(flap_grace_ms, 2 * PRESENT_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReapWindows:
    """How long the reaper waits for what; read together, so that one pass is consistent."""

    interval_ms: int
    spawn_timeout_ms: int
    """A provision that was not adopted may take so long to register."""
    stranded_ms: int
    """An adopted agent may be away so long while its coordinator lives."""
    flap_grace_ms: int
    """As set; `grace_ms` is what holds."""
    reattempt_ms: int
    """Pause before a scale-down that was not delivered is sent again."""
    claim_retention_ms: int

    grace_ms: int = field(init=False)
    """Out of sight for less than this is a blink.  The setting is shared with others, for whom less is harmless."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "grace_ms", reap_grace_ms(self.flap_grace_ms))  # once, not for each candidate

    @property
    def outcome_retention_ms(self) -> int:
        return max(OUTCOME_RETENTION_MS, 2 * self.spawn_timeout_ms)


@dataclass(frozen=True, slots=True)
class Condemn:
    """Send its scale-down."""

    reason: ScaleDownReason


@dataclass(frozen=True, slots=True)
class Drop:
    """No machine was ever asked for: delete the row."""


def view_suffices(instances: Iterable[Instance], me: InstanceId, now: Instant) -> bool:
    """Whether a leader sees enough of its cluster to act for it.

    One that knows other coordinators and sees none alive may be the one that is cut off, and would condemn all
    that the others hold.
    """
    others = [each for each in instances if each.id != me and each.role == "coordinator"]
    return not others or any(now - each.last_beat_at < PRESENT_MS for each in others)


def verdict(
    candidate: ReapCandidate, *, me: InstanceId, absent_ms: int, now: Instant, windows: ReapWindows
) -> Condemn | Drop | None:
    """None: leave it alone.  `absent_ms`: for how long it was seen absent, 0 at first sight; `now`: the store's."""
    if candidate.state is SpawnState.ENDING:
        return _of_ending(candidate, now, windows)
    if absent_ms < windows.grace_ms:
        return None
    if candidate.adopted_by is not None:
        is_alone = not adopter_lives(candidate, me=me, now=now, windows=windows)
        if is_alone or absent_ms >= windows.stranded_ms:
            return Condemn(ScaleDownReason.HEARTBEAT_TIMEOUT)
        return None
    if not candidate.owner_instance_id or now - candidate.spawned_at < windows.spawn_timeout_ms:
        return None
    if not candidate.was_sent:
        return Drop()
    return Condemn(ScaleDownReason.JOB_COMPLETE if candidate.job_over else ScaleDownReason.SPAWN_TIMEOUT)


def adopter_lives(candidate: ReapCandidate, *, me: InstanceId, now: Instant, windows: ReapWindows) -> bool:
    """Its last beat may be a grace old: a coordinator blinks too."""
    if candidate.adopted_by == me:
        return True
    beat_at = candidate.adopter_beat_at
    return beat_at is not None and now - beat_at < windows.grace_ms


def _of_ending(candidate: ReapCandidate, now: Instant, windows: ReapWindows) -> Condemn | Drop | None:
    """Its end was decided on, and its agent is admitted no more; did its scale-down get through?"""
    if not candidate.was_sent:
        return Drop()
    if candidate.is_ending_sent:
        return None
    if candidate.undelivered_at is not None and now - candidate.undelivered_at < windows.reattempt_ms:
        return None
    try:
        return Condemn(ScaleDownReason(candidate.end_reason or ""))
    except ValueError:  # an error stands there, so its machine did not come
        return Condemn(ScaleDownReason.JOB_COMPLETE if candidate.job_over else ScaleDownReason.SPAWN_TIMEOUT)
