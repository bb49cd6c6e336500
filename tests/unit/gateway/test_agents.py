"""The gateway: frames in order, both ways, bounded, and an end that is told exactly once."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, WSServerHandshakeError, web

from kici.adapters.clock import RealClock
from kici.gateway import agents
from kici.gateway.agents import PING_SECONDS, QUEUE_BYTES_MAX, Gateway
from kici.kit.supervise import Supervisor
from kici.ports.link import Link
from kici.wire.messages import FRAME_BYTES_MAX, CloseCode

OnFrame = Callable[["Listener", bytes], Awaitable[None]]


class Listener:
    """A session that remembers."""

    def __init__(self, link: Link, on_frame: OnFrame) -> None:
        self.link = link
        self.frames: list[bytes] = []
        self.codes: list[int] = []
        self.over = asyncio.Event()
        self._on_frame = on_frame

    async def received(self, frame: bytes | str) -> None:
        assert isinstance(frame, bytes)
        self.frames.append(frame)
        await self._on_frame(self, frame)

    async def closed(self, code: int) -> None:
        self.codes.append(code)
        self.over.set()


async def echo(listener: Listener, frame: bytes) -> None:
    listener.link.send(frame)


class Place:
    """A gateway on a port, and a client for it."""

    def __init__(self, gateway: Gateway, port: int, client: ClientSession) -> None:
        self.gateway = gateway
        self.port = port
        self.url = f"http://127.0.0.1:{port}/ws"
        self.client = client
        self.sessions: list[Listener] = []
        self.arrived = asyncio.Event()
        self.on_frame: OnFrame = echo

    def connected(self, link: Link) -> Listener:
        listener = Listener(link, self.on_frame)
        self.sessions.append(listener)
        self.arrived.set()
        return listener

    async def connect(self, **options: Any) -> ClientWebSocketResponse[Any]:
        ws: ClientWebSocketResponse[Any] = await self.client.ws_connect(self.url, **options)
        return ws

    async def ended(self) -> Listener:
        async with asyncio.timeout(10):
            await self.arrived.wait()
            await self.sessions[0].over.wait()
        return self.sessions[0]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with Supervisor("test") as tasks, ClientSession() as client:
        place = Place.__new__(Place)
        gateway = Gateway(place, clock=RealClock(), tasks=tasks)
        app = web.Application()
        app.router.add_get("/ws", gateway.handle)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        place.__init__(gateway, runner.addresses[0][1], client)  # type: ignore[misc]  # the gateway needs its handler first
        yield place
        gateway.close_all(1001, "over")
        await runner.cleanup()


async def test_frames_go_both_ways_in_order(place: Place) -> None:
    ws = await place.connect()
    for number in range(100):
        await ws.send_str(f"{number} ä")
    assert [await ws.receive_str() for _ in range(100)] == [f"{number} ä" for number in range(100)]
    await ws.close(code=4000)
    listener = await place.ended()
    assert listener.codes == [4000]
    assert listener.link.remote == "127.0.0.1"


async def test_a_close_comes_after_what_was_sent_before_it(place: Place) -> None:
    async def answer(listener: Listener, _: bytes) -> None:
        listener.link.send(b"one")
        listener.link.send(b"two")
        listener.link.close(4003, "enough ä")
        listener.link.send(b"three")
        listener.link.close(4001, "again")

    place.on_frame = answer
    ws = await place.connect()
    await ws.send_str("x")
    assert [await ws.receive_str(), await ws.receive_str()] == ["one", "two"]
    end = await ws.receive()
    assert (end.type, end.data, end.extra) == (WSMsgType.CLOSE, 4003, "enough ä")
    assert (await place.ended()).codes == [4003]


HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


async def test_a_peer_that_vanishes_is_closed_without_a_frame(place: Place) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
    writer.write(HANDSHAKE)
    await reader.readuntil(b"\r\n\r\n")
    assert place.gateway.connections == 1
    writer.transport.abort()
    assert (await place.ended()).codes == [1006]
    assert place.gateway.connections == 0


async def test_the_kernel_watches_over_connections(place: Place) -> None:
    ws = await place.connect()
    await ws.send_str("x")
    await ws.receive()
    (sock,) = [
        transport.get_extra_info("socket")
        for transport in asyncio.get_running_loop()._transports.values()  # type: ignore[attr-defined]  # its only list
        if transport.get_extra_info("sockname")[1] == place.port
    ]
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20


async def test_one_frame_is_handled_at_a_time(place: Place) -> None:
    inside = 0

    async def slow(listener: Listener, frame: bytes) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        await asyncio.sleep(0)
        inside -= 1
        listener.link.send(frame)

    place.on_frame = slow
    ws = await place.connect()
    for _ in range(20):
        await ws.send_str("x")
    for _ in range(20):
        await ws.receive_str()


async def test_a_web_page_is_kept_out(place: Place) -> None:
    with pytest.raises(WSServerHandshakeError) as caught:
        await place.connect(headers={"Origin": "http://evil.example"})
    assert caught.value.status == 403
    assert place.sessions == []


async def test_binary_frames_are_refused(place: Place) -> None:
    ws = await place.connect()
    await ws.send_bytes(b"x")
    end = await ws.receive()
    assert (end.type, end.data) == (WSMsgType.CLOSE, CloseCode.INVALID_MESSAGE)
    assert (await place.ended()).frames == []


async def test_a_frame_over_the_limit_ends_the_connection_unread(place: Place) -> None:
    with mute_peer(place) as sock:
        sock.sendall(b"\x81\xff" + (FRAME_BYTES_MAX + 1).to_bytes(8) + b"\0\0\0\0x")
        listener = await place.ended()
        assert listener.frames == []
        assert len(listener.codes) == 1


async def test_a_fault_of_the_handler_ends_that_connection_only(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: Listener, frame: bytes) -> None:
        raise RuntimeError(frame)

    other = await place.connect()
    place.on_frame = fail
    ws = await place.connect()
    with caplog.at_level(logging.ERROR):
        await ws.send_str("x")
        end = await ws.receive()
    assert (end.type, end.data) == (WSMsgType.CLOSE, CloseCode.INTERNAL)
    assert [record.message for record in caplog.records] == ["connection.failed"]
    await other.send_str("fine")
    assert await other.receive_str() == "fine"


ONE_FRAME = b"\x81\x81\0\0\0\0x"
"""A text frame of one byte, masked as clients must."""


async def test_a_peer_that_does_not_read_is_cut_off_before_it_fills_the_memory(place: Place) -> None:
    block = b"x" * 100_000

    async def flood(listener: Listener, _: bytes) -> None:
        for _number in range(2 * QUEUE_BYTES_MAX // len(block)):
            listener.link.send(block)
            await asyncio.sleep(0)

    place.on_frame = flood
    with mute_peer(place) as sock:
        sock.sendall(ONE_FRAME)  # and never read
        listener = await place.ended()
    assert listener.codes == [CloseCode.GOING_AWAY]
    listener.link.send(b"ignored")


@contextlib.contextmanager
def mute_peer(place: Place) -> Iterator[socket.socket]:
    """A connection whose other end never reads."""
    with socket.create_connection(("127.0.0.1", place.port)) as sock:
        sock.sendall(HANDSHAKE)
        yield sock


async def test_a_peer_that_does_not_read_cannot_put_off_its_close(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "CLOSE_SECONDS", 0.2)

    async def much(listener: Listener, _: bytes) -> None:
        for _number in range(60):
            listener.link.send(b"x" * 100_000)
        listener.link.close(4004, "silent")

    place.on_frame = much
    with mute_peer(place) as sock:
        sock.sendall(ONE_FRAME)
        listener = await place.ended()
    assert listener.codes == [4004]


async def test_draining_waits_for_a_slow_reader(place: Place) -> None:
    block = b"x" * 100_000
    drained = asyncio.Event()

    async def flood(listener: Listener, _: bytes) -> None:
        for _number in range(60):
            listener.link.send(block)
        await listener.link.drain()
        drained.set()

    place.on_frame = flood
    ws = await place.connect(max_msg_size=0)
    await ws.send_str("x")
    for _ in range(60):
        assert not drained.is_set() or len(place.sessions) == 1
        await ws.receive_str()
    async with asyncio.timeout(5):
        await drained.wait()


async def test_every_connection_is_pinged_once_in_a_round(place: Place) -> None:
    sockets = [await place.connect(autoping=False) for _ in range(5)]
    for _ in range(PING_SECONDS):
        place.gateway.ping_some()
    for ws in sockets:
        assert (await ws.receive()).type is WSMsgType.PING
        with pytest.raises(TimeoutError):
            await ws.receive(timeout=0.02)


async def test_all_connections_are_closed_when_the_program_ends(place: Place) -> None:
    sockets = [await place.connect() for _ in range(3)]
    place.gateway.close_all(1001, "restarting")
    for ws in sockets:
        end = await ws.receive()
        assert (end.type, end.data, end.extra) == (WSMsgType.CLOSE, 1001, "restarting")


async def test_a_plain_request_is_not_served(place: Place) -> None:
    async with place.client.get(place.url) as response:
        assert response.status == 400
