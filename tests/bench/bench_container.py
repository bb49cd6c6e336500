"""Containers: from enqueueing to first output beside `docker run` of the same image and command; bursts; sweeps.

A Docker engine in a network namespace of its own, and the coordinator program beside it; the runtime volume is warm.
Ours and `docker run` take turns, so that both meet the same machine; what the coordinator's process used of the
processor is told too.  `docker run` has no agent, no rules of a packet filter and no store: the ratio is their price.
Agents live on a network of their own, for which the engine also starts a name service in each container; so the same
is measured with `docker run` on that network, too.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from tests.bench.bench_coordinator import Bench, parts, percentile
from tests.bench.row import Row
from tests.contract.backend_benches import an_order
from tests.contract.container_benches import RealEngineBench, import_kinds
from tests.docker_engine import Lab, busybox_tree, lab
from tests.integration.docker_lab import BUSYBOX, LabCoordinator, a_pool, coordinator, import_images

from kici.backends.container.fencing import DEFAULT_NETWORK
from kici.domain.errors import KiciError
from kici.testing import engines
from kici.testing.contracts.backend import Kind, an_id

SINGLES = 20
BURSTS = (10, 50)
ORPHANS = 200
AT_ONCE = 8
"""How many of the orphans are made at once; the engine makes about five each second, however many are asked for."""
COMMAND = ("/bin/echo", "hello")
NETWORK = DEFAULT_NETWORK.name


def rows() -> Iterator[Row]:
    reason = engines.absence("docker")
    if reason is not None:
        print(f"  docker: {reason}; its figures are left out", flush=True)
        return
    with lab() as engine:
        import_images(engine)
        pool = a_pool(engine, maxConcurrentSpawns=int(os.environ.get("KICI_BENCH_SPAWNS", "8")))
        with coordinator(engine, "bench", pool, KICI_LOG_FORMAT="json") as kici, engine.enter():
            yield from asyncio.run(_jobs(engine, kici))
        import_kinds(engine, busybox_tree(engine.folder / "kinds"))
        yield from asyncio.run(_sweep(engine))


async def _jobs(engine: Lab, kici: LabCoordinator) -> list[Row]:
    token = (kici.data_dir / "owner-token").read_text().strip()
    base, headers = f"http://127.0.0.1:{kici.port}", {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(base, headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        bench = Bench(kici, "", http)
        await bench.first_output("pool")  # the runtime volume, the network, and every module
        found = await _singles(engine, kici, bench)
        for count in BURSTS:
            await _all_gone(kici)
            ours, used = await _burst(kici, bench, count)
            await _all_gone(kici)
            theirs = await _burst_by_docker(engine, count)
            there = await _burst_by_docker(engine, count, "--network", NETWORK)
            found += [
                Row(f"{count} at once, last first output, ours", ours, "s", "once"),
                Row(f"{count} at once, last first output, docker run", theirs, "s", "once"),
                Row(f"{count} at once, last first output, docker run on the agents' network", there, "s", "once"),
                Row(f"{count} at once, ours / docker run", ours / theirs, "", "of the above"),
                Row(f"{count} at once, ours / docker run there", ours / there, "", "of the above"),
                Row(f"{count} at once, the coordinator's own CPU", used, "s", "/proc/stat, until the last output"),
            ]
        await _all_gone(kici)
        return found


async def _singles(engine: Lab, kici: LabCoordinator, bench: Bench) -> list[Row]:
    ours, theirs, there, jobs = [], [], [], []
    used = 0.0
    for _ in range(SINGLES):
        began = cpu_seconds(bench.pid)
        job, taken = await bench.first_output("pool")
        await _all_gone(kici)
        used += cpu_seconds(bench.pid) - began
        ours.append(taken)
        jobs.append(job)
        theirs.append(await _docker_run(engine))
        there.append(await _docker_run(engine, "--network", NETWORK))
    how = f"{SINGLES} one after another, in turns"
    ratio = percentile(ours, 0.5) / percentile(theirs, 0.5)
    like = percentile(ours, 0.5) / percentile(there, 0.5)
    return [
        Row("enqueue to first output, container, p50", percentile(ours, 0.5), "s", how),
        Row("enqueue to first output, container, p99", percentile(ours, 0.99), "s", how),
        Row("docker run to first output, p50", percentile(theirs, 0.5), "s", how),
        Row("docker run to first output, p99", percentile(theirs, 0.99), "s", how),
        Row("docker run on the agents' network to first output, p50", percentile(there, 0.5), "s", how),
        Row("enqueue to first output / docker run, p50", ratio, "", "of the medians above"),
        Row("enqueue to first output / docker run there, p50", like, "", "of the medians above"),
        Row(
            "the coordinator's own CPU for each job", used / SINGLES, "s", "/proc/stat, from submission to nothing left"
        ),
        *parts(bench, "container", jobs, how),
    ]


async def _docker_run(engine: Lab, *options: str) -> float:
    """Until it prints, and then to its end."""
    start = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *("docker", "-H", f"unix://{engine.socket}", "run", "--rm", *options, BUSYBOX, *COMMAND),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"hello\n"
    took = time.perf_counter() - start
    assert await process.wait() == 0
    return took


async def _burst(kici: LabCoordinator, bench: Bench, count: int) -> tuple[float, float]:
    began, start = cpu_seconds(bench.pid), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(bench.first_output("pool"))
    return time.perf_counter() - start, cpu_seconds(bench.pid) - began


async def _burst_by_docker(engine: Lab, count: int, *options: str) -> float:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_docker_run(engine, *options)) for _ in range(count)]
    return max(task.result() for task in tasks)


async def _all_gone(kici: LabCoordinator) -> None:
    while not kici.is_gone():  # noqa: ASYNC110  # the engine is asked, as an onlooker
        await asyncio.sleep(0.02)


async def _sweep(engine: Lab) -> list[Row]:
    """Agents of a backend that forgot them, found by their labels and removed; and as many by one `docker rm`."""
    with tempfile.TemporaryDirectory() as folder:
        bench = RealEngineBench(engine, Path(folder))
        bench.configure_for(ORPHANS)
        await bench.start()
        try:
            await _fill(bench, 0)
            await bench.backend.release_all()
            used, start = time.process_time(), time.perf_counter()
            removed = await bench.backend.cleanup_orphans(frozenset())
            ours, used = time.perf_counter() - start, time.process_time() - used
            assert (removed, bench.on_host()) == (ORPHANS, frozenset()), removed
            await _fill(bench, ORPHANS)
            ids = [one["Id"] for one in engine.containers(kici_managed="true")]
            assert len(ids) == ORPHANS
            start = time.perf_counter()
            subprocess.run(
                ("docker", "-H", f"unix://{engine.socket}", "rm", "-f", *ids), check=True, stdout=subprocess.DEVNULL
            )
            theirs = time.perf_counter() - start
        finally:
            await bench.close()
    return [
        Row(f"reclaim of {ORPHANS} orphans that run", ours, "s", "once, with their rules; they end when asked to"),
        Row(f"our own CPU for the reclaim of {ORPHANS} orphans", used, "s", "process_time"),
        Row(f"docker rm -f of {ORPHANS} containers that run", theirs, "s", "once"),
        Row("reclaim / docker rm -f", ours / theirs, "", "of the two above"),
    ]


async def _fill(bench: RealEngineBench, first: int) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            try:
                await bench.backend.spawn(an_order(an_id(number), Kind.LIVES), lambda _: None)
            except KiciError as error:
                sys.exit(f"agent {number} of the sweep could not be made: {error}")

    async with asyncio.TaskGroup() as group:
        for number in range(first, first + ORPHANS):
            group.create_task(one(number))


def cpu_seconds(pid: int) -> float:
    """What a process used of the processor until now, without its children."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    for row in rows():
        print(f"  {row.measure:58} {row.value:10.3f} {row.unit:3} {row.method}", flush=True)
