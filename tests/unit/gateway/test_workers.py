"""The worker's sockets: links that it opens, and the relay of its agents."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, WSMsgType, WSServerHandshakeError, web

from kici.domain.errors import Retryable
from kici.domain.ids import AgentId
from kici.gateway.worker_relay import LOST, Relay
from kici.gateway.workers import WebSocketDialer
from kici.ports.link import Link

Serve = Callable[[web.WebSocketResponse[bool]], Awaitable[None]]


async def echo(ws: web.WebSocketResponse[bool]) -> None:
    async for message in ws:
        if message.data == b"close":
            await ws.close(code=4033, message="no use for you ä".encode())
        elif message.data == b"abort":
            raise asyncio.CancelledError
        else:
            await ws.send_frame(message.data, message.type)


@asynccontextmanager
async def server(handle: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/ws", handle)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"ws://127.0.0.1:{runner.addresses[0][1]}/ws"
    finally:
        await runner.cleanup()


def serving(serve: Serve, *, autoping: bool = True) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(decode_text=False, autoping=autoping)
        await ws.prepare(request)
        await serve(ws)
        return ws

    return handle


class Listener:
    """A session that remembers."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.frames: list[bytes] = []
        self.codes: list[int] = []
        self.changed = asyncio.Event()

    async def received(self, frame: bytes | str) -> None:
        assert isinstance(frame, bytes)
        self.frames.append(frame)
        self.changed.set()

    async def closed(self, code: int) -> None:
        self.codes.append(code)


class Door:
    def __init__(self) -> None:
        self.listener: Listener | None = None

    def connected(self, link: Link) -> Listener:
        self.listener = Listener(link)
        link.send(b"hello")
        return self.listener


async def heard(door: Door, count: int) -> Listener:
    async with asyncio.timeout(10):
        while door.listener is None or len(door.listener.frames) < count:  # noqa: ASYNC110  # whoever speaks first
            await asyncio.sleep(0.01)
    return door.listener


async def test_a_link_carries_frames_both_ways_and_ends_as_we_say() -> None:
    async with server(serving(echo)) as url, ClientSession() as client, asyncio.TaskGroup() as group:
        door = Door()
        dialled = group.create_task(WebSocketDialer(client).dial(url, door))
        listener = await heard(door, 1)
        for number in range(100):
            listener.link.send(f"{number}".encode())
        await heard(door, 101)
        assert listener.frames == [b"hello", *(f"{number}".encode() for number in range(100))]
        await listener.link.drain()
        listener.link.close(4050, "over")
        listener.link.send(b"too late")
        await dialled
        assert listener.codes == [4050]


async def test_a_link_ends_as_the_coordinator_says() -> None:
    async with server(serving(echo)) as url, ClientSession() as client, asyncio.TaskGroup() as group:
        door = Door()
        dialled = group.create_task(WebSocketDialer(client).dial(url, door))
        listener = await heard(door, 1)
        listener.link.send(b"close")
        await dialled
        assert listener.codes == [4033]


async def test_a_session_that_fails_ends_its_link_and_nothing_else() -> None:
    class Broken(Listener):
        async def received(self, frame: bytes | str) -> None:
            raise ValueError("oh no")

    class BrokenDoor(Door):
        def connected(self, link: Link) -> Listener:
            self.listener = Broken(link)
            link.send(b"hello")
            return self.listener

    async with server(serving(echo)) as url, ClientSession() as client:
        door = BrokenDoor()
        await WebSocketDialer(client).dial(url, door)
        assert door.listener is not None
        assert len(door.listener.codes) == 1


async def test_a_coordinator_that_is_not_there_is_named() -> None:
    async with ClientSession() as client:
        with pytest.raises(Retryable, match="cannot connect to ws"):
            await WebSocketDialer(client).dial("ws://127.0.0.1:1/", Door())


@asynccontextmanager
async def relayed(upstream: str | None, asked: list[AgentId | None] | None = None) -> AsyncIterator[str]:
    def choose(agent_id: AgentId | None) -> str | None:
        if asked is not None:
            asked.append(agent_id)
        return upstream

    async with ClientSession() as client, server(Relay(upstream=choose, client=client).handle) as url:
        yield url


@pytest.mark.spec("D5")
async def test_frames_of_an_agent_pass_as_they_are() -> None:
    asked: list[AgentId | None] = []
    async with server(serving(echo)) as above, relayed(above, asked) as url, ClientSession() as client:
        ws = await client.ws_connect(f"{url}?agent=scaler-bare-metal-0123abcd")
        await ws.send_str("ä text")
        await ws.send_bytes(b"\x00\xff")
        assert await ws.receive_str() == "ä text"
        assert await ws.receive_bytes() == b"\x00\xff"
        await ws.close()
        assert asked == ["scaler-bare-metal-0123abcd"]


async def test_a_sign_of_life_is_of_the_coordinator_not_of_the_relay() -> None:
    pings: list[bytes] = []

    async def deaf(ws: web.WebSocketResponse[bool]) -> None:
        while (message := await ws.receive()).type is not WSMsgType.CLOSE:
            pings.append(message.data)

    async with server(serving(deaf, autoping=False)) as above, relayed(above) as url, ClientSession() as client:
        ws = await client.ws_connect(url, autoping=False)
        await ws.ping(b"are you there")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ws.receive()
        assert pings == [b"are you there"]
        await ws.close()


async def test_a_close_keeps_its_code_and_reason_so_that_a_refusal_stays_one() -> None:
    async with server(serving(echo)) as above, relayed(above) as url, ClientSession() as client:
        ws = await client.ws_connect(url)
        await ws.send_str("close")
        end = await ws.receive()
        assert (end.type, end.data, end.extra) == (WSMsgType.CLOSE, 4033, "no use for you ä")


async def test_an_agent_that_closes_is_closed_upstream_as_it_said() -> None:
    codes: list[int | None] = []

    async def watch(ws: web.WebSocketResponse[bool]) -> None:
        async for _ in ws:
            pass
        codes.append(ws.close_code)

    async with server(serving(watch)) as above, relayed(above) as url, ClientSession() as client:
        ws = await client.ws_connect(url)
        await ws.close(code=4000)
        async with asyncio.timeout(5):
            while not codes:  # noqa: ASYNC110  # the other side notices in its own time
                await asyncio.sleep(0.01)
        assert codes == [4000]


async def test_an_agent_whose_way_breaks_is_told_to_come_back_here() -> None:
    async def breaks(ws: web.WebSocketResponse[bool]) -> None:
        await ws.receive()
        assert ws._req is not None
        assert ws._req.transport is not None
        ws._req.transport.abort()

    async with server(serving(breaks)) as above, relayed(above) as url, ClientSession() as client:
        ws = await client.ws_connect(url)
        await ws.send_str("x")
        end = await ws.receive()
        assert (end.type, end.data) == (WSMsgType.CLOSE, LOST)


@pytest.mark.parametrize(
    ("upstream", "headers", "status"),
    [(None, {}, 503), ("ws://127.0.0.1:1/ws", {}, 502), (None, {"Origin": "http://evil.example"}, 403)],
)
async def test_without_a_coordinator_nobody_is_let_in(
    upstream: str | None, headers: dict[str, str], status: int
) -> None:
    async with relayed(upstream) as url, ClientSession() as client:
        with pytest.raises(WSServerHandshakeError) as error:
            await client.ws_connect(url, headers=headers)
        assert error.value.status == status
