"""Ledger files as whoever is killed, or gets in the way, leaves them."""

import asyncio
import ctypes
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kici.adapters import life_locks
from kici.adapters.boot import this_boot
from kici.adapters.ledger_files import Busy, LedgerFiles, choose_folder, foresee_folder, usual_places
from kici.adapters.machine_ledger import FileLedger
from kici.decide.admit import Cap
from kici.decide.ledger import BOOT_TIME, Kind, Ledger, Outcome, Row, add, declare, reserve
from kici.domain.errors import Misconfigured, Retryable
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.resources import Amount
from kici.domain.spawn import Reservation
from kici.testing.builders import a_shape

CAP = Cap(cpus=5.0)


def ledger_of(folder: Path, name: str = "one", *, lock_seconds: float = 5.0) -> FileLedger:
    return FileLedger(instance_id=InstanceId(name), boot="boot-1", folder=lambda: folder, lock_seconds=lock_seconds)


def files_of(folder: Path, name: str = "one") -> LedgerFiles:
    return LedgerFiles(folder, instance_id=InstanceId(name), boot="boot-1", lock_seconds=5.0)


def held(agent: str, cpus: float = 1.0) -> Reservation:
    return Reservation(
        agent_id=AgentId(agent),
        scaler=ScalerName("local"),
        shape=a_shape(cpus),
        machine_pool="ci",
        owner_instance_id=InstanceId("one"),
        reserved_at=Instant(7),
    )


def a_row(agent: str, instance: str = "one", *, kind: Kind = Kind.PROCESS) -> Row:
    return Row(
        instance_id=InstanceId(instance),
        agent_id=AgentId(agent),
        requests=Amount(cpus=1.0),
        reserved_at=Instant(7),
        boot="boot-1",
        kind=kind,
    )


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ci.json").read_text())
    return found


async def agents(ledger: FileLedger) -> list[str]:
    return sorted(row.agent_id for row in (await ledger.refresh("ci", CAP)).rows)


# ---------------------------------------------------------------------- the folder


def test_the_usual_places_follow_the_environment() -> None:
    home = Path("/home/u")
    assert usual_places({}, home) == (
        Path("/var/lib/kici/scaler-ledger"),
        Path("/home/u/.local/state/kici/scaler-ledger"),
        Path("/tmp/kici-scaler-ledger"),
    )
    assert usual_places({"XDG_STATE_HOME": "/state", "TMPDIR": "/scratch"}, home)[1:] == (
        Path("/state/kici/scaler-ledger"),
        Path("/scratch/kici-scaler-ledger"),
    )


@pytest.mark.spec("scaler 38.7.8")
def test_the_first_place_that_can_be_written_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    places = [tmp_path / "file" / "ledger", tmp_path / "second" / "ledger", tmp_path / "third"]
    assert foresee_folder(None, places) == places[1]
    assert not places[1].exists()
    assert choose_folder(None, places) == places[1]
    assert places[1].is_dir()
    assert list(places[1].iterdir()) == []
    assert not places[2].exists()


def test_no_place_at_all_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert foresee_folder(None, [tmp_path / "file" / "ledger"]) is None
    assert foresee_folder(tmp_path / "file" / "ledger", [tmp_path / "fine"]) is None
    with pytest.raises(Misconfigured, match="KICI_MACHINE_LEDGER_DIR"):
        choose_folder(None, [tmp_path / "file" / "ledger"])
    with pytest.raises(Misconfigured, match="KICI_MACHINE_LEDGER_DIR"):
        choose_folder(tmp_path / "file" / "ledger", [tmp_path / "fine"])


def test_a_named_folder_is_used_and_no_other(tmp_path: Path) -> None:
    assert choose_folder(tmp_path / "a" / "b", [tmp_path / "c"]) == tmp_path / "a" / "b"
    assert not (tmp_path / "c").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_strangers_folder_in_a_place_for_everybody_is_not_trusted(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    planted = shared / "kici-scaler-ledger"
    planted.mkdir()
    os.chown(planted, 12345, 12345)
    places = [planted, tmp_path / "own"]
    assert foresee_folder(None, places) == choose_folder(None, places) == tmp_path / "own"


def test_several_users_can_share_a_folder_that_lets_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    before = os.umask(0o077)
    try:
        ledger = ledger_of(tmp_path)
        asyncio.run(ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS))
        ledger.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "agents").stat().st_mode) == 0o2770
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o644}


def test_nothing_is_touched_before_a_pool_is_used(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(tmp_path / "ledger")
        await ledger.leave(frozenset())
        assert ledger.descriptor(AgentId("a")) is None

    asyncio.run(main())
    assert not (tmp_path / "ledger").exists()


# ---------------------------------------------------------------------- the file


async def test_the_file_says_who_holds_what(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    await ledger.try_reserve("ci", Cap(cpus=5.0, memory_bytes=9), held("a", 1.5), Kind.PROCESS)
    ledger.close()
    assert written(tmp_path) == {
        "version": 2,
        "caps": {"one": {"maxCpu": 5.0, "maxMemoryBytes": 9}},
        "reservations": [
            {
                "instanceId": "one",
                "agentId": "a",
                "cpus": 1.5,
                "memBytes": 0,
                "reservedAt": 7,
                "bootId": "boot-1",
                "kind": "process",
            }
        ],
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 1, "cap": {}, "reservations": []}',
        '{"version": 3, "caps": {}, "reservations": []}',
        '{"version": 2, "caps": {"../../etc": {}}, "reservations": []}',
        '{"version": 2, "caps": {}, "reservations": [{"instanceId": "a"}]}',
    ],
)
async def test_what_cannot_be_understood_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "ci.json").write_text(text)
    ledger = ledger_of(tmp_path)
    with pytest.raises(Misconfigured, match=r"ci\.json cannot be used"):
        await ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS)
    assert (tmp_path / "ci.json").read_text() == text
    assert ledger.descriptor(AgentId("a")) is None
    assert (await ledger.refresh("other", CAP)).rows == (), "another pool is not concerned"
    ledger.close()


@pytest.mark.parametrize("name", ["ci.json", "ci.flock"])
async def test_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / name).symlink_to(tmp_path / "victim")
    ledger = ledger_of(tmp_path)
    with pytest.raises(Retryable, match="cannot be used"):
        await ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS)
    ledger.close()
    assert (tmp_path / "victim").read_text() == "mine"


async def test_a_planted_temporary_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".ci.json.new").symlink_to(tmp_path / "victim")
    ledger = ledger_of(tmp_path)
    await ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS)
    ledger.close()
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "ci.json").is_symlink()


async def test_a_file_that_would_say_the_same_is_not_written(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    await ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS)
    before = (tmp_path / "ci.json").stat()
    await ledger.refresh("ci", CAP)
    assert (tmp_path / "ci.json").stat().st_ino == before.st_ino
    ledger.close()


@pytest.mark.spec("scaler 38.7.5")
async def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ledger_of(tmp_path)
    await ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Retryable, match="No space left"):
            await ledger.try_reserve("ci", CAP, held("b"), Kind.PROCESS)
    assert [row["agentId"] for row in written(tmp_path)["reservations"]] == ["a"]
    assert ledger.descriptor(AgentId("b")) is None
    assert await agents(ledger) == ["a"]
    ledger.close()


async def test_a_release_that_could_not_be_written_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, other = ledger_of(tmp_path), ledger_of(tmp_path, "other")
    for agent, kind in (("process", Kind.PROCESS), ("container", Kind.CONTAINER)):
        await ledger.try_reserve("ci", CAP, held(agent), kind)

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        for agent in ("process", "container"):
            with pytest.raises(Retryable):
                await ledger.release("ci", AgentId(agent))
    assert await agents(other) == ["container"], "nobody holds the process any more"
    assert await agents(ledger) == []
    ledger.close()
    other.close()


# ---------------------------------------------------------------------- others, and what kills them


@pytest.mark.spec("scaler 38.7.4", "scaler 50.9")
async def test_a_pool_that_somebody_keeps_locked_is_busy_until_that_one_is_gone(tmp_path: Path) -> None:
    """In place of a stale lock that is broken: the kernel takes it from whoever ends."""
    ledger = ledger_of(tmp_path, lock_seconds=0.1)
    await ledger.refresh("ci", CAP)
    program = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "ci.flock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    old = time.time() - 3600
    os.utime(tmp_path / "ci.flock", (old, old))
    with pytest.raises(Busy, match=r"ci\.flock for 0\.1 s"):
        await ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS)
    assert ledger.descriptor(AgentId("a")) is None
    holder.kill()
    holder.communicate()
    assert (await ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS)).refused is None
    ledger.close()


async def test_those_in_line_behind_one_that_waited_in_vain_do_not_wait_one_after_the_other(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, lock_seconds=0.2)
    await ledger.refresh("ci", CAP)
    with (tmp_path / "ci.flock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_fails(ledger, f"agent-{number}")) for number in range(50)]
        assert all(task.result() for task in tasks)
        assert time.monotonic() - began < 5.0
    assert (await ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS)).refused is None
    ledger.close()


async def _fails(ledger: FileLedger, agent: str) -> bool:
    try:
        await ledger.try_reserve("ci", CAP, held(agent), Kind.PROCESS)
    except Busy:
        return True
    return False


async def test_a_call_that_is_called_off_is_done_whole_and_can_be_undone(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    await ledger.refresh("ci", CAP)
    with (tmp_path / "ci.flock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        task = asyncio.ensure_future(ledger.try_reserve("ci", CAP, held("a"), Kind.PROCESS))
        await asyncio.sleep(0.05)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [row["agentId"] for row in written(tmp_path)["reservations"]] == ["a"]
    await ledger.release("ci", AgentId("a"))
    assert await agents(ledger) == []
    ledger.close()


def test_two_processes_cannot_be_one_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = files_of(tmp_path)
    with pytest.raises(Misconfigured, match="was the data directory copied"):
        LedgerFiles(tmp_path, instance_id=InstanceId("one"), boot="boot-1", lock_seconds=0.05)
    first.close()
    files_of(tmp_path).close()


children: set[int] = set()


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    for child in children.copy():
        os.kill(child, signal.SIGKILL)
        code_of(child)


def forked(work: Callable[[], int]) -> int:
    """Run it in a child that ends with its answer as the exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which the child does not need
        pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code & 0xFF)
    children.add(pid)
    return pid


def code_of(pid: int) -> int:
    children.discard(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def take(files: LedgerFiles, name: str, agent: str) -> bool:
    def step(now: Ledger) -> Outcome:
        return reserve(now, a_row(agent, name), cap=CAP, pool="ci", scaler=ScalerName("local"))

    assert files.hold(AgentId(agent))
    return files.change("ci", step).refused is None


@pytest.mark.spec("scaler 38.7.9")
def test_of_twenty_processes_at_one_moment_exactly_as_many_are_admitted_as_fit(tmp_path: Path) -> None:
    start_reader, start_writer = os.pipe()
    end_reader, end_writer = os.pipe()

    def one(number: int) -> bool:
        os.close(start_writer)
        os.close(end_writer)
        files = files_of(tmp_path, f"instance-{number}")
        os.read(start_reader, 1)  # until the other side is closed
        admitted = take(files, f"instance-{number}", f"agent-{number}")
        os.write(result_writer, b"+" if admitted else b"-")
        os.read(end_reader, 1)
        return admitted

    result_reader, result_writer = os.pipe()
    children = [forked(partial(one, number)) for number in range(20)]
    time.sleep(0.2)
    os.close(start_writer)
    answers = b"".join(os.read(result_reader, 1) for _ in children)
    assert sorted(answers) == sorted(b"+" * 5 + b"-" * 15)
    assert len(written(tmp_path)["reservations"]) == 5
    os.close(end_writer)
    assert sum(map(code_of, children)) == 5
    files = files_of(tmp_path)
    assert files.change("ci", lambda now: Outcome(ledger=now)).ledger.rows == (), "all of them are gone"
    files.close()
    for descriptor in (start_reader, end_reader, result_reader, result_writer):
        os.close(descriptor)


@pytest.mark.spec("scaler 38.7.5")
def test_killed_at_any_moment_nobody_leaves_a_broken_file_or_a_row_of_the_dead(tmp_path: Path) -> None:
    def hammer(name: str) -> int:
        files, number = files_of(tmp_path, name), 0
        while True:
            number += 1
            agent = f"{name}-{number}"
            if take(files, name, agent) and number % 3:
                files.change("ci", lambda now: Outcome(ledger=Ledger(caps=now.caps, rows=now.rows[:-1])))
            files.drop(AgentId(agent))

    for number in range(30):
        child = forked(partial(hammer, f"instance-{number}"))
        time.sleep(0.01 + 0.003 * number)
        os.kill(child, signal.SIGKILL)
        assert code_of(child) == -signal.SIGKILL
        if (tmp_path / "ci.json").exists():
            json.loads((tmp_path / "ci.json").read_text())
    files = files_of(tmp_path)
    assert files.change("ci", lambda now: Outcome(ledger=now)).ledger == Ledger(caps={})
    files.sweep()
    assert [path.name for path in tmp_path.rglob("*.alive")] == ["one.alive"]
    files.close()


NEW_PID_NAMESPACE = 0x20000000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a PID namespace")
def test_who_lives_is_known_across_pid_namespaces(tmp_path: Path) -> None:
    """A coordinator in a container: its pids mean nothing here, and ours nothing there."""
    result_reader, result_writer = os.pipe()

    def enter() -> int:
        assert ctypes.CDLL(None).unshare(NEW_PID_NAMESPACE) == 0
        os.close(result_reader)
        child = forked(inside)
        os.close(result_writer)
        return code_of(child)

    def inside() -> int:
        files = files_of(tmp_path, "inside")
        assert os.getpid() == 1
        assert take(files, "inside", "agent-inside")
        descriptor = files.descriptor(AgentId("agent-inside"))
        assert descriptor is not None
        agent = subprocess.Popen(["sleep", "1000"], pass_fds=[descriptor])
        files.close()
        seen = files_of(tmp_path, "inside-too").change("ci", lambda now: Outcome(ledger=now)).ledger
        os.write(result_writer, b"".join(f"{row.agent_id}\n".encode() for row in seen.rows))
        os.close(result_writer)
        return agent.wait()

    outside = files_of(tmp_path, "outside")
    assert take(outside, "outside", "agent-outside")
    child = forked(enter)
    os.close(result_writer)
    with os.fdopen(result_reader) as answers:
        assert answers.read().split() == ["agent-outside", "agent-inside"]
    assert rows(outside) == ["agent-inside", "agent-outside"]
    os.kill(int(Path(f"/proc/{child}/task/{child}/children").read_text()), signal.SIGKILL)  # and all in its namespace
    assert code_of(child) != 0
    assert rows(outside) == ["agent-outside"]
    outside.close()


def rows(files: LedgerFiles) -> list[str]:
    return sorted(row.agent_id for row in files.change("ci", lambda now: Outcome(ledger=now)).ledger.rows)


# ---------------------------------------------------------------------- locks and boots


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "locks").mkdir()
    return tmp_path / "locks"


def test_a_file_is_held_as_long_as_anybody_has_it_open(folder: Path) -> None:
    assert not life_locks.is_held(folder / "a")
    descriptor = life_locks.hold(folder / "a", seconds=0)
    assert descriptor is not None
    assert life_locks.is_held(folder / "a")
    assert life_locks.hold(folder / "a", seconds=0.01) is None
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[descriptor])
    os.close(descriptor)
    assert life_locks.is_held(folder / "a")
    child.kill()
    child.wait()
    assert not life_locks.is_held(folder / "a")


def test_who_looks_does_not_see_others_that_look(folder: Path) -> None:
    (folder / "a").touch()
    with (folder / "a").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not life_locks.is_held(folder / "a")


def test_programs_that_are_started_meanwhile_do_not_hold_it(folder: Path) -> None:
    descriptor = life_locks.hold(folder / "a", seconds=0)
    assert descriptor is not None
    child = subprocess.Popen(["sleep", "1000"], close_fds=False)
    time.sleep(0.05)
    os.close(descriptor)
    assert not life_locks.is_held(folder / "a")
    child.kill()
    child.wait()


def test_only_what_nobody_holds_is_removed(folder: Path) -> None:
    descriptor = life_locks.hold(folder / "held", seconds=0)
    assert descriptor is not None
    (folder / "free").touch()
    life_locks.remove_unheld(folder)
    assert [path.name for path in folder.iterdir()] == ["held"]
    os.close(descriptor)


def test_a_file_that_was_removed_before_it_was_held_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, removals = life_locks.lock, [1, 2]

    def swept(path: Path, *, seconds: float) -> int | None:
        descriptor = real(path, seconds=seconds)
        if removals:
            removals.pop()
            path.unlink()
        return descriptor

    monkeypatch.setattr(life_locks, "lock", swept)
    descriptor = life_locks.hold(folder / "a", seconds=0)
    assert descriptor is not None
    assert life_locks.is_held(folder / "a")
    os.close(descriptor)


@pytest.mark.spec("scaler 50.16")
def test_a_host_without_a_boot_id_is_known_by_the_moment_of_its_start(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  1 2 3\nbtime 1700000000\nprocesses 4\n")
    assert this_boot(tmp_path) == f"{BOOT_TIME}1700000000"
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("0f5a\n")
    assert this_boot(tmp_path) == "0f5a"


def test_a_row_with_a_cap_is_written_as_declared(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    files.change("ci", lambda now: Outcome(ledger=add(declare(now, InstanceId("one"), CAP), a_row("a", kind=Kind.VM))))
    again = files.change("ci", lambda now: Outcome(ledger=now)).ledger
    assert again == Ledger(caps={InstanceId("one"): CAP}, rows=(a_row("a", kind=Kind.VM),))
    files.close()
