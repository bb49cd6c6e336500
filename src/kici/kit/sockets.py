"""What the kernel is asked to find out about a peer: a cut network tells nobody that a connection is over."""

import socket
from typing import Any, Protocol


class OnSocket(Protocol):
    """A transport, or a WebSocket."""

    def get_extra_info(self, name: str, default: Any = None) -> Any: ...


def watch_peer(
    connection: OnSocket, *, idle_seconds: int, probe_seconds: int, probes: int, unanswered_seconds: float
) -> None:
    """Let the kernel find out when the peer is gone, and break the connection then.

    After `idle_seconds` without traffic it probes every `probe_seconds`; so many probes without an answer are the end,
    and so is anything sent that is not acknowledged within `unanswered_seconds`.  Not for Unix sockets, whose peer
    cannot vanish without notice.
    """
    sock = connection.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle_seconds),
        ("TCP_KEEPINTVL", probe_seconds),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", round(unanswered_seconds * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
