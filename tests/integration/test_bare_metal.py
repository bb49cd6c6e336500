"""Agents as real processes: what resists is ended, what is left behind is found, what the host refuses is told."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import uvloop
from tests.integration.bare_metal_host import TOKEN, a_script, local, marked

from kici.domain.errors import DeterministicRefusal
from kici.domain.ids import AgentId
from kici.domain.spawn import ScaleDownReason
from kici.ports.backend import SpawnEventType
from kici.testing.contracts.backend import an_id, until

ROOT = Path(__file__).parents[2]


@pytest.mark.spec("scaler 30.10.7")
async def test_what_ignores_term_is_killed_after_five_seconds_with_all_its_children(tmp_path: Path) -> None:
    """The agent, a child, a child in a session of its own, and a grandchild whose parent has gone."""
    stubborn = a_script(tmp_path / "stubborn", "trap '' TERM; sleep 1001 & wait; sleep 1002")
    agent = a_script(
        tmp_path / "agent",
        f"trap '' TERM; {stubborn} & setsid {stubborn} & (setsid {stubborn} &); echo up; while :; do sleep 1; done",
    )
    async with local(tmp_path, agent=agent) as here:
        agent_id = await here.spawn()
        await until(lambda: len(marked(tmp_path)) == 8)
        started = time.monotonic()
        await here.backend.destroy(agent_id, ScaleDownReason.IDLE)
        took = time.monotonic() - started
        assert 5.0 <= took < 8.0
        assert marked(tmp_path) == {}
        assert list((tmp_path / "data" / "agents").iterdir()) == []
        assert here.backend.tail(agent_id, 5) == ["up"]


async def test_a_willing_agent_is_waited_for_no_longer_than_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kici.agents")
    agent = a_script(tmp_path / "agent", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    async with local(tmp_path, agent=agent) as here:
        agent_id = await here.spawn()
        await until(lambda: here.backend.tail(agent_id, 1) == ["up"])
        started = time.monotonic()
        await here.backend.destroy(agent_id, ScaleDownReason.IDLE)
        assert time.monotonic() - started < 3.0
        assert here.backend.tail(agent_id, 1) == ["bye"]
        said = [record.__dict__["kici"] for record in caplog.records if record.getMessage() == "agent.output"]
        assert {each["agent_id"] for each in said} == {agent_id}
        assert (said[0]["text"], said[-1]["text"]) == ("up", "bye")  # a shell may say more in between


@pytest.mark.spec("scaler 30.10.5")
async def test_a_script_that_dies_tells_its_last_words(tmp_path: Path) -> None:
    agent = a_script(tmp_path / "agent", "echo cannot reach anything >&2; sleep 1000 & exit 4")
    async with local(tmp_path, agent=agent) as here:
        agent_id = await here.spawn()
        await until(lambda: bool(here.heard.failures(agent_id)))
        (event,) = here.heard.failures(agent_id)
        assert event.detail.endswith(
            "exited with code 4 before it registered; the end of its output:\ncannot reach anything"
        )
        assert marked(tmp_path) == {}, "its child is ended with it"


def a_directory(path: Path) -> str:
    path.mkdir()
    return str(path)


@pytest.mark.spec("scaler 30.10.4")
@pytest.mark.parametrize("kind", ["missing", "directory", "not executable", "not a program", "no interpreter", "E2BIG"])
@pytest.mark.parametrize(
    "cgroups", [False, pytest.param(True, marks=[pytest.mark.engine("cgroups"), pytest.mark.xdist_group("cgroups")])]
)
async def test_what_the_host_refuses_is_refused_for_good(tmp_path: Path, kind: str, cgroups: bool) -> None:
    path = tmp_path / "agent"
    environment = {"PATH": "/usr/bin:/bin"}
    match kind:
        case "directory":
            path.mkdir()
        case "not executable":
            path.write_text("#!/bin/sh\n")
        case "not a program":
            path.write_text("just words")
            path.chmod(0o755)
        case "no interpreter":
            path.write_text("#!/no/such/interpreter\n")
            path.chmod(0o755)
        case "E2BIG":
            a_script(path, "true")
            environment["KICI_AGENT_ENV_BIG"] = "x" * 300_000
        case _:
            assert kind == "missing"
    async with local(tmp_path, agent=path, environment=environment, cgroups=cgroups) as here:
        with pytest.raises(DeterministicRefusal, match="refuses to start"):
            _ = await here.spawn()
        assert [one.type for one in here.heard.events] == [SpawnEventType.PROVISIONING, SpawnEventType.FAILED]
        assert here.backend.active_count() == 0
        assert list((tmp_path / "data" / "agents").iterdir()) == []
        assert list((tmp_path / "data" / "work").iterdir()) == []


@pytest.mark.spec("T3.10")
@pytest.mark.spec("scaler 30.10.10")
async def test_an_agent_sees_its_own_token_and_nothing_of_ours(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "KICI_DATABASE_URL": "postgres://u:hunter2@h/d", "AWS_SECRET": "hunter2"}
    agent = a_script(tmp_path / "agent", "env; echo end; exec sleep 1000")
    async with local(tmp_path, agent=agent, environment=environment) as here:
        agent_id = await here.spawn()
        await until(lambda: here.backend.tail(agent_id, 1) == ["end"])
        seen = here.backend.tail(agent_id, 100)
        assert f"KICI_AGENT_TOKEN={TOKEN}" in seen
        assert not [line for line in seen if "hunter2" in line or "DATABASE" in line]
        for path in (tmp_path / "data" / "agents").iterdir():
            assert path.stat().st_mode & 0o077 == 0, f"{path} is open to others"
        assert TOKEN not in (tmp_path / "data" / "agents" / f"{agent_id}.json").read_text()
        await here.backend.shutdown_all()


@pytest.mark.spec("scaler 50.8", "D19")
@pytest.mark.parametrize("label", ["linux", "own"])
async def test_a_killed_coordinators_agents_live_and_are_found(tmp_path: Path, label: str) -> None:
    """Started plainly, and forked from a zygote, which ends when its coordinator does."""
    agent = a_script(tmp_path / "agent", "echo ready; while :; do echo tick; sleep 0.05; done")
    coordinator = _coordinator(tmp_path, agent, 2, label)
    assert coordinator.stdout is not None
    for number in range(2):
        assert coordinator.stdout.readline().strip() == an_id(number)
    await until(lambda: len(set(marked(tmp_path).values())) == 2)
    before = marked(tmp_path)
    _kill(coordinator)
    async with local(tmp_path) as here:
        found = await here.backend.recover(frozenset({an_id(0), an_id(1), an_id(2)}))
        assert {one.agent_id for one in found} == {an_id(0), an_id(1)}
        assert {before[int(one.ref)] for one in found} == {an_id(0), an_id(1)}
        await until(lambda: bool(here.backend.tail(an_id(0), 1)))
        os.kill(int(found[0].ref), signal.SIGKILL)
        await until(lambda: bool(here.heard.exits))
        ((agent_id, how),) = here.heard.exits
        assert agent_id == found[0].agent_id
        assert "unknown" in how, "how a process that is not our child ended nobody can say"
        await here.backend.shutdown_all()
        assert marked(tmp_path) == {}
    assert not _zygotes(tmp_path)


@pytest.mark.parametrize("label", ["linux", "own"])
@pytest.mark.parametrize("moment", range(4))
async def test_a_coordinator_killed_while_it_spawns_loses_none(tmp_path: Path, label: str, moment: int) -> None:
    """At whatever moment: what runs has a record or a mark, and so an end."""
    agent = a_script(tmp_path / "agent", "setsid sleep 1000 & exec sleep 1000")
    coordinator = _coordinator(tmp_path, agent, 100, label)
    assert coordinator.stdout is not None
    for _ in range(1 + moment * 5):
        coordinator.stdout.readline()
    _kill(coordinator)
    running = {AgentId(name) for name in (await _settled(tmp_path)).values()}
    async with local(tmp_path) as here:
        assert running
        owned = frozenset(sorted(running)[:1])
        assert len(await here.backend.recover(owned)) == 1
        assert await here.backend.cleanup_orphans(frozenset()) == len(running) - 1
        assert set(marked(tmp_path).values()) == owned
        await here.backend.shutdown_all()
        assert marked(tmp_path) == {}
        assert list((tmp_path / "data" / "agents").iterdir()) == []
        assert list((tmp_path / "data" / "work").iterdir()) == []


async def test_a_burst_of_fifty(tmp_path: Path) -> None:
    agent = a_script(tmp_path / "agent", "exec sleep 1000")
    async with local(tmp_path, agent=agent) as here:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(here.spawn(number))
        assert here.backend.active_count() == 50
        await here.backend.shutdown_all()
        assert marked(tmp_path) == {}


def test_on_the_loop_that_production_uses(tmp_path: Path) -> None:
    agent = a_script(tmp_path / "agent", "echo up; exec sleep 1000")

    async def main() -> None:
        async with local(tmp_path, agent=agent) as here:
            for number, label in ((1, "linux"), (2, "own")):
                agent_id = await here.spawn(number, label=label)
                await until(partial(here.backend.tail, agent_id, 1))
            assert here.zygote.pid is not None
            here.backend.mark_registered(an_id(1))
            (pid,) = [pid for pid, name in marked(tmp_path).items() if name == an_id(1)]
            os.kill(pid, signal.SIGTERM)
            await until(lambda: bool(here.heard.exits))
            assert "exited with signal 15" in here.heard.exits[0][1]
            await here.backend.shutdown_all()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert marked(tmp_path) == {}


def _coordinator(folder: Path, agent: Path, count: int, label: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.bare_metal_host", str(folder), str(agent), str(count), label],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def _kill(coordinator: subprocess.Popen[str]) -> None:
    coordinator.kill()
    coordinator.wait()
    assert coordinator.stdout is not None
    coordinator.stdout.close()


async def _settled(folder: Path) -> dict[int, str]:
    """What runs when nobody is left who would start more, and what was being started has come up."""
    await until(lambda: not _zygotes(folder))
    before, found = None, marked(folder)
    while found != before:
        await asyncio.sleep(0.5)
        before, found = found, marked(folder)
    return found


def _zygotes(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if b"kici.adapters.zygote" in command and str(folder).encode() in environment:
            found.append(process.name)
    return found
