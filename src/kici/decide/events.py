"""What becomes of an event that could not be delivered, and which events wait for the run that they start."""

from dataclasses import dataclass
from typing import Final

from kici.domain.event import CHAIN_DEPTH_MAX, SCALE_DOWN, SCALE_UP, DeadReason, StoredEvent, is_event_name, is_reserved
from kici.kit.backoff import exponential

RETRY_MS_MIN: Final = 5_000
RETRY_MS_MAX: Final = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    delay_ms: int
    run_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bury:
    reason: DeadReason


def waits_for_run(name: str) -> bool:
    """Whether the event is handled only when its run succeeds.  Else starting the run is all there is to do."""
    return name in (SCALE_UP, SCALE_DOWN)


def retry_delay_ms(attempts: int, jitter: float) -> int:
    """Full jitter (`jitter` from 0 to 1) over a window that doubles with each attempt."""
    return round(jitter * exponential(attempts, base=RETRY_MS_MIN, maximum=RETRY_MS_MAX))


def after_failure(event: StoredEvent, *, is_passing: bool, attempts_max: int, jitter: float) -> Retry | Bury:
    """A delivery failed.  `is_passing`: trying again may help."""
    if not is_passing:
        return Bury(reason=DeadReason.NON_RETRYABLE)
    if event.attempts >= attempts_max:
        return Bury(reason=DeadReason.EXHAUSTED)
    return Retry(delay_ms=retry_delay_ms(event.attempts, jitter))


def after_failed_run(event: StoredEvent, *, attempts_max: int, jitter: float) -> Retry | Bury:
    """The run of an event failed.

    For a scale-up that is the provider's answer: the scaler's backoff decides when it is asked again, and another
    scaler may do.  A scale-down has no other way than to be tried again.
    """
    if event.name == SCALE_UP:
        return Bury(reason=DeadReason.NON_RETRYABLE)
    decided = after_failure(event, is_passing=True, attempts_max=attempts_max, jitter=jitter)
    return Retry(delay_ms=decided.delay_ms, run_failed=True) if isinstance(decided, Retry) else decided


def emission_fault(name: str, chain_depth: int) -> str | None:
    """Why a job or person may not emit this; None: it may."""
    if not is_event_name(name):
        return f"{name[:80]!r} is no event name: letters, digits, dots, underscores and hyphens are"
    if is_reserved(name):
        return f"event names that begin with kici. or __ are reserved: {name[:80]} comes from coordinators only"
    if chain_depth > CHAIN_DEPTH_MAX:
        return f"this event would be number {chain_depth} of a chain; {CHAIN_DEPTH_MAX} is the most"
    return None
