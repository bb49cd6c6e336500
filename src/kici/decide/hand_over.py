"""When a coordinator that lost the database sends its agents to another, and which addresses agents are told.

A coordinator without the database can begin and end nothing for its agents; one that has it can.  It counts only the
time in which it was awake: after a pause of its process it finds out first whether it is cut off at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kici.decide.container_plan import is_loopback
from kici.domain.peer import Capacity

CUT_OFF_SECONDS: Final = 30.0
"""Without a beat that was written: then it gives its agents up.  Others may take machines over a little later."""
DOUBT_SECONDS: Final = 20.0
"""Without one: from then on others are asked whether they can work."""
READY_TIMES: Final = 3
"""So often in a row another must have said that it can: after an outage of all, one is always the first to be back."""
PAUSED_SECONDS: Final = 8.0
"""Longest gap between two looks of a process that runs; anything longer was a pause."""


@dataclass(slots=True)
class Watchfulness:
    """Since when this process has looked without a break, monotonic seconds."""

    awake_since: float
    looked_at: float

    def looks(self, now: float) -> None:
        if now - self.looked_at > PAUSED_SECONDS:
            self.awake_since = now
        self.looked_at = now

    def seconds_cut_off(self, *, beat_at: float, now: float) -> float:
        """`beat_at`: when the last beat that was written began."""
        return now - max(self.awake_since, beat_at)


def elsewhere(capacities: Iterable[Capacity]) -> tuple[str, ...]:
    """Where agents may go beside this coordinator.  A loopback address is another program to whoever is not there."""
    told = (capacity.address for capacity in capacities)
    return tuple(sorted({address for address in told if address and not is_loopback(address)}))


def for_agent(addresses: Iterable[str], *, on_worker: bool) -> list[str]:
    """What an agent is told.  On the host of a worker, a loopback address is somebody else's."""
    return [address for address in addresses if not (on_worker and is_loopback(address))]
