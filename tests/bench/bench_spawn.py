"""How long one agent process takes to make: by exec and from the zygote, alone and in a burst, and what it weighs."""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.row import Row

from kici.adapters.cgroups import NoCgroups
from kici.adapters.clock import RealClock
from kici.adapters.files import RealFiles
from kici.adapters.processes import LinuxProcesses
from kici.adapters.this_host import launch_host
from kici.adapters.zygote_client import Zygote
from kici.backends.bare_metal.backend import BareMetalBackend, BareMetalSettings
from kici.backends.bare_metal.compute import Tools
from kici.decide.launch import OWN_AGENT, CgroupSupport, ProcessSet
from kici.domain.ids import AgentId, ScalerName, scaler_agent_id
from kici.domain.resources import NOTHING
from kici.domain.spawn import ScaleDownReason
from kici.kit.supervise import Supervisor
from kici.ports.backend import SpawnOrder

SINGLES = 40
BURST = 50
TARGET = "kici.agent.program:run"
FIRST_WORD_SECONDS = 30.0


class Bench:
    """Bare metal with this installation's agent, and no coordinator for it to find."""

    def __init__(self, backend: BareMetalBackend, zygote: Zygote | None) -> None:
        self.backend = backend
        self.zygote = zygote
        self._count = 0

    async def spawn(self) -> AgentId:
        self._count += 1
        order = SpawnOrder(
            agent_id=scaler_agent_id("bare-metal", f"{self._count:08x}"),
            label_set=("local",),
            labels=("local",),
            gate=frozenset(),
            token="none",
            orchestrator_url="ws://127.0.0.1:9/ws",
            limits=NOTHING,
            requests=NOTHING,
        )
        compute = await self.backend.spawn(order, lambda _: None)
        return compute.agent_id

    async def first_word(self, agent_id: AgentId) -> None:
        """Until the agent has said that it could not connect: it is up and has tried."""
        async with asyncio.timeout(FIRST_WORD_SECONDS):
            while not self.backend.tail(agent_id, 1):  # noqa: ASYNC110  # a file tells nobody
                await asyncio.sleep(0.001)


def rows() -> Iterator[Row]:
    yield from asyncio.run(_measure("exec", with_zygote=False))
    yield from asyncio.run(_measure("zygote", with_zygote=True))


async def _measure(name: str, *, with_zygote: bool) -> list[Row]:
    env = {"PATH": os.defpath, "LANG": "C.UTF-8"}
    clock = RealClock()
    zygote = Zygote(python=sys.executable, target=TARGET, env=env, clock=clock) if with_zygote else None
    with tempfile.TemporaryDirectory() as folder:
        async with Supervisor("bench") as supervisor:
            tools = Tools(
                processes=LinuxProcesses(), files=RealFiles(), cgroups=NoCgroups(), clock=clock, zygote=zygote
            )
            settings = BareMetalSettings(
                scaler=ScalerName("local"),
                max_agents=1000,
                sets=(ProcessSet(labels=("local",), binary_path=OWN_AGENT),),
                enforce_cgroups=False,
                data_dir=Path(folder),
            )
            backend = BareMetalBackend(
                settings=settings,
                host=launch_host(env, CgroupSupport()),
                tools=tools,
                supervisor=supervisor,
                on_exit=lambda *_: None,
            )
            try:
                return await _rows(name, Bench(backend, zygote))
            finally:
                await backend.shutdown_all()
                if zygote is not None:
                    await zygote.close()


async def _rows(name: str, bench: Bench) -> list[Row]:
    if bench.zygote is not None:
        _ = await bench.zygote.open()
    returned, running, ended = [], [], []
    for _ in range(SINGLES):
        start = time.perf_counter()
        agent_id = await bench.spawn()
        returned.append((time.perf_counter() - start) * 1000)
        await bench.first_word(agent_id)
        running.append((time.perf_counter() - start) * 1000)
        start = time.perf_counter()
        await bench.backend.destroy(agent_id, ScaleDownReason.IDLE)
        ended.append((time.perf_counter() - start) * 1000)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(bench.spawn()) for _ in range(BURST)]
    burst = (time.perf_counter() - start) * 1000
    for task in tasks:
        await bench.first_word(task.result())
    all_up = (time.perf_counter() - start) * 1000
    pss = [_pss_mb(int(one.ref)) for one in bench.backend.computes()]
    method = f"{SINGLES} one after another"
    return [
        Row(f"spawn returns, {name}, p50", statistics.median(returned), "ms", method),
        Row(f"spawn returns, {name}, p99", _p99(returned), "ms", method),
        Row(f"spawn to first attempt to connect, {name}, p50", statistics.median(running), "ms", method),
        Row(f"spawn to first attempt to connect, {name}, p99", _p99(running), "ms", method),
        Row(f"destroy an idle agent, {name}, p50", statistics.median(ended), "ms", method),
        Row(f"burst of {BURST}, {name}: all spawns returned", burst, "ms", "once"),
        Row(f"burst of {BURST}, {name}: all tried to connect", all_up, "ms", "once"),
        Row(f"PSS of an idle agent among {BURST}, {name}, p50", statistics.median(pss), "MB", "smaps_rollup"),
    ]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    for row in rows():
        sys.stdout.write(f"{row.measure:55} {row.value:10,.1f} {row.unit:4} {row.method}\n")
