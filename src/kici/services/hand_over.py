"""Agents of a coordinator that lost the database go to one that has it; all agents know where the others are.

Handing over is no loss: jobs run on, and what this coordinator made stays until it can read again who is where.
Nobody is sent away unless another coordinator answers that it can work, so an outage that all share changes nothing.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Never

from kici.decide.hand_over import CUT_OFF_SECONDS, DOUBT_SECONDS, READY_TIMES, Watchfulness, elsewhere, for_agent
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.peers import PeerProbe
from kici.services.agent_sessions import AgentSessions
from kici.services.instance_heartbeat import InstanceHeartbeat
from kici.services.peers import PeerView
from kici.services.registry import AgentRegistry
from kici.wire.messages import CoordinatorsChanged

LOOK_SECONDS: Final = 2.0
WHY: Final = "this coordinator cannot reach the database; another one can"


class HandOver:
    def __init__(
        self,
        *,
        heartbeat: InstanceHeartbeat,
        peers: PeerView,
        registry: AgentRegistry,
        sessions: AgentSessions,
        probe: PeerProbe,
        leave_workers: Callable[[str], Awaitable[None]],
        own: tuple[str, ...],
        clock: Clock,
    ) -> None:
        """`own`: addresses of this coordinator; `leave_workers(why)` ends the links of its workers."""
        self._heartbeat = heartbeat
        self._peers = peers
        self._registry = registry
        self._sessions = sessions
        self._probe = probe
        self._leave_workers = leave_workers
        self._own = own
        self._clock = clock
        self._watch = Watchfulness(clock.monotonic(), clock.monotonic())
        self._told = own
        self._ready_times = 0
        """How often in a row another coordinator said that it can work, in this outage."""
        self._is_over = False
        """This outage's agents were sent away."""

    def addresses(self) -> list[str]:
        """All coordinators, this one first."""
        return list(dict.fromkeys([*self._own, *elsewhere(self._peers.capacities)]))

    async def run(self) -> Never:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            await self.tick()

    async def tick(self) -> None:
        """One look, which never waits for the store."""
        self._tell()
        now = self._clock.monotonic()
        self._watch.looks(now)
        cut_off = self._watch.seconds_cut_off(beat_at=now - self._heartbeat.seconds_since_beat, now=now)
        if cut_off < DOUBT_SECONDS:
            self._is_over, self._ready_times = False, 0
        elif not self._is_over:
            address = await self._ready_one()
            self._ready_times = 0 if address is None else self._ready_times + 1
            if address is not None and self._ready_times >= READY_TIMES and cut_off >= CUT_OFF_SECONDS:
                await self._hand_over(address)

    def _tell(self) -> None:
        """Let agents know when coordinators came or went."""
        addresses = tuple(self.addresses())
        if addresses == self._told:
            return
        self._told = addresses
        for agent in self._registry:
            on_worker = agent.spawn is not None and agent.spawn.worker_id is not None
            agent.seat.send(CoordinatorsChanged(coordinators=for_agent(addresses, on_worker=on_worker)))

    async def _ready_one(self) -> str | None:
        """The address of another coordinator that can work now."""
        for address in elsewhere(self._peers.capacities):
            if await self._probe.is_ready(address):
                return address
        return None

    async def _hand_over(self, address: str) -> None:
        self._is_over = True
        await self._leave_workers(WHY)  # first, so that agents behind them find another way
        count = self._sessions.hand_over(WHY)
        emit(Event.AGENTS_HANDED_OVER, count=count, to=address)
