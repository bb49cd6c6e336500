"""The program that runs one job of an agent in a container of its own.

Its agent starts it with a socket for a standard input, over which it hears what to run and when to stop, and takes its
standard output and error for the job's.  A program of its own, so that agents stay small; it ends when its agent does.

    python -m kici.apps.job_container            run the job that the socket tells
    python -m kici.apps.job_container --clear F  remove what dead processes left, by the records in folder F
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from kici.adapters.agent_archive import find_archive, installation
from kici.adapters.clock import RealClock
from kici.adapters.docker_engine import archive
from kici.adapters.docker_jobs import DockerJobEngine
from kici.adapters.job_output import JobOutput
from kici.adapters.job_records import JobRecords
from kici.adapters.nft import Nft
from kici.adapters.this_host import resolvers, this_processes
from kici.agent.host import shield
from kici.agent.inner import packed
from kici.backends.container.fencing import Fencing
from kici.backends.container.flights import Flights
from kici.backends.container.images import Images
from kici.backends.container.job_image import JobImages
from kici.backends.container.job_network import JOB_NETWORK, JobNetwork
from kici.backends.container.job_run import JobRun, JobWish, clear
from kici.backends.container.job_runtime import JobRuntime
from kici.backends.container.runtime import Runtimes
from kici.decide.job_container import WORKSPACE, Recipe, Sandbox
from kici.domain.container import RegistryAuth, registry_of
from kici.domain.errors import DeterministicRefusal, KiciError
from kici.domain.resources import Amount
from kici.kit.supervise import Supervisor
from kici.ports.engine import EngineAddress, EngineKind
from kici.wire.container_order import ASK, FAILED, LENGTH_BYTES, ContainerFailure, ContainerOrder
from kici.wire.messages import JobContainer


def main(argv: list[str]) -> int:
    """The exit code: the job's own, `FAILED` when it was not run."""
    shield()
    if argv[:1] == ["--clear"]:
        return asyncio.run(clear_all(Path(argv[1])))
    with socket.socket(fileno=os.dup(0)) as agent:
        order = take_order(agent)
        return FAILED if order is None else asyncio.run(carry_out(order, agent))


def take_order(agent: socket.socket) -> ContainerOrder | None:
    """None: the agent is gone already."""
    head = _exactly(agent, LENGTH_BYTES)
    body = _exactly(agent, int.from_bytes(head)) if head else b""
    return msgspec.json.decode(body, type=ContainerOrder) if body else None


def _exactly(agent: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = agent.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


async def carry_out(order: ContainerOrder, agent: socket.socket) -> int:
    """Run the job, listening to the agent; tell it why if the job could not be run."""
    agent.settimeout(0)
    async with Supervisor("job") as tasks, _engine(order.engine) as engine, asyncio.TaskGroup() as group:
        job = group.create_task(outcome(order, engine, tasks, hearer := Hearer(agent)), name="run")
        listener = group.create_task(hearer.listen(job), name="listen")
        job.add_done_callback(lambda _: listener.cancel())
    if job.cancelled():
        return FAILED
    code = job.result()
    if isinstance(code, int):
        return code
    with suppress(OSError):
        agent.send(msgspec.json.encode(ContainerFailure(reason=code)))
    return FAILED


async def outcome(order: ContainerOrder, engine: DockerJobEngine, tasks: Supervisor, hearer: "Hearer") -> int | str:
    """The job's exit code, or why it was not run."""
    try:
        run = hearer.run = await assemble(order, engine, tasks)
        return await run.run(wish_of(order))
    except KiciError as error:
        return str(error)
    except OSError as error:
        return f"the job's container could not be run: {error}"


class Hearer:
    """Does what the agent says, or somebody who sends TERM."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._is_asked = asyncio.Event()
        self.run: JobRun | None = None
        """Once there is one."""

    async def listen(self, job: "asyncio.Task[int | str]") -> None:
        """Until the agent is gone, or wants the job gone: it is cancelled then, and clears up."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._is_asked.set)
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)  # what ends the agent is the agent's to pass on
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._ask_when_asked(job), name="ask")
            while await self._heard(loop) == ASK:
                self._is_asked.set()
            job.cancel()
            asking.cancel()

    async def _heard(self, loop: asyncio.AbstractEventLoop) -> bytes:
        try:
            return await loop.sock_recv(self._agent, 1)
        except OSError:
            return b""

    async def _ask_when_asked(self, job: "asyncio.Task[int | str]") -> None:
        while True:
            await self._is_asked.wait()
            self._is_asked.clear()
            if self.run is None or not await self.run.ask():
                job.cancel()


async def assemble(order: ContainerOrder, engine: DockerJobEngine, tasks: Supervisor) -> JobRun:
    """Everything that a run needs.  Raises `Permanent` or `DeterministicRefusal`."""
    clock, records, packets = RealClock(), JobRecords(Path(order.folder)), Nft()
    tasks.start("clear", clear(records, engine))
    job_images = JobImages(engine=engine, records=records, clock=clock, pack=archive)
    if order.container.dockerfile is not None:
        tasks.start("prune", job_images.prune())
    fencing = Fencing(engine=engine, packets=packets, network=JOB_NETWORK, resolvers=resolvers)
    flights = Flights(tasks)
    return JobRun(
        engine=engine,
        images=Images(engine=engine, flights=flights, clock=clock),
        job_images=job_images,
        runtime=JobRuntime(
            runtimes=Runtimes(
                engine=engine,
                flights=flights,
                clock=clock,
                find_archive=partial(find_archive, this_processes(), records.runtime),
            ),
            records=records,
            engine=order.engine,
            installation=installation(),
        ),
        network=JobNetwork(engine=engine, fencing=fencing, is_isolated=await is_isolated(order, engine, packets)),
        records=records,
        output=JobOutput(),
    )


async def is_isolated(order: ContainerOrder, engine: DockerJobEngine, packets: Nft) -> bool:
    """Whether rules are set.  Raises `DeterministicRefusal` where they are demanded and cannot be."""
    wanted = order.sandbox.isolated
    if wanted is False:
        return False
    problem = "the engine is on another machine" if not engine.address.is_local else await packets.problem()
    if problem is not None and wanted:
        raise DeterministicRefusal(
            f"the job's container cannot be isolated here, which KICI_SANDBOX_NETWORK_ISOLATION demands: {problem}"
        )
    return problem is None


def wish_of(order: ContainerOrder) -> JobWish:
    container, sandbox = order.container, order.sandbox
    recipe = None
    if container.dockerfile is not None:
        recipe = Recipe(
            dockerfile=container.dockerfile, context=container.context, target=container.target, args=container.args
        )
    return JobWish(
        name=order.name,
        agent_id=order.agent_id,
        job_id=order.job_id,
        run_id=order.run_id,
        image=container.image,
        recipe=recipe,
        auth=auth_of(container),
        declared=Amount(cpus=container.cpus, memory_bytes=container.memory_bytes),
        sandbox=Sandbox(
            is_hardened=sandbox.hardened,
            pids_max=sandbox.pids_max,
            default_limits=Amount(cpus=sandbox.cpus, memory_bytes=sandbox.memory_bytes),
            is_root_read_only=sandbox.root_read_only,
            user=sandbox.user,
        ),
        cpu_count=os.cpu_count() or 1,
        command=packed({"command": order.command, "env": order.env, "directory": WORKSPACE}),
    )


def auth_of(container: JobContainer) -> RegistryAuth | None:
    if container.password is None:
        return None
    server = container.registry or registry_of(container.image or "")
    return RegistryAuth(username=container.username or "", password=container.password, server=server)


def address_of(url: str) -> EngineAddress:
    kind = EngineKind.PODMAN if "podman" in url else EngineKind.DOCKER
    return EngineAddress(url=url, kind=kind, is_local=url.startswith("unix://"))


async def clear_all(folder: Path) -> int:
    """Remove what dead processes left on engines that answer."""
    records = JobRecords(folder)
    with records.stale() as left:
        engines = sorted({engine for _, engine in left})
    for url in engines:
        with suppress(KiciError):
            async with _engine(url) as engine:
                _ = await clear(records, engine)
    return 0


@asynccontextmanager
async def _engine(url: str) -> AsyncIterator[DockerJobEngine]:
    engine = DockerJobEngine(address_of(url))
    try:
        yield engine
    finally:
        await engine.close()


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # standard error is the job's
    sys.exit(main(sys.argv[1:]))
