"""The scaler's request path, recovery and pools: how much each costs the coordinator itself.

Backends are fakes that make nothing, so that what is measured is ours.  `requestScale` is measured without a store
(every write answers at once) and durably on PostgreSQL, where this machine has one.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from tests.bench.row import Row
from tests.engines import migrated_database, postgres_server

from kici.adapters.clock import RealClock
from kici.adapters.entropy import SystemEntropy
from kici.adapters.sealer import AesGcmSealer
from kici.apps.assembly import Coordinator
from kici.apps.given import Given
from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig, WarmPool
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.fit import AgentShape
from kici.decide.pool import pools_of
from kici.decide.route import Router
from kici.domain.ids import AgentId, ConnectionId, Instant, JobId, RunId, ScalerName
from kici.domain.platform import Host
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.scale import Spawning
from kici.kit.supervise import Supervisor
from kici.ports.backend import Compute, ComputeState
from kici.services.registry import ConnectedAgent
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.stores.postgres.open import open_postgres
from kici.testing import engines
from kici.testing.builders import a_demand, a_job, an_instance

HOST = Host("linux", "x86_64")
CPU = ResourceRequest(requests=Ask(cpus=1.0))
SIZES = ((1, 1), (10, 5), (100, 10), (1000, 10))
PLENTY = 1_000_000
SPAWNS = 10_000


class NoStore:
    """Every write succeeds at once and nothing is there to be read."""

    def __getattr__(self, name: str) -> Any:
        async def answer(*_: object, **__: object) -> Any:
            return {"settings_version": 0, "settings": {}, "insert_spawn": None}.get(name, [])

        return answer


class NoBackend:
    """Makes nothing, at once."""

    type = "bare-metal"
    spawns_on_local_host = True

    def __init__(self) -> None:
        self.alive: frozenset[AgentId] = frozenset()

    def active_count(self) -> int:
        return len(self.alive)

    async def spawn(self, order: Any, on_event: Any) -> Compute:
        return Compute(
            agent_id=order.agent_id,
            label_set=order.label_set,
            ref="none",
            spawned_at=Instant(0),
            state=ComputeState.RUNNING,
        )

    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        self.alive = known
        return tuple(
            Compute(agent_id=one, label_set=(), ref="", spawned_at=Instant(0), state=ComputeState.RUNNING)
            for one in known
        )

    def __getattr__(self, name: str) -> Any:
        async def nothing(*_: object, **__: object) -> int:
            return 0

        return (lambda *_: None) if name == "mark_registered" else nothing


def config(scalers: int, sets: int, *, warm: int = 0) -> ScalersConfig:
    return ScalersConfig(
        global_max_agents=PLENTY,
        scalers=tuple(
            ScalerEntry(
                name=ScalerName(f"s{number}"),
                type=BackendType.BARE_METAL,
                max_agents=PLENTY,
                max_concurrent_spawns=1000,
                label_sets=tuple(
                    LabelSet(labels=("linux", f"s{number}", f"set{index}"), resources=CPU, binary_path="agent")
                    for index in range(sets)
                ),
                warm_pool=WarmPool(enabled=warm > 0, size=warm),
            )
            for number in range(scalers)
        ),
    )


@asynccontextmanager
async def coordinator(file: ScalersConfig, store: Any) -> AsyncIterator[Coordinator]:
    entropy = SystemEntropy()
    async with Supervisor("bench") as supervisor:
        fleet = Fleet(
            runtimes={
                entry.name: ScalerRuntime(
                    name=entry.name,
                    backend=NoBackend(),
                    caps=scaler_caps(entry),
                    orchestrator_url="ws://nowhere/ws",
                    spawns_at_once=1000,
                )
                for entry in file.scalers
            },
            router=Router(routables(file, HOST)),
            caps=host_caps(file),
        )
        yield Coordinator(
            Given(
                store=store,
                clock=RealClock(),
                entropy=entropy,
                supervisor=supervisor,
                sealer=AesGcmSealer(bytes(32), entropy),
                instance=an_instance(),
                fleet=fleet,
            )
        )


def jobs(scalers: int, sets: int, count: int) -> list[Any]:
    return [
        a_job(
            id=JobId(f"job-{number}"),
            run_id=RunId(f"run-{number}"),
            demand=a_demand("linux", f"s{number % scalers}", f"set{number % sets}"),
        )
        for number in range(count)
    ]


async def request_rate(scalers: int, sets: int, count: int) -> float:
    """Requests for each second, one after the other, with nothing to write to."""
    wanted = jobs(scalers, sets, count)
    async with coordinator(config(scalers, sets), NoStore()) as one:
        began = time.perf_counter()
        for job in wanted:
            assert isinstance(await one.manager.request(job), Spawning)
        return count / (time.perf_counter() - began)


async def durable_rate(url: str, first: int, count: int) -> float:
    """Requests for each second, all at once."""
    store = open_postgres(url)
    try:
        async with coordinator(config(10, 5), store) as one:
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for job in jobs(10, 5, first + count)[first:]:
                    group.create_task(one.manager.request(job))
            return count / (time.perf_counter() - began)
    finally:
        await store.close()


async def recovery_seconds(url: str) -> float:
    """Spawn rows, reservations and sessions of a previous process, as many as `durable_rate` left."""
    store = open_postgres(url)
    try:
        async with coordinator(config(10, 5), store) as one:
            began = time.perf_counter()
            await one.recover()
            assert len(one.spawns) == SPAWNS
            return time.perf_counter() - began
    finally:
        await store.close()


class Seat:
    opened_at = 0.0

    def __init__(self, number: int) -> None:
        self.connection_id = ConnectionId(str(number))

    def send(self, message: object) -> None:
        pass

    def close(self, code: int, reason: str) -> None:
        pass


async def pool_tick_ms(pools: int, agents: int) -> float:
    """One pass of the warm pools when every agent is ready and nothing is to do."""
    file = config(pools, 1, warm=agents // pools)
    async with coordinator(file, NoStore()) as one:
        entries = one.manager.fleet.router.entries
        one.pools.configure(pools_of(file, entries)[0])
        for number in range(agents):
            entry = entries[number % len(entries)]
            one.registry.add(
                ConnectedAgent(
                    agent_id=AgentId(f"agent-{number}"),
                    seat=Seat(number),
                    shape=AgentShape(labels=frozenset(entry.agent_labels), gate=entry.gate),
                    labels=frozenset(entry.agent_labels),
                    registered_at=Instant(number),
                )
            )
        taken = []
        for _ in range(30):
            began = time.perf_counter()
            assert await one.pools.tick() == 0
            taken.append((time.perf_counter() - began) * 1000)
        return statistics.median(taken)


async def _measure() -> list[Row]:
    found = []
    for scalers, sets in SIZES:
        rates = [await request_rate(scalers, sets, 3000) for _ in range(3)]
        how = "3000 one after the other, best of 3"
        found.append(Row(f"requestScale, no store, {scalers}x{sets}", max(rates), "/s", how))
    how = "1000 registered agents, all ready, median of 30"
    found.append(Row("one tick of 100 pools", await pool_tick_ms(100, 1000), "ms", how))
    return found


def rows() -> Iterator[Row]:
    yield from asyncio.run(_measure())
    if engines.absence("postgres") is None:
        yield from _on_postgres()


def _on_postgres() -> Iterator[Row]:
    with postgres_server(fsync=True) as server, migrated_database(server) as url:
        rate = asyncio.run(durable_rate(url, 0, 1000))
        yield Row("requestScale, durable, 1000 concurrent", rate, "/s", "10x5, fsync", "postgres")
        for first in range(1000, SPAWNS, 1000):
            asyncio.run(durable_rate(url, first, 1000))
        seconds = asyncio.run(recovery_seconds(url))
        yield Row("recovery of 10 000 spawns and reservations", seconds, "s", "two tables, all alive", "postgres")
