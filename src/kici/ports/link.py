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
