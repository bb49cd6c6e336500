"""The simulated network: who listens where, and the connections that can be cut, lost or never made."""

import asyncio
from typing import Final, Protocol

from kici.domain.ids import AgentId
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.trace import WORLD, Trace
from kici.testing.sim_link import SimEnd, SimWire

ANYBODY: Final = "ws://anybody/ws"
"""A load balancer before all coordinators."""
WORKERS: Final = "/worker"
"""Ends the address at which a coordinator lets workers in."""
CONNECT_SECONDS_MAX: Final = 10.0
"""After which an agent gives up an attempt that nobody answers."""
CONNECT_TRIES: Final = 10
"""How often its kernel says hello meanwhile: who stood still, or was cut off, may answer a later one."""


class Listener(Protocol):
    def accept(self, end: SimEnd) -> None: ...


class Network:
    """A wire's end `a` is the agent's, `b` the coordinator's."""

    def __init__(self, trace: Trace, entropy: SeededEntropy, *, delay_seconds: tuple[float, float]) -> None:
        self._trace = trace
        self._entropy = entropy
        self._delay_seconds = delay_seconds
        self._wires: dict[AgentId, tuple[str, SimWire]] = {}
        self.listeners: dict[str, Listener] = {}
        self.is_black_hole = False
        """Nothing connects, and nobody is told."""
        self.dark: dict[str, int] = {}
        """Where nothing arrives: who listens there is cut off or stands still.  How many reasons there are for it."""

    async def connect(self, url: str, agent_id: AgentId) -> SimEnd:
        """Raises `ConnectionError` as the agent's real connection does."""
        await asyncio.sleep(self._entropy.uniform(*self._delay_seconds))
        if url == ANYBODY:
            doors = sorted(there for there in self.listeners if not there.endswith(WORKERS))
            url = self._entropy.choice(doors or [url])
        for _ in range(CONNECT_TRIES):
            if not self.is_black_hole and url not in self.dark:
                break
            await asyncio.sleep(CONNECT_SECONDS_MAX / CONNECT_TRIES)
        else:
            raise ConnectionError(f"cannot connect to {url}: timed out")
        listener = self.listeners.get(url)
        if listener is None:
            raise ConnectionError(f"cannot connect to {url}: refused")
        wire = SimWire(self._entropy, delay_seconds=self._delay_seconds, names=(agent_id, url))
        self._wires[agent_id] = (url, wire)
        listener.accept(wire.b)
        return wire.a

    def is_intact(self, agent_id: AgentId) -> bool:
        """Whether what is sent on the latest connection of this agent arrives."""
        known = self._wires.get(agent_id)
        if known is None:
            return False
        url, wire = known
        return url not in self.dark and not wire.is_deaf and not wire.a.is_closed and not wire.b.is_closed

    def connected(self) -> list[AgentId]:
        return [agent_id for agent_id in self._wires if self.is_intact(agent_id) and "/" not in agent_id]

    def cut(self, agent_id: AgentId) -> None:
        """Reset the connection of an agent: both ends are told."""
        known = self._wires.pop(agent_id, None)
        if known is not None:
            self._trace.tell("its connection was cut", agent_id)
            known[1].cut()

    def half_open(self, agent_id: AgentId, *, to_agent: bool = True, to_coordinator: bool = True) -> None:
        """Lose everything on the connection of an agent from now on, and tell nobody."""
        known = self._wires.get(agent_id)
        if known is not None:
            self._trace.tell(f"half open (to agent {to_agent}, to coordinator {to_coordinator})", agent_id)
            known[1].half_open(to_a=to_agent, to_b=to_coordinator)

    def darken(self, url: str, *, loses: bool) -> None:
        """From now on nothing arrives there and nobody is told; `loses`: what is under way is lost, not late."""
        self.dark[url] = self.dark.get(url, 0) + 1
        if loses:
            for agent_id, (there, _) in self._wires.items():
                if there == url:
                    self.half_open(agent_id)

    def lighten(self, url: str) -> None:
        self.dark[url] -= 1
        if not self.dark[url]:
            del self.dark[url]

    def cut_off(self, url: str) -> None:
        """The program that listened there is dead: the kernel resets its connections."""
        self.listeners.pop(url, None)
        self._trace.tell(f"nobody listens at {url}", WORLD)
        for agent_id in [agent_id for agent_id, (there, _) in self._wires.items() if there == url]:
            _, wire = self._wires.pop(agent_id)
            wire.cut()
