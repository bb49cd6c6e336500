"""The worker's side of one link to a coordinator, without I/O: frames and time in, effects out.

It says who it is, shows that it knows its credential (or offers its one-time join token), and believes a
coordinator only when that shows the same: orders start programs on this host.  After `Over` nothing follows.
Times are seconds of a monotonic clock.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kici.wire.codec import BadFrame, UnknownType
from kici.wire.coordinator_half import close_reason
from kici.wire.messages import CloseCode, Unsupported
from kici.wire.worker_codec import decode_order
from kici.wire.worker_messages import (
    Challenge,
    LinkClose,
    Refused,
    Welcome,
    WorkerBeat,
    WorkerHello,
    WorkerJoin,
    WorkerMessage,
    WorkerOrder,
    WorkerProof,
)
from kici.wire.worker_proof import COORDINATOR, WORKER, hash_of, is_proof, proof_of
from kici.wire.worker_pulse import Pulse

HANDSHAKE_SECONDS: Final = 20.0
"""Longer than the coordinator's, which knows better why."""


class HalfPhase(StrEnum):
    GREETING = "greeting"
    PROVING = "proving"
    LINKED = "linked"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Send:
    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class Keep:
    """Remember this credential before anything else."""

    credential: str


@dataclass(frozen=True, slots=True)
class Welcomed:
    """Let in: tell what is offered and held."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Ordered:
    order: WorkerOrder


@dataclass(frozen=True, slots=True)
class Over:
    """Close the connection."""

    code: int
    reason: str
    is_permanent: bool = False
    """Coming again with the same credential or token is in vain."""


Effect = Send | Keep | Welcomed | Ordered | Over


class WorkerHalf:
    """One connection."""

    __slots__ = ("_credential", "_hello", "_instance_id", "_join_token", "_phase", "_pulse", "_since")

    def __init__(self, hello: WorkerHello, *, credential: str | None, join_token: str | None, now: float) -> None:
        """A credential is used before a join token."""
        self._hello = hello
        self._credential = credential
        self._join_token = join_token
        self._instance_id = ""
        self._phase = HalfPhase.GREETING
        self._since = now
        self._pulse = Pulse(now)

    @property
    def phase(self) -> HalfPhase:
        return self._phase

    def opened(self) -> list[Effect]:
        return [Send(self._hello)]

    def receive(self, frame: bytes | str, now: float) -> list[Effect]:
        if self._phase is HalfPhase.CLOSED:
            return []
        self._pulse.heard(now)
        try:
            order = decode_order(frame)
        except UnknownType as error:
            return [Send(Unsupported(what=error.what))]
        except BadFrame as error:
            return self._over(CloseCode.INVALID_MESSAGE, f"invalid message: {error}")
        return self._handle(order)

    def said(self, now: float) -> None:
        """Something was sent."""
        self._pulse.said(now)

    def tick(self, now: float) -> list[Effect]:
        """Let time act."""
        if self._phase is HalfPhase.CLOSED:
            return []
        if self._phase is not HalfPhase.LINKED:
            late = now >= self._since + HANDSHAKE_SECONDS
            return self._over(CloseCode.TIMEOUT, f"not let in within {HANDSHAKE_SECONDS:g} s") if late else []
        silence = self._pulse.silence(now)
        if silence is not None:
            return self._over(CloseCode.HEARTBEAT, f"silent for {silence:.0f} s")
        return [Send(WorkerBeat())] if self._pulse.is_beat_due(now) else []

    def leave(self, reason: str) -> list[Effect]:
        """Close for a reason of the driver's."""
        return self._over(CloseCode.GOING_AWAY, reason)

    def _handle(self, order: WorkerOrder) -> list[Effect]:
        match self._phase, order:
            case _, Refused(reason=reason, is_permanent=is_permanent):
                return self._over(LinkClose.REFUSED, reason, is_permanent=is_permanent)
            case HalfPhase.GREETING, Challenge():
                return self._prove(order)
            case HalfPhase.PROVING, Welcome():
                return self._welcomed(order)
            case HalfPhase.LINKED, _ if not isinstance(order, WorkerBeat | Challenge | Welcome):
                return [Ordered(order)]
            case _:
                return []

    def _prove(self, challenge: Challenge) -> list[Effect]:
        self._instance_id = challenge.instance_id
        self._phase = HalfPhase.PROVING
        if self._credential is not None:
            key = hash_of(self._credential)
            proof = proof_of(key, side=WORKER, nonce=challenge.nonce, who=self._hello.worker_id)
            return [Send(WorkerProof(proof=proof))]
        if self._join_token is not None:
            return [Send(WorkerJoin(token=self._join_token))]
        return self._over(LinkClose.REFUSED, "this worker has neither a credential nor a join token", is_permanent=True)

    def _welcomed(self, welcome: Welcome) -> list[Effect]:
        if self._credential is not None:
            key, nonce = hash_of(self._credential), self._hello.nonce
            is_known = is_proof(welcome.proof, key, side=COORDINATOR, nonce=nonce, who=self._instance_id)
            if not is_known or welcome.instance_id != self._instance_id:
                return self._over(LinkClose.REFUSED, "the coordinator does not know this worker's credential")
        elif welcome.credential is None:
            return self._over(LinkClose.REFUSED, "the coordinator gave no credential for the join token")
        self._phase = HalfPhase.LINKED
        kept: list[Effect] = [] if welcome.credential is None else [Keep(welcome.credential)]
        return [*kept, Welcomed(self._instance_id)]

    def _over(self, code: int, reason: str, *, is_permanent: bool = False) -> list[Effect]:
        if self._phase is HalfPhase.CLOSED:
            return []
        self._phase = HalfPhase.CLOSED
        return [Over(code, close_reason(reason), is_permanent)]
