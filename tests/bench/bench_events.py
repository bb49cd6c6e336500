"""Event scalers: what asking for a machine, its claim code and its events cost, and how fast an event is delivered.

`python -m tests.bench events`.  PostgreSQL is a throw-away cluster with fsync on; SQLite is a file, as in production.
Asking is the whole of it: slot, claim code and scale-up are committed.  A claim code is registered, redeemed, and
its token written.  Delivery counts from before the event is written to the call of its webhook.
"""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import uvloop
from tests.bench.bench_store import opened
from tests.bench.event_coordinator import EVENT, Sink, an_event_coordinator, subscribe
from tests.bench.meter import Meter, server_pid
from tests.bench.row import Row, rate
from tests.engines import Server, postgres_server

from kici.adapters.clock import RealClock
from kici.apps.assembly import Coordinator
from kici.domain.ids import InstanceId, JobId, RunId
from kici.domain.provision import SlotRules
from kici.domain.resources import Amount
from kici.domain.scale import Spawning
from kici.ports.backend import SpawnOrder
from kici.ports.store import Store
from kici.stores.postgres.notifier import PostgresNotifier
from kici.testing import engines
from kici.testing.builders import HERE, a_demand, a_job, a_reservation
from kici.testing.contracts.store_events import CLOUD, an_event, an_event_spawn

COUNT: Final = 1000
SINGLE: Final = 300
TTL_MS: Final = 600_000
RULES: Final = SlotRules(agents_max=1_000_000, lock_wait_ms=5000)


async def measure_events(store: Store, name: str, server: int | None) -> list[Row]:
    with Meter(server) as meter:
        async with asyncio.TaskGroup() as group:
            for number in range(COUNT):
                group.create_task(store.emit_event(an_event(f"bench-{number}")))
    rows = [rate("events emitted, concurrent", COUNT, meter, f"{COUNT} at once", name)]
    handled = 0
    with Meter(server) as meter:
        while batch := await store.claim_events(HERE, lease_ms=60_000, limit=50):
            async with asyncio.TaskGroup() as group:
                for event in batch:
                    group.create_task(store.process_event(event))
            handled += len(batch)
    return [*rows, rate("events claimed and done, by fifty", handled, meter, f"{handled} in all", name)]


async def ask(one: Coordinator, number: int) -> None:
    """A machine for a job, until its scale-up is committed."""
    job = a_job(id=JobId(f"job-{number}"), run_id=RunId(f"run-{number}"), demand=a_demand("cloud"))
    answer = await one.manager.request(job)
    assert isinstance(answer, Spawning), answer
    tracked = one.spawns.get(answer.agent_id)
    assert tracked is not None
    assert tracked.task is not None
    await tracked.task
    assert tracked.is_settled


async def measure_asking(store: Store, name: str, server: int | None) -> list[Row]:
    async with an_event_coordinator(store) as one:
        await subscribe(one)
        with Meter(server) as single:
            for number in range(SINGLE):
                await ask(one, number)
        with Meter(server) as many:
            async with asyncio.TaskGroup() as group:
                for number in range(SINGLE, SINGLE + COUNT):
                    group.create_task(ask(one, number))
    what = "requestScale of an event scaler"
    return [
        rate(f"{what}, one at a time", SINGLE, single, f"{SINGLE}, until the scale-up is committed", name),
        rate(f"{what}, concurrent", COUNT, many, f"{COUNT} at once, until the scale-ups are committed", name),
    ]


async def measure_claims(store: Store, name: str, server: int | None) -> list[Row]:
    first = 1_000_000
    orders = []
    for number in range(first, first + SINGLE + COUNT):
        spawn = an_event_spawn(number)
        orders.append(
            SpawnOrder(
                agent_id=spawn.agent_id,
                label_set=("cloud",),
                labels=("cloud",),
                gate=frozenset({"cloud"}),
                token=None,
                orchestrator_url="ws://x/ws",
                limits=Amount(),
                requests=Amount(),
            )
        )
    async with asyncio.TaskGroup() as group:
        for number in range(first, first + SINGLE + COUNT):
            spawn = an_event_spawn(number)
            group.create_task(store.insert_cluster_spawn(spawn, a_reservation(spawn), RULES))
    async with an_event_coordinator(store) as one:

        async def trade(order: SpawnOrder) -> None:
            code = await one.claims.register(order, scaler=CLOUD, ttl_ms=TTL_MS, agent_token_ttl_ms=TTL_MS)
            assert (await one.claims.redeem(code, caller="bench")).agent_token

        with Meter(server) as single:
            for order in orders[:SINGLE]:
                await trade(order)
        with Meter(server) as many:
            async with asyncio.TaskGroup() as group:
                for order in orders[SINGLE:]:
                    group.create_task(trade(order))
    what = "claim registered and redeemed with its token"
    return [
        rate(f"{what}, one at a time", SINGLE, single, f"{SINGLE} claims", name),
        rate(f"{what}, concurrent", COUNT, many, f"{COUNT} at once", name),
    ]


async def measure_delivery(store: Store, name: str, url: str | None) -> list[Row]:
    """By the coordinator that emitted it, and by another one, which must be told."""
    clock = RealClock()
    rows: list[Row] = []
    for by in ("the same coordinator", "another coordinator"):
        sink = Sink()
        async with AsyncExitStack() as stack:
            if by == "the same coordinator":
                one = await stack.enter_async_context(an_event_coordinator(store, sink=sink))
            elif url is not None:
                theirs, ours = (PostgresNotifier(url, clock=clock, name=who) for who in ("b", "a"))
                there = InstanceId("b")
                _ = await stack.enter_async_context(an_event_coordinator(store, sink=sink, notifier=theirs, id=there))
                one = await stack.enter_async_context(an_event_coordinator(store, notifier=ours))
            else:
                break
            await asyncio.sleep(0.5)
            seconds = []
            for number in range(SINGLE):
                began = time.perf_counter()
                emitted = await one.events.emitter.emit(EVENT, {"n": number}, source=f"{by}-{number}")
                seconds.append(await sink.at(emitted.emission_id) - began)
                await asyncio.sleep(0.002)
        seconds.sort()
        how = f"{SINGLE} one at a time"
        for part in (50, 99):
            value = seconds[len(seconds) * part // 100] * 1000
            rows.append(Row(f"emit to delivery, {by}, p{part}", value, "ms", how, name))
    return rows


async def measure(name: str, server: Server | None, folder: Path) -> list[Row]:
    pid = None if server is None else await server_pid(server.url)
    rows: list[Row] = []
    async with opened(name, server, folder) as (store, url):
        rows += await measure_events(store, name, pid)
        rows += await measure_asking(store, name, pid)
        rows += await measure_claims(store, name, pid)
        rows += await measure_delivery(store, name, url)
    return rows


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="kici-bench-") as folder:
        found = uvloop.run(measure("sqlite", None, Path(folder)))
        if engines.absence("postgres") is None:
            with postgres_server(fsync=True) as server:
                found += uvloop.run(measure("postgres", server, Path(folder)))
    return found
