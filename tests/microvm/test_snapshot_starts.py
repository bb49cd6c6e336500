"""Guests that go on from snapshots, by the real programs: each is its own machine, and no snapshot holds a secret."""

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.microvm.lab import Namespace, until
from tests.microvm.orchestra import PYTHON, Orchestra, firecracker_entry, kill, orchestra, qemu_entry, stand_in_entry
from tests.microvm.real_bench import real_microvms, vm_host
from tests.microvm.snapshot_bench import SnapshotBench

from kici.ports.backend import SpawnEventType
from kici.testing.contracts.backend import CASES, Case, Kind, an_id

pytestmark = [pytest.mark.xdist_group("microvms"), pytest.mark.timeout(300)]
SECRET = "only-for-the-guest"
ROOT = Path(__file__).parents[2]
DRIFT_SECONDS = 4
"""How far an emulated clock, measured by the guest on a busy machine, may be off."""


def with_snapshot(entry: dict[str, Any]) -> dict[str, Any]:
    sets = [{**each, "snapshotStart": True} for each in entry["labelSets"]]
    return {**entry, "labelSets": sets}


def snapshots(one: Orchestra) -> list[Path]:
    return list(one.base.glob("*/.snapshots/*/[0-9a-f]*/snapshot.state"))


def until_made(one: Orchestra) -> Path:
    until(lambda: len(snapshots(one)) == 1, seconds=120, what="a snapshot is made")
    (state,) = snapshots(one)
    until(lambda: not one.vm_processes(), what="what it was made of is gone")
    return state.parent


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


@pytest.mark.engine("firecracker")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_machines_from_snapshots_keep_the_contract(case: Case) -> None:
    async with real_microvms(SnapshotBench) as bench:
        await case(bench)


@pytest.mark.engine("firecracker")
async def test_a_snapshot_that_is_torn_is_thrown_away_and_the_machine_boots() -> None:
    async with real_microvms(SnapshotBench) as bench:
        assert isinstance(bench, SnapshotBench)
        for folder in bench.snapshots():
            state = folder / "snapshot.state"
            state.chmod(0o600)
            state.write_bytes(state.read_bytes()[:-100])
        await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
        (ready,) = [each for each in bench.heard.events if each.type is SpawnEventType.READY]
        assert "boots" in ready.detail
        assert "firecracker refuses PUT /snapshot/load with 400" in ready.detail
        assert an_id(1) in bench.vmm_pids()


class NextStart(SnapshotBench):
    """A coordinator that finds what the one before left."""

    async def start(self) -> None:
        await super(SnapshotBench, self).start()
        await self.backend.recover(frozenset())
        await self.backend.cleanup_orphans(frozenset())
        await self.are_made()


STEPS = [
    *(("record", "do"), ("files", "done"), ("interface", "done"), ("vmm", "do"), ("vmm", "done"), ("guest", "done")),
    *(("guest", "undo"), ("vmm", "undone"), ("files", "undo"), ("record", "undo")),
]
"""Of making what is to be copied, and, once the snapshot is written, of ending it."""


@pytest.mark.engine("firecracker")
@pytest.mark.parametrize(("step", "phase"), STEPS)
async def test_after_kill_9_in_the_midst_of_a_snapshot_it_is_made_and_nothing_is_left(step: str, phase: str) -> None:
    with vm_host() as (folder, network):
        walker = subprocess.run(
            (sys.executable, "-m", "tests.microvm.template_walker", str(folder), network.name, step, phase),
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(folder)},  # it cannot tidy up after itself
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert walker.returncode == -signal.SIGKILL, walker.stderr
        bench = NextStart(folder, network)
        await bench.start()
        try:
            await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
            ready = [each.detail for each in bench.heard.events if each.type is SpawnEventType.READY]
            assert "goes on from a snapshot" in ready[0]
        finally:
            await bench.close()
        assert not {kind: found for kind, found in bench.leftovers().items() if found}, bench.leftovers()


class OldFirecracker(SnapshotBench):
    """One that says it is of a version that names no interface anew."""

    def __init__(self, folder: Path, network: Namespace) -> None:
        super().__init__(folder, network)
        real = Path(self.jail.firecracker)
        old = folder / "bin/firecracker"
        old.parent.mkdir()
        old.write_bytes(real.read_bytes().replace(b"1.12.1", b"1.11.9"))
        old.chmod(0o755)
        self.jail = dataclasses.replace(self.jail, firecracker=str(old))

    async def start(self) -> None:
        await super(SnapshotBench, self).start()
        await self.backend.recover(frozenset())


@pytest.mark.engine("firecracker")
async def test_a_firecracker_that_cannot_name_the_interface_makes_none_and_says_so() -> None:
    async with real_microvms(OldFirecracker) as bench:
        told = ""
        for number in range(1, 4):
            await bench.backend.spawn(bench.order(an_id(number), Kind.LIVES), bench.heard.on_event)
            told = [each.detail for each in bench.heard.events if each.type is SpawnEventType.READY][-1]
            if "cannot give the interface" in told:
                break
            await asyncio.sleep(1)
            await bench.backend.sweep()
        assert re.search(r"since firecracker 1\.11\.9 cannot give the interface of a restored .*; 1\.12 can", told)


@pytest.mark.engine("firecracker")
@pytest.mark.spec("scaler 36.18.18")
def test_jobs_run_in_guests_of_firecracker_that_go_on_from_one_snapshot() -> None:
    with orchestra(with_snapshot(firecracker_entry(env={"SECRET": SECRET}))) as one:
        folder = until_made(one)
        for _ in range(2):
            done = one.coordinator.run("run", "-l", "tiny", "--", "metadata")
            assert (done.returncode, done.stdout) == (0, "status 200 {}\n"), done.stderr + one.log()[-3000:]
        until(
            lambda: len(set(re.findall(r"renewed with (\w+)", one.log()))) == 2,
            what="each goes on from the snapshot, with chance of its own",
        )
        held = contents(folder)
        assert SECRET.encode() not in held
        assert not re.search(rb"kat_\w{8}", held), "no credential of an agent"
        one.until_clean()
    assert not list(one.base.glob("*/.snapshots/*/*")), "nothing is left of it"


LOOK = """
import fcntl, json, os, socket, struct, time
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def asked(number):
    return fcntl.ioctl(probe, number, struct.pack("16s24x", b"eth0"))
started = os.path.exists("/marker")
open("/marker", "w").close()
print(json.dumps({
    "time": time.time(),
    "random": os.urandom(16).hex(),
    "uuid": open("/proc/sys/kernel/random/uuid").read().strip(),
    "address": socket.inet_ntoa(asked(0x8915)[20:24]),
    "mac": asked(0x8927)[18:24].hex(":").upper(),
    "host": socket.gethostname(),
    "command line": open("/proc/cmdline").read(),
    "routes": open("/proc/net/route").read(),
    "marker was there": started,
    "uptime": float(open("/proc/uptime").read().split()[0]),
}))
"""


@pytest.mark.engine("qemu")
@pytest.mark.parametrize("make", [qemu_entry, stand_in_entry], ids=["port", "metadata"])
def test_jobs_run_in_linux_guests_that_go_on_from_one_snapshot_and_share_nothing(
    make: Callable[[], dict[str, Any]],
) -> None:
    """Told by a serial port, or by the metadata service of what stands in for firecracker."""
    entry = with_snapshot(make())
    entry["labelSets"][0]["env"] = {"SECRET": SECRET}
    with orchestra(entry) as one:
        folder = until_made(one)
        made_at = (folder / "snapshot.state").stat().st_mtime
        time.sleep(2 * DRIFT_SECONDS)  # so that a clock that was not set shows
        found = []
        for _ in range(2):
            began = time.time()
            done = one.coordinator.run("run", "-l", "vm", "--", *PYTHON, LOOK, seconds=120)
            assert done.returncode == 0, done.stderr + one.log()[-3000:]
            found.append({**json.loads(done.stdout), "began": began, "ended": time.time()})
        for each in found:
            assert each["began"] - DRIFT_SECONDS < each["time"] < each["ended"] + DRIFT_SECONDS
            assert "ip=169.254.1.2:::255.255.0.0::" in each["command line"], "it went on, and did not boot"
            assert not each["marker was there"], "each has a drive of its own"
            assert f"eth0\t00000000\t{bytes([1, 0, 200, 10]).hex().upper()}" in each["routes"]
            last = int(each["address"].rsplit(".", 1)[1])
            assert each["mac"] == f"06:00:AC:C8:00:{last:02X}"
            assert each["host"].startswith("scaler-firecracker-")
        for name in ("random", "uuid", "host"):
            assert found[0][name] != found[1][name]
        assert found[0]["time"] - made_at > DRIFT_SECONDS
        held = contents(folder)
        assert SECRET.encode() not in held
        assert not re.search(rb"kat_\w{8}", held), "no credential of an agent"
        assert found[0]["host"].encode() not in held
        one.until_clean()
    assert not list(one.base.glob("*/.snapshots/*/*")), "nothing is left of it"


@pytest.mark.engine("qemu")
def test_a_coordinator_that_is_killed_while_a_snapshot_is_made_makes_it_again() -> None:
    with orchestra(with_snapshot(qemu_entry())) as one:
        until(lambda: bool(one.vm_processes()), what="what is to be copied boots")
        before = one.vm_processes()
        kill(one)
        assert one.vm_processes() == before
        one.coordinator.start()
        until(lambda: before.items().isdisjoint(one.vm_processes().items()), seconds=60, what="it is ended")
        until_made(one)
