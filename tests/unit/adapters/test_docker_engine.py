"""The Docker client's connections, against a small engine on a socket of the test."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kici.adapters.docker_engine import DockerEngine
from kici.domain.errors import KiciError, Retryable
from kici.ports.engine import EngineAddress, EngineKind

LINE = b"\x01\x00\x00\x00\x00\x00\x00\x06hello\n"


class Endless:
    """Answers whatever is followed with one piece, and then nothing until it is hung up on."""

    def __init__(self) -> None:
        self.hung_up = asyncio.Event()

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.41", "Version": "20", "Arch": "amd64", "Os": "linux"})

    async def inspect(self, _: web.Request) -> web.Response:
        return web.json_response({"Config": {"Tty": False}})

    async def output(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, LINE)

    async def pull(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, json.dumps({"status": "Pulling"}).encode() + b"\n")

    async def broken(self, _: web.Request) -> web.Response:
        told = [{"status": "Pulling"}, {"error": "write /data: no space left on device"}]
        return web.Response(body=b"".join(json.dumps(each).encode() + b"\n" for each in told))

    async def networks(self, _: web.Request) -> web.Response:
        """The filter of an engine lets longer names through."""
        return web.json_response([{"Name": "kici-agent-net-2", "Id": "0123456789abcdef", "Options": {}}])

    async def _stream(self, request: web.Request, piece: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(piece)
        try:
            await asyncio.Event().wait()
        finally:
            self.hung_up.set()
        return response


@asynccontextmanager
async def an_engine(folder: Path, *, is_broken: bool = False) -> AsyncIterator[tuple[Endless, DockerEngine]]:
    endless = Endless()
    app = web.Application()
    for version in ("", "/v1.41"):
        app.router.add_get(f"{version}/version", endless.version)
        app.router.add_get(f"{version}/containers/one/json", endless.inspect)
        app.router.add_get(f"{version}/containers/one/logs", endless.output)
        app.router.add_post(f"{version}/images/create", endless.broken if is_broken else endless.pull)
        app.router.add_get(f"{version}/networks", endless.networks)
    runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    socket = str(folder / "docker.sock")
    await web.UnixSite(runner, socket).start()
    engine = DockerEngine(EngineAddress(kind=EngineKind.DOCKER, url=f"unix://{socket}", is_local=True))
    try:
        yield endless, engine
    finally:
        await engine.close()
        await runner.cleanup()


async def cut_off(task: "asyncio.Task[None]") -> BaseException:
    """Cancelled, and whatever it held kept from the collector: closing must not be left to it."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    return caught.value


@pytest.mark.parametrize("what", ["follow", "pull"])
async def test_a_stream_that_is_cut_off_closes_its_connection_at_once(tmp_path: Path, what: str) -> None:
    async with an_engine(tmp_path) as (endless, engine):
        told = asyncio.Event()

        async def follow() -> None:
            async for _ in engine.follow("one", lines=1):
                told.set()

        async def pull() -> None:
            await engine.pull("img:1", None, lambda _: told.set())

        task = asyncio.create_task(follow() if what == "follow" else pull())
        async with asyncio.timeout(5):
            await told.wait()
        gc.disable()
        try:
            held = await cut_off(task)
            async with asyncio.timeout(5):
                await endless.hung_up.wait()
            assert held is not None
        finally:
            gc.enable()


async def test_a_connection_serves_again_after_an_answer_that_was_read(tmp_path: Path) -> None:
    async with an_engine(tmp_path) as (_, engine):
        await engine.info()
        await engine.info()
        connector = engine._connector
        assert isinstance(connector, aiohttp.UnixConnector)
        assert sum(map(len, connector._conns.values())) == 1


@pytest.mark.spec("scaler 27.4.4")
async def test_an_error_in_the_middle_of_a_pull_is_an_error(tmp_path: Path) -> None:
    """The answer began well, so its status says nothing."""
    heard: list[str] = []
    async with an_engine(tmp_path, is_broken=True) as (_, engine):
        with pytest.raises(Retryable, match=r"image img:1 could not be pulled.*no space left on device"):
            await engine.pull("img:1", None, heard.append)
    assert heard == ["Pulling"]


@pytest.mark.spec("scaler 29.10.11")
async def test_a_network_of_a_longer_name_is_another_one(tmp_path: Path) -> None:
    async with an_engine(tmp_path) as (_, engine):
        assert await engine.network("kici-agent-net") is None
        assert await engine.network("kici-agent-net-2") == "br-0123456789ab"


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, b"", "is no container engine; check the address"),
        (200, b"{}", "is no container engine; check the address"),
        (502, b"", "is no container engine; check the address"),
        (500, b'{"message": ""}', "HTTP 500 was answered, without a reason"),
        (500, b'{"message": "on fire"}', "on fire"),
    ],
)
async def test_whoever_answers_in_an_engines_place_is_told_of(
    tmp_path: Path, status: int, body: bytes, told: str
) -> None:
    """Such as a proxy: an address in a file may be wrong."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    socket = str(tmp_path / "docker.sock")
    await web.UnixSite(runner, socket).start()
    engine = DockerEngine(EngineAddress(kind=EngineKind.DOCKER, url=f"unix://{socket}", is_local=True))
    try:
        with pytest.raises(KiciError, match=told):
            await engine.info()
    finally:
        await engine.close()
        await runner.cleanup()
