"""The HTTP application over fakes, served from a thread of its own, for clients that block."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from click.testing import CliRunner, Result

from kici.cli.main import kici
from kici.testing.fake_surface import FakeSurface
from kici.web.app import build_app
from kici.web.logins import Logins

SECONDS = 10.0


@dataclass
class Served:
    """A coordinator that answers, and the command line pointed at it."""

    fake: FakeSurface
    url: str
    loop: asyncio.AbstractEventLoop

    def do(self, act: Callable[[], Any]) -> Any:
        """Change something of the fakes where they live."""
        done: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(act()))
        return done.result(SECONDS)

    def later(self, seconds: float, act: Callable[..., object], *arguments: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.call_later, seconds, act, *arguments)

    def kici(self, *arguments: str, token: str = "owner", stdin: str | None = None) -> Result:
        environ = {"KICI_URL": self.url, "KICI_TOKEN": token, "KICI_DATA_DIR": None}
        return CliRunner().invoke(kici, list(arguments), env=environ, input=stdin)


@contextmanager
def serving() -> Iterator[Served]:
    ready: Future[Served] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        fake = FakeSurface()
        surface = fake.surface
        app = build_app(surface, Logins(surface.tokens, surface.clock, surface.entropy))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        ready.set_result(Served(fake, f"http://127.0.0.1:{port}", asyncio.get_running_loop()))
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    served = ready.result(SECONDS)
    try:
        yield served
    finally:
        served.loop.call_soon_threadsafe(stop.set)
        thread.join(SECONDS)
