"""The whole way of a job through a real coordinator: cold and warm latency, bursts, throughput, memory.

The coordinator is the program itself, in a process of its own, on each store.  Cold agents are real processes;
agents for throughput and memory are connections of one process that speaks the real protocol and runs jobs in no
time, so that the coordinator is what is measured.  Times of a job's parts come from the coordinator's log.
"""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from tests.bench.row import Row

from kici.testing.programs import KICI, CoordinatorProgram, environment, marked

SCALERS = """
version: 1
globalMaxAgents: 400
scalers:
  - name: zygote
    type: bare-metal
    maxAgents: 300
    maxConcurrentSpawns: 16
    labelSets:
      - labels: [zygote]
        binaryPath: kici-agent
  - name: exec
    type: bare-metal
    maxAgents: 300
    maxConcurrentSpawns: 16
    labelSets:
      - labels: [exec]
        binaryPath: {agent}
"""


class Bench:
    """One coordinator program and a client of its API."""

    def __init__(self, program: CoordinatorProgram, store: str, http: aiohttp.ClientSession) -> None:
        self.program = program
        self.store = store
        self.http = http

    @property
    def pid(self) -> int:
        assert self.program.process is not None
        return self.program.process.pid

    async def submit(self, label: str, command: list[str]) -> str:
        document = {"runsOn": [label], "command": command}
        async with self.http.post("/api/v1/jobs", json=document) as answer:
            assert answer.status in (200, 201), await answer.text()
            found = await answer.json()
            return str(found["id"])

    async def first_output(self, label: str) -> tuple[str, float]:
        """Submit a job that prints, and follow it: its id, and seconds from the submission to its first output."""
        began = time.perf_counter()
        job = await self.submit(label, ["/bin/echo", "hello"])
        path = f"/api/v1/jobs/{job}/logs"
        async with self.http.get(path, headers={"Accept": "text/event-stream"}) as stream:
            async for line in stream.content:
                if line.startswith(b"event: stdout"):
                    return job, time.perf_counter() - began
        raise AssertionError(f"job {job} ended without output")

    async def over(self, jobs: set[str]) -> None:
        """Wait until all of these are over, by the log: to ask for them all the time would be measured with them."""
        left, rest = set(jobs), ""
        with self.program.log.open() as log:
            while left:
                *lines, rest = (rest + log.read()).split("\n")
                ends = (json.loads(line) for line in lines if '"job.finished"' in line)
                left -= {end["job_id"] for end in ends}
                await asyncio.sleep(0.02)

    def log(self) -> list[dict[str, Any]]:
        lines = self.program.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError


def pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError


@asynccontextmanager
async def coordinator(store: str, url: str | None) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="kici-bench-") as folder:
        agent = Path(folder) / "agent"
        agent.write_text(f"#!/bin/sh\nexec {sys.executable} -m kici.apps.agent\n")
        agent.chmod(0o755)
        scalers = Path(folder) / "scalers.yaml"
        scalers.write_text(SCALERS.format(agent=agent))
        extra = ["--scalers", str(scalers)]
        if url is not None:
            extra += ["--database-url", url]
        env = {"KICI_LOG_FORMAT": "json", "KICI_SECRET_KEY": "0" * 64}
        with CoordinatorProgram(Path(folder) / "data", extra=extra, env=env) as program:
            token = (program.data_dir / "owner-token").read_text().strip()
            base = f"http://127.0.0.1:{program.port}"
            connector = aiohttp.TCPConnector(limit=0)
            headers = {"Authorization": f"Bearer {token}"}
            async with aiohttp.ClientSession(base, headers=headers, connector=connector) as http:
                yield Bench(program, store, http)


async def measure_start(store: str, url: str | None) -> list[Row]:
    """Start to ready of an existing installation, and memory at rest."""
    rows = []
    async with coordinator(store, url) as bench:
        bench.program.stop(signal.SIGTERM)
        seconds, memory = [], 0.0
        for _ in range(5):
            began = time.perf_counter()
            bench.program.start()
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.5)
            memory = rss_mb(bench.pid)
            bench.program.stop(signal.SIGTERM)
        rows.append(
            Row("start to ready", statistics.median(seconds), "s", "median of 5, program to endpoint file", store)
        )
        rows.append(Row("RSS idle", memory, "MB", "VmRSS half a second after ready", store))
    return rows


async def measure_cold(bench: Bench, label: str, count: int) -> list[Row]:
    """Submit, make an agent, run, one at a time."""
    seconds, jobs = [], []
    for _ in range(count):
        job, taken = await bench.first_output(label)
        seconds.append(taken)
        jobs.append(job)
        await asyncio.sleep(0.2)
    how = f"{count} jobs one at a time, each with an agent of its own"
    rows = [
        Row(f"submit to first output, fresh agent by {label}, p50", percentile(seconds, 0.5), "s", how, bench.store),
        Row(f"submit to first output, fresh agent by {label}, p99", percentile(seconds, 0.99), "s", how, bench.store),
    ]
    return rows + parts(bench, label, jobs, how)


def parts(bench: Bench, label: str, jobs: list[str], how: str) -> list[Row]:
    """How long each part of the way took, by the coordinator's log: medians."""
    at: dict[str, dict[str, float]] = {job: {} for job in jobs}
    runs: dict[str, str] = {}
    agents: dict[str, str] = {}
    for line in bench.log():
        seconds = _seconds(line["time"])
        match line["event"]:
            case "job.submitted":
                runs[line["run_id"]] = ""
                at.setdefault(line["run_id"], {})["submitted"] = seconds
            case "spawn.admitted" if line["job_id"] in at:
                agents[line["agent_id"]] = line["job_id"]
                at[line["job_id"]]["row"] = seconds
            case "spawn.settled" | "agent.registered" as event if line["agent_id"] in agents:
                at[agents[line["agent_id"]]][event] = seconds
            case "job.started" if line["job_id"] in at:
                at[line["job_id"]]["received"] = seconds
                at[line["job_id"]]["submitted"] = at[line["run_id"]]["submitted"]
    steps = (
        ("row", "submitted", "row"),
        ("spawn", "row", "spawn.settled"),
        ("register", "spawn.settled", "agent.registered"),
        ("receive", "agent.registered", "received"),
        ("submit to job received", "submitted", "received"),
    )
    rows = []
    for name, before, after in steps:
        taken = [at[job][after] - at[job][before] for job in jobs if {before, after} <= at[job].keys()]
        if taken:
            what = f"{name}, fresh agent by {label}, p50" if " " in name else f"  part {name}, by {label}, p50"
            rows.append(Row(what, percentile(taken, 0.5), "s", f"{how}; log times, 1 ms", bench.store))
    return rows


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


async def measure_burst(bench: Bench, label: str, count: int) -> list[Row]:
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(bench.submit(label, ["/bin/true"])) for _ in range(count)]
    await bench.over({task.result() for task in tasks})
    seconds = time.perf_counter() - began
    how = "submitted at once, one agent each"
    return [
        Row(f"burst of {count} cold jobs by {label}, last finished", seconds, "s", how, bench.store),
        Row(
            f"whole agents by {label}, {count} at once",
            count / seconds,
            "/s",
            f"{how}, made, used and gone",
            bench.store,
        ),
    ]


@asynccontextmanager
async def fake_agents(
    bench: Bench, count: int, label: str, *, prefix: str | None = None
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Connections that speak the agents' protocol from another process and run jobs in no time.

    What is given waits until all of them are back, after they were cut off.
    """
    async with bench.http.post("/api/v1/admin/agent-tokens", json={"name": label}) as answer:
        token = (await answer.json())["token"]
    argv = [sys.executable, "-m", "tests.bench.instant_agents", str(count), label, prefix or label]
    url = f"ws://127.0.0.1:{bench.program.port}/ws"
    env = environment(KICI_ORCHESTRATOR_URL=url, KICI_AGENT_TOKEN=token, PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def ready() -> None:
        assert process.stdout is not None
        line = await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)
        assert line == b"ready\n", line

    try:
        await ready()
        yield ready
    finally:
        process.terminate()
        process.wait()


async def measure_warm(bench: Bench, count: int) -> list[Row]:
    """A real static agent that waits, jobs one at a time."""
    async with bench.http.post("/api/v1/admin/agent-tokens", json={"name": "warm"}) as answer:
        token = (await answer.json())["token"]
    env = environment(
        KICI_ORCHESTRATOR_URL=f"ws://127.0.0.1:{bench.program.port}/ws",
        KICI_AGENT_TOKEN=token,
        KICI_AGENT_ID="warm-1",
        KICI_LABELS="warm",
    )
    process = subprocess.Popen([*KICI, "agent"], env=env)
    try:
        await until_agents(bench, 1)
        await bench.first_output("warm")
        seconds, jobs = [], []
        for _ in range(count):
            job, taken = await bench.first_output("warm")
            seconds.append(taken)
            jobs.append(job)
            await asyncio.sleep(0.02)
        how = f"{count} jobs one at a time on one waiting agent"
        rows = [
            Row("submit to first output, idle agent, p50", percentile(seconds, 0.5), "s", how, bench.store),
            Row("submit to first output, idle agent, p99", percentile(seconds, 0.99), "s", how, bench.store),
            Row("RSS of an idle agent by exec", rss_mb(process.pid), "MB", "VmRSS after jobs", bench.store),
        ]
        return [*rows, *_received(bench, jobs, how)]
    finally:
        process.terminate()
        process.wait()


def _received(bench: Bench, jobs: list[str], how: str) -> list[Row]:
    """From the submission to the agent's acknowledgement, committed."""
    submitted: dict[str, float] = {}
    taken = []
    for line in bench.log():
        if line["event"] == "job.submitted":
            submitted[line["run_id"]] = _seconds(line["time"])
        if line["event"] == "job.started" and line["job_id"] in jobs:
            taken.append(_seconds(line["time"]) - submitted[line["run_id"]])
    return [
        Row(f"submit to job received, idle agent, p{part}", value, "s", f"{how}; log, 1 ms", bench.store)
        for part, value in ((50, percentile(taken, 0.5)), (99, percentile(taken, 0.99)))
    ]


async def until_agents(bench: Bench, count: int) -> None:
    while True:
        async with bench.http.get("/api/v1/admin/agents") as answer:
            items = (await answer.json())["items"]
        if sum(item["state"] in ("idle", "busy") for item in items) >= count:
            return
        await asyncio.sleep(0.05)


async def measure_rate(bench: Bench, agents: int, count: int) -> Row:
    """Trivial jobs through idle agents, submitted 32 at a time."""
    label = f"instant{agents}"
    async with fake_agents(bench, agents, label):
        gate = asyncio.Semaphore(32)

        async def one() -> str:
            async with gate:
                return await bench.submit(label, ["/bin/true"])

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for _ in range(count)]
        await bench.over({task.result() for task in tasks})
        rate = count / (time.perf_counter() - began)
    return Row(f"jobs per second through {agents} idle agents", rate, "/s", f"{count} trivial jobs", bench.store)


async def measure_connections(bench: Bench, count: int) -> list[Row]:
    async with fake_agents(bench, count, "crowd"):
        await until_agents(bench, count)
        await asyncio.sleep(1)
        memory = rss_mb(bench.pid)
    return [Row(f"RSS with {count} connected agents", memory, "MB", "VmRSS, idle connections", bench.store)]


async def measure_zygote_memory(bench: Bench) -> list[Row]:
    """Memory of agents that sit on a sleeping job."""
    jobs = [await bench.submit("zygote", ["/bin/sleep", "4"]) for _ in range(8)]
    await asyncio.sleep(2)
    pids = [pid for pid in marked(str(bench.program.data_dir)) if _is_agent(pid)]
    shares = [pss_mb(pid) for pid in pids]
    await bench.over(set(jobs))
    if not shares:
        return []
    return [
        Row("PSS of an agent by zygote", statistics.median(shares), "MB", f"{len(shares)} agents at once", bench.store)
    ]


def _is_agent(pid: int) -> bool:
    with suppress(OSError):
        return b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


async def rows_of(store: str, url: str | None, say: Callable[[str], None]) -> list[Row]:
    rows = []
    say(f"{store}: start")
    rows += await measure_start(store, url)
    async with coordinator(store, url) as bench:
        for label in ("zygote", "exec"):
            say(f"{store}: cold jobs by {label}")
            rows += await measure_cold(bench, label, 25)
        say(f"{store}: warm jobs")
        rows += await measure_warm(bench, 100)
        for count in (8, 50, 200):
            say(f"{store}: burst of {count}")
            rows += await measure_burst(bench, "zygote", count)
        rows += await measure_zygote_memory(bench)
        for agents in (4, 200):
            say(f"{store}: jobs through {agents} agents")
            rows.append(await measure_rate(bench, agents, 2000))
        say(f"{store}: 2000 connections")
        rows += await measure_connections(bench, 2000)
    return rows


def rows(stores: dict[str, str | None], say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """`stores`: name -> database URL; None is the embedded one."""
    found: list[Row] = []
    for store, url in stores.items():
        found += asyncio.run(rows_of(store, url, say))
    return found


if __name__ == "__main__":
    chosen: dict[str, str | None] = {"sqlite": None}
    if os.environ.get("KICI_TEST_POSTGRES_URL"):
        chosen["postgres"] = os.environ["KICI_TEST_POSTGRES_URL"]
    for row in rows(chosen, lambda text: print(f"... {text}", file=sys.stderr)):
        print(f"{row.measure:55} {row.store:9} {row.value:10.3f} {row.unit:4} {row.method}")
