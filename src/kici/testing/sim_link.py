"""A simulated connection: two ends that implement the link port, and a wire between them that can be hurt.

Frames arrive in order, each after a delay drawn from the seed.  Bounds are those of a real socket: `drain` waits
while more than half of `bytes_max` is unread by the peer, and a sender that goes on regardless is closed.

`cut` resets the connection: both ends learn at once, frames under way are lost.  `half_open` loses everything from
then on in both directions (or one) and tells nobody: only a heartbeat can find out.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final, Self

from kici.ports.entropy import Entropy

ABNORMAL: Final = 1006
"""What an end sees as the close code when the connection broke instead of being closed."""
TOO_SLOW: Final = 1008
BYTES_MAX: Final = 8 * 1024 * 1024
CLOSE_SECONDS: Final = 10.0
"""How long an end waits for the peer's answer to its close before it gives the connection up."""


class LinkClosed(Exception):
    """The connection is over.  `code` and `reason` are the peer's, or 1006 when it broke."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}".rstrip())
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Close:
    code: int
    reason: str
    is_answer: bool


class SimEnd:
    """One end.  `send`, `close`, `drain` and `remote` are the link port; `receive` is the owner's."""

    def __init__(self, wire: "SimWire", remote: str) -> None:
        self._wire = wire
        self._remote = remote
        self._inbox: deque[bytes] = deque()
        self._under_way: deque[bytes | _Close] = deque()
        self._arrives_at = 0.0
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self._closing: asyncio.TimerHandle | None = None
        self._end: _Close | None = None
        self.peer = self

    @property
    def remote(self) -> str:
        return self._remote

    @property
    def is_closed(self) -> bool:
        """Whether this end has closed or was closed: `send` does nothing any more."""
        return self._end is not None or self._closing is not None

    def send(self, frame: bytes) -> None:
        if self.is_closed:
            return
        self.peer._unread_bytes += len(frame)
        if self.peer._unread_bytes > self._wire.bytes_max:
            self.close(TOO_SLOW, "the peer does not read")
            return
        self._wire.carry(frame, self.peer)

    def close(self, code: int, reason: str) -> None:
        if self.is_closed:
            return
        loop = asyncio.get_running_loop()
        self._closing = loop.call_later(CLOSE_SECONDS, self._over, _Close(code, reason, is_answer=True))
        self._wire.carry(_Close(code, reason, is_answer=False), self.peer)

    async def drain(self) -> None:
        while not self.is_closed and self.peer._unread_bytes > self._wire.bytes_max // 2:
            self.peer._changed.clear()
            await self.peer._changed.wait()

    async def receive(self) -> bytes:
        """The next frame.  Raises `LinkClosed` when there will be none.  For one reader."""
        while not self._inbox:
            if self._end is not None:
                raise LinkClosed(self._end.code, self._end.reason)
            self._changed.clear()
            await self._changed.wait()
        frame = self._inbox.popleft()
        self._unread_bytes -= len(frame)
        self._changed.set()
        return frame

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.receive()
        except LinkClosed:
            raise StopAsyncIteration from None

    def _arrive(self) -> None:
        """One delay is over: the oldest thing under way to this end is here."""
        if not self._under_way:
            return  # the connection was cut meanwhile
        match self._under_way.popleft():
            case _ if self._end is not None:
                pass
            case _Close() as close:
                if not close.is_answer:
                    self._wire.carry(_Close(close.code, close.reason, is_answer=True), self.peer)
                self._over(close)
            case frame:
                self._inbox.append(frame)
                self._changed.set()

    def _over(self, end: _Close) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._end = self._end or end
        self._changed.set()
        self.peer._changed.set()


class SimWire:
    """What is between two ends.  Make it on the running loop."""

    def __init__(
        self,
        entropy: Entropy,
        *,
        delay_seconds: tuple[float, float] = (0.001, 0.020),
        names: tuple[str, str] = ("a", "b"),
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self._entropy = entropy
        self._delay_seconds = delay_seconds
        self._deaf: set[int] = set()
        self.bytes_max = bytes_max
        self.a = SimEnd(self, names[1])
        self.b = SimEnd(self, names[0])
        self.a.peer, self.b.peer = self.b, self.a

    @property
    def is_deaf(self) -> bool:
        """Whether what is sent in either direction is lost."""
        return bool(self._deaf)

    def cut(self) -> None:
        """Reset: both ends are told at once."""
        for end in (self.a, self.b):
            end._under_way.clear()
            end._over(_Close(ABNORMAL, "connection lost", is_answer=True))

    def half_open(self, *, to_a: bool = True, to_b: bool = True) -> None:
        """From now on nothing arrives, and nobody is told."""
        for end, deaf in ((self.a, to_a), (self.b, to_b)):
            if deaf:
                self._deaf.add(id(end))
                end._under_way.clear()

    def carry(self, what: "bytes | _Close", to: SimEnd) -> None:
        """Deliver to an end after the delay, behind what is already on its way."""
        if id(to) in self._deaf:
            return
        loop = asyncio.get_running_loop()
        to._arrives_at = max(to._arrives_at, loop.time() + self._entropy.uniform(*self._delay_seconds))
        to._under_way.append(what)
        loop.call_at(to._arrives_at, to._arrive)
