"""Agents that people started: each with a token of its own, and started again whenever it ends."""

import asyncio
from collections.abc import Callable
from typing import Final

from kici.domain.agent import AgentKind
from kici.domain.ids import AgentId
from kici.ports.store import Store
from kici.services.tokens import Tokens
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.agent import AgentPlace, SimAgent
from kici.testing.sim.ledger import SELF_LABELS, AgentTruth
from kici.testing.sim_clock import SimClock
from kici.wire.agent_settings import AgentSettings
from kici.wire.messages import AgentRegister

KINDS: Final = (
    (("linux", "metal"), ()),
    (("linux", "x64"), ()),
    (("linux", "metal", "heavy"), ("heavy",)),
)
"""Labels and gates."""
RESTART_SECONDS: Final = 1.0


class StaticAgents:
    """`url(number)` is where the agent of this number connects to first."""

    def __init__(self, store: Store, place: AgentPlace, entropy: SeededEntropy, *, url: Callable[[int], str]) -> None:
        self._store = store
        self._place = place
        self._tokens = Tokens(store=store, clock=SimClock(), entropy=entropy)
        self._url = url
        self._agents: dict[AgentId, SimAgent] = {}
        self._settings: dict[AgentId, AgentSettings] = {}

    def alive(self) -> list[SimAgent]:
        return [agent for agent in self._agents.values() if agent.is_alive]

    async def add(self, number: int) -> None:
        """Make a token for one more agent, and start it."""
        agent_id = AgentId(f"static-{number}")
        labels, gate = KINDS[number % len(KINDS)]
        own = (*SELF_LABELS, f"kici:host:{agent_id}")
        token, plain = self._tokens.new_agent_token(
            kind=AgentKind.STATIC, labels=frozenset(labels), gate=frozenset(gate), name=agent_id
        )
        await self._store.create_agent_token(token)
        self._settings[agent_id] = AgentSettings(
            url=self._url(number),
            register=AgentRegister(agent_id=agent_id, labels=[*labels, *own]),
            token=plain,
        )
        self._place.ledger.agents[agent_id] = AgentTruth(
            agent_id=agent_id, labels=frozenset((*labels, *own)), gate=frozenset(gate)
        )
        self._start(agent_id)

    def crash(self, agent: SimAgent, seconds: float) -> None:
        """One is killed, and started again after a while."""
        agent.crash("killed")
        self._again(agent.id, seconds)

    def _start(self, agent_id: AgentId) -> None:
        agent = SimAgent(
            self._place.ledger.agents[agent_id],
            self._settings[agent_id],
            self._place,
            on_exit=lambda how: self._again(agent_id, RESTART_SECONDS),
        )
        self._agents[agent_id] = agent
        agent.start()

    def _again(self, agent_id: AgentId, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._start, agent_id)
