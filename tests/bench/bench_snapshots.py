"""MicroVMs from snapshots: how soon a guest is there that goes on, beside one that boots, and what a snapshot costs.

Real firecracker with the tiny guest, which boots in no time, and emulated QEMU with a real Linux and our agent, which
does not.  A guest is there when it asks a small server of the bench for its WebSocket.
"""

import asyncio
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.bench.bench_microvm import Arrivals
from tests.bench.row import Row
from tests.microvm.linux_guest import linux_guest
from tests.microvm.qemu_bench import QemuBench, linux_set
from tests.microvm.real_bench import RealMicroVmBench, a_set, an_order, vm_host

from kici.backends.firecracker.settings import MicroVmSet
from kici.domain.spawn import ScaleDownReason
from kici.testing import engines
from kici.testing.contracts.backend import Kind, an_id

MADE_SECONDS_MAX = 120


def rows() -> Iterator[Row]:
    for engine in ("firecracker", "qemu"):
        reason = engines.absence(engine)
        if reason is not None:
            print(f"  {engine}: {reason}; its figures are left out", flush=True)
            continue
        if engine == "qemu":
            linux_guest()  # while there is still a way out
        with vm_host() as (folder, network):
            if engine == "firecracker":
                bench, chosen, count = RealMicroVmBench(folder, network), a_set(Kind.LIVES, env={}), 12
            else:
                bench, chosen, count = QemuBench(folder, network), linux_set(Kind.LIVES), 5
            bench.configure(max_agents=100, sets=(chosen,), stop_seconds=0.0)
            yield from asyncio.run(_compare(bench, chosen, count, engine))


async def _compare(bench: RealMicroVmBench, chosen: MicroVmSet, count: int, engine: str) -> list[Row]:
    await bench.start()
    await bench.backend.recover(frozenset())
    arrivals = Arrivals()
    server = await arrivals.serve()
    try:
        _ = await _some(bench, arrivals, 1)  # the drive template, and every module
        booting, booting_cpu = await _some(bench, arrivals, count)
        start = time.perf_counter()
        bench.configure(sets=(replace(chosen, snapshot_start=True),))
        bench.backend.configure(bench.settings)
        folder = await _made(bench)
        made = time.perf_counter() - start
        going_on, cpu = await _some(bench, arrivals, count)
    finally:
        arrivals.forget()
        server.close()
        await bench.close()
    method = f"{count} one after another, server: CPU of children that ended meanwhile"
    return [
        Row(f"{engine}: spawn to registered, booting, p50", booting, "ms", method, servers=booting_cpu),
        Row(f"{engine}: spawn to registered, from a snapshot, p50", going_on, "ms", method, servers=cpu),
        Row(
            f"{engine}: from a snapshot / booting",
            going_on / booting,
            "",
            "of the two above",
            servers=cpu / booting_cpu,
        ),
        Row(f"{engine}: making a snapshot", made, "s", "once, a boot included"),
        Row(f"{engine}: a snapshot on disk", folder / 2**20, "MiB", "blocks of its files"),
    ]


async def _made(bench: RealMicroVmBench) -> int:
    """Wait for it; how many bytes it takes."""
    base = bench.settings.base / bench.vmm.kind / ".snapshots"
    found: list[Path] = []
    async with asyncio.timeout(MADE_SECONDS_MAX):
        while not found:
            await asyncio.sleep(0.02)
            found = list(base.glob("*/[0-9a-f]*"))
    return sum(path.stat().st_blocks * 512 for path in found[0].iterdir())


async def _some(bench: RealMicroVmBench, arrivals: Arrivals, count: int) -> tuple[float, float]:
    """Milliseconds of one, and of processors that children of ours used for it."""
    took = []
    before = _children()
    for number in range(count):
        arrivals.forget()
        start = time.perf_counter()
        await bench.backend.spawn(an_order(an_id(number), Kind.LIVES), lambda _: None)
        took.append((await arrivals.last_of(1) - start) * 1000)
        await bench.backend.destroy(an_id(number), ScaleDownReason.IDLE)
    return statistics.median(took), (_children() - before) * 1000 / count


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    for row in rows():
        print(f"  {row.measure:56} {row.value:10.2f} {row.unit:4} {row.method}; CPU {row.servers}", flush=True)
