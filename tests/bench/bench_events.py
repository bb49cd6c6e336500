"""Event scalers: what asking for a machine, its claim code, its events and the reaper cost the store.

`python -m tests.bench events`.  PostgreSQL is a throw-away cluster with fsync on; SQLite is a file, as in production.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

import uvloop
from tests.bench.bench_store import opened, timed
from tests.bench.row import Row
from tests.engines import Server, postgres_server

from kici.adapters.clock import RealClock
from kici.adapters.entropy import SystemEntropy
from kici.adapters.sealer import AesGcmSealer
from kici.decide.backoff import BackoffSettings
from kici.decide.elect import Term
from kici.domain.ids import Instant
from kici.domain.instance import Lease
from kici.domain.provision import SlotRules
from kici.domain.resources import Amount
from kici.observe.metrics import Metrics
from kici.ports.backend import SpawnOrder
from kici.ports.store import Store
from kici.services.claim_store import ClaimStore
from kici.services.event_emitter import EventEmitter
from kici.services.event_provision_reaper import EventProvisionReaper
from kici.services.settings import LiveSettings
from kici.services.shared_deferrals import SharedDeferrals
from kici.services.tokens import Tokens
from kici.testing import engines
from kici.testing.builders import HERE, a_reservation
from kici.testing.contracts.store_events import CLOUD, a_session_of, an_event, an_event_spawn, scale_up

COUNT: Final = 1000
MACHINES: Final = 10_000
TOGETHER: Final = 10
TTL_MS: Final = 600_000
RULES: Final = SlotRules(agents_max=1_000_000, lock_wait_ms=5000)


class Leads:
    def term(self) -> Term | None:
        lease = Lease(name="leader", holder=HERE, token=1, expires_at=Instant(0))
        return Term(lease=lease, trusted_until=float("inf"))


async def asks(store: Store, number: int) -> None:
    """The slot under the lock of the scaler, and the scale-up."""
    spawn = an_event_spawn(number)
    assert await store.insert_cluster_spawn(spawn, a_reservation(spawn), RULES) is None
    assert await store.emit_scale_up(scale_up(number))


async def comes(store: Store, number: int) -> None:
    assert await store.register_agent(a_session_of(number), needs_spawn=True, bound=None) is not None


async def measure_asking(store: Store, name: str) -> list[Row]:
    rate = await timed(COUNT, TOGETHER, lambda n: asks(store, n + 1))
    return [Row("machines of one scaler asked for, ten at once", rate, "1/s", f"rate over {COUNT}", name)]


async def fill(store: Store, machines: int) -> None:
    """Machines whose agents are there."""

    async def one(number: int) -> None:
        spawn = an_event_spawn(number)
        if number > COUNT:
            await store.insert_spawn(spawn, a_reservation(spawn), None)
        await comes(store, number)

    await timed(machines, TOGETHER, lambda n: one(n + 1))


async def measure_events(store: Store, name: str) -> list[Row]:
    rate = await timed(COUNT, TOGETHER, lambda n: store.emit_event(an_event(f"bench-{n}")))
    rows = [Row("events emitted, ten at once", rate, "1/s", f"rate over {COUNT}", name)]
    handled = 0
    begun = time.perf_counter()
    while batch := await store.claim_events(HERE, lease_ms=60_000, limit=50):
        async with asyncio.TaskGroup() as group:
            for event in batch:
                group.create_task(store.process_event(event))
        handled += len(batch)
    rate = handled / (time.perf_counter() - begun)
    return [*rows, Row("events claimed and done, by fifty", rate, "1/s", f"rate over {handled}", name)]


async def measure_claims(store: Store, name: str) -> list[Row]:
    clock, entropy = RealClock(), SystemEntropy()
    claims = ClaimStore(
        store=store, mints=Tokens(store=store, clock=clock, entropy=entropy), clock=clock, entropy=entropy
    )
    codes: list[str] = []

    async def register(number: int) -> None:
        spawn = an_event_spawn(MACHINES + number + 1)
        await store.insert_cluster_spawn(spawn, a_reservation(spawn), RULES)
        order = SpawnOrder(
            agent_id=spawn.agent_id,
            label_set=("cloud",),
            labels=("cloud",),
            gate=frozenset({"cloud"}),
            token=None,
            orchestrator_url="ws://x/ws",
            limits=Amount(),
            requests=Amount(),
        )
        codes.append(await claims.register(order, scaler=CLOUD, ttl_ms=TTL_MS, agent_token_ttl_ms=TTL_MS))

    await timed(COUNT, TOGETHER, register)
    rate = await timed(COUNT, TOGETHER, lambda n: claims.redeem(codes[n], caller="bench"))
    return [Row("claim codes redeemed, ten at once", rate, "1/s", f"rate over {COUNT}", name)]


async def measure_reaper(store: Store, name: str, machines: int) -> list[Row]:
    clock = RealClock()
    settings = LiveSettings(store=store, clock=clock)
    entropy = SystemEntropy()

    async def nobody(*_: object) -> None:
        raise AssertionError("no run is cancelled here")

    reaper = EventProvisionReaper(
        store=store,
        emitter=EventEmitter(
            store=store,
            sealer=AesGcmSealer(b"k" * 32, entropy),
            entropy=entropy,
            metrics=Metrics(),
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
        leadership=Leads(),
        settings=settings,
        metrics=Metrics(),
        clock=clock,
        instance_id=HERE,
    )
    took: list[float] = []
    for _ in range(5):
        begun = time.perf_counter()
        assert await reaper.tick() == 0
        took.append((time.perf_counter() - begun) * 1000)
    return [Row(f"reaper, one pass over {machines}", min(took), "ms", "best of 5, all of them well", name)]


async def measure(name: str, server: Server | None, folder: Path, machines: int) -> list[Row]:
    rows: list[Row] = []
    async with opened(name, server, folder) as store:
        rows += await measure_events(store, name)
        rows += await measure_asking(store, name)
        await fill(store, machines)
        rows += await measure_reaper(store, name, machines)
        rows += await measure_claims(store, name)
    return rows


def rows(*, machines: int = MACHINES) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="kici-bench-") as folder:
        found = uvloop.run(measure("sqlite", None, Path(folder), machines))
        if engines.absence("postgres") is None:
            with postgres_server(fsync=True) as server:
                found += uvloop.run(measure("postgres", server, Path(folder), machines))
    return found
