"""The coordinator's side of one worker link, without I/O: frames and time in, effects out.

It knows the order of the conversation: hello, challenge, proof or join token, welcome, offer, inventory, work.  It
does not know credentials: where they are needed it says `Judge`, answered by `welcomed` or `refused`.  After a
`Close` effect it is over.  Times are seconds of a monotonic clock.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kici.domain.errors import Bug
from kici.wire.codec import BadFrame, UnknownType
from kici.wire.coordinator_half import close_reason
from kici.wire.messages import CloseCode, Unsupported
from kici.wire.worker_codec import decode_from_worker
from kici.wire.worker_messages import (
    ROLE,
    WORKER_PROTOCOL_MIN,
    Challenge,
    LinkClose,
    Refused,
    Welcome,
    WorkerBeat,
    WorkerHello,
    WorkerInventory,
    WorkerJoin,
    WorkerMessage,
    WorkerOffer,
    WorkerOrder,
    WorkerProof,
)
from kici.wire.worker_pulse import Pulse

HANDSHAKE_SECONDS: Final = 15.0


class GatePhase(StrEnum):
    GREETING = "greeting"
    """Waits for the hello."""
    CHALLENGED = "challenged"
    JUDGING = "judging"
    """The driver looks at the proof or token."""
    COMPARING = "comparing"
    """Waits for offer and inventory."""
    LINKED = "linked"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Send:
    message: WorkerOrder


@dataclass(frozen=True, slots=True)
class Close:
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Judge:
    """Is it who it says?  Answer by `welcomed` or `refused`."""

    hello: WorkerHello
    proof: WorkerProof | WorkerJoin


@dataclass(frozen=True, slots=True)
class Linked:
    """It told all that it offers and holds: work may begin."""

    offer: WorkerOffer
    inventory: WorkerInventory


@dataclass(frozen=True, slots=True)
class Received:
    message: WorkerMessage


Effect = Send | Close | Judge | Linked | Received


class WorkerGate:
    """One connection."""

    __slots__ = ("_hello", "_instance_id", "_nonce", "_offer", "_phase", "_pulse", "_since")

    def __init__(self, *, instance_id: str, nonce: str, now: float) -> None:
        self._instance_id = instance_id
        self._nonce = nonce
        self._phase = GatePhase.GREETING
        self._since = now
        self._pulse = Pulse(now)
        self._hello: WorkerHello | None = None
        self._offer: WorkerOffer | None = None

    @property
    def phase(self) -> GatePhase:
        return self._phase

    @property
    def nonce(self) -> str:
        return self._nonce

    def receive(self, frame: bytes | str, now: float) -> list[Effect]:
        if self._phase is GatePhase.CLOSED:
            return []
        self._pulse.heard(now)
        try:
            message = decode_from_worker(frame)
        except UnknownType as error:
            return [Send(Unsupported(what=error.what))]
        except BadFrame as error:
            return self._close(CloseCode.INVALID_MESSAGE, f"invalid message: {error}")
        return self._handle(message, now)

    def said(self, now: float) -> None:
        """Something was sent."""
        self._pulse.said(now)

    def tick(self, now: float) -> list[Effect]:
        """Let time act."""
        if self._phase is GatePhase.CLOSED:
            return []
        if self._phase is not GatePhase.LINKED:
            late = now >= self._since + HANDSHAKE_SECONDS
            return self._close(CloseCode.TIMEOUT, f"not linked within {HANDSHAKE_SECONDS:g} s") if late else []
        silence = self._pulse.silence(now)
        if silence is not None:
            return self._close(CloseCode.HEARTBEAT, f"silent for {silence:.0f} s")
        return [Send(WorkerBeat())] if self._pulse.is_beat_due(now) else []

    def welcomed(self, *, proof: str, credential: str | None) -> list[Effect]:
        """It is who it says."""
        if not self._awaits_judgement():
            return []
        self._phase = GatePhase.COMPARING
        return [Send(Welcome(instance_id=self._instance_id, proof=proof, credential=credential))]

    def refused(self, reason: str, *, is_permanent: bool) -> list[Effect]:
        """It is not let in, or (in any phase) not any more."""
        if self._phase is GatePhase.CLOSED:
            return []
        code = LinkClose.REFUSED if is_permanent else LinkClose.THROTTLED
        return [Send(Refused(reason=reason, is_permanent=is_permanent)), *self._close(code, reason)]

    def dismissed(self, code: int, reason: str) -> list[Effect]:
        """Close for a reason of the driver's."""
        return self._close(code, reason)

    def _handle(self, message: WorkerMessage, now: float) -> list[Effect]:
        match self._phase, message:
            case GatePhase.GREETING, WorkerHello():
                return self._greet(message)
            case GatePhase.CHALLENGED, WorkerProof() | WorkerJoin():
                assert self._hello is not None
                self._phase = GatePhase.JUDGING
                return [Judge(self._hello, message)]
            case GatePhase.COMPARING, WorkerOffer():
                self._offer = message
                return []
            case GatePhase.COMPARING, WorkerInventory() if self._offer is not None:
                self._phase = GatePhase.LINKED
                self._pulse.heard(now)
                return [Linked(self._offer, message)]
            case GatePhase.LINKED, _ if not isinstance(message, WorkerBeat | WorkerHello | WorkerJoin | WorkerProof):
                return [Received(message)]
            case GatePhase.GREETING | GatePhase.CHALLENGED, _ if not isinstance(message, WorkerBeat | Unsupported):
                return self.refused("Missing auth method", is_permanent=True)
            case _:
                return []

    def _greet(self, hello: WorkerHello) -> list[Effect]:
        if hello.protocol_version < WORKER_PROTOCOL_MIN:
            return self.refused("Unsupported protocol version", is_permanent=True)
        if hello.role != ROLE:
            return self.refused("Role mismatch", is_permanent=True)
        self._hello = hello
        self._phase = GatePhase.CHALLENGED
        return [Send(Challenge(nonce=self._nonce, instance_id=self._instance_id))]

    def _awaits_judgement(self) -> bool:
        if self._phase is GatePhase.CLOSED:
            return False
        if self._phase is not GatePhase.JUDGING:
            raise Bug(f"a judgement came in phase {self._phase.value!r}")
        return True

    def _close(self, code: int, reason: str) -> list[Effect]:
        if self._phase is GatePhase.CLOSED:
            return []
        self._phase = GatePhase.CLOSED
        return [Close(code, close_reason(reason))]
