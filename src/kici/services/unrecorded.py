"""Agents that are connected here though their sessions do not say so: others take them for gone.

A registration that was long under way, because its coordinator stood still, may be written after the agent has
registered anew; and when that coordinator finds the connection over, the session goes.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Never

from kici.domain.ids import AgentId, ConnectionId, InstanceId
from kici.kit.unbroken import Unbroken
from kici.ports.clock import Clock
from kici.ports.peers import PeerStore
from kici.services.registry import AgentRegistry
from kici.services.store_outages import sits_out_outages

INTERVAL_SECONDS: Final = 15.0
UNRECORDED_SECONDS: Final = 25.0
"""How long one must lack its session: twice seen, and well before it is taken for a stray."""


class Unrecorded:
    def __init__(
        self,
        *,
        store: PeerStore,
        registry: AgentRegistry,
        sends_away: Callable[[AgentId, str], Awaitable[object]],
        clock: Clock,
        instance_id: InstanceId,
    ) -> None:
        """`sends_away(agent, why)` closes a connection; the agent comes back, with its job, and registers anew."""
        self._store = store
        self._registry = registry
        self._sends_away = sends_away
        self._clock = clock
        self._instance_id = instance_id
        self._lacking = Unbroken[tuple[AgentId, ConnectionId]]()

    async def run(self) -> Never:
        while True:
            await self._clock.sleep(INTERVAL_SECONDS)
            with sits_out_outages("looking for unrecorded agents", then=self._lacking.forget):
                await self.tick()

    async def tick(self) -> None:
        """One look; sends those away that have lacked their session for long."""
        connected = [(agent.agent_id, agent.seat.connection_id) for agent in self._registry]
        recorded = await self._store.connections_of(self._instance_id)
        lacking = [(agent_id, seat) for agent_id, seat in connected if recorded.get(agent_id) != seat]
        now = self._clock.monotonic()
        for agent_id, seat in sorted(self._lacking.look(lacking, now=now, seconds=UNRECORDED_SECONDS)):
            agent = self._registry.get(agent_id)
            if agent is not None and agent.seat.connection_id == seat:
                await self._sends_away(agent_id, "its registration was lost; it registers anew")
