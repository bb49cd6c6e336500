"""One connection of an agent: moves effects of the protocol machine to the services that answer them.

Frames of one agent are handled one after the other, so its own order is kept; agents do not wait for each other.
While the store is down a frame waits for it: nothing is dropped, and the agent is not read any faster.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar, assert_never

from kici.decide.dispatch import LossCause
from kici.domain.agent import AgentToken
from kici.domain.errors import Conflict, Denied, NoCapacity, StoreDown
from kici.domain.ids import ConnectionId, JobId
from kici.domain.logs import NewChunk, Stream
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.link import Link
from kici.services.claim_store import Redeemed
from kici.services.job_lifecycle import JobLifecycle
from kici.services.registry import AgentRegistry, ConnectedAgent
from kici.wire.coordinator_half import (
    Authenticate,
    Close,
    CoordinatorHalf,
    Effect,
    Phase,
    Received,
    Redeem,
    Register,
    Send,
    Unhealthy,
)
from kici.wire.messages import (
    AgentLeaving,
    AgentMessage,
    AgentMetrics,
    AgentRegister,
    AgentStatus,
    ClaimCredentials,
    ClaimCredentialsResponse,
    CloseCode,
    ConfigAck,
    Credentials,
    ErrorMessage,
    JobAck,
    JobReject,
    JobStatusReport,
    LogAck,
    LogChunkMessage,
    Message,
)

T = TypeVar("T")
STORE_RETRY_SECONDS: Final = 1.0
VIOLATIONS_MAX: Final = 5
VIOLATION_WINDOW_SECONDS: Final = 60.0


class Doors(Protocol):
    """Who answers the questions of a connection."""

    async def authenticate(self, connection: "AgentConnection", token: str | None) -> None: ...

    async def register(self, connection: "AgentConnection", message: AgentRegister) -> None: ...

    async def gone(self, connection: "AgentConnection", why: str) -> None:
        """The one loss funnel.  Safe to call again."""
        ...


class LogSink(Protocol):
    async def append(self, chunk: NewChunk) -> int:
        """Store; the offset after the last stored byte of that stream.  Raises `Conflict` on a gap."""
        ...


class Claims(Protocol):
    async def redeem(self, code: str, *, caller: str) -> Redeemed:
        """Raises `Denied`, `NoCapacity` or `StoreDown`."""
        ...


class AgentConnection:
    """Implements `Seat` and the gateway's session."""

    def __init__(
        self,
        *,
        connection_id: ConnectionId,
        link: Link,
        half: CoordinatorHalf,
        doors: Doors,
        work: "FrameWork",
    ) -> None:
        self._connection_id = connection_id
        self._opened_at = work.clock.monotonic()
        self._link = link
        self.half = half
        self._doors = doors
        self._work = work
        self.agent: ConnectedAgent | None = None
        """Set once registered."""
        self.token: AgentToken | None = None
        """What it authenticated with."""
        self.cause = LossCause.CONNECTION_CLOSED
        self.is_busy = False
        """A frame is being handled: silence is ours, not the agent's."""
        self.is_in_doubt = False
        """Its session row may be written, and the store did not say so."""
        self.is_over = False
        """The funnel has taken it."""
        self.leaving: str | None = None
        """The agent said that it closes on purpose."""
        self.ended_at: float | None = None
        """Monotonic time at which its compute was seen to have ended."""
        self.ended_how = ""
        self._violations: list[float] = []

    @property
    def connection_id(self) -> ConnectionId:
        return self._connection_id

    @property
    def opened_at(self) -> float:
        return self._opened_at

    @property
    def remote(self) -> str:
        return self._link.remote

    def send(self, message: Message) -> None:
        self._link.send(self._work.encode(message))

    def close(self, code: int, reason: str) -> None:
        self._link.close(code, reason)

    async def received(self, frame: bytes | str) -> None:
        """One frame from the gateway.  Returns when it is dealt with."""
        if self.is_over:
            return
        self.is_busy = True
        try:
            await self.apply(self.half.receive(frame, self._work.clock.monotonic()))
        finally:
            self.is_busy = False
            self.half.heard(self._work.clock.monotonic())  # what it sent while we were slow was not read yet

    async def closed(self, code: int) -> None:
        """The socket is closed, by whichever side."""
        await self._doors.gone(self, self._how(code))

    def _how(self, code: int) -> str:
        """What is known best of its end."""
        if self.ended_how:
            return self.ended_how
        return f"its connection closed ({code})" if self.leaving is None else f"it left ({self.leaving})"

    async def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self.send(message)
                case Close(code, reason):
                    if code == CloseCode.HEARTBEAT:
                        self.cause = LossCause.HEARTBEAT_TIMEOUT
                    self.close(code, reason)
                    await self._doors.gone(self, reason)
                case Authenticate(token):
                    await self._doors.authenticate(self, token)
                case Register(message):
                    await self._doors.register(self, message)
                case Redeem(message=claim):
                    await self.apply(self.half.redeemed(await self._redeem(claim)))
                case Received(message):
                    await self._received(message)
                case Unhealthy(age_seconds):
                    emit(Event.AGENT_SILENT, agent_id=self._name(), age_seconds=round(age_seconds))
                case _:
                    assert_never(effect)

    async def _redeem(self, claim: ClaimCredentials) -> ClaimCredentialsResponse:
        """Trade a claim code.  What went wrong inside is not for whoever offered it."""
        about = claim.request_id
        try:
            redeemed = await self._work.claims.redeem(claim.claim_code, caller=self._link.remote.rpartition(":")[0])
        except Denied as error:
            return ClaimCredentialsResponse(request_id=about, error=str(error))
        except (StoreDown, NoCapacity) as error:
            emit(Event.STORE_DOWN, remote=self._link.remote, error=str(error))
            return ClaimCredentialsResponse(request_id=about, error="cannot be judged now; try again", retryable=True)
        credentials = Credentials(
            agent_token=redeemed.agent_token,
            agent_id=redeemed.agent_id,
            orchestrator_url=redeemed.orchestrator_url,
            labels=list(redeemed.labels),
        )
        return ClaimCredentialsResponse(request_id=about, credentials=credentials)

    async def tick(self) -> None:
        """Let the timers of the conversation act."""
        if not self.is_busy and not self.is_over:
            await self.apply(self.half.tick(self._work.clock.monotonic()))

    async def _received(self, message: AgentMessage) -> None:
        agent = self.agent
        if agent is None or self.half.phase is not Phase.REGISTERED:
            return
        if self._work.registry.get(agent.agent_id) is not agent:
            return  # it goes on in a newer connection, and says again there what counts
        match message:
            case JobAck(job_id=job_id):
                await self._while_here(agent, lambda: self._work.lifecycle.acknowledged(agent, JobId(job_id)))
            case JobReject(job_id=job_id, reason=reason):
                await self._while_here(agent, lambda: self._work.lifecycle.rejected(agent, JobId(job_id), reason))
            case JobStatusReport():
                await self._status(agent, message)
            case LogChunkMessage():
                await self._output(agent, message)
            case ConfigAck() if agent.is_new:  # of any other, the next start asks
                await self._patiently(lambda: self._work.lifecycle.may_start(agent))
            case AgentStatus(draining=draining):
                await self._patiently(lambda: self._work.lifecycle.said(agent, draining=draining))
            case _:
                self._heard(agent, message)

    def _heard(self, agent: ConnectedAgent, message: AgentMessage) -> None:
        """What an agent says of itself, and what nothing has to be stored for."""
        match message:
            case AgentMetrics():
                agent.reported = message
                self._work.figures(agent, message)
            case AgentLeaving(reason=reason):
                self.leaving = reason
                self.cause = LossCause.LEFT
                agent.draining = True
                self._work.registry.refresh(agent)
            case _:
                pass

    async def _status(self, agent: ConnectedAgent, report: JobStatusReport) -> None:
        if report.state != "running":
            await self._patiently(lambda: self._work.lifecycle.reported(agent, report))

    async def _output(self, agent: ConnectedAgent, message: LogChunkMessage) -> None:
        job_id = JobId(message.job_id)
        if job_id not in agent.jobs:
            self._violation(message.job_id)
            return
        chunk = NewChunk(job_id=job_id, stream=Stream(message.stream), offset=message.offset, data=message.data)
        try:
            end = await self._patiently(lambda: self._work.logs.append(chunk))
        except Conflict as error:  # it comes back and sends from where the stored output ends
            self.close(CloseCode.INTERNAL, str(error))
            await self._doors.gone(self, str(error))
            return
        self.send(LogAck(job_id=message.job_id, stream=message.stream, offset=end))

    def _violation(self, job_id: str) -> None:
        """A frame about a job that this agent does not hold: refused with one fixed text, and counted."""
        now = self._work.clock.monotonic()
        self._violations = [at for at in self._violations if now - at < VIOLATION_WINDOW_SECONDS] + [now]
        emit(Event.AGENT_REFUSED, agent_id=self._name(), job_id=job_id, reason="not its job")
        self.send(ErrorMessage(code="NOT_OWNED", message="not owned by this agent"))
        if len(self._violations) >= VIOLATIONS_MAX:
            self.close(CloseCode.PROTOCOL, "too many frames about jobs of other agents")

    async def _while_here(self, agent: ConnectedAgent, work: Callable[[], Awaitable[object]]) -> None:
        """The same, unless the agent has come anew meanwhile: then it has said there what counts."""

        async def once() -> None:
            if self._work.registry.get(agent.agent_id) is agent:
                await work()

        await self._patiently(once)

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` until the store answers.  What it does is guarded, so doing it twice is harmless."""
        while True:
            try:
                return await work()
            except StoreDown as error:
                emit(Event.STORE_DOWN, agent_id=self._name(), error=str(error))
                await self._work.clock.sleep(STORE_RETRY_SECONDS)

    def _name(self) -> str:
        return self.agent.agent_id if self.agent else self._link.remote


class FrameWork:
    """What connections share: who handles the frames of registered agents."""

    def __init__(
        self,
        *,
        clock: Clock,
        registry: AgentRegistry,
        lifecycle: JobLifecycle,
        logs: LogSink,
        claims: Claims,
        encode: Callable[[Message], bytes],
    ) -> None:
        self.clock = clock
        self.registry = registry
        self.lifecycle = lifecycle
        self.logs = logs
        self.claims = claims
        self.encode = encode
        self.figures: Callable[[ConnectedAgent, AgentMetrics], None] = lambda agent, report: None
        """Set by the composition root: told of what agents report of themselves."""
