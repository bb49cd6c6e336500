"""What an agent's process inherits proves its life, however it is started, and nothing else has it open."""

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from signal import SIGKILL

import pytest
from tests.integration.bare_metal_host import marked

from kici.adapters import life_locks
from kici.adapters.clock import RealClock
from kici.adapters.processes import LinuxProcesses
from kici.adapters.processes_portable import PortableProcesses
from kici.adapters.zygote_client import Zygote
from kici.ports.processes import Process, Program
from kici.testing.contracts.backend import until

PROBE = """
import subprocess, sys, time
def run(environ):
    subprocess.Popen(["sleep", "1000"])
    print("ready", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for pid in marked(tmp_path):
        os.kill(pid, SIGKILL)


def program(folder: Path, name: str, *, inherits: tuple[int, ...] = (), groups: tuple[Path, ...] = ()) -> Program:
    script = folder / "agent"
    script.write_text("#!/bin/sh\necho ready\nexec sleep 1000\n")
    script.chmod(0o755)
    return Program(
        argv=(str(script),),
        env={"PATH": "/usr/bin:/bin"},
        cwd=folder,
        output=folder / f"{name}.log",
        mark=f"{folder}/data/agents/{name}",
        groups=groups,
        inherits=inherits,
    )


Start = Callable[[Program], Awaitable[Process]]


@asynccontextmanager
async def by_zygote(folder: Path) -> AsyncIterator[Start]:
    (folder / "probe.py").write_text(PROBE)
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)}
    zygote = Zygote(python=sys.executable, target="probe:run", env=env, clock=RealClock())
    try:
        yield zygote.start
    finally:
        await zygote.close()


@asynccontextmanager
async def by_linux(_: Path) -> AsyncIterator[Start]:
    yield LinuxProcesses().start


@asynccontextmanager
async def by_any_host(_: Path) -> AsyncIterator[Start]:
    yield PortableProcesses().start


async def says_ready(folder: Path, name: str) -> None:
    await until(lambda: "ready" in (folder / f"{name}.log").read_text())


@pytest.mark.spec("D18")
@pytest.mark.parametrize("way", [by_zygote, by_linux, by_any_host])
async def test_the_lock_is_free_exactly_when_the_agent_is_gone(
    way: Callable[[Path], AbstractAsyncContextManager[Start]], tmp_path: Path
) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    async with way(tmp_path) as start:
        processes = {}
        for name in ("a", "b"):
            descriptor = life_locks.hold(locks / name, seconds=0)
            assert descriptor is not None
            processes[name] = await start(program(tmp_path, name, inherits=(descriptor,)))
            os.close(descriptor)
            await says_ready(tmp_path, name)
        assert life_locks.is_held(locks / "a")
        os.kill(processes["a"].id.pid, SIGKILL)
        await processes["a"].wait()
        assert not life_locks.is_held(locks / "a"), "neither its starter nor its sibling has it"
        assert life_locks.is_held(locks / "b")
        os.kill(processes["b"].id.pid, SIGKILL)
        await processes["b"].wait()
        await until(lambda: not life_locks.is_held(locks / "b"))


async def test_a_shell_that_enters_control_groups_first_hands_it_on(tmp_path: Path) -> None:
    descriptor = life_locks.hold(tmp_path / "lock", seconds=0)
    assert descriptor is not None
    (tmp_path / "cgroup.procs").touch()
    wanted = program(tmp_path, "a", inherits=(descriptor,), groups=(tmp_path / "cgroup.procs",))
    process = await LinuxProcesses().start(wanted)
    os.close(descriptor)
    await says_ready(tmp_path, "a")
    assert (tmp_path / "cgroup.procs").read_text().split() == [str(process.id.pid)]
    assert life_locks.is_held(tmp_path / "lock")
    os.kill(process.id.pid, SIGKILL)
    await process.wait()
    assert not life_locks.is_held(tmp_path / "lock")


async def test_a_fork_that_was_called_off_leaves_the_lock_free(tmp_path: Path) -> None:
    """The coordinator died before it let the child become an agent."""
    descriptor = life_locks.hold(tmp_path / "lock", seconds=0)
    assert descriptor is not None
    async with by_zygote(tmp_path) as start:
        await start(program(tmp_path, "first"))
        missing = Program(
            argv=("ignored",),
            env={},
            cwd=tmp_path / "no-such-folder",
            output=tmp_path / "a.log",
            mark=f"{tmp_path}/data/agents/a",
            inherits=(descriptor,),
        )
        process = await start(missing)
        os.close(descriptor)
        await process.wait()
        await until(lambda: not life_locks.is_held(tmp_path / "lock"))
