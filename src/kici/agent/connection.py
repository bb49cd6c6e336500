"""One WebSocket connection of the agent.

Pings go out on their own and nobody insists on the pongs: a coordinator that waits for its database answers late
without being dead.  Every byte that arrives is a sign of life; the protocol half judges the silence.
"""

import asyncio
import ssl
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kici.agent.sparing import without
from kici.kit.version import VERSION
from kici.wire.messages import FRAME_BYTES_MAX

# It asks these for the version of a checkout and for the system's proxies, and we have neither: a quarter of a start.
with without("importlib.metadata", "urllib.request"):
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, WebSocketException

OPEN_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 1.0
PING_SECONDS: Final = 20.0
NO_CLOSE_FRAME: Final = 1006


class _Listening(ClientConnection):
    """Tells whenever anything arrives."""

    on_data: Callable[[], None] | None = None

    def data_received(self, data: bytes) -> None:
        if self.on_data is not None:
            self.on_data()
        super().data_received(data)


class Connection:
    """Sending queues; what is queued is bounded by the outbox of the protocol half."""

    def __init__(self, socket: _Listening) -> None:
        self._socket = socket
        self._queue: deque[bytes] = deque()
        self._is_queued = asyncio.Event()
        self._is_sent = asyncio.Event()
        self._is_sent.set()

    def send(self, frame: bytes) -> None:
        self._queue.append(frame)
        self._is_queued.set()
        self._is_sent.clear()

    async def read(self, on_frame: Callable[[bytes], None]) -> tuple[int, str]:
        """Give each frame away until the connection is closed; the code and reason of that."""
        try:
            while True:
                on_frame(await self._socket.recv(decode=False))
        except ConnectionClosed as closed:
            frame = closed.rcvd or closed.sent
            return (NO_CLOSE_FRAME, "connection lost") if frame is None else (frame.code, frame.reason)

    async def write(self) -> None:
        """Send what is queued, until the connection is closed."""
        try:
            while True:
                await self._is_queued.wait()
                while self._queue:
                    await self._socket.send(self._queue.popleft(), text=True)
                self._is_queued.clear()
                self._is_sent.set()
        except ConnectionClosed:
            self._is_sent.set()

    async def flush(self) -> None:
        """Return when everything queued was handed to the kernel, or never will be."""
        await self._is_sent.wait()

    async def close(self, code: int, reason: str) -> None:
        await self._socket.close(code, reason)


def trust() -> ssl.SSLContext:
    """Whom to believe: the certificates of this system, and those that came with our runtime into an image without."""
    context = ssl.create_default_context()
    brought = Path(sys.prefix) / "etc" / "ca.pem"
    if brought.exists():
        context.load_verify_locations(brought)
    return context


async def open_connection(url: str, on_data: Callable[[], None]) -> Connection:
    """Raises `ConnectionError` with what went wrong."""
    options: dict[str, Any] = {
        **({"ssl": trust()} if url.startswith("wss:") else {}),
        "create_connection": _Listening,
        "compression": None,
        "open_timeout": OPEN_SECONDS,
        "close_timeout": CLOSE_SECONDS,
        "ping_interval": PING_SECONDS,
        "ping_timeout": None,
        "max_size": FRAME_BYTES_MAX,
        "proxy": None,
        "user_agent_header": f"kici-agent/{VERSION}",
    }
    try:
        socket = await connect(url, **options)
    except (OSError, TimeoutError, WebSocketException, ValueError) as error:
        raise ConnectionError(f"cannot connect to {url}: {str(error) or type(error).__name__}") from error
    assert isinstance(socket, _Listening)
    socket.on_data = on_data
    return Connection(socket)
