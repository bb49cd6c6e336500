"""Bare metal on this machine, for tests and for a coordinator process that is there to be killed.

As a program: `python -m tests.integration.bare_metal_host FOLDER AGENT COUNT ZYGOTE` spawns COUNT agents, prints the id
of each once it runs, then waits to be killed.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from kici.adapters.cgroups import LinuxCgroups, NoCgroups
from kici.adapters.clock import RealClock
from kici.adapters.files import RealFiles
from kici.adapters.processes import LinuxProcesses
from kici.adapters.this_host import launch_host
from kici.adapters.zygote_client import Zygote
from kici.backends.bare_metal.backend import BareMetalBackend, BareMetalSettings
from kici.backends.bare_metal.compute import Tools
from kici.decide.launch import OWN_AGENT, LimitsBy, ProcessSet
from kici.domain.ids import AgentId, ScalerName
from kici.domain.resources import NOTHING, Amount
from kici.kit.supervise import Supervisor
from kici.ports.backend import SpawnOrder
from kici.testing.contracts.backend import Heard, an_id

TOKEN = "kat-sesame-open-0123456789"
STUB = """
import os, sys, time
def run(environ):
    print("ready", sorted(environ))
    time.sleep(1000)
"""


class Local:
    """One coordinator's bare metal."""

    def __init__(self, backend: BareMetalBackend, heard: Heard, zygote: Zygote) -> None:
        self.backend = backend
        self.heard = heard
        self.zygote = zygote

    async def spawn(self, number: int = 1, *, label: str = "linux", limits: Amount = NOTHING) -> AgentId:
        order = SpawnOrder(
            agent_id=an_id(number),
            label_set=(label,),
            labels=(label, "kici:scaler:local"),
            gate=frozenset(),
            token=TOKEN,
            orchestrator_url="ws://127.0.0.1:9/ws",
            limits=limits,
            requests=NOTHING,
        )
        _ = await self.backend.spawn(order, self.heard.on_event)
        return order.agent_id


@asynccontextmanager
async def local(
    folder: Path,
    *,
    agent: Path | str = "/nowhere",
    cgroups: bool = False,
    target: str = "stub_agent:run",
    environment: Mapping[str, str] | None = None,
    stop_seconds: float = 5.0,
) -> AsyncIterator[Local]:
    """`linux` is `agent`; `own` is this installation's agent: from a zygote with `target` as its program."""
    (folder / "stub_agent.py").write_text(STUB)
    groups = LinuxCgroups() if cgroups else NoCgroups()
    env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": str(folder)}
    heard = Heard()
    zygote = Zygote(python=sys.executable, target=target, env=env, clock=RealClock())
    async with Supervisor("local") as supervisor:
        backend = BareMetalBackend(
            settings=BareMetalSettings(
                scaler=ScalerName("local"),
                max_agents=200,
                sets=(
                    ProcessSet(labels=("linux",), binary_path=str(agent)),
                    ProcessSet(labels=("own",), binary_path=OWN_AGENT),
                ),
                enforce_cgroups=groups.support.limits is not LimitsBy.NONE,
                data_dir=folder / "data",
                stop_seconds=stop_seconds,
            ),
            host=launch_host(dict(os.environ) if environment is None else environment, groups.support),
            tools=Tools(
                processes=LinuxProcesses(), files=RealFiles(), cgroups=groups, clock=RealClock(), zygote=zygote
            ),
            supervisor=supervisor,
            on_exit=heard.on_exit,
        )
        try:
            yield Local(backend, heard, zygote)
        finally:
            await zygote.close()


def a_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def marked(folder: Path) -> dict[int, str]:
    """Running processes below a data directory, by pid, read without the code under test."""
    prefix = f"AGENT_COMPUTE_MARK={folder}/data/agents/".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "environ").read_bytes().split(b"\0")
            state = (process / "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        for word in words if state != b"Z" else []:
            if word.startswith(prefix):
                found[int(process.name)] = word.removeprefix(prefix).decode()
    return found


async def _serve(folder: Path, agent: str, count: int, label: str) -> None:
    async with local(folder, agent=agent) as here:
        for number in range(count):
            sys.stdout.write(f"{await here.spawn(number, label=label)}\n")
            sys.stdout.flush()
        await asyncio.sleep(1000)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
