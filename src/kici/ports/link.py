"""A message connection to an agent, seen from the coordinator."""

from typing import Protocol


class Link(Protocol):
    """One open connection.  Sending never blocks the caller: frames queue, and a peer that does not read
    is closed when more than the bound is queued."""

    @property
    def remote(self) -> str:
        """Address of the peer, for people."""
        ...

    def send(self, frame: bytes) -> None:
        """Queue one text frame.  Ignored after close."""
        ...

    def close(self, code: int, reason: str) -> None:
        """Start to close.  Frames already queued are sent first."""
        ...

    async def drain(self) -> None:
        """Return when the queue is below its bound (how reading slower becomes flow control)."""
        ...


class LinkSession(Protocol):
    """What listens to one connection."""

    async def received(self, frame: bytes | str) -> None:
        """Handle one frame.  The next one is read when this returns: being slow is flow control."""
        ...

    async def closed(self, code: int) -> None:
        """The connection is over, for whatever reason (1006: without a close frame).  Called exactly once, last."""
        ...


class LinkHandler(Protocol):
    """What makes a listener for each new connection of one kind of peer."""

    def connected(self, link: Link) -> LinkSession: ...
