"""Provision backoff: a scaler that keeps failing to provide agents is asked less and less often.

One record for each scaler.  A failure is counted once for each agent, whoever reports it (the scaler's own
prune and the cluster's reaper may both see the same dead provision), so the record remembers the ids it counted.
The window is fixed when the failure is recorded; later changes of the settings move only later windows.

A launch that failed by chance (`stumbled`) is another matter: the next one may succeed at once.  Only when that fails,
too, the pause grows, and never beyond half a minute.
"""

from dataclasses import dataclass
from typing import Final

from kici.domain.ids import AgentId, Instant, ScalerName
from kici.domain.verdict import InBackoff
from kici.kit.backoff import exponential

COUNTED_MAX: Final = 64
"""Remembered agent ids; the oldest is forgotten first."""
SETTING_MS_MIN: Final = 1000
STUMBLE_MS: Final = 1000
"""Pause after the second launch in a row that failed by chance.  The first is followed by another at once."""
STUMBLE_MS_MAX: Final = 30_000
_LONG_AGO: Final = Instant(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffSettings:
    base_ms: int = 30_000
    """Window after the first failure.  Half a minute lets a passing fault pass."""
    max_ms: int = 900_000
    """Longest window.  A quarter of an hour: a mended scaler is found soon enough."""
    failures_max: int = 5
    """Failures in a row from which on a person should look."""

    def problems(self) -> tuple[str, ...]:
        """What is wrong with these values, in words of the settings; empty when they may be used."""
        found = []
        if self.base_ms < SETTING_MS_MIN:
            found.append(f"scaler_provision_backoff_base_ms is {self.base_ms}, at least {SETTING_MS_MIN} is needed")
        if self.max_ms < self.base_ms:
            found.append(
                f"scaler_provision_backoff_max_ms is {self.max_ms}, it may not be below "
                f"scaler_provision_backoff_base_ms, which is {self.base_ms}"
            )
        if self.failures_max < 1:
            found.append(f"scaler_provision_max_consecutive_failures is {self.failures_max}, at least 1 is needed")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferral:
    """The record of one scaler.  A registration of any of its agents deletes it."""

    failures: int = 0
    """In a row."""
    since: Instant = _LONG_AGO
    """Of the last failure."""
    until: Instant = _LONG_AGO
    last_error: str = ""
    counted: tuple[AgentId, ...] = ()
    """Agents whose failure is in the count, oldest first."""


UNTROUBLED: Final = Deferral()


def record_failure(
    deferral: Deferral, agent_id: AgentId, *, error: str, settings: BackoffSettings, now: Instant
) -> Deferral:
    """The record after this agent failed to come; the same value when it is counted already.

    One step: read the settings first, then load, call and store without waiting in between, or one of two
    failures at the same time is lost.
    """
    if agent_id in deferral.counted:
        return deferral
    failures = deferral.failures + 1
    delay_ms = round(exponential(failures, base=settings.base_ms, maximum=settings.max_ms))
    return Deferral(
        failures=failures,
        since=now,
        until=Instant(now + delay_ms),
        last_error=error,
        counted=(*deferral.counted, agent_id)[-COUNTED_MAX:],
    )


def refusal(
    deferral: Deferral, *, scaler: ScalerName, is_external: bool, settings: BackoffSettings, now: Instant
) -> InBackoff | None:
    """None: the scaler may be asked.  Else until when it may not; `until - now` is when to come back.

    A clock that stands before the failure was set back.  How much of the window is left is then not known, so that the
    scaler is asked: waiting for the clock to catch up could take for ever.
    """
    if deferral.failures == 0 or not deferral.since <= now < deferral.until:
        return None
    return InBackoff(
        scaler=scaler,
        failures=deferral.failures,
        until=deferral.until,
        last_error=deferral.last_error,
        is_repeated=deferral.failures >= settings.failures_max,
        is_external=is_external,
    )


def stumbled(deferral: Deferral, *, error: str, started_at: Instant, now: Instant) -> Deferral:
    """The record after a launch failed for a reason that need not concern the next one.

    `started_at`, `now`: of the launch and its failure, on the clock of the record.  A launch that was under way when
    another failed tells nothing new, however many they are.
    """
    if deferral.failures and started_at <= deferral.since:
        return deferral
    failures = deferral.failures + 1
    delay_ms = 0 if failures == 1 else round(exponential(failures - 1, base=STUMBLE_MS, maximum=STUMBLE_MS_MAX))
    return Deferral(failures=failures, since=now, until=Instant(now + delay_ms), last_error=error)
