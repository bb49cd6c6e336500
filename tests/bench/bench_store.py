"""What a job costs the store, and whether a claim stays flat while the backlog grows.

`python -m tests.bench.bench_store [sqlite] [postgres] [--jobs N]`.  PostgreSQL is a throw-away cluster with fsync on,
or `KICI_TEST_POSTGRES_URL`.  SQLite is a file, as in production.  Rates are wall time of one event loop.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop
from tests.bench.row import Row
from tests.engines import Server, postgres_server

from kici.domain.ids import AgentId, ClassId, JobId, RunId
from kici.domain.job import JobStatus
from kici.ports.store import Offer, Store
from kici.stores.postgres.open import open_postgres
from kici.stores.sqlite.open import open_sqlite
from kici.testing import engines
from kici.testing.builders import a_new_job, a_new_run, a_reservation, a_session, a_spawn, a_spec
from kici.testing.contracts.store_rules import RUNNING, SUCCESS, a_claim

JOBS: Final = 2000
TOGETHER: Final = 10
ROWS_PER_SUBMIT: Final = 20
BACKLOGS: Final = (100, 10_000, 100_000)
CLASSES: Final = 20
CLAIMS: Final = 300
SPEC: Final = a_spec("/bin/sh", "-e", "-c", "make test\n" * 20, env={f"NAME_{n}": "value" * 4 for n in range(10)})


def job_id(prefix: str, number: int) -> str:
    return f"{prefix}-{number:08d}"


async def timed(count: int, width: int, work: Callable[[int], Awaitable[object]]) -> float:
    """Calls in a second, when `width` callers do `count` calls between them."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await work(number)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(caller())
    return count / (time.perf_counter() - start)


async def submit_one(store: Store, prefix: str, number: int, *labels: str) -> None:
    id = job_id(prefix, number)
    await store.submit(a_new_run(id=RunId(f"r-{id}")), [replace(a_new_job(id, *labels), spec=SPEC)])


async def submit_many(store: Store, prefix: str, number: int, *labels: str, count: int = ROWS_PER_SUBMIT) -> None:
    jobs = [replace(a_new_job(f"{prefix}-{number:06d}-{n:02d}", *labels), spec=SPEC) for n in range(count)]
    await store.submit(a_new_run(id=RunId(f"r-{prefix}-{number:06d}")), jobs)


async def measure_path(store: Store, name: str, count: int) -> list[Row]:
    """Submit, claim, start and finish, by one caller and by several."""
    rows = []
    for width in (1, TOGETHER):
        how, who = f"{count} jobs", "one at a time" if width == 1 else "ten at once"
        prefix, label = f"path{width}", f"w{width}"
        held: list[tuple[JobId, AgentId]] = []

        async def submit(number: int, prefix: str = prefix, label: str = label) -> None:
            await submit_one(store, prefix, number, label)

        rows.append(Row(f"submit, {who}", await timed(count, width, submit), "jobs/s", how, name))
        classes = [waiting.class_id for waiting in await store.waiting_classes(limit=100)]

        async def claim(
            number: int, held: list[tuple[JobId, AgentId]] = held, classes: list[ClassId] = classes
        ) -> None:
            agent_id = AgentId(f"agent-{number}")
            job = await store.claim_oldest(classes, a_claim(agent_id))
            assert job is not None
            held.append((job.id, agent_id))

        async def start(number: int, held: list[tuple[JobId, AgentId]] = held) -> None:
            assert await store.start_job(*held[number])

        async def finish(number: int, held: list[tuple[JobId, AgentId]] = held) -> None:
            id, agent_id = held[number]
            assert await store.finish_job(id, SUCCESS, agent_id=agent_id, from_statuses=RUNNING)

        rows.append(Row(f"claim, {who}", await timed(count, width, claim), "jobs/s", how, name))
        rows.append(Row(f"start, {who}", await timed(count, width, start), "jobs/s", how, name))
        rows.append(Row(f"finish, {who}", await timed(count, width, finish), "jobs/s", how, name))
    return rows


async def measure_spawns(store: Store, name: str, count: int) -> list[Row]:
    """What a scaler-made agent costs beside its job: the spawn row, and the registration that claims the job."""
    rows = []
    for width in (1, TOGETHER):
        how = f"{count} agents, {'one at a time' if width == 1 else f'{width} at once'}"
        for number in range(count):
            await submit_one(store, f"spawn{width}", number, "bound")

        async def insert(number: int, width: int = width) -> None:
            spawn = a_spawn(
                agent_id=AgentId(f"agent-{width}-{number}"), bound_job_id=JobId(job_id(f"spawn{width}", number))
            )
            assert await store.insert_spawn(spawn, a_reservation(spawn), None) is None

        async def register(number: int, width: int = width) -> None:
            agent_id = AgentId(f"agent-{width}-{number}")
            done = await store.register_agent(a_session(agent_id=agent_id), needs_spawn=True, bound=a_claim(agent_id))
            assert done is not None
            assert done.job is not None

        rows.append(Row("insert spawn", await timed(count, width, insert), "agents/s", how, name))
        rows.append(Row("register with bound job", await timed(count, width, register), "agents/s", how, name))
    return rows


async def measure_batches(store: Store, name: str, count: int) -> Row:
    submits = count // ROWS_PER_SUBMIT * 4

    async def submit(number: int) -> None:
        await submit_many(store, "batch", number, "batch")

    rate = await timed(submits, TOGETHER, submit) * ROWS_PER_SUBMIT
    how = f"{submits} runs of {ROWS_PER_SUBMIT} jobs, {TOGETHER} at once"
    return Row("submit, multi-row", rate, "jobs/s", how, name)


async def measure_backlog(store: Store, name: str) -> list[Row]:
    """A claim that fits, and one that finds nothing, while the backlog of many classes grows."""
    rows: list[Row] = []
    made = runs = 0
    for backlog in BACKLOGS:
        per_run = ROWS_PER_SUBMIT if backlog > 20 * CLASSES else backlog // CLASSES
        missing = (backlog - made) // per_run

        async def submit(number: int, first: int = runs, per_run: int = per_run) -> None:
            run = first + number
            await submit_many(store, "backlog", run, f"class-{run % CLASSES}", count=per_run)

        await timed(missing, TOGETHER, submit)
        made, runs = made + missing * per_run, runs + missing
        classes = [waiting.class_id for waiting in await store.waiting_classes(limit=100)]
        elsewhere = [ClassId(class_id ^ 1) for class_id in classes]
        for measure, asked in (("claim that fits", classes), ("claim that finds nothing", elsewhere)):
            value = await claim_ms(store, asked)
            how = f"{backlog} waiting in {len(classes)} classes, median of {CLAIMS}, one at a time"
            rows.append(Row(measure, value, "ms", how, name))
        scan = [await seconds(store.waiting_classes(limit=100)) for _ in range(20)]
        rows.append(Row("waiting classes", statistics.median(scan) * 1000, "ms", f"{backlog} waiting", name))
    return rows


async def claim_ms(store: Store, classes: Sequence[ClassId]) -> float:
    """Median time of a claim; what was claimed goes back, so that the backlog stays."""
    taken = []
    for number in range(CLAIMS):
        agent_id = AgentId(f"bench-{number}")
        start = time.perf_counter()
        job = await store.claim_oldest(classes, a_claim(agent_id))
        taken.append(time.perf_counter() - start)
        if job is not None:
            assert job.status is JobStatus.DISPATCHED
            await store.requeue_job(Offer(job.id, agent_id), reason="bench", attempts_max=10**6)
    return statistics.median(taken) * 1000


async def seconds(call: Awaitable[object]) -> float:
    start = time.perf_counter()
    await call
    return time.perf_counter() - start


@asynccontextmanager
async def opened(name: str, server: Server | None, folder: Path) -> AsyncIterator[tuple[Store, str | None]]:
    """A new store, and its URL when it is on the server."""
    if server is None:
        store = open_sqlite(str(folder / f"{name}-{time.monotonic_ns()}.db"))
        await store.migrate()
        yield store, None
        await store.close()
    else:
        async with server.database() as url:
            store = open_postgres(url)
            await store.migrate()
            yield store, url
            await store.close()


async def measure(name: str, server: Server | None, folder: Path, count: int) -> list[Row]:
    rows: list[Row] = []
    async with opened(name, server, folder) as (store, _):
        rows += await measure_path(store, name, count)
        rows += await measure_spawns(store, name, count // 2)
        rows.append(await measure_batches(store, name, count))
    async with opened(name, server, folder) as (store, _):
        rows += await measure_backlog(store, name)
    return rows


def rows(stores: Sequence[str] = ("sqlite", "postgres"), *, count: int = JOBS) -> list[Row]:
    """Everything, for the stores that this machine has."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kici-bench-") as folder:
        if "sqlite" in stores:
            found += uvloop.run(measure("sqlite", None, Path(folder), count))
        if "postgres" in stores and engines.absence("postgres") is None:
            with postgres_server(fsync=True) as server:
                found += uvloop.run(measure("postgres", server, Path(folder), count))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stores", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--jobs", type=int, default=JOBS)
    chosen = parser.parse_args()
    for row in rows(chosen.stores, count=chosen.jobs):
        print(f"{row.store:9} {row.measure:26} {row.value:10.2f} {row.unit:9} {row.method}")


if __name__ == "__main__":
    main()
