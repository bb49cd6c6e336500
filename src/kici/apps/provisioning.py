"""How event scalers reach what asks for machines, which is made after them: each call finds it anew."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kici.domain.event import ScaleUp
from kici.domain.ids import AgentId, ScalerName
from kici.domain.spawn import ScaleDownReason
from kici.ports.backend import SpawnOrder
from kici.ports.entropy import Entropy
from kici.ports.events import ClaimCodes, ScaleEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioning:
    find_events: Callable[[], ScaleEvents]
    find_claims: Callable[[], ClaimCodes]
    entropy: Entropy

    def events(self) -> ScaleEvents:
        return _Events(self.find_events)

    def claims(self) -> ClaimCodes:
        return _Claims(self.find_claims)


class _Events:
    def __init__(self, find: Callable[[], ScaleEvents]) -> None:
        self._find = find

    async def scale_up(self, payload: ScaleUp, targets: Sequence[str], *, expires_in_ms: int) -> None:
        await self._find().scale_up(payload, targets, expires_in_ms=expires_in_ms)

    async def scale_down(
        self, agent_id: AgentId, scaler: ScalerName, reason: ScaleDownReason, *, targets: Sequence[str]
    ) -> bool:
        return await self._find().scale_down(agent_id, scaler, reason, targets=targets)


class _Claims:
    def __init__(self, find: Callable[[], ClaimCodes]) -> None:
        self._find = find

    async def register(self, order: SpawnOrder, *, scaler: ScalerName, ttl_ms: int, agent_token_ttl_ms: int) -> str:
        return await self._find().register(order, scaler=scaler, ttl_ms=ttl_ms, agent_token_ttl_ms=agent_token_ttl_ms)

    async def invalidate(self, agent_id: AgentId) -> None:
        await self._find().invalidate(agent_id)
