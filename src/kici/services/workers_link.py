"""One connection of a worker: moves effects of the protocol machine to whoever answers them."""

from typing import Protocol, assert_never

from kici.ports.clock import Clock
from kici.ports.link import Link
from kici.wire.codec import encode
from kici.wire.worker_gate import Close, Effect, Judge, Linked, Received, Send, WorkerGate
from kici.wire.worker_messages import WorkerHello, WorkerMessage, WorkerOrder


class Desk(Protocol):
    """Who answers the questions of a connection."""

    async def judge(self, connection: "WorkerConnection", asked: Judge) -> None: ...

    async def linked(self, connection: "WorkerConnection", told: Linked) -> None: ...

    async def received(self, connection: "WorkerConnection", message: WorkerMessage) -> None: ...

    async def lost(self, connection: "WorkerConnection", why: str) -> None:
        """Called once, last."""
        ...


class WorkerConnection:
    """Implements the gateway's session."""

    def __init__(self, *, link: Link, gate: WorkerGate, desk: Desk, clock: Clock) -> None:
        self.gate = gate
        self.hello: WorkerHello | None = None
        """Who it is, once that is known."""
        self._link = link
        self._desk = desk
        self._clock = clock
        self._is_over = False

    @property
    def remote(self) -> str:
        return self._link.remote

    def send(self, order: WorkerOrder) -> None:
        self.gate.said(self._clock.monotonic())
        self._link.send(encode(order))

    async def received(self, frame: bytes | str) -> None:
        """One frame from the gateway.  Returns when it is dealt with."""
        await self.apply(self.gate.receive(frame, self._clock.monotonic()))

    async def closed(self, code: int) -> None:
        """The socket is closed, by whichever side."""
        await self._over(f"its connection closed ({code})")

    async def tick(self) -> None:
        await self.apply(self.gate.tick(self._clock.monotonic()))

    async def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(order):
                    self.send(order)
                case Close(code, reason):
                    self._link.close(code, reason)
                    await self._over(reason)
                case Judge():
                    await self._desk.judge(self, effect)
                case Linked():
                    await self._desk.linked(self, effect)
                case Received(message):
                    await self._desk.received(self, message)
                case _:
                    assert_never(effect)

    async def _over(self, why: str) -> None:
        if not self._is_over:
            self._is_over = True
            await self._desk.lost(self, why)
