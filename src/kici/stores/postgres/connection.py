"""A connection to PostgreSQL that breaks soon when the network in between was cut in silence.

Nobody is told of such a cut.  A call that is under way would wait for the driver's own timeout, which is longer than
any statement may take; the kernel knows sooner, since nothing of what it sends is acknowledged.  A server that works
on a long statement acknowledges, and is left alone.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from kici.kit.sockets import watch_peer

if TYPE_CHECKING:  # the driver's classes are generic for type checkers only
    _Connection = asyncpg.Connection[asyncpg.Record]
else:
    _Connection = asyncpg.Connection

IDLE_SECONDS: Final = 5
PROBE_SECONDS: Final = 3
PROBES: Final = 3
UNANSWERED_SECONDS: Final = 10.0
"""Longer than a moment in which packets are lost, shorter than anybody waits for an answer."""


class WatchedConnection(_Connection):
    """What the driver makes of a socket; the socket is told to look after its peer."""

    __slots__ = ()

    def __init__(self, protocol: Any, transport: asyncio.Transport, *more: Any) -> None:
        super().__init__(protocol, transport, *more)
        watch_peer(
            transport,
            idle_seconds=IDLE_SECONDS,
            probe_seconds=PROBE_SECONDS,
            probes=PROBES,
            unanswered_seconds=UNANSWERED_SECONDS,
        )
