"""Benches for the contract of backends: the fake one, and bare metal on a fake and on the real host."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kici.adapters.cgroups import LinuxCgroups, NoCgroups
from kici.adapters.clock import RealClock
from kici.adapters.files import RealFiles
from kici.adapters.processes import LinuxProcesses
from kici.adapters.zygote_client import Zygote
from kici.backends.bare_metal.backend import BareMetalBackend, BareMetalSettings
from kici.backends.bare_metal.compute import Tools
from kici.decide.launch import OWN_AGENT, CgroupSupport, LaunchHost, ProcessSet
from kici.domain.ids import AgentId, ScalerName
from kici.domain.resources import NOTHING
from kici.kit.supervise import Supervisor
from kici.ports.backend import SpawnOrder
from kici.ports.cgroups import Cgroups
from kici.ports.processes import Exit
from kici.testing.contracts.backend import MAX_AGENTS, Heard, Kind
from kici.testing.fake_backend import FakeBackend, FakeMachines, SpawnScript, refuses
from kici.testing.fake_files import FakeFiles
from kici.testing.fake_processes import FakeHost, FakeProcesses, Script
from kici.testing.sim_clock import SimClock

SCALER = ScalerName("local")
MISSING = "/nowhere/agent"


def an_order(agent_id: AgentId, kind: Kind) -> SpawnOrder:
    return SpawnOrder(
        agent_id=agent_id,
        label_set=("linux", kind.value),
        labels=("linux", kind.value, "kici:scaler:local"),
        gate=frozenset(),
        token="sesame",
        orchestrator_url="ws://127.0.0.1:4000/ws",
        limits=NOTHING,
        requests=NOTHING,
    )


class FakeBench:
    """The fake backend keeps the contract that it stands in for."""

    make: type[FakeBackend] = FakeBackend

    def __init__(self) -> None:
        self.heard = Heard()
        self.machines = FakeMachines()
        self.scripts: dict[AgentId, SpawnScript] = {}
        self.backend = self._backend()

    def _backend(self) -> FakeBackend:
        return self.make(
            scaler=SCALER,
            machines=self.machines,
            clock=SimClock(),
            on_exit=self.heard.on_exit,
            sets=tuple(("linux", kind.value) for kind in Kind),
            max_agents=MAX_AGENTS,
        )

    def order(self, agent_id: AgentId, kind: Kind) -> SpawnOrder:
        script = {
            Kind.LIVES: SpawnScript(),
            Kind.DIES: SpawnScript(dies_after_seconds=0.05),
            Kind.REFUSED: refuses(),
            Kind.SLOW: SpawnScript(seconds=5.0),
        }[kind]
        self.backend.scripts = iter([script])
        return an_order(agent_id, kind)

    def on_host(self) -> frozenset[AgentId]:
        return frozenset(self.machines.alive)

    async def die(self, agent_id: AgentId) -> None:
        self.machines.die(agent_id)

    async def restart(self) -> None:
        self.machines.watchers.clear()
        self.backend = self._backend()


class BareMetalBench:
    """Bare metal over any host: `programs` says which program does what, `on_host` what is there."""

    def __init__(self, data_dir: Path, host: LaunchHost, programs: dict[Kind, str], tools: Callable[[], Tools]) -> None:
        self.heard = Heard()
        self._data_dir = data_dir
        self._host = host
        self._programs = programs
        self._make_tools = tools
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        supervisor = await self._stack.enter_async_context(Supervisor("bench"))
        self.tools = self._make_tools()
        self.backend = BareMetalBackend(
            settings=BareMetalSettings(
                scaler=SCALER,
                max_agents=MAX_AGENTS,
                sets=tuple(
                    ProcessSet(labels=("linux", kind.value), binary_path=path, env={"STUB": kind.value})
                    for kind, path in self._programs.items()
                ),
                enforce_cgroups=False,
                data_dir=self._data_dir,
                stop_seconds=0.5,
            ),
            host=self._host,
            tools=self.tools,
            supervisor=supervisor,
            on_exit=self.heard.on_exit,
        )

    def order(self, agent_id: AgentId, kind: Kind) -> SpawnOrder:
        return an_order(agent_id, kind)

    async def restart(self) -> None:
        await self._leave()
        await self.start()

    async def _leave(self) -> None:
        await self._stack.aclose()

    async def close(self) -> None:
        await self.backend.shutdown_all()
        await self.backend.cleanup_orphans(frozenset())
        await self._leave()


class FakeHostBench(BareMetalBench):
    def __init__(self) -> None:
        self.files = FakeFiles()
        programs: dict[Kind, str] = {kind: f"/opt/{kind.value}" for kind in Kind}
        scripts = {
            programs[Kind.LIVES]: Script(output="ready\n", children=2),
            programs[Kind.DIES]: Script(output="oh no\n", lives_seconds=0.2, exit=Exit(code=3)),
            programs[Kind.SLOW]: Script(start_seconds=1.0),
        }
        self.machine = FakeHost(self.files, scripts)
        super().__init__(
            Path("/data"),
            LaunchHost(system="linux", environment={}, python="/bin/python", program_folder="/bin"),
            programs | {Kind.REFUSED: MISSING},
            lambda: Tools(
                processes=FakeProcesses(self.machine), files=self.files, cgroups=NoCgroups(), clock=SimClock()
            ),
        )

    def on_host(self) -> frozenset[AgentId]:
        names = {Path(one.mark).name for one in self.machine.running()}
        names |= {path.name.split(".")[0] for path in self.files.contents}
        names |= {path.name for path in self.files.folders if path.parent.name == "work"}
        return frozenset(map(AgentId, names))

    async def die(self, agent_id: AgentId) -> None:
        for one in self.machine.running():
            if Path(one.mark).name == agent_id and one.parent is None:
                one.end(Exit(signal=9))


AGENT_SCRIPTS = {
    Kind.LIVES: "sleep 1000 & echo ready; wait",
    Kind.DIES: "echo oh no; exit 3",
    Kind.SLOW: "exec sleep 1000",
}


class RealHostBench(BareMetalBench):
    """Shell scripts as agents, on this machine."""

    def __init__(self, folder: Path, cgroups: Cgroups) -> None:
        self.data_dir = folder / "data"
        programs = {kind: str(a_script(folder / kind.value, AGENT_SCRIPTS.get(kind, ""))) for kind in Kind}
        self._cgroups = cgroups
        super().__init__(
            self.data_dir,
            this_host(cgroups.support),
            programs | {Kind.REFUSED: MISSING},
            lambda: Tools(processes=LinuxProcesses(), files=RealFiles(), cgroups=cgroups, clock=RealClock()),
        )

    def on_host(self) -> frozenset[AgentId]:
        names = {Path(mark).name for mark in running_marks(self.data_dir)}
        for folder in ("agents", "work"):
            if (self.data_dir / folder).exists():
                names |= {name.split(".")[0] for name in os.listdir(self.data_dir / folder)}
        return frozenset(map(AgentId, names))

    async def die(self, agent_id: AgentId) -> None:
        processes = LinuxProcesses()
        mark = f"{self.data_dir}/agents/{agent_id}"
        while not (found := await processes.marked(mark)):  # noqa: ASYNC110  # in the midst of its exec
            await asyncio.sleep(0.01)
        _, root = found[0]
        held = processes.adopt(root)
        assert held is not None
        held.send(signal.SIGKILL)
        await held.wait()


STUB_AGENT = """
import os, sys, time
def run(environ):
    if environ["STUB"] == "dies":
        print("oh no")
        return 3
    if os.fork() == 0:
        os.setsid()
    print("ready")
    time.sleep(1000)
"""


class ZygoteBench(RealHostBench):
    """Agents forked from a zygote, with a stub for the agent program."""

    def __init__(self, folder: Path, cgroups: Cgroups) -> None:
        super().__init__(folder, cgroups)
        (folder / "stub_agent.py").write_text(STUB_AGENT)
        self._programs = dict.fromkeys(Kind, OWN_AGENT) | {Kind.REFUSED: MISSING}
        self._env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": str(folder)}
        self._make_tools = self._tools

    def _tools(self) -> Tools:
        self.zygote = Zygote(python=sys.executable, target="stub_agent:run", env=self._env, clock=RealClock())
        return Tools(
            processes=LinuxProcesses(),
            files=RealFiles(),
            cgroups=self._cgroups,
            clock=RealClock(),
            zygote=self.zygote,
        )

    async def _leave(self) -> None:
        await super()._leave()
        await self.zygote.close()


def a_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def this_host(cgroups: CgroupSupport | None = None) -> LaunchHost:
    return LaunchHost(
        system=sys.platform,
        environment=dict(os.environ),
        python=sys.executable,
        program_folder=str(Path(sys.executable).parent),
        cgroups=cgroups or CgroupSupport(),
    )


def running_marks(data_dir: Path) -> set[str]:
    """Read anew, without the code under test."""
    prefix = f"AGENT_COMPUTE_MARK={data_dir}/".encode()
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "environ").read_bytes().split(b"\0")
            state = (process / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        found |= {word.decode().partition("=")[2] for word in words if word.startswith(prefix) and state != b"Z"}
    return found


@asynccontextmanager
async def fake() -> AsyncIterator[FakeBench]:
    yield FakeBench()


@asynccontextmanager
async def bare_metal_on_a_fake_host() -> AsyncIterator[FakeHostBench]:
    bench = FakeHostBench()
    await bench.start()
    yield bench
    await bench.close()


@asynccontextmanager
async def bare_metal(
    folder: Path, cgroups: Cgroups | None = None, make: type[RealHostBench] = RealHostBench
) -> AsyncIterator[RealHostBench]:
    bench = make(folder, cgroups or NoCgroups())
    await bench.start()
    try:
        yield bench
    finally:
        await bench.close()
    assert not running_marks(bench.data_dir), "processes are left behind"
    assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left behind"


@asynccontextmanager
async def bare_metal_with_cgroups(folder: Path) -> AsyncIterator[RealHostBench]:
    async with bare_metal(folder, LinuxCgroups()) as bench:
        yield bench


@asynccontextmanager
async def bare_metal_with_a_zygote(folder: Path) -> AsyncIterator[RealHostBench]:
    async with bare_metal(folder, make=ZygoteBench) as bench:
        yield bench
