"""The reaper of provisioned machines: what a pass costs that spares all of them, and one that tears all of them down.

`python -m tests.bench reaper`.  PostgreSQL is a throw-away cluster with fsync on.  Spared because their agents are
there, or because they have been out of sight for less than the grace; torn down because their coordinator died long
ago.  The rows of one machine are written as always, and then multiplied by the database.
"""

import logging
import time
from collections.abc import Iterator
from typing import Final

import asyncpg
import uvloop
from tests.bench.event_coordinator import REF, an_event_coordinator, subscribe
from tests.bench.meter import Meter, server_pid
from tests.bench.row import Row, duration, rate
from tests.engines import Server, postgres_server

from kici.adapters.clock import RealClock
from kici.adapters.entropy import SystemEntropy
from kici.adapters.sealer import AesGcmSealer
from kici.decide.backoff import BackoffSettings
from kici.decide.elect import Term
from kici.domain.instance import Lease
from kici.observe.metrics import Metrics
from kici.ports.store import Store
from kici.services.event_emitter import EventEmitter
from kici.services.event_provision_reaper import EventProvisionReaper
from kici.services.settings import LiveSettings
from kici.services.shared_deferrals import SharedDeferrals
from kici.stores.postgres.open import open_postgres
from kici.testing import engines
from kici.testing.builders import HERE, a_reservation, an_instance
from kici.testing.contracts.store_events import a_session_of, an_event_spawn, scale_up

SIZES: Final = (10_000, 100_000)
PASSES: Final = 5
TABLES: Final = ("scaler_spawning_agents", "scaler_reservations", "agent_sessions")


class Leads:
    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def term(self) -> Term | None:
        return Term(lease=self._lease, trusted_until=float("inf"))


class Later(RealClock):
    """A clock that can be moved on."""

    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_seconds


async def machines(store: Store, url: str, count: int) -> None:
    """So many machines of one scaler, adopted and with their agents' sessions."""
    spawn = an_event_spawn(0)
    assert await store.insert_spawn(spawn, a_reservation(spawn), None) is None
    assert await store.emit_scale_up(scale_up(0))
    for event in await store.claim_events(HERE, lease_ms=1000, limit=10):
        await store.process_event(event)
    assert await store.register_agent(a_session_of(0), needs_spawn=True, bound=None) is not None
    await multiply(url, count)


async def multiply(url: str, count: int) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            "UPDATE scaler_spawning_agents SET bound_job_id = NULL, provisioning_targets = $1", f'["{REF}"]'
        )
        for table in TABLES:
            await connection.execute(
                f"INSERT INTO {table} SELECT made.*"
                f" FROM (SELECT to_jsonb(each) AS fields FROM {table} AS each LIMIT 1) AS one"
                f" CROSS JOIN generate_series(2, {count}) AS number"
                f" CROSS JOIN LATERAL jsonb_populate_record(NULL::{table},"
                " one.fields || jsonb_build_object('agent_id', 'machine-' || number)) AS made"
            )
        await connection.execute("ANALYZE")
    finally:
        await connection.close()


async def passes(reaper: EventProvisionReaper, server: int | None) -> Meter:
    """The best of several passes that do nothing."""
    found = []
    for _ in range(PASSES):
        with Meter(server) as meter:
            assert await reaper.tick() == 0
        found.append(meter)
    return min(found, key=lambda each: each.wall)


async def measure(url: str, count: int, server: int | None) -> list[Row]:
    store = open_postgres(url)
    try:
        await store.beat(an_instance())
        await machines(store, url, count)
        lease = await store.acquire_lease("leader", HERE, ttl_ms=86_400_000)
        assert lease is not None
        clock = Later()
        async with an_event_coordinator(store) as one:
            await subscribe(one)
        reaper = a_reaper(store, clock, Leads(lease))
        how = f"best of {PASSES}"
        rows = [duration(f"reaper tick, {count} spared: agents there", await passes(reaper, server), how, unit="ms")]
        await store.delete_sessions_of(HERE)
        meter = await passes(reaper, server)
        rows.append(duration(f"reaper tick, {count} spared: absent within the grace", meter, how, unit="ms"))
        if count == SIZES[0]:
            clock.ahead_seconds = 86_400.0
            with Meter(server) as meter:
                assert await reaper.tick() == count
            rows.append(rate(f"reaper tick, {count} torn down", count, meter, "one pass, scale-downs committed"))
        return rows
    finally:
        await store.close()


def a_reaper(store: Store, clock: Later, leads: Leads) -> EventProvisionReaper:
    entropy, metrics = SystemEntropy(), Metrics()

    async def nobody(*_: object) -> None:
        raise AssertionError("no run is cancelled here")

    return EventProvisionReaper(
        store=store,
        emitter=EventEmitter(
            store=store,
            sealer=AesGcmSealer(b"k" * 32, entropy),
            entropy=entropy,
            metrics=metrics,
            instance_id=HERE,
            rate_max=lambda: 100,
            cancel_run=nobody,
        ),
        deferrals=SharedDeferrals(
            store=store,
            clock=clock,
            settings=lambda: BackoffSettings(base_ms=30_000, max_ms=900_000),
            is_needed=lambda: True,
        ),
        leadership=leads,
        settings=LiveSettings(store=store, clock=clock),
        metrics=metrics,
        clock=clock,
        instance_id=HERE,
    )


async def _measure(server: Server) -> list[Row]:
    pid = await server_pid(server.url)
    found: list[Row] = []
    for count in SIZES:
        async with server.database() as url:
            store = open_postgres(url)
            await store.migrate()
            await store.close()
            found += await measure(url, count, pid)
    return found


def rows() -> Iterator[Row]:
    logging.getLogger("kici").setLevel(logging.ERROR)  # each tear-down is a warning
    if engines.absence("postgres") is None:
        with postgres_server(fsync=True) as server:
            yield from uvloop.run(_measure(server))
