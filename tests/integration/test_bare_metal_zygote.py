"""Agents forked from a prepared process: quick, small, apart from each other, and not lost with it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.integration.bare_metal_host import TOKEN, Local, local, marked

from kici.adapters.clock import RealClock
from kici.adapters.processes import LinuxProcesses
from kici.adapters.zygote_client import AGAIN_SECONDS, Zygote
from kici.domain.errors import Retryable
from kici.ports.processes import Exit, Process, Program
from kici.testing.contracts.backend import until

REAL_AGENT = "kici.agent.program:run"
PSS_KB_MAX = 12 * 1024
PROBE = """
import json, os, signal, sys, time
def run(environ):
    if environ.get("EXIT"):
        sys.exit(int(environ["EXIT"]))
    if environ.get("RAISE"):
        raise RuntimeError("it broke")
    print(json.dumps({
        "environ": environ, "os_environ": dict(os.environ), "cwd": os.getcwd(),
        "session": os.getsid(0), "pid": os.getpid(),
        "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
        "stdin": os.readlink("/proc/self/fd/0"), "chld": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "comm": open("/proc/self/comm").read().strip(),
    }))
    print("to stderr", file=sys.stderr)
    time.sleep(1000)
"""


class Clock(RealClock):
    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds


class Prepared:
    def __init__(self, folder: Path, zygote: Zygote, clock: Clock) -> None:
        self.folder = folder
        self.zygote = zygote
        self.clock = clock

    def program(self, name: str = "a", **env: str) -> Program:
        mark = f"{self.folder}/data/agents/{name}"
        output = self.folder / f"{name}.log"
        return Program(argv=("ignored",), env=env, cwd=self.folder, output=output, mark=mark)

    async def start(self, name: str = "a", **env: str) -> Process:
        return await self.zygote.start(self.program(name, **env))

    async def says(self, name: str = "a") -> dict[str, object]:
        path = self.folder / f"{name}.log"
        await until(lambda: path.read_text().count("\n") >= 2)
        said: dict[str, object] = json.loads(path.read_text().splitlines()[0])
        return said


@asynccontextmanager
async def prepared(folder: Path, program: str = PROBE) -> AsyncIterator[Prepared]:
    (folder / "probe.py").write_text(program)
    clock = Clock()
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "LANG": "C.UTF-8"}
    zygote = Zygote(python=sys.executable, target="probe:run", env=env, clock=clock)
    try:
        yield Prepared(folder, zygote, clock)
    finally:
        await zygote.close()
        for pid in marked(folder):
            os.kill(pid, signal.SIGKILL)


async def test_the_child_is_an_agent_and_no_zygote(tmp_path: Path) -> None:
    async with prepared(tmp_path) as here:
        process = await here.start("a", A="1", KICI_AGENT_TOKEN=TOKEN)
        said = await here.says()
        mark = f"{tmp_path}/data/agents/a"
        told = {"A": "1", "KICI_AGENT_TOKEN": TOKEN, "AGENT_COMPUTE_MARK": mark}
        assert said["environ"] == said["os_environ"] == told
        assert said["cwd"] == str(tmp_path)
        assert said["session"] == said["pid"] == process.id.pid
        assert said["descriptors"] == ["0", "1", "2"]
        assert said["stdin"] == "/dev/null"
        assert said["chld"] is True
        assert said["comm"] == "kici-agent"
        assert "to stderr" in (tmp_path / "a.log").read_text()
        assert _command(process.id.pid) == ["kici-agent", f"AGENT_COMPUTE_MARK={mark}"]
        assert marked(tmp_path) == {process.id.pid: "a"}
        adopted = LinuxProcesses().adopt(process.id)
        assert adopted is not None, "its identity is the one that anybody reads"
        adopted.close()


async def test_exit_codes_and_signals_are_reported(tmp_path: Path) -> None:
    async with prepared(tmp_path) as here:
        assert await (await here.start(EXIT="7")).wait() == Exit(code=7)
        assert await (await here.start("b", RAISE="1")).wait() == Exit(code=70)
        assert "RuntimeError: it broke" in (tmp_path / "b.log").read_text()
        process = await here.start("c")
        os.kill(process.id.pid, signal.SIGKILL)
        assert await process.wait() == Exit(signal=9)
        assert not process.is_alive()


async def test_a_child_that_cannot_begin_says_why_in_its_output(tmp_path: Path) -> None:
    async with prepared(tmp_path) as here:
        program = Program(
            argv=(), env={}, cwd=tmp_path / "nowhere", output=tmp_path / "a.log", mark=f"{tmp_path}/data/agents/a"
        )
        assert await (await here.zygote.start(program)).wait() == Exit(code=70)
        assert "nowhere" in (tmp_path / "a.log").read_text()


async def test_no_credential_passes_through_the_zygote(tmp_path: Path) -> None:
    """Neither in what it shows nor anywhere in its memory, which every later agent inherits."""
    async with prepared(tmp_path) as here:
        first = await here.start("a", KICI_AGENT_TOKEN=TOKEN)
        _ = await here.says("a")
        second = await here.start("b", KICI_AGENT_TOKEN="another")
        _ = await here.says("b")
        assert here.zygote.pid is not None
        assert _memory_has(first.id.pid, TOKEN), "the search finds what is there"
        assert not _memory_has(here.zygote.pid, TOKEN)
        assert not _memory_has(second.id.pid, TOKEN)


async def test_it_ends_with_its_coordinator_and_its_children_live(tmp_path: Path) -> None:
    async with prepared(tmp_path) as here:
        process = await here.start()
        pid = here.zygote.pid
        assert pid is not None
        await here.zygote.close()
        assert str(pid) not in os.listdir("/proc")
        assert process.is_alive()
        os.kill(process.id.pid, signal.SIGTERM)
        assert await process.wait() == Exit(), "nobody is left who could say how"


async def test_a_lost_zygote_is_started_again_later(tmp_path: Path) -> None:
    async with prepared(tmp_path) as here:
        process = await here.start()
        _lose(here.zygote)
        await until(lambda: here.zygote.pid is None)
        with pytest.raises(Retryable, match="lost"):
            _ = await here.start("b")
        assert process.is_alive()
        here.clock.ahead_seconds = AGAIN_SECONDS + 1
        assert (await here.start("c")).is_alive()


async def test_one_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kici.adapters.zygote_client.ANSWER_SECONDS", 0.3)
    async with prepared(tmp_path) as here:
        _ = await here.zygote.open()
        assert here.zygote.pid is not None
        os.kill(here.zygote.pid, signal.SIGSTOP)
        with pytest.raises(Retryable, match="does not answer"):
            _ = await here.start()
        assert here.zygote.pid is None
        assert marked(tmp_path) == {}


async def test_a_child_whose_coordinator_is_lost_before_it_is_told_to_go_never_becomes_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second one, started plainly, would share its id and its token."""
    async with prepared(tmp_path) as here:
        channel = await here.zygote.open()
        forked: list[int] = []

        def lose(message: dict[str, object], descriptors: list[int]) -> None:
            forked.append(int(str(message["pid"])))
            for descriptor in descriptors:
                os.close(descriptor)
            channel.close()

        monkeypatch.setattr(channel, "_take", lose)
        with pytest.raises(Retryable, match="it is gone"):
            _ = await here.start(SECRET=TOKEN)
        await until(lambda: marked(tmp_path) == {})
        assert forked
        assert (tmp_path / "a.log").read_text() == ""


async def test_a_program_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    async with prepared(tmp_path, "raise SystemExit('not here')") as here:
        with pytest.raises(Retryable, match="ended while it started"):
            _ = await here.start()


async def test_a_called_off_fork_leaves_nothing(tmp_path: Path) -> None:
    async with prepared(tmp_path) as here:
        _ = await here.zygote.open()
        for number in range(8):
            task = asyncio.create_task(here.start(str(number)))
            for _ in range(number):
                await asyncio.sleep(0)
            if task.cancel():
                _ = await asyncio.wait({task})
                assert task.cancelled()
                assert marked(tmp_path) == {}
            else:
                os.kill(task.result().id.pid, signal.SIGKILL)
                _ = await task.result().wait()


async def test_a_burst_of_fifty_forks(tmp_path: Path) -> None:
    async with prepared(tmp_path) as here:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(here.start(str(number))) for number in range(50)]
        assert len({task.result().id.pid for task in tasks}) == 50
        await until(lambda: len(set(marked(tmp_path).values())) == 50)


async def test_the_backend_falls_back_to_a_plain_start(tmp_path: Path) -> None:
    async with local(tmp_path, target=REAL_AGENT) as here:
        _ = await here.spawn(1, label="own")
        _lose(here.zygote)
        await until(lambda: here.zygote.pid is None)
        second = await here.spawn(2, label="own")
        await until(lambda: second in marked(tmp_path).values())
        commands = [_command(pid) for pid, name in marked(tmp_path).items() if name == second]
        assert "kici.apps.agent" in commands[0]
        await here.backend.shutdown_all()
        assert marked(tmp_path) == {}


async def test_ten_real_agents_go_when_asked(tmp_path: Path) -> None:
    """Idle agents without a coordinator."""
    async with _ten(tmp_path) as here:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await here.backend.shutdown_all()
        assert loop.time() - started < 4.0
        assert marked(tmp_path) == {}
        assert not here.heard.exits


async def test_ten_real_agents_are_small(tmp_path: Path) -> None:
    """They share what they did not change."""
    async with _ten(tmp_path) as here:
        assert here.zygote.pid is not None
        try:
            sizes = [_pss_kb(int(one.ref)) for one in here.backend.computes()]
            assert max(sizes) <= PSS_KB_MAX, sizes
        except PermissionError:
            pytest.skip("agents show their memory to root only")
        finally:
            await here.backend.shutdown_all()


@asynccontextmanager
async def _ten(folder: Path) -> AsyncIterator[Local]:
    async with local(folder, target=REAL_AGENT) as here:
        ids = [await here.spawn(number, label="own") for number in range(10)]
        await until(lambda: all(here.backend.tail(agent_id, 1) for agent_id in ids))
        yield here


def _lose(zygote: Zygote) -> None:
    assert zygote.pid is not None
    os.kill(zygote.pid, signal.SIGKILL)


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")


def _pss_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _memory_has(pid: int, text: str) -> bool:
    """Whether a text is anywhere in the writable memory of a process."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, rights = line.split()[:2]
            if rights.startswith("rw"):
                start, end = (int(word, 16) for word in area.split("-"))
                memory.seek(start)
                try:
                    if text.encode() in memory.read(end - start):
                        return True
                except OSError:
                    continue
    return False
