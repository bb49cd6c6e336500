"""How scalers ask the world outside for machines, and claim codes for the agents on them."""

from collections.abc import Sequence
from typing import Protocol

from kici.domain.errors import DeterministicRefusal
from kici.domain.event import ScaleUp
from kici.domain.ids import AgentId, ScalerName
from kici.domain.spawn import ScaleDownReason
from kici.ports.backend import SpawnOrder


class NoSubscriber(DeterministicRefusal):
    """None of the targets of a scale event is subscribed to it: nobody would make or remove the machine."""


class ScaleEvents(Protocol):
    async def scale_up(self, payload: ScaleUp, targets: Sequence[str], *, expires_in_ms: int) -> None:
        """Ask for a machine; returns when that is written.

        Raises `NoSubscriber`, `Conflict` when the spawn has ended meanwhile, or `StoreDown`: then it may be written.
        """
        ...

    async def scale_down(
        self, agent_id: AgentId, scaler: ScalerName, reason: ScaleDownReason, *, targets: Sequence[str]
    ) -> bool:
        """Give a machine back, to those who were asked for it (`targets` where that is not known).

        False: nothing was sent, because nothing was asked for, another coordinator has the agent, or nobody
        subscribes (which is logged).  Safe to repeat.  Raises `StoreDown`.
        """
        ...


class ClaimCodes(Protocol):
    """Claim codes of one scaler's agents."""

    async def register(self, order: SpawnOrder, *, scaler: ScalerName, ttl_ms: int, agent_token_ttl_ms: int) -> str:
        """A new code for the agent of an order.  Raises `StoreDown`."""
        ...

    async def invalidate(self, agent_id: AgentId) -> None:
        """Its codes are good for nothing any more.  Raises `StoreDown`."""
        ...
