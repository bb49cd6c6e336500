from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kici.testing.fake_surface import FakeSurface
from kici.web.app import build_app
from kici.web.logins import Logins
from kici.web.pages import LOGINS

Client = TestClient[web.Request, web.Application]


@pytest.fixture
def fake() -> FakeSurface:
    return FakeSurface()


@pytest.fixture
async def client(fake: FakeSurface) -> AsyncIterator[Client]:
    """The application over fakes, asked by nobody in particular."""
    surface = fake.surface
    app = build_app(surface, Logins(surface.tokens, surface.clock, surface.entropy))
    async with TestClient(TestServer(app)) as client:
        yield client


@pytest.fixture
def logins(client: Client) -> Logins:
    app = client.app
    assert app is not None
    return app[LOGINS]
