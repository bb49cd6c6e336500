"""The real embedded store for tests and simulation: in memory, inline, on the given clock."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kici.ports.clock import Clock
from kici.ports.store import Store
from kici.stores.sqlite.open import open_sqlite
from kici.testing.sim_clock import SimClock


@asynccontextmanager
async def a_store(clock: Clock | None = None) -> AsyncIterator[Store]:
    """A fresh store with its schema.  Its own clock is `clock` (the loop's virtual time)."""
    clock = clock or SimClock()
    store = open_sqlite(":memory:", clock_now=clock.now, inline=True)
    try:
        await store.migrate()
        yield store
    finally:
        await store.close()
