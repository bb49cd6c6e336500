"""Event scalers on a real PostgreSQL: the lock of a scaler is its own, and nobody waits for it longer than allowed."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import asyncpg
import pytest
from tests.engines import Server, postgres_server

from kici.domain.errors import LockContended
from kici.domain.ids import ScalerName
from kici.ports.store import Store
from kici.stores.postgres.open import open_postgres
from kici.testing.contracts.store_events import CLOUD, RULES, an_event_spawn, slot
from kici.testing.contracts.store_rules import ALL

pytestmark = pytest.mark.engine("postgres")
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('kici:scaler:cap|' || $1, 0))"
SHORT_MS = 200


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
async def url(server: Server) -> AsyncIterator[str]:
    async with server.database() as url:
        store = open_postgres(url)
        await store.migrate()
        await store.close()
        yield url


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    store = open_postgres(url)
    yield store
    await store.close()


@pytest.fixture
async def holder(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Somebody who holds the lock of the scaler and does not go on."""
    connection = await asyncpg.connect(url)
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(LOCK, CLOUD)
    yield connection
    await transaction.rollback()
    await connection.close()


@pytest.mark.spec("scaler 23.7.3")
async def test_waits_for_the_lock_of_a_scaler_no_longer_than_allowed(store: Store, holder: asyncpg.Connection) -> None:
    begun = time.monotonic()
    with pytest.raises(LockContended):
        await slot(store, an_event_spawn(1), replace(RULES, lock_wait_ms=SHORT_MS))
    assert SHORT_MS / 1000 <= time.monotonic() - begun < 5
    assert await store.spawns(owner=None, limit=10) == []


@pytest.mark.spec("scaler 23.7.3")
async def test_writes_when_the_lock_comes_free_in_time(store: Store, url: str) -> None:
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        await connection.execute(LOCK, CLOUD)
        waiting = asyncio.create_task(slot(store, an_event_spawn(1), replace(RULES, lock_wait_ms=10_000)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
    assert await waiting is None
    await connection.close()


async def test_another_scaler_does_not_wait(store: Store, holder: asyncpg.Connection) -> None:
    spawn = replace(an_event_spawn(1), scaler=ScalerName("another"))
    assert await slot(store, spawn, replace(RULES, lock_wait_ms=SHORT_MS)) is None


@pytest.mark.spec("scaler 23.7.1")
async def test_two_pools_together_keep_the_cap(store: Store, url: str) -> None:
    other = open_postgres(url)
    rules = replace(RULES, agents_max=3, lock_wait_ms=10_000)
    answers = await asyncio.gather(
        *(slot((store, other)[n % 2], an_event_spawn(n), rules) for n in range(20)),
    )
    assert answers.count(None) == 3
    assert len(await store.spawns(owner=None, limit=ALL)) == 3
    await other.close()
