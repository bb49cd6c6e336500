"""The scaler's request path, recovery and pools: how much each costs the coordinator itself.

Backends are fakes that make nothing, so that what is measured is ours.  `requestScale` is measured without a store
(every write answers at once) and durably on PostgreSQL, where this machine has one.  There, the driver alone writes
the same rows with the same statement on as many connections: what a request costs if it is nothing but its write.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import uvloop
from tests.bench.meter import Meter, server_pid
from tests.bench.row import Row, duration, rate
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
from kici.stores.postgres.engine import HERE
from kici.stores.postgres.open import POOL_MAX, open_postgres
from kici.stores.query import Query, load, numbered
from kici.stores.spawns import spawn_row_params
from kici.testing import engines
from kici.testing.builders import a_demand, a_job, a_reservation, a_session, a_spawn, an_agent_token, an_instance

HOST = Host("linux", "x86_64")
CPU = ResourceRequest(requests=Ask(cpus=1.0))
SIZES = ((1, 1), (10, 5), (100, 10), (1000, 10))
PLENTY = 1_000_000
SPAWNS = 10_000
REQUESTS = 3000
ROUND = 1000


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


async def request_rate(scalers: int, sets: int) -> Row:
    """Requests for each second, one after the other, with nothing to write to."""
    found = []
    for _ in range(3):
        wanted = jobs(scalers, sets, REQUESTS)
        async with coordinator(config(scalers, sets), NoStore()) as one:
            with Meter() as meter:
                for job in wanted:
                    assert isinstance(await one.manager.request(job), Spawning)
        found.append(meter)
    best = min(found, key=lambda each: each.ours)
    how = f"{REQUESTS} one after the other, best of 3"
    return rate(f"requestScale, no store, {scalers}x{sets}", REQUESTS, best, how)


async def durable(url: str, first: int, server: int | None) -> Meter:
    """`ROUND` requests, all at once, until every row is committed."""
    store = open_postgres(url)
    try:
        async with coordinator(config(10, 5), store) as one:
            wanted = jobs(10, 5, first + ROUND)[first:]
            await store.ping()
            with Meter(server) as meter:
                async with asyncio.TaskGroup() as group:
                    for job in wanted:
                        group.create_task(one.manager.request(job))
            return meter
    finally:
        await store.close()


async def by_driver_alone(url: str, server: int | None) -> Meter:
    """The rows of `ROUND` other requests, one statement for each on a pool of connections."""
    text, names = _insert_spawn()
    values = []
    for number in range(ROUND):
        spawn = a_spawn(agent_id=AgentId(f"raw-{number}"), bound_job_id=JobId(f"raw-{number}"))
        token = an_agent_token(id=f"raw-{number}", hash=f"raw-{number}", agent_id=spawn.agent_id)
        params = spawn_row_params(spawn, a_reservation(spawn), token)
        values.append([params[name] for name in names])
    async with asyncpg.create_pool(url, min_size=POOL_MAX, max_size=POOL_MAX) as pool:
        with Meter(server) as meter:
            async with asyncio.TaskGroup() as group:
                for each in values:
                    group.create_task(pool.fetch(text, *each))
        async with pool.acquire() as connection:
            for table in ("scaler_spawning_agents", "scaler_reservations", "agent_tokens"):
                await connection.execute(f"DELETE FROM {table} WHERE agent_id LIKE 'raw-%'")
    return meter


def _insert_spawn() -> tuple[str, tuple[str, ...]]:
    statement = numbered(load(HERE / "queries")[Query.INSERT_SPAWN])
    return statement.text, statement.parameters


async def add_sessions(url: str) -> None:
    """The third table: each of these agents is connected to the process that is about to be killed."""
    store = open_postgres(url)
    for spawn in await store.spawns(owner=None, limit=SPAWNS):
        session = a_session(agent_id=spawn.agent_id)
        assert await store.register_agent(session, needs_spawn=True, bound=None) is not None
    await store.close()


async def recovery(url: str, server: int | None) -> Row:
    """What a killed process left, as much as `durable` and `add_sessions` made."""
    store = open_postgres(url)
    try:
        await store.ping()
        async with coordinator(config(10, 5), store) as one:
            with Meter(server) as meter:
                await one.recover()
            assert len(one.spawns) == SPAWNS
        how = "spawns, reservations and sessions; all alive, once"
        return duration("recovery of 10 000 rows in each of three tables", meter, how, "postgres")
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


async def pool_tick(pools: int, agents: int) -> Row:
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
            with Meter() as meter:
                assert await one.pools.tick() == 0
            taken.append(meter)
    middle = sorted(taken, key=lambda each: each.wall)[len(taken) // 2]
    how = f"{agents} registered agents, all ready, median of 30"
    return duration(f"one tick of {pools} pools", middle, how, unit="ms")


async def _measure() -> list[Row]:
    return [
        *[await request_rate(scalers, sets) for scalers, sets in SIZES],
        await pool_tick(100, 1000),
    ]


def rows() -> Iterator[Row]:
    yield from uvloop.run(_measure())
    if engines.absence("postgres") is None:
        with postgres_server(fsync=True) as server, migrated_database(server) as url:
            yield from uvloop.run(_on_postgres(url))


async def _on_postgres(url: str) -> list[Row]:
    server = await server_pid(url)
    raw = [await by_driver_alone(url, server) for _ in range(3)]
    ours = [await durable(url, first, server) for first in range(0, SPAWNS, ROUND)]
    how = f"10x5, fsync, median of {len(ours)} rounds on a growing table"
    middle = sorted(ours, key=lambda each: each.wall)[len(ours) // 2]
    least = min(raw, key=lambda each: each.wall)
    await add_sessions(url)
    return [
        rate(f"requestScale, durable, {ROUND} concurrent", ROUND, middle, how, "postgres"),
        rate("  the same rows by the driver alone", ROUND, least, f"{POOL_MAX} connections, best of 3", "postgres"),
        await recovery(url, server),
    ]
