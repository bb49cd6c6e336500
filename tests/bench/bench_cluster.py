"""Several coordinators on one PostgreSQL: jobs for each second, the cost of a beat, and ten thousand agents at once.

`python -m tests.bench cluster`.  Coordinators are the program itself, each in a process of its own, all on this
machine: what is asked is whether more of them get in each other's way.  Agents are connections of other processes
that run jobs in no time.  The storm: the coordinator is killed with -9 and started again, its agents come back within
a few seconds of noticing, and jobs that are submitted before the first of them is back must all succeed.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import asyncpg
import uvloop
from tests.bench.bench_coordinator import Bench, coordinator, fake_agents
from tests.bench.meter import Meter, server_pid, server_seconds
from tests.bench.row import Row, duration
from tests.engines import Server, postgres_server

from kici.domain.ids import AgentId
from kici.stores.postgres.open import open_postgres
from kici.testing import engines
from kici.testing.builders import a_session, an_instance

AGENTS: Final = 60
JOBS: Final = 1500
SUBMITTED_AT_ONCE: Final = 32
CROWD: Final = 10_000
STORM_JOBS: Final = 500
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@asynccontextmanager
async def a_database(server: Server) -> AsyncIterator[tuple[str, asyncpg.Connection]]:
    async with server.database() as url:
        store = open_postgres(url)
        await store.migrate()
        await store.close()
        connection = await asyncpg.connect(url)
        yield url, connection
        await connection.close()


async def all_over(connection: asyncpg.Connection) -> None:
    while await connection.fetchval("SELECT count(*) FROM jobs WHERE finished_at IS NULL"):  # noqa: ASYNC110  # a table
        await asyncio.sleep(0.05)


async def submit_many(benches: list[Bench], label: str, count: int) -> None:
    gate = asyncio.Semaphore(SUBMITTED_AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            _ = await benches[number % len(benches)].submit(label, ["/bin/true"])

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))


async def jobs_per_second(server: Server, pid: int | None, count: int) -> Row:
    async with a_database(server) as (url, connection), AsyncExitStack() as stack:
        benches = [await stack.enter_async_context(coordinator("postgres", url)) for _ in range(count)]
        for number, bench in enumerate(benches):
            _ = await stack.enter_async_context(
                fake_agents(bench, AGENTS // count, "instant", prefix=f"instant-{number}")
            )
        await submit_many(benches, "instant", 100)
        await all_over(connection)
        before = sum(processor_seconds(bench.pid) for bench in benches)
        servers = 0.0 if pid is None else server_seconds(pid)
        began = time.perf_counter()
        await submit_many(benches, "instant", JOBS)
        await all_over(connection)
        seconds = time.perf_counter() - began
        servers = 0.0 if pid is None else server_seconds(pid) - servers
        ours = sum(processor_seconds(bench.pid) for bench in benches) - before
        assert await connection.fetchval("SELECT count(*) FROM jobs WHERE status <> 'success'") == 0
    how = f"{JOBS} trivial jobs, {AGENTS} agents in all"
    measure = f"jobs per second, {count} coordinator{'s' if count > 1 else ''}"
    return Row(measure, JOBS / seconds, "/s", how, "postgres", JOBS / ours, JOBS / servers if servers else None)


async def beat(server: Server, pid: int | None) -> Row:
    """A coordinator says that it lives, and all of its agents with it: their sessions rest on its beat."""
    async with a_database(server) as (url, _):
        store = open_postgres(url)
        async with asyncio.TaskGroup() as group:
            for number in range(CROWD):
                session = a_session(agent_id=AgentId(f"agent-{number}"))
                group.create_task(store.register_agent(session, needs_spawn=False, bound=None))
        found = []
        for _ in range(20):
            with Meter(pid) as meter:
                await store.beat(an_instance())
            found.append(meter)
        await store.close()
    middle = sorted(found, key=lambda each: each.wall)[len(found) // 2]
    return duration(f"one presence beat of {CROWD} agents", middle, "median of 20", "postgres", unit="ms")


async def storm(server: Server, say: Callable[[str], None]) -> list[Row]:
    async with a_database(server) as (url, connection), coordinator("postgres", url) as bench:
        async with fake_agents(bench, CROWD, "crowd") as all_back:
            say(f"{CROWD} agents are there")
            bench.program.stop(signal.SIGKILL)
            began = time.perf_counter()
            bench.program.start()
            await submit_many([bench], "crowd", STORM_JOBS)
            await all_back()
            seconds = time.perf_counter() - began
            say("they are back")
            await all_over(connection)
            ours = processor_seconds(bench.pid)
        lost = await connection.fetch("SELECT status, reason FROM jobs WHERE status <> 'success'")
        for job in lost:
            say(f"lost: {job['status']}, {job['reason']}")
        assert await connection.fetchval("SELECT count(*) FROM jobs") == STORM_JOBS
    how = "from the start of a killed coordinator until all are registered"
    return [
        Row(f"reconnect storm of {CROWD}", seconds, "s", how, "postgres", ours),
        Row(
            f"  jobs lost in the storm, of {STORM_JOBS}",
            len(lost),
            "",
            "submitted before the first is back",
            "postgres",
        ),
    ]


async def _one(measured: Awaitable[Row]) -> list[Row]:
    return [await measured]


def rows(say: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    if engines.absence("postgres") is not None:
        return
    with postgres_server(fsync=True) as server:
        pid = asyncio.run(server_pid(server.url))
        for count in (1, 2, 3):
            yield from uvloop.run(_one(jobs_per_second(server, pid, count)))
        yield from uvloop.run(_one(beat(server, pid)))
        yield from uvloop.run(storm(server, say))
