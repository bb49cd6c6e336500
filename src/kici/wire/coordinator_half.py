"""The coordinator's side of one agent connection, without I/O: frames and time in, effects out.

It knows the order of the conversation (authenticate, register, work), its timers and its limits.  It does not
know tokens, jobs or stores: where those are needed it says `Authenticate` or `Register`, and whoever drives it
answers by `authenticated`, `auth_failed`, `registered` or `refused`.

An answer that comes after the connection was closed has no effect.  Times are seconds of a monotonic clock.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kici.domain.errors import Bug
from kici.wire.codec import BadFrame, UnknownType, decode_from_agent
from kici.wire.messages import (
    PROTOCOL_VERSION_MIN,
    AgentMessage,
    AgentRegister,
    AuthFailure,
    AuthRequest,
    AuthSuccess,
    ClaimCredentials,
    CloseCode,
    CoordinatorMessage,
    ErrorMessage,
    Heartbeat,
    LogChunkMessage,
    RegisterAck,
    Unsupported,
)
from kici.wire.pace import Pace

AUTH_SECONDS: Final = 5.0
REGISTRATION_SECONDS: Final = 10.0
UNHEALTHY_SECONDS: Final = 90.0
DEAD_SECONDS: Final = 180.0
CLOSE_REASON_BYTES_MAX: Final = 123


class Phase(StrEnum):
    PENDING_AUTH = "pending auth"
    AUTHENTICATING = "authenticating"
    """The driver is looking at the token."""
    PENDING_REGISTRATION = "pending registration"
    REGISTERING = "registering"
    """The driver is looking at the registration."""
    REGISTERED = "registered"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Send:
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Close:
    code: int
    reason: str
    """At most 123 bytes."""


@dataclass(frozen=True, slots=True)
class Authenticate:
    """Answer by `authenticated` or `auth_failed`."""

    token: str | None


@dataclass(frozen=True, slots=True)
class Register:
    """Answer by `registered` or `refused`."""

    message: AgentRegister


@dataclass(frozen=True, slots=True)
class Redeem:
    """A claim code is offered for credentials, in whatever phase: answer by `redeemed`."""

    message: ClaimCredentials


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a registered agent."""

    message: AgentMessage


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """Nothing was heard for too long; said once for each silence."""

    age_seconds: float


Effect = Send | Close | Authenticate | Register | Redeem | Received | Unhealthy


class CoordinatorHalf:
    """One connection.  After a `Close` effect it is over: nothing has any effect any more."""

    __slots__ = ("_auth_required", "_heard_at", "_pace", "_phase", "_phase_since", "_unhealthy")

    def __init__(self, *, auth_required: bool, now: float) -> None:
        self._auth_required = auth_required
        self._phase = Phase.PENDING_AUTH if auth_required else Phase.PENDING_REGISTRATION
        self._phase_since = now
        self._heard_at = now
        self._unhealthy = False
        self._pace = Pace(now)

    @property
    def phase(self) -> Phase:
        return self._phase

    def receive(self, frame: bytes | str, now: float) -> list[Effect]:
        """Handle one frame of the peer."""
        if self._phase is Phase.CLOSED:
            return []
        self.heard(now)
        try:
            message = decode_from_agent(frame)
        except UnknownType as error:
            return self._paced(Unsupported(what=error.what), len(frame), now, [Send(Unsupported(what=error.what))])
        except BadFrame as error:
            return [
                Send(ErrorMessage(code="INVALID_MESSAGE", message=str(error)[:500])),
                *self._close(CloseCode.INVALID_MESSAGE, f"invalid message: {error}"),
            ]
        return self._paced(message, len(frame), now, self._handle(message, now))

    def heard(self, now: float) -> None:
        """A sign of life, or: the silence until now was ours, since the driver was busy and did not read."""
        self._heard_at = max(self._heard_at, now)
        self._unhealthy = False

    def excuse(self, seconds: float, now: float) -> None:
        """For so long, until `now`, the driver read nobody's frames: that was no silence of this peer."""
        self._phase_since = min(now, self._phase_since + seconds)
        self._heard_at = min(now, self._heard_at + seconds)

    def tick(self, now: float) -> list[Effect]:
        """Let time act; call it at `next_deadline` or whenever it suits."""
        match self._phase:
            case Phase.PENDING_AUTH | Phase.AUTHENTICATING if now >= self._phase_since + AUTH_SECONDS:
                return self._close(CloseCode.TIMEOUT, f"not authenticated within {AUTH_SECONDS:g} s")
            case Phase.PENDING_REGISTRATION if now >= self._phase_since + REGISTRATION_SECONDS:
                return self._close(CloseCode.TIMEOUT, f"not registered within {REGISTRATION_SECONDS:g} s")
            case Phase.REGISTERING | Phase.REGISTERED:
                return self._listen(now)
            case _:
                return []

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next, if nothing else happens before."""
        match self._phase:
            case Phase.PENDING_AUTH | Phase.AUTHENTICATING:
                return self._phase_since + AUTH_SECONDS
            case Phase.PENDING_REGISTRATION:
                return self._phase_since + REGISTRATION_SECONDS
            case Phase.REGISTERING | Phase.REGISTERED:
                return self._heard_at + (DEAD_SECONDS if self._unhealthy else UNHEALTHY_SECONDS)
            case Phase.CLOSED:
                return None

    def authenticated(self, connection_id: str, now: float | None = None) -> list[Effect]:
        """The token is good.  The registration timer starts at `now` (unknown: when the peer was last heard)."""
        if not self._awaits_answer(Phase.AUTHENTICATING):
            return []
        self._enter(Phase.PENDING_REGISTRATION, self._heard_at if now is None else now)
        return [Send(AuthSuccess(connection_id=connection_id))]

    def auth_failed(self, reason: str) -> list[Effect]:
        """The token is not good, and will never be."""
        if not self._awaits_answer(Phase.AUTHENTICATING):
            return []
        return [Send(AuthFailure(reason=reason)), *self._close(CloseCode.AUTH_FAILED, reason)]

    def registered(self, ack: RegisterAck) -> list[Effect]:
        """The registration is stored: from here on its messages are `Received`."""
        if not self._awaits_answer(Phase.REGISTERING):
            return []
        self._enter(Phase.REGISTERED, self._heard_at)
        return [Send(ack)]

    def refused(self, code: int, reason: str) -> list[Effect]:
        """Close on the driver's demand, in any phase: a refused token or registration, or a later dismissal."""
        return self._close(code, reason)

    def redeemed(self, answer: CoordinatorMessage) -> list[Effect]:
        """Answer to a claim code; no timer and no phase is moved by it."""
        return [] if self._phase is Phase.CLOSED else [Send(answer)]

    def _handle(self, message: AgentMessage, now: float) -> list[Effect]:
        if isinstance(message, ClaimCredentials):
            return [Redeem(message)]
        match self._phase:
            case Phase.PENDING_AUTH:
                return self._handle_pending_auth(message, now)
            case Phase.PENDING_REGISTRATION:
                return self._handle_pending_registration(message, now)
            case Phase.REGISTERED if isinstance(message, AgentRegister):
                self._enter(Phase.REGISTERING, now)
                return [Register(message)]
            case Phase.REGISTERED if not isinstance(message, AuthRequest):
                return [Received(message)]
            case _:
                return []

    def _handle_pending_auth(self, message: AgentMessage, now: float) -> list[Effect]:
        match message:
            case AuthRequest():
                return self._authenticate(message, now)
            case AgentRegister():
                return self._close(CloseCode.UNAUTHORIZED, "authentication required: set KICI_AGENT_TOKEN")
            case _:
                return []

    def _handle_pending_registration(self, message: AgentMessage, now: float) -> list[Effect]:
        match message:
            case AgentRegister():
                self._enter(Phase.REGISTERING, now)
                return [Register(message)]
            case AuthRequest() if not self._auth_required:
                return self._authenticate(message, now)
            case _:
                return []

    def _authenticate(self, message: AuthRequest, now: float) -> list[Effect]:
        if message.protocol_version < PROTOCOL_VERSION_MIN:
            reason = f"protocol {message.protocol_version} is older than {PROTOCOL_VERSION_MIN}: upgrade the agent"
            return self._close(CloseCode.PROTOCOL, reason)
        if self._auth_required:
            self._phase = Phase.AUTHENTICATING  # the timer runs on: it bounds the look-up too
        else:
            self._enter(Phase.AUTHENTICATING, now)
        return [Authenticate(message.token)]

    def _paced(self, message: AgentMessage, size: int, now: float, effects: list[Effect]) -> list[Effect]:
        """Apply the limits.  A registered agent's output is paced by acknowledgements and slow reading instead."""
        is_output = self._phase is Phase.REGISTERED and isinstance(message, LogChunkMessage)
        if is_output or isinstance(message, Heartbeat) or self._phase is Phase.CLOSED:
            return effects
        overrun = self._pace.count(size, now)
        if overrun is None:
            return effects
        wait_ms = round(overrun.wait_seconds * 1000)
        if overrun.is_too_long:
            return [*effects, *self._close(CloseCode.PROTOCOL, "over the message rate limit for too long")]
        if overrun.is_new:
            warning = f"over the message rate limit: pause for {wait_ms} ms"
            return [*effects, Send(ErrorMessage(code="RATE_LIMITED", message=warning))]
        return effects

    def _listen(self, now: float) -> list[Effect]:
        age_seconds = now - self._heard_at
        if age_seconds >= DEAD_SECONDS:
            return self._close(CloseCode.HEARTBEAT, f"silent for {age_seconds:.0f} s")
        if age_seconds >= UNHEALTHY_SECONDS and not self._unhealthy:
            self._unhealthy = True
            return [Unhealthy(age_seconds)]
        return []

    def _awaits_answer(self, phase: Phase) -> bool:
        if self._phase is Phase.CLOSED:
            return False
        if self._phase is not phase:
            raise Bug(f"an answer for phase {phase.value!r} came in phase {self._phase.value!r}")
        return True

    def _enter(self, phase: Phase, now: float) -> None:
        self._phase = phase
        self._phase_since = now

    def _close(self, code: int, reason: str) -> list[Effect]:
        if self._phase is Phase.CLOSED:
            return []
        self._phase = Phase.CLOSED
        return [Close(code, close_reason(reason))]


def close_reason(text: str) -> str:
    """The text, cut to what a close frame can carry, at a character."""
    return text.encode("utf-8", "replace")[:CLOSE_REASON_BYTES_MAX].decode("utf-8", "ignore")
