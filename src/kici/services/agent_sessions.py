"""Agents come, stay and go: authentication, registration, and the one funnel through which every loss passes.

A loss is a socket that closed, silence, a missed acknowledgement, a revoked token, or a compute that was seen
dead.  The funnel is keyed by connection and runs once for each: it takes the agent out of the registry first, so
that nothing is offered to it any more, then looks after its jobs, then after its compute.  A superseded
connection is no loss: its agent goes on with the newer one.
"""

import logging
from collections.abc import Callable
from typing import Final, Never, Protocol

from kici.decide.dispatch import MAY_RETURN, LossCause
from kici.domain.agent import AgentToken
from kici.domain.errors import Denied, KiciError, StoreDown
from kici.domain.ids import AgentId, ConnectionId, TokenId
from kici.domain.spawn import ScaleDownReason
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.link import Link
from kici.ports.store import AgentStore
from kici.services.absences import Absences
from kici.services.agent_connection import AgentConnection, FrameWork
from kici.services.drain_state import DrainState
from kici.services.registration import Computes, Registration
from kici.services.registry import AgentRegistry, ConnectedAgent
from kici.wire.coordinator_half import CoordinatorHalf
from kici.wire.messages import AgentExit, AgentRegister, CloseCode

TICK_SECONDS: Final = 1.0
STORE_RETRY_SECONDS: Final = 1.0
LATE_SECONDS_MIN: Final = 0.5
"""A look at the timers that comes so much too late says that nobody was read meanwhile: this program stood still, or
had too many to read at once."""
LAST_WORDS_SECONDS: Final = 1.0
"""How long the socket of an agent that was seen dead may still deliver what the agent had sent."""


class TokenCheck(Protocol):
    async def verify_agent(self, plain: str) -> AgentToken:
        """Raises `Denied` or `StoreDown`."""
        ...


class AgentSessions:
    """Implements `Doors` for connections, and the gateway's handler."""

    def __init__(
        self,
        *,
        tokens: TokenCheck | None,
        store: AgentStore,
        registry: AgentRegistry,
        registration: Registration,
        absences: Absences,
        computes: Computes,
        work: FrameWork,
        drain: DrainState,
        supervisor: Supervisor,
        clock: Clock,
        entropy: Entropy,
        grace_ms: Callable[[bool], int],
    ) -> None:
        """`tokens` None: agents are not authenticated.  `grace_ms(scaler managed)`: how long one may stay away."""
        self._tokens = tokens
        self._store = store
        self._registry = registry
        self._registration = registration
        self._absences = absences
        self._computes = computes
        self.work = work
        self._drain = drain
        self._supervisor = supervisor
        self._clock = clock
        self._entropy = entropy
        self._grace_ms = grace_ms
        work.lifecycle.may_start = self.may_start
        self._connections: dict[ConnectionId, AgentConnection] = {}
        self._registering = 0
        self.lost: Callable[[LossCause], None] = lambda cause: None
        """Told of every agent that was lost."""
        self.refused: Callable[[int], None] = lambda code: None
        """Told of every connection that was not let in, by its close code."""

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def is_registering(self) -> bool:
        """Whether the session row of some agent may still be written."""
        return self._registering > 0

    def connected(self, link: Link) -> AgentConnection:
        """A new socket."""
        connection = AgentConnection(
            connection_id=ConnectionId(self._entropy.hex(8)),
            link=link,
            half=CoordinatorHalf(auth_required=self._tokens is not None, now=self._clock.monotonic()),
            doors=self,
            work=self.work,
        )
        self._connections[connection.connection_id] = connection
        return connection

    async def run(self) -> Never:
        """Keep the timers of all connections.  Leave by cancellation."""
        while True:
            due_at = self._clock.monotonic() + TICK_SECONDS
            await self._clock.sleep(TICK_SECONDS)
            self._excuse(self._clock.monotonic() - due_at)
            await self.tick()

    def _excuse(self, late_seconds: float) -> None:
        """What agents said in a time in which nobody was read still waits: closing them would make them say it again,
        and a crowd that is too much at once would be so for ever."""
        if late_seconds >= LATE_SECONDS_MIN:
            for connection in self._connections.values():
                connection.half.excuse(late_seconds, self._clock.monotonic())

    async def tick(self) -> None:
        """One look at every connection and every absent agent."""
        now = self._clock.monotonic()
        for connection in list(self._connections.values()):
            if connection.ended_at is not None and now - connection.ended_at >= LAST_WORDS_SECONDS:
                connection.close(CloseCode.GOING_AWAY, connection.ended_how)
                await self.gone(connection, connection.ended_how)
            else:
                await connection.tick()
        if not self._drain.stopping:
            await self._absences.tick()

    # ------------------------------------------------------------------ Doors

    async def authenticate(self, connection: AgentConnection, token: str | None) -> None:
        if self._tokens is None:
            await connection.apply(connection.half.authenticated(connection.connection_id))
            return
        try:
            connection.token = await self._tokens.verify_agent(token or "")
        except Denied as error:
            emit(Event.AGENT_REFUSED, remote=connection.remote, reason=str(error))
            self.refused(CloseCode.AUTH_FAILED)
            await connection.apply(connection.half.auth_failed(str(error)))
        except StoreDown:
            connection.close(CloseCode.INTERNAL, "the store cannot be asked; come back")
            await self.gone(connection, "the store could not be asked")
        else:
            await connection.apply(connection.half.authenticated(connection.connection_id))

    async def register(self, connection: AgentConnection, message: AgentRegister) -> None:
        if self._drain.stopping:  # the rows of all agents here are about to be deleted
            connection.cause = LossCause.STOPPING
            connection.close(CloseCode.GOING_AWAY, "the coordinator stops")
            return
        self._registering += 1
        try:
            await self._registration.register(connection, message)
        finally:
            self._registering -= 1
        if connection.is_in_doubt:
            self._forget(AgentId(message.agent_id), connection.connection_id)
        if connection.is_over and connection.agent is not None:
            await self._lose(connection, "its connection closed while it registered")

    async def may_start(self, agent: ConnectedAgent) -> bool:
        """Whether a job may start on it: not while it could read there what its agent was told at its boot.

        Raises `StoreDown` when another coordinator would have to be asked.
        """
        if agent.spawn is None or agent.may_start:
            return True
        try:
            await self._computes.clear_boot_data(agent.spawn)
        except StoreDown:
            raise
        except KiciError as error:
            why = f"its boot data may still be readable, so no job may start on it: {error}"
            emit(Event.AGENT_REFUSED, level=logging.ERROR, agent_id=agent.agent_id, reason=why)
            if self._registry.get(agent.agent_id) is agent:
                await self.dismiss(agent.agent_id, cause=LossCause.DISMISSED, code=CloseCode.DISMISSED, why=why)
            return False
        agent.may_start = True
        return self._registry.get(agent.agent_id) is agent

    async def gone(self, connection: AgentConnection, why: str) -> None:
        """The one loss funnel."""
        if connection.is_over:
            return
        connection.is_over = True
        self._connections.pop(connection.connection_id, None)
        if connection.agent is not None:
            await self._lose(connection, why)

    async def _lose(self, connection: AgentConnection, why: str) -> None:
        assert connection.agent is not None
        agent = self._registry.remove(connection.agent.agent_id, connection.connection_id)
        if agent is None:
            return  # superseded: the agent lives on in its newer connection
        emit(Event.AGENT_LOST, agent_id=agent.agent_id, cause=connection.cause, reason=why, jobs=len(agent.jobs))
        self.lost(connection.cause)
        if self._drain.stopping:
            return
        self._forget(agent.agent_id, connection.connection_id)
        grace_ms = self._grace_ms(agent.spawn is not None)
        is_expected = connection.cause is LossCause.HANDED_OVER and agent.spawn is not None
        if agent.jobs or is_expected:
            await self._absences.begin(
                agent.agent_id,
                scaler_managed=agent.spawn is not None,
                cause=connection.cause,
                how=why,
                grace_ms=grace_ms,
            )
        elif agent.spawn is not None:
            await self._lose_idle(agent.agent_id, connection.cause, why, grace_ms=grace_ms)

    async def _lose_idle(self, agent_id: AgentId, cause: LossCause, why: str, *, grace_ms: int) -> None:
        """One that holds no job here may hold one elsewhere, if we stood still while it went there."""
        try:
            if cause in MAY_RETURN and await self._absences.has_moved(agent_id):
                return
        except StoreDown:  # seen to once it answers
            self._absences.expect(agent_id, scaler_managed=True, cause=cause, how=why, grace_ms=grace_ms)
            return
        beats = cause is LossCause.HEARTBEAT_TIMEOUT
        reason = ScaleDownReason.HEARTBEAT_TIMEOUT if beats else ScaleDownReason.JOB_COMPLETE
        self._computes.agent_gone(agent_id, reason)

    def _forget(self, agent_id: AgentId, connection_id: ConnectionId) -> None:
        """Delete the session row of a connection that is over, however long the store takes."""
        self._supervisor.start(f"forget.{connection_id}", self._forget_session(agent_id, connection_id))

    async def _forget_session(self, agent_id: AgentId, connection_id: ConnectionId) -> None:
        while True:
            try:
                await self._store.release_agent(agent_id, connection_id)
                return
            except StoreDown as error:
                emit(Event.STORE_DOWN, agent_id=agent_id, error=str(error))
                await self._clock.sleep(STORE_RETRY_SECONDS)

    # ------------------------------------------------------------------ what others see of an agent

    def waits_for(self, agent_id: AgentId) -> bool:
        """Whether an agent is away and may still return to its jobs."""
        return agent_id in self._absences

    def compute_ended(self, agent_id: AgentId, how: str) -> None:
        """Its backend saw the compute of a registered agent end: proof of death."""
        agent = self._registry.get(agent_id)
        connection = None if agent is None else self._connections.get(agent.seat.connection_id)
        if connection is not None:
            connection.cause = LossCause.COMPUTE_ENDED
            connection.ended_how = how
            connection.ended_at = self._clock.monotonic()
        else:
            self._supervisor.start(f"died.{agent_id}", self._died(agent_id, how))

    async def _died(self, agent_id: AgentId, how: str) -> None:
        if not await self._absences.died(agent_id, how):
            self._computes.agent_gone(agent_id, ScaleDownReason.SHUTDOWN)

    async def dismiss(self, agent_id: AgentId, *, cause: LossCause, code: int, why: str) -> bool:
        """Close an agent's connection for a reason of ours.  False: it is not connected here."""
        agent = self._registry.get(agent_id)
        connection = None if agent is None else self._connections.get(agent.seat.connection_id)
        if connection is None:
            return False
        await self._close(connection, cause=cause, code=code, why=why)
        return True

    async def _close(self, connection: AgentConnection, *, cause: LossCause, code: int, why: str) -> None:
        connection.cause = cause
        connection.close(code, why)
        await self.gone(connection, why)

    def revoked(self, token_id: TokenId) -> None:
        """A token was revoked: its connections close at once, also those that have not registered yet."""
        for connection in self._connections.values():
            if connection.token is not None and connection.token.id == token_id:
                self._supervisor.start(
                    f"revoked.{connection.connection_id}",
                    self._close(
                        connection,
                        cause=LossCause.TOKEN_REVOKED,
                        code=CloseCode.UNAUTHORIZED,
                        why="its token was revoked",
                    ),
                )

    def hand_over(self, reason: str) -> int:
        """Send all agents to other coordinators.  No loss of any: it is seen later who went where.  How many."""
        left = []
        for connection in list(self._connections.values()):
            connection.cause, connection.is_over = LossCause.HANDED_OVER, True
            connection.close(CloseCode.HANDOVER, reason)
            if connection.agent is None:
                continue
            agent = self._registry.remove(connection.agent.agent_id, connection.connection_id)
            if agent is None:
                continue
            left.append((agent.agent_id, connection.connection_id))
            emit(Event.AGENT_LOST, agent_id=agent.agent_id, cause=connection.cause, reason=reason, jobs=len(agent.jobs))
            if agent.jobs or agent.spawn is not None:
                self._absences.expect(
                    agent.agent_id,
                    scaler_managed=agent.spawn is not None,
                    cause=connection.cause,
                    how=reason,
                    grace_ms=self._grace_ms(agent.spawn is not None),
                )
        self._connections.clear()
        self._supervisor.start(f"forget.handed-over.{self._clock.monotonic()}", self._forget_sessions(left))
        return len(left)

    async def _forget_sessions(self, left: list[tuple[AgentId, ConnectionId]]) -> None:
        for agent_id, connection_id in left:
            await self._forget_session(agent_id, connection_id)

    def drain_agent(self, agent_id: AgentId) -> bool:
        """Let an agent finish its job and leave.  False: it is not connected here."""
        agent = self._registry.get(agent_id)
        if agent is None:
            return False
        agent.draining = True
        self._registry.refresh(agent)
        agent.seat.send(AgentExit(reason="drained by an operator"))
        return True

    def close_all(self, reason: str) -> None:
        """We are stopping: no loss of any agent."""
        for connection in list(self._connections.values()):
            connection.cause = LossCause.STOPPING
            connection.close(CloseCode.GOING_AWAY, reason)
