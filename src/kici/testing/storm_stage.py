"""A whole cluster for a storm: three coordinators, two workers and PostgreSQL, each on a host of its own.

The programs are the real ones.  What runs is counted by looking at the processes, not by asking anybody.
"""

import asyncio
import json
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from kici.domain.agent import AgentSession
from kici.domain.errors import StoreDown
from kici.domain.ids import InstanceId, JobId
from kici.domain.job import Job
from kici.ports.processes import MARK
from kici.ports.store import JobFilter, Store
from kici.services.elector import LEASE
from kici.stores.postgres.open import open_postgres
from kici.testing.network_lab import NETWORK, NetworkLab
from kici.testing.postgres_cluster import Cluster
from kici.testing.programs import CoordinatorProgram, until
from kici.testing.worker_program import WorkerProgram

T = TypeVar("T")
COORDINATORS: Final = ("c1", "c2", "c3")
WORKERS: Final = ("w1", "w2")
DATABASE: Final = "db"
PORT: Final = 4000
CAPS: Final = {"c1": 2, "c2": 2, "c3": 2, "w1": 4, "w2": 4}
"""Agents at most, by host."""
SAMPLE_SECONDS: Final = 0.25
ROWS_MAX: Final = 10_000
SCALERS: Final = """
version: 1
globalMaxAgents: {cap}
scalers:
  - name: near
    type: bare-metal
    maxAgents: {cap}
    labelSets:
      - labels: [linux, {name}]
        binaryPath: kici-agent
"""
_POSTGRES: Final = {
    "listen_addresses": "*",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "fsync": "off",  # the server is killed, the machine is not
}


class Census:
    """Counts living agents of every host by their processes, for as long as it is entered."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self.most: Counter[str] = Counter()
        """The largest number that was seen at once, by host."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> Counter[str]:
        """Agents that have a process, by host."""
        agents = marks()
        return Counter(
            {host: sum(mark.startswith(f"{folder}/") for mark in agents) for host, folder in self._folders.items()}
        )

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.most |= self.now()


def marks() -> set[str]:
    """The marks of all agents that have a living process (Linux)."""
    needle = f"{MARK}=".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if state != b"Z":
            found |= {part[len(needle) :].decode() for part in environ.split(b"\0") if part.startswith(needle)}
    return found


class Stage:
    """Entering starts everything and returns when everybody knows everybody."""

    def __init__(self, coordinators: Sequence[str] = COORDINATORS, workers: Sequence[str] = WORKERS) -> None:
        self._names = (tuple(coordinators), tuple(workers))
        self.folder = Path(tempfile.mkdtemp(prefix="kici-storm-"))
        self.starts = self.folder / "starts"
        """One file for each job, in which its script says that it starts and that it ends."""
        self.keeps_folder = False
        self.coordinators: dict[str, CoordinatorProgram] = {}
        self.workers: dict[str, WorkerProgram] = {}
        self._stack = ExitStack()
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self.programs.values():  # all at once; the stack waits for each
            if program.process is not None and program.process.poll() is None:
                program.process.terminate()
        self._stack.close()
        if error is None and not self.keeps_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------ what there is

    @property
    def programs(self) -> dict[str, CoordinatorProgram | WorkerProgram]:
        return {**self.coordinators, **self.workers}

    def leader(self) -> str | None:
        """The host of the coordinator that holds the lease; None: nobody does, or the database does not answer."""

        async def ask(store: Store) -> InstanceId | None:
            lease = await store.lease(LEASE)
            return lease.holder if lease is not None and lease.expires_at > await store.database_now() else None

        try:
            holder = self._runner.run(self._with_store(ask))
        except StoreDown:
            return None
        return next((host for host, program in self.coordinators.items() if id_of(program) == holder), None)

    def jobs(self) -> dict[str, list[Job]]:
        """All jobs by name.  Raises `StoreDown`."""

        async def ask(store: Store) -> list[Job]:
            return await store.jobs(JobFilter(limit=ROWS_MAX))

        found: dict[str, list[Job]] = {}
        for job in self._runner.run(self._with_store(ask)):
            found.setdefault(job.name, []).append(job)
        return found

    def holders(self) -> dict[str, str]:
        """The host of the coordinator that each connected agent is with."""

        async def ask(store: Store) -> list[AgentSession]:
            return await store.sessions(instance_id=None, limit=ROWS_MAX)

        hosts = {id_of(program): host for host, program in self.coordinators.items()}
        return {row.agent_id: hosts[row.instance_id] for row in self._runner.run(self._with_store(ask))}

    def rows(self) -> dict[str, int]:
        """Rows of what should be gone when nothing runs, by what they are."""

        async def ask(store: Store) -> dict[str, int]:
            owners = [row.id for row in await store.instances(limit=ROWS_MAX)]
            reservations = [len(await store.reservations(owner=owner, limit=ROWS_MAX)) for owner in owners]
            return {
                "spawns": len(await store.spawns(owner=None, limit=ROWS_MAX)),
                "reservations": sum(reservations),
                "sessions": len(await store.sessions(instance_id=None, limit=ROWS_MAX)),
                "queued": await store.queued_count(),
            }

        return self._runner.run(self._with_store(ask))

    def census(self) -> Census:
        return Census({host: program.data_dir for host, program in self.programs.items()})

    def submit(self, through: str, jobs: dict[str, object]) -> None:
        """A run of these jobs."""
        done = self.coordinators[through].run("submit", "-d", "-", given=json.dumps({"jobs": jobs}))
        assert done.returncode == 0, f"submitting through {through}: {done.stderr}"

    def begun(self, name: str) -> list[str]:
        """What the script of a job wrote of itself."""
        path = self.starts / name
        return path.read_text().split() if path.exists() else []

    def log_of(self, host: str) -> Path:
        return self.programs[host].log

    # ------------------------------------------------------------------ how

    def _start(self) -> None:
        self.starts.mkdir()
        self._stack.callback(self._runner.close)
        coordinators, workers = self._names
        self.network = self._stack.enter_context(NetworkLab([DATABASE, *coordinators, *workers]))
        self.postgres = Cluster(
            Path(tempfile.mkdtemp(prefix="kici-storm-db-")),
            address=self.network.address(DATABASE),
            port=5432,
            within=self.network.within(DATABASE),
        )
        self._stack.callback(shutil.rmtree, self.postgres.folder, ignore_errors=True)
        self.postgres.make(_POSTGRES)
        self.postgres.lets_in(NETWORK)
        self.postgres.start()
        self._stack.callback(self.postgres.stop)
        for host in coordinators:
            self.coordinators[host] = self._stack.enter_context(self._coordinator(host))
        first = self.coordinators[coordinators[0]]
        urls = [f"http://{self.network.address(host)}:{PORT}" for host in coordinators]
        for host in workers:
            self.workers[host] = self._stack.enter_context(self._worker(host, urls).takes_token(first))
        until(self._is_whole, seconds=60, what="all coordinators and workers know each other")

    def _coordinator(self, host: str) -> CoordinatorProgram:
        address = f"{self.network.address(host)}:{PORT}"
        scalers = self.folder / f"{host}.yaml"
        scalers.write_text(SCALERS.format(name=host, cap=CAPS[host]))
        return CoordinatorProgram(
            self.folder / host,
            port=PORT,
            extra=[
                *("--host", self.network.address(host)),
                *("--scalers", str(scalers)),
                *("--database-url", self.postgres.url),
            ],
            env={
                "KICI_SECRET_KEY": "0" * 64,
                "KICI_CLUSTER_ADDRESS": f"ws://{address}/ws",
                # Some jobs are for one host only: they wait for it however long it is cut off.
                "KICI_UNROUTABLE_GRACE_MS": "600000",
            },
            within=self.network.within(host),
        )

    def _worker(self, host: str, urls: list[str]) -> WorkerProgram:
        worker = WorkerProgram(self.folder / host, urls, within=self.network.within(host))
        worker.scalers.write_text(SCALERS.format(name=host, cap=CAPS[host]))
        return worker

    def _is_whole(self) -> bool:
        coordinators, workers = self._names
        peers = self.coordinators[coordinators[0]].admin("peers")
        links = [len(each["linkedTo"]) for each in peers if each["role"] == "worker"]
        return len(peers) == len(self.programs) and links == [len(coordinators)] * len(workers)

    async def _with_store(self, work: Callable[[Store], Awaitable[T]]) -> T:
        store = open_postgres(self.postgres.local_url)
        try:
            return await work(store)
        finally:
            await store.close()


def id_of(program: CoordinatorProgram) -> InstanceId:
    return InstanceId((program.data_dir / "instance-id").read_text().strip())


def ended(jobs: dict[str, list[Job]]) -> dict[JobId, Job]:
    return {job.id: job for many in jobs.values() for job in many if job.finished_at is not None}
