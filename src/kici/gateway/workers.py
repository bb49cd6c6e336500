"""The worker's end of its links: opens a WebSocket to a coordinator and serves it to its end.

The coordinator's end is the gateway of agents with another handler.
"""

import asyncio
import logging
from collections import deque
from typing import Final

from aiohttp import (
    ClientConnectionResetError,
    ClientError,
    ClientSession,
    ClientWebSocketResponse,
    WSMsgType,
)

from kici.domain.errors import Retryable
from kici.gateway.agents import watch_peer
from kici.ports.link import LinkHandler
from kici.wire.messages import FRAME_BYTES_MAX, CloseCode

log = logging.getLogger(__name__)

Socket = ClientWebSocketResponse[bool]

OPEN_SECONDS: Final = 10.0
QUEUE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of frames that a coordinator does not take; more, and it is left."""
DRAINED_BYTES: Final = 1024 * 1024
NO_CLOSE_FRAME: Final = 1006


class DialledLink:
    """Implements `Link` on a socket that we opened."""

    def __init__(self, socket: Socket, remote: str) -> None:
        self._socket = socket
        self._remote = remote
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._closing: tuple[int, bytes] | None = None
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()

    @property
    def remote(self) -> str:
        return self._remote

    @property
    def close_code(self) -> int | None:
        """The code of our own close, if we asked for one."""
        return None if self._closing is None else self._closing[0]

    def send(self, frame: bytes) -> None:
        if self._closing is not None:
            return
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        if self._queued_bytes > QUEUE_BYTES_MAX:
            self._queue.clear()
            self._closing = (CloseCode.GOING_AWAY, b"")
        self._changed.set()

    def close(self, code: int, reason: str) -> None:
        if self._closing is None:
            self._closing = (code, reason.encode())
            self._changed.set()

    async def drain(self) -> None:
        while self._queued_bytes > DRAINED_BYTES and self._closing is None:
            self._drained.clear()
            await self._drained.wait()

    async def write(self) -> None:
        """Send what is queued, until the connection is over; then close it, if that is our wish."""
        try:
            while True:
                while self._queue:
                    frame = self._queue.popleft()
                    await self._socket.send_frame(frame, WSMsgType.TEXT)
                    self._queued_bytes -= len(frame)
                    self._drained.set()
                if self._closing is not None:
                    code, reason = self._closing
                    _ = await self._socket.close(code=code, message=reason)
                    return
                self._changed.clear()
                await self._changed.wait()
        except (ConnectionError, ClientConnectionResetError):
            return  # reading finds the same


class WebSocketDialer:
    """Implements `ports.workers.Dialer`."""

    def __init__(self, client: ClientSession) -> None:
        self._client = client

    async def dial(self, url: str, handler: LinkHandler) -> None:
        socket = await open_socket(self._client, url, timeout_seconds=OPEN_SECONDS)
        link = DialledLink(socket, url)
        session = handler.connected(link)
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(link.write(), name=f"write {url}")
                try:
                    while (message := await socket.receive()).type is WSMsgType.TEXT:
                        await session.received(message.data)
                finally:
                    writer.cancel()
        except* Exception as errors:
            log.exception("link.failed", extra={"kici": {"url": url}}, exc_info=errors)
        finally:
            _ = await socket.close()
            await session.closed(link.close_code or socket.close_code or NO_CLOSE_FRAME)


async def open_socket(client: ClientSession, url: str, *, timeout_seconds: float, autoping: bool = True) -> Socket:
    """Raises `Retryable` with what went wrong."""
    try:
        async with asyncio.timeout(timeout_seconds):
            socket: Socket = await client.ws_connect(
                url,
                max_msg_size=FRAME_BYTES_MAX,
                autoping=autoping,
                decode_text=False,
            )
    except (ClientError, OSError, TimeoutError, ValueError) as error:
        raise Retryable(f"cannot connect to {url}: {str(error) or type(error).__name__}") from error
    watch_peer(socket)
    return socket
