"""Ports of this machine for programs that tests start."""

import random
import socket
from pathlib import Path
from typing import Final

_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port where nobody listens, and which no connection gets of itself.

    Those that the system gives away (`bind` to port 0 too) may be taken by any connection on this machine before the
    program that is to listen there has begun, or while it is away between two starts: even by one that tries to reach
    it, and so finds itself.
    """
    first = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    candidates = range(10_000, first) if first > 12_000 else range(2_000, first)
    while True:
        port = random.choice(candidates)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
