"""Agents that this coordinator made, that have registered, and of which nobody hears any more.

Whoever holds an agent's connection sees it end, and the agent's backend sees it die.  When the one stops at that
moment and the notice of the other is lost, the agent would be waited for without end.
"""

from collections.abc import Callable
from typing import Final, Never

from kici.domain.ids import AgentId, InstanceId
from kici.domain.spawn import ScaleDownReason
from kici.kit.unbroken import Unbroken
from kici.ports.clock import Clock
from kici.ports.peers import PeerStore
from kici.services.spawn_book import SpawnBook
from kici.services.store_outages import sits_out_outages
from kici.services.teardown import Teardown

INTERVAL_SECONDS: Final = 30.0
STRAY_SECONDS: Final = 180.0
"""How long one must be seen nowhere: longer than coordinators wait for an agent by themselves."""
ROWS_MAX: Final = 1000


class Strays:
    def __init__(
        self,
        *,
        store: PeerStore,
        spawns: SpawnBook,
        teardown: Teardown,
        is_known: Callable[[AgentId], bool],
        clock: Clock,
        instance_id: InstanceId,
    ) -> None:
        """`is_known(agent)`: whether it is connected here, or is waited for."""
        self._store = store
        self._spawns = spawns
        self._teardown = teardown
        self._is_known = is_known
        self._clock = clock
        self._instance_id = instance_id
        self._nowhere = Unbroken[AgentId]()
        self._looked_at = 0.0

    async def run(self) -> Never:
        while True:
            await self._clock.sleep(INTERVAL_SECONDS)
            with sits_out_outages("looking for strays", then=self._nowhere.forget):
                await self.tick()

    async def tick(self) -> None:
        """One look; ends those that have been nowhere for long."""
        strays = await self._store.strays(self._instance_id, limit=ROWS_MAX)
        now = self._clock.monotonic()
        if now - self._looked_at > 2 * INTERVAL_SECONDS:  # we stood still, and so did our own beat
            self._nowhere.forget()
        self._looked_at = now
        unknown = (agent_id for agent_id in strays if not self._is_known(agent_id))
        for agent_id in sorted(self._nowhere.look(unknown, now=now, seconds=STRAY_SECONDS)):
            tracked = self._spawns.get(agent_id)
            if tracked is not None:
                self._teardown.begin(tracked, ScaleDownReason.HEARTBEAT_TIMEOUT)
