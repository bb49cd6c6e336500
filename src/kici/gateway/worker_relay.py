"""Agents of a worker reach coordinators through this: one upstream socket for each, frames as they are, both ways.

Nothing is looked into.  Pings are passed on, too: what an agent takes for a sign of life must come from a coordinator,
not from here.  Reading waits for writing, so a slow side slows the other.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from aiohttp import ClientConnectionResetError, ClientSession, WSMessage, WSMsgType, web
from aiohttp.http_websocket import WSMessageTextBytes

from kici.domain.errors import Retryable
from kici.domain.ids import AgentId
from kici.gateway.agents import watch_peer
from kici.gateway.workers import Socket, open_socket
from kici.wire.messages import FRAME_BYTES_MAX

OPEN_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 5.0
AGENTS_MAX: Final = 20_000
LOST: Final = 1012
"""Told to an agent whose way upstream broke: it comes back here, and another coordinator may be linked by then."""
_PASSED: Final = frozenset({WSMsgType.TEXT, WSMsgType.BINARY, WSMsgType.PING, WSMsgType.PONG})
_UNSPEAKABLE: Final = frozenset({1005, 1006, 1015})
"""Codes that no close frame carries."""


class _Socket(Protocol):
    @property
    def close_code(self) -> int | None: ...

    async def receive(self) -> WSMessage | WSMessageTextBytes: ...

    async def send_frame(self, message: bytes, opcode: WSMsgType) -> None: ...

    async def close(self, *, code: int = 1000, message: bytes = b"") -> bool: ...


class Relay:
    """Register `handle` as the route of agents."""

    def __init__(self, *, upstream: Callable[[AgentId | None], str | None], client: ClientSession) -> None:
        """`upstream(agent id)`: where an agent is best served; None: nowhere now."""
        self._upstream = upstream
        self._client = client
        self._count = 0

    @property
    def connections(self) -> int:
        return self._count

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one agent's connection to its end."""
        if "Origin" in request.headers:
            raise web.HTTPForbidden(text="This endpoint is for agents, not for web pages.\n")
        name = request.query.get("agent")
        url = self._upstream(None if name is None else AgentId(name))
        if url is None or self._count >= AGENTS_MAX:
            raise web.HTTPServiceUnavailable(text="This worker is linked to no coordinator now.\n")
        self._count += 1
        try:
            above = await self._open(url)
            below = web.WebSocketResponse(
                compress=False,
                autoping=False,
                max_msg_size=FRAME_BYTES_MAX,
                timeout=CLOSE_SECONDS,
                decode_text=False,
            )
            try:
                _ = await below.prepare(request)
                if request.transport is not None:
                    watch_peer(request.transport)
                await _join(below, above)
            finally:
                _ = await above.close(code=LOST)
            return below
        finally:
            self._count -= 1

    async def _open(self, url: str) -> Socket:
        try:
            return await open_socket(self._client, url, timeout_seconds=OPEN_SECONDS, autoping=False)
        except Retryable as error:
            raise web.HTTPBadGateway(text=f"{error}\n") from error


async def _join(below: _Socket, above: _Socket) -> None:
    """Both ways, until one of them ends; the other is told the same end."""
    async with asyncio.TaskGroup() as group:
        down = group.create_task(_pass(above, below), name="relay down")
        up = group.create_task(_pass(below, above), name="relay up")
        down.add_done_callback(lambda _: up.cancel())
        up.add_done_callback(lambda _: down.cancel())


async def _pass(source: _Socket, sink: _Socket) -> None:
    try:
        while (message := await source.receive()).type in _PASSED:
            await sink.send_frame(message.data, message.type)
    except (ConnectionError, ClientConnectionResetError):
        return  # the other way finds the end, and tells it
    code = source.close_code or LOST
    reason = message.extra if isinstance(message.extra, str) else ""
    _ = await sink.close(code=LOST if code in _UNSPEAKABLE else code, message=reason.encode())
