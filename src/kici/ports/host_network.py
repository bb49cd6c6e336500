"""The network of a host's microVMs: a bridge, an interface for each machine, and packet filter rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kici.decide.isolate import Needs, Policy
from kici.decide.microvm import Bridge, Guest


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeHealth:
    """What is wrong with a bridge and its static rules."""

    faults: tuple[str, ...] = ()

    @property
    def is_healthy(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        return "; ".join(self.faults) or "healthy"


class HostNetwork(Protocol):
    """Every call may raise `Retryable` or `DeterministicRefusal`, naming the command and what it printed."""

    @property
    def bridge(self) -> Bridge: ...

    async def health(self) -> BridgeHealth:
        """Never raises for what is missing; what cannot be read counts as missing."""
        ...

    async def provision(self) -> None:
        """Make bridge, address, forwarding and static rules, or mend them.  Guests that run keep their rules."""
        ...

    async def probe_isolation(self) -> None:
        """Raise `DeterministicRefusal` where the kernel cannot keep ports of a bridge apart."""
        ...

    async def make_tap(self, guest: Guest, *, owner: int | None) -> None:
        """Make the guest's interface, on the bridge, kept apart from other ports, down.

        `owner`: uid that may open it; None: us.  Raises `Conflict` when there is one of that name.
        """
        ...

    async def admit(self, guest: Guest, *, policy: Policy, needs: Needs) -> None:
        """Put the guest's rules in place, as one transaction; rules of an earlier guest of its address go."""
        ...

    async def link_up(self, guest: Guest) -> None: ...

    async def dismiss(self, guest: Guest) -> None:
        """Take the guest's rules away, and nobody else's.  None there: no-op."""
        ...

    async def remove_tap(self, name: str) -> bool:
        """Whether there was one.  One of that name on another bridge is somebody else's, and stays."""
        ...

    async def taps(self) -> Sequence[str]:
        """Interfaces on the bridge, by name."""
        ...

    async def admitted(self) -> dict[str, str]:
        """Addresses that have rules, and whose they are (as in names of chains)."""
        ...
