"""How long one agent process takes to make: by exec and from the zygote, alone and in a burst, and what it weighs.

Then whole spawns on PostgreSQL: requests at once through the scaler, until each has its row, its token and a real
process, which is a shell that sleeps, so that the coordinator and the kernel are what is measured.  Beside it the same
shells started by the standard library alone, one after the other.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop
from tests.bench.meter import Meter, server_pid
from tests.bench.row import Row, rate
from tests.engines import migrated_database, postgres_server

from kici.adapters.cgroups import NoCgroups
from kici.adapters.clock import RealClock
from kici.adapters.entropy import SystemEntropy
from kici.adapters.files import RealFiles
from kici.adapters.processes import LinuxProcesses
from kici.adapters.sealer import AesGcmSealer
from kici.adapters.this_host import launch_host
from kici.adapters.zygote_client import Zygote
from kici.apps.assembly import Coordinator
from kici.apps.given import Given
from kici.backends.bare_metal.backend import BareMetalBackend, BareMetalSettings
from kici.backends.bare_metal.compute import Tools
from kici.config.model import BackendType, LabelSet, ScalerEntry, ScalersConfig
from kici.decide.entries import host_caps, routables, scaler_caps
from kici.decide.launch import OWN_AGENT, CgroupSupport, ProcessSet
from kici.decide.route import Router
from kici.domain.ids import AgentId, JobId, RunId, ScalerName, scaler_agent_id
from kici.domain.job import Job
from kici.domain.resources import NOTHING
from kici.domain.scale import Spawning
from kici.domain.spawn import ScaleDownReason
from kici.kit.supervise import Supervisor
from kici.ports.backend import SpawnOrder
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.stores.postgres.open import open_postgres
from kici.testing import engines
from kici.testing.builders import a_demand, a_job, an_instance
from kici.testing.coordinator_bench import HOST

SINGLES = 40
BURST = 50
STUBS = 100
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
    if engines.absence("postgres") is None:
        with postgres_server(fsync=True) as server, migrated_database(server) as url:
            yield from uvloop.run(_with_rows(url))


def _backend(folder: Path, supervisor: Supervisor, program: str, zygote: Zygote | None = None) -> BareMetalBackend:
    env = {"PATH": os.defpath, "LANG": "C.UTF-8"}
    return BareMetalBackend(
        settings=BareMetalSettings(
            scaler=ScalerName("local"),
            max_agents=1000,
            sets=(ProcessSet(labels=("local",), binary_path=program),),
            enforce_cgroups=False,
            data_dir=folder,
        ),
        host=launch_host(env, CgroupSupport()),
        tools=Tools(
            processes=LinuxProcesses(), files=RealFiles(), cgroups=NoCgroups(), clock=RealClock(), zygote=zygote
        ),
        supervisor=supervisor,
        on_exit=lambda *_: None,
    )


async def _with_rows(url: str) -> list[Row]:
    server = await server_pid(url)
    found = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            stub = Path(folder) / "stub"
            stub.write_text("#!/bin/sh\nexec sleep 600\n")
            stub.chmod(0o755)
            found.append(await _spawn_all(url, Path(folder), str(stub), server))
    best = min(found, key=lambda each: each.wall)
    how = f"{STUBS} requests at once, rows and tokens committed, best of 3"
    return [
        rate("real process spawns with tokens and rows, concurrent", STUBS, best, how, "postgres"),
        rate("  the same shells by subprocess alone", STUBS, _shells(), "one after the other"),
    ]


async def _spawn_all(url: str, folder: Path, program: str, server: int | None) -> Meter:
    store = open_postgres(url)
    entropy = SystemEntropy()
    entry = ScalerEntry(
        name=ScalerName("local"),
        type=BackendType.BARE_METAL,
        max_agents=1000,
        label_sets=(LabelSet(labels=("local",), binary_path=program),),
    )
    config = ScalersConfig(scalers=(entry,), global_max_agents=1000)
    await store.ping()
    async with Supervisor("bench") as supervisor:
        backend = _backend(folder, supervisor, program)
        runtime = ScalerRuntime(
            name=entry.name,
            backend=backend,
            caps=scaler_caps(entry),
            orchestrator_url="ws://127.0.0.1:9/ws",
            spawns_at_once=16,
        )
        router = Router(routables(config, HOST))
        one = Coordinator(
            Given(
                store=store,
                clock=RealClock(),
                entropy=entropy,
                supervisor=supervisor,
                sealer=AesGcmSealer(bytes(32), entropy),
                instance=an_instance(),
                fleet=Fleet(runtimes={entry.name: runtime}, router=router, caps=host_caps(config)),
            )
        )
        jobs = [a_job(id=JobId(entropy.hex(8)), run_id=RunId("run"), demand=a_demand("local")) for _ in range(STUBS)]

        async def spawn(job: Job) -> None:
            answer = await one.manager.request(job)
            assert isinstance(answer, Spawning), answer
            tracked = one.spawns.get(answer.agent_id)
            assert tracked is not None
            assert tracked.task is not None
            await tracked.task
            assert tracked.is_settled

        with Meter(server) as meter:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(spawn(job))
        assert backend.active_count() == STUBS
        for compute in backend.computes():
            await backend.destroy(compute.agent_id, ScaleDownReason.SHUTDOWN)
    await store.close()
    return meter


def _shells() -> Meter:
    with Meter() as meter:
        shells = [subprocess.Popen(["/bin/sh", "-c", "exec sleep 600"], start_new_session=True) for _ in range(STUBS)]
    for shell in shells:
        shell.kill()
        shell.wait()
    return meter


async def _measure(name: str, *, with_zygote: bool) -> list[Row]:
    env = {"PATH": os.defpath, "LANG": "C.UTF-8"}
    clock = RealClock()
    zygote = Zygote(python=sys.executable, target=TARGET, env=env, clock=clock) if with_zygote else None
    with tempfile.TemporaryDirectory() as folder:
        async with Supervisor("bench") as supervisor:
            backend = _backend(Path(folder), supervisor, OWN_AGENT, zygote)
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
