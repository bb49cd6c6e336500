"""WebSocket endpoint: moves bytes between sockets and whoever handles them, and knows nothing of what they mean.

An idle connection costs one waiting coroutine and no timers: what is sent is written by a task that lives while
there is something to write, and one loop pings all connections in turn.  Nobody insists on pongs, since a peer is
read only as fast as its frames are handled: the kernel finds dead peers (keep-alive probes, unacknowledged data),
the protocol above finds silent ones.
"""

import asyncio
import logging
from collections import deque
from typing import Final, Never

from aiohttp import ClientConnectionResetError, WSMsgType, web

from kici.kit import sockets
from kici.kit.finish import finish
from kici.kit.sockets import OnSocket
from kici.kit.supervise import Supervisor
from kici.ports.clock import Clock
from kici.ports.link import LinkHandler, LinkSession
from kici.wire.messages import FRAME_BYTES_MAX, CloseCode

log = logging.getLogger(__name__)

Socket = web.WebSocketResponse[bool]

QUEUE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of frames that a peer does not take; more, and it is cut off."""
DRAINED_BYTES: Final = 256 * 1024
PING_SECONDS: Final = 20
CLOSE_SECONDS: Final = 5.0
CLOSED_SECONDS: Final = 60.0
"""Longest time that a session may take over the end of its connection."""
NO_CLOSE_FRAME: Final = 1006


class SocketLink:
    """Implements `Link` on one WebSocket."""

    __slots__ = (
        "_closing",
        "_drained",
        "_ender",
        "_queue",
        "_queued_bytes",
        "_remote",
        "_socket",
        "_tasks",
        "_transport",
        "_writer",
    )

    def __init__(self, socket: Socket, transport: asyncio.Transport, remote: str, tasks: Supervisor) -> None:
        self._socket = socket
        self._transport = transport
        self._remote = remote
        self._tasks = tasks
        self._queue: deque[tuple[WSMsgType, bytes]] = deque()
        self._queued_bytes = 0
        self._closing: tuple[int, bytes] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._ender: asyncio.Task[None] | None = None
        self._drained: asyncio.Event | None = None

    @property
    def remote(self) -> str:
        return self._remote

    @property
    def close_code(self) -> int | None:
        """The code of our own close, if we asked for one."""
        return None if self._closing is None else self._closing[0]

    def send(self, frame: bytes) -> None:
        self._put(WSMsgType.TEXT, frame)

    def close(self, code: int, reason: str) -> None:
        if self._closing is None:
            self._closing = (code, reason.encode())
            self._ender = self._tasks.spawn("close", self._end())

    async def drain(self) -> None:
        if self._queued_bytes > DRAINED_BYTES and not self._socket.closed:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    def ping(self) -> None:
        """Keep the path open; unless it is busy anyway."""
        if not self._queue:
            self._put(WSMsgType.PING, b"")

    async def ended(self) -> None:
        """Return when a close that was asked for is done with."""
        if self._ender is not None:
            await _end_of(self._ender)

    def _put(self, kind: WSMsgType, payload: bytes) -> None:
        if self._closing is not None or self._socket.closed:
            return
        self._queue.append((kind, payload))
        self._queued_bytes += len(payload)
        if self._queued_bytes > QUEUE_BYTES_MAX:
            self._closing = (CloseCode.GOING_AWAY, b"")
            self._give_up()
        elif self._writer is None:
            self._writer = self._tasks.spawn("write", self._write())

    async def _write(self) -> None:
        """Send what is queued."""
        try:
            while self._queue:
                kind, payload = self._queue[0]
                await self._socket.send_frame(payload, kind)
                if self._queue:  # not given up meanwhile
                    _ = self._queue.popleft()
                    self._queued_bytes -= len(payload)
                self._wake()
        except (ConnectionError, ClientConnectionResetError):
            self._give_up()
        finally:
            self._writer = None

    async def _end(self) -> None:
        """Send what is queued, close, and wait for the peer to agree; not for ever."""
        assert self._closing is not None
        code, reason = self._closing
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._writer is not None:
                    await _end_of(self._writer)
                _ = await self._socket.close(code=code, message=reason)
        except TimeoutError:
            pass
        finally:
            self._give_up()

    def _give_up(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._drained is not None and self._queued_bytes <= DRAINED_BYTES:
            self._drained.set()
            self._drained = None


async def _end_of(task: asyncio.Task[None]) -> None:
    _ = await asyncio.wait({task})  # noqa: TID251 (neither cancels it nor cares how it ended)


class Gateway:
    """One endpoint for one kind of peer: register `handle` as its route, keep `run` running."""

    def __init__(self, handler: LinkHandler, *, clock: Clock, tasks: Supervisor) -> None:
        self._handler = handler
        self._clock = clock
        self._tasks = tasks
        self._links: list[set[SocketLink]] = [set() for _ in range(PING_SECONDS)]
        self._turn = 0

    @property
    def connections(self) -> int:
        return sum(len(links) for links in self._links)

    async def run(self) -> Never:
        """Ping every connection once in each `PING_SECONDS`, some of them each second."""
        while True:
            await self._clock.sleep(1)
            self.ping_some()

    def ping_some(self) -> None:
        """Ping the connections whose turn it is."""
        self._turn = (self._turn + 1) % len(self._links)
        for link in tuple(self._links[self._turn]):
            link.ping()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one connection to its end."""
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="This endpoint is for agents, not for web pages.\n")
        ws = web.WebSocketResponse(
            compress=False, max_msg_size=FRAME_BYTES_MAX, timeout=CLOSE_SECONDS, decode_text=False
        )
        _ = await ws.prepare(request)
        if request.transport is None:
            return ws
        watch_peer(request.transport)
        link = SocketLink(ws, request.transport, request.remote or "unknown", self._tasks)
        session = self._handler.connected(link)
        turn = min(self._links, key=len)
        turn.add(link)
        try:
            await _read(ws, link, session)
        finally:
            turn.discard(link)
            await finish(
                session.closed(link.close_code or ws.close_code or NO_CLOSE_FRAME),
                seconds=CLOSED_SECONDS,
                what=f"the end of the connection of {link.remote}",
            )
            await link.ended()
        return ws

    def close_all(self, code: int, reason: str) -> None:
        """Start to close every connection: the program is about to end."""
        for links in self._links:
            for link in tuple(links):
                link.close(code, reason)


async def _read(ws: Socket, link: SocketLink, session: LinkSession) -> None:
    while True:
        message = await ws.receive()
        if message.type is WSMsgType.BINARY:
            link.close(CloseCode.INVALID_MESSAGE, "text frames only")
        if message.type is not WSMsgType.TEXT:
            return
        try:
            await session.received(message.data)
        except Exception:
            log.exception("connection.failed", extra={"remote": link.remote})
            link.close(CloseCode.INTERNAL, "internal error")
            return


def watch_peer(connection: OnSocket) -> None:
    """Let the kernel find out when an agent's or a worker's host is gone."""
    sockets.watch_peer(connection, idle_seconds=20, probe_seconds=10, probes=3, unanswered_seconds=60)
