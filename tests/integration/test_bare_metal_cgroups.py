"""Limits and ends by control groups, for real: needs a tree that we may write to."""

import os
import re
import signal
from pathlib import Path

import pytest
from tests.integration.bare_metal_host import Local, a_script, local, marked

from kici.adapters.cgroups import LinuxCgroups, own_folders
from kici.decide.launch import CgroupPlan, LimitsBy
from kici.domain.resources import Amount
from kici.domain.spawn import ScaleDownReason
from kici.testing.contracts.backend import an_id, until

# The groups of this host are looked at as a whole: one test at a time makes any with the ids of tests.
pytestmark = [pytest.mark.engine("cgroups"), pytest.mark.xdist_group("cgroups")]
MIB = 1024**2
LIMITS = Amount(cpus=1.5, memory_bytes=64 * MIB)


@pytest.mark.spec("scaler 30.10.1")
@pytest.mark.parametrize("label", ["linux", "own"])
async def test_limits_are_set_before_the_agent_begins(tmp_path: Path, label: str) -> None:
    agent = a_script(tmp_path / "agent", "echo up; exec sleep 1000")
    async with local(tmp_path, agent=agent, cgroups=True) as here:
        agent_id = await here.spawn(label=label, limits=LIMITS)
        await until(lambda: here.backend.tail(agent_id, 1))
        (pid,) = marked(tmp_path)
        inside = _groups_of(pid)
        assert any(folder.name == agent_id for folder in inside)
        found = {path.name: path.read_text().strip() for folder in inside for path in _settings(folder)}
        assert found.get("cpu.cfs_quota_us", found.get("cpu.max", "").split(" ")[0]) == "150000"
        assert found.get("memory.limit_in_bytes", found.get("memory.max")) == str(64 * MIB)
        assert found["pids.max"] == "4096"
        await here.backend.destroy(agent_id, ScaleDownReason.IDLE)
        assert not [folder for folder in inside if folder.name == agent_id and folder.exists()]
    _nothing_left()


async def test_memory_beyond_the_limit_ends_it(tmp_path: Path) -> None:
    agent = a_script(tmp_path / "agent", "exec python3 -c 'print(len(bytes(1) * (1 << 29)))'")
    async with local(tmp_path, agent=agent, cgroups=True) as here:
        agent_id = await here.spawn(limits=LIMITS)
        await until(lambda: here.heard.failures(agent_id))
        assert "exited with signal 9 before it registered" in here.heard.failures(agent_id)[0].detail
    _nothing_left()


async def test_nothing_escapes_its_group(tmp_path: Path) -> None:
    """Another session, another parent, no mark: only the group still knows whose it is."""
    pid_file = tmp_path / "pid"
    daemon = a_script(
        tmp_path / "daemon",
        f"trap '' TERM; echo $$ >{pid_file}.new; mv {pid_file}.new {pid_file}\nwhile :; do /bin/sleep 1; done",
    )
    agent = a_script(tmp_path / "agent", f"(env -i setsid {daemon} &); exec sleep 1000")
    async with local(tmp_path, agent=agent, cgroups=True) as here:
        agent_id = await here.spawn()
        await until(pid_file.exists)
        pid = int(pid_file.read_text())
        assert pid not in marked(tmp_path)
        await here.backend.destroy(agent_id, ScaleDownReason.IDLE)
        await until(lambda: not _runs(pid))
    _nothing_left()


async def test_an_agent_that_ends_by_itself_takes_its_group_along(tmp_path: Path) -> None:
    agent = a_script(tmp_path / "agent", "(env -i setsid sleep 1000 &); sleep 0.2; exit 0")
    async with local(tmp_path, agent=agent, cgroups=True) as here:
        agent_id = await here.spawn()
        here.backend.mark_registered(agent_id)
        await until(lambda: here.heard.exits)
    _nothing_left()


async def test_groups_are_found_again(tmp_path: Path) -> None:
    agent = a_script(tmp_path / "agent", "(env -i setsid sleep 1000 &); exec sleep 1000")
    async with local(tmp_path, agent=agent, cgroups=True) as here:
        await _two(here)
        await here.backend.release_all()
    async with local(tmp_path, agent=agent, cgroups=True) as here:
        assert len(await here.backend.recover(frozenset({an_id(1)}))) == 1
        os.kill(int(here.backend.computes()[0].ref), signal.SIGKILL)
        await until(lambda: here.heard.exits)
        assert await here.backend.cleanup_orphans(frozenset()) == 1
    _nothing_left()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_killing_works_without_the_kernels_own_way(tmp_path: Path, version: str) -> None:
    """Each hierarchy by itself: `cgroup.kill` in the unified one, the freezer and signals in the others."""
    own = own_folders(Path("/sys/fs/cgroup"))
    key = "" if version == "v2" else "freezer"
    if key not in own:
        pytest.skip(f"no {version} hierarchy here")
    groups = LinuxCgroups(own={key: own[key]})
    assert groups.support.tracking
    assert groups.support.limits is LimitsBy.NONE or version == "v2"
    group = groups.create("kici-test", CgroupPlan())
    pid = os.fork()
    if pid == 0:
        group.entries[0].write_text(str(os.getpid()))
        for _ in range(50):
            if os.fork() == 0:
                signal.pause()
            signal.sigtimedwait([], 0.01)
        signal.pause()
    while not group.entries[0].read_text().split():
        os.sched_yield()
    while not group.kill():
        os.sched_yield()
    os.waitpid(pid, 0)
    while not group.remove():
        os.sched_yield()
    _nothing_left()


async def _two(here: Local) -> None:
    for number in (1, 2):
        _ = await here.spawn(number)


def _groups_of(pid: int) -> list[Path]:
    folders = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for base in (Path("/sys/fs/cgroup") / controllers, Path("/sys/fs/cgroup/unified")):
            folder = base / path.lstrip("/")
            if folder.is_dir() and path != "/":
                folders.append(folder)
    return folders


def _settings(folder: Path) -> list[Path]:
    names = ("cpu.cfs_quota_us", "cpu.max", "memory.limit_in_bytes", "memory.max", "pids.max")
    return [folder / name for name in names if (folder / name).exists() and re.match("scaler-", folder.name)]


def _runs(pid: int) -> bool:
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def _nothing_left() -> None:
    for folder in own_folders(Path("/sys/fs/cgroup")).values():
        left = folder / "kici"
        names = [path.name for path in left.iterdir() if path.is_dir()] if left.exists() else []
        assert not [name for name in names if name.startswith(("scaler-bare-metal-0000", "kici-test"))], names
