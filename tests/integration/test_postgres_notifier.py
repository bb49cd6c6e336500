"""Hints between coordinators through a real PostgreSQL: at once, few, and none to oneself."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.engines import Server, postgres_server

from kici.adapters.clock import RealClock
from kici.kit.supervise import Supervisor
from kici.ports.peers import Topic
from kici.stores.postgres.notifier import PostgresNotifier
from kici.testing.cuttable_proxy import CuttableProxy

pytestmark = pytest.mark.engine("postgres")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


class Ear:
    """A coordinator that counts what it hears."""

    def __init__(self, url: str, name: str, **timing: float) -> None:
        self.notifier = PostgresNotifier(url, clock=RealClock(), name=name, **timing)
        self.heard: Counter[Topic] = Counter()
        self._something = asyncio.Event()
        for topic in Topic:
            self.notifier.listen(topic, lambda topic=topic: self._hears(topic))  # type: ignore[misc]  # bound above

    def _hears(self, topic: Topic) -> None:
        self.heard[topic] += 1
        self._something.set()

    async def hears(self, topic: Topic, times: int) -> None:
        async with asyncio.timeout(10):
            while self.heard[topic] < times:
                self._something.clear()
                await self._something.wait()


@asynccontextmanager
async def two(server: Server) -> AsyncIterator[tuple[Ear, Ear]]:
    async with server.database() as url, Supervisor("test") as supervisor:
        ears = Ear(url, "a"), Ear(url, "b")
        for ear in ears:
            supervisor.service("hints", ear.notifier.run)
            for topic in Topic:
                await ear.hears(topic, 1)  # connected: whatever was missed is looked for
            ear.heard.clear()
        yield ears


async def test_a_burst_is_heard_by_the_other_in_two(server: Server) -> None:
    async with two(server) as (one, other):
        one.notifier.hint(Topic.EVENTS)
        await other.hears(Topic.EVENTS, 1)
        for _ in range(100):
            one.notifier.hint(Topic.EVENTS)
        one.notifier.hint(Topic.QUEUE)
        await other.hears(Topic.QUEUE, 1)
        assert 2 <= other.heard[Topic.EVENTS] <= 3
        assert not one.heard


async def test_who_lost_the_connection_looks_at_everything(server: Server) -> None:
    async with two(server) as (_, other):
        await server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
        )
        for topic in Topic:
            await other.hears(topic, 1)


@pytest.mark.parametrize("talks", [False, True], ids=["who only listens", "who sends hints"])
async def test_a_connection_that_dies_in_silence_is_noticed_and_replaced(server: Server, talks: bool) -> None:
    async with server.database() as url, Supervisor("test") as supervisor:
        parts = urlsplit(url)
        assert parts.port is not None
        async with CuttableProxy(parts.port) as proxy:
            through = urlunsplit(parts._replace(netloc=f"postgres@127.0.0.1:{proxy.port}"))
            near, far = Ear(url, "a"), Ear(through, "b", quiet_seconds=0.5, answer_seconds=0.5)
            for ear in (near, far):
                supervisor.service("hints", ear.notifier.run)
                await ear.hears(Topic.QUEUE, 1)
            far.heard.clear()
            proxy.stall()
            if talks:
                far.notifier.hint(Topic.EVENTS)
            await far.hears(Topic.QUEUE, 1)  # connected anew: whatever was missed is looked for
            far.heard.clear()
            near.notifier.hint(Topic.EVENTS)
            await far.hears(Topic.EVENTS, 1)
            proxy.resume()
