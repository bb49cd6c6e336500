"""Withdrawal: provisions whose job is over before their machine came are taken back, and that is no failure.

Only event provisions, and only once the scale-up is known to be out: a scale-down before its scale-up would leak
the machine.
"""

from dataclasses import dataclass

from kici.domain.ids import InstanceId
from kici.domain.provision import ProvisionNews
from kici.domain.spawn import SpawnState


@dataclass(frozen=True, slots=True)
class Forget:
    """Somebody else looks after it, or nothing is left of it."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Its job is over: give the machine back, and call it no failure."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Its machine will not come."""

    why: str


def what_to_do(news: ProvisionNews, me: InstanceId, *, is_booting: bool = True) -> Forget | Withdraw | Fail | None:
    """None: go on waiting for its agent.  `is_booting`: whether its agent has not been seen here."""
    if news.state is None or news.adopted_by not in (None, me):
        return Forget()
    if not is_booting:
        return None
    if news.failure is not None and news.state is SpawnState.BOOTING:
        return Withdraw() if news.job_over else Fail(news.failure)
    if news.state is SpawnState.ENDING:
        return Forget()
    if news.job_over and news.state is SpawnState.BOOTING:
        return Withdraw()
    return None
