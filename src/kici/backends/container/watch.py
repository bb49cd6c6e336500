"""Noticing ends: the engine's events say at once, a look at everything says for certain.

Events are hints.  After each gap in them, and every half minute, all tracked containers are compared with the
engine's list.  While the engine is away nothing is concluded.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Never

from kici.backends.container.compute import Tracked
from kici.backends.container.house import House
from kici.decide.container_plan import AGENT
from kici.domain.errors import KiciError
from kici.domain.ids import AgentId
from kici.kit.backoff import exponential
from kici.kit.ticker import Ticker
from kici.ports.backend import ComputeState
from kici.ports.clock import Clock
from kici.ports.engine import ContainerInfo

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 0.2
RETRY_SECONDS_MAX: Final = 5.0
ENDS: Final = frozenset({"die", "destroy"})

Ended = Callable[[Tracked, ContainerInfo | None], Coroutine[Any, Any, None]]


class Watch:
    def __init__(
        self,
        *,
        house: Callable[[], House],
        labels: Mapping[str, str],
        agents: Callable[[], Sequence[Tracked]],
        ended: Ended,
        clock: Clock,
    ) -> None:
        self._house = house
        self._labels = labels
        self._agents = agents
        self._ended = ended
        self._clock = clock
        self._suspects: set[AgentId] = set()
        self._must_see_all = True
        self._ticker = Ticker(LOOK_SECONDS)

    def look(self, agent_id: AgentId) -> None:
        """See soon whether this one still runs."""
        self._suspects.add(agent_id)
        self._ticker.nudge()

    async def run(self) -> Never:
        """Watch for ever.  Leave by cancellation."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="listen")
            group.create_task(self._look(), name="look")
        raise AssertionError("both go on for ever")

    async def _listen(self) -> Never:
        failures = 0
        while True:
            began = self._clock.monotonic()
            try:
                async for event in self._house().engine.events(self._labels):
                    if event is None:
                        self._see_all()  # what happened before was not heard
                    elif event.action in ENDS:
                        self.look(AgentId(event.labels.get(AGENT, "")))
            except KiciError as error:
                if failures == 0 or self._clock.monotonic() - began > RETRY_SECONDS_MAX:
                    log.warning("engine.silent", extra={"kici": {"error": str(error)}})
            # That the engine was asked is no sign of life: only that it was heard for a while.
            failures = 1 if self._clock.monotonic() - began > RETRY_SECONDS_MAX else failures + 1
            await self._clock.sleep(exponential(failures, base=RETRY_SECONDS, maximum=RETRY_SECONDS_MAX))

    async def _look(self) -> Never:
        while True:
            was_hinted = await self._ticker.next()
            try:
                await self.tick(everything=not was_hinted)
            except KiciError as error:
                log.debug("engine.away", extra={"kici": {"error": str(error)}})
                self._must_see_all = True

    async def tick(self, *, everything: bool) -> None:
        """One look.  Without `everything` only at those of whom something was heard."""
        suspects = self._suspects
        self._suspects = set()
        is_whole = everything or self._must_see_all
        agents = [
            agent
            for agent in self._agents()
            if agent.state is ComputeState.RUNNING and (is_whole or agent.id in suspects)
        ]
        if not agents:
            self._must_see_all = False
            return
        house = self._house()
        if is_whole:
            alive = {one.labels.get(AGENT) for one in await house.engine.containers(self._labels) if one.is_running}
            agents = [agent for agent in agents if agent.id not in alive]
            self._must_see_all = False
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(self._judge(house, agent), name=f"look at {agent.id}")

    async def _judge(self, house: House, agent: Tracked) -> None:
        try:
            found = await house.engine.inspect(agent.handle)
            if found is None or not found.is_running:
                await self._ended(agent, found)
        except KiciError as error:
            log.debug("engine.away", extra={"kici": {"agent_id": agent.id, "error": str(error)}})
            self._must_see_all = True

    def _see_all(self) -> None:
        self._must_see_all = True
        self._ticker.nudge()
