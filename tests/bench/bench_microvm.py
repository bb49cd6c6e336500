"""MicroVMs: what our part of a spawn costs beside what the VMM and the guest take, and the drives and sweeps around it.

Real firecracker and jailer with the tiny guest, which registers with a small server of the bench; the same machine
"by hand" is the jailer and its requests in a straight line, with nothing prepared, watched or remembered.
"""

import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.bench.row import Row
from tests.microvm.real_bench import BRIDGE, UID, RealMicroVmBench, a_set, an_order, guest_folder, vm_host

from kici.adapters.block_templates import OverlayTemplates
from kici.adapters.firecracker_api import FirecrackerApi
from kici.adapters.host_commands import HostCommands
from kici.decide.microvm import Machine, guest
from kici.decide.microvm_boot import BootOrder, boot_args, metadata
from kici.decide.microvm_firecracker import boot_calls
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId
from kici.domain.resources import NOTHING
from kici.domain.spawn import ScaleDownReason
from kici.testing import engines
from kici.testing.contracts.backend import Kind, an_id

SINGLES = 12
BURSTS = (10, 50)
BURST_TURNS = 3
DEAD = 500


class Arrivals:
    """A server at the coordinator's place: a guest has arrived when it asks for its WebSocket."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self._writers: list[asyncio.StreamWriter] = []
        self._met_one = asyncio.Event()
        self.missing = 0
        """Guests that did not arrive, of those that were waited for last."""

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._met, "0.0.0.0", 4000)

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")[0]
        self.times.setdefault(address, time.perf_counter())
        self._writers.append(writer)  # open, so that the guest waits for an answer and lives on
        self._met_one.set()

    async def last_of(self, count: int) -> float:
        """When so many different guests had arrived, or as many as did: some give up on a machine that is too busy."""
        with suppress(TimeoutError):
            async with asyncio.timeout(40):
                while len(self.times) < count:
                    self._met_one.clear()
                    await self._met_one.wait()
        self.missing = count - len(self.times)
        return max(self.times.values())

    def forget(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        self.times.clear()


def rows() -> Iterator[Row]:
    reason = engines.absence("firecracker")
    if reason is not None:
        print(f"  firecracker: {reason}; its figures are left out", flush=True)
        return
    with vm_host() as (folder, network):
        bench = RealMicroVmBench(folder, network)
        bench.configure(max_agents=100, sets=(a_set(Kind.LIVES, env={}),), stop_seconds=0.0)
        yield from asyncio.run(_spawns(bench))
    yield from asyncio.run(_drives())
    with vm_host() as (folder, network):
        yield from asyncio.run(_sweep(RealMicroVmBench(folder, network)))


async def _spawns(bench: RealMicroVmBench) -> list[Row]:
    await bench.start()
    await bench.backend.recover(frozenset())
    arrivals = Arrivals()
    server = await arrivals.serve()
    try:
        await _one(bench, arrivals, 0)  # the drive template, and every module
        ours, hand = [], []
        for number in range(SINGLES):
            ours.append(await _one(bench, arrivals, number + 1))
            hand.append(await _by_hand(bench, arrivals, number))
        found = [
            Row("spawn to registered, ours, p50", _p50(ours), "ms", f"{SINGLES}, in turns"),
            Row("spawn to registered, by hand, p50", _p50(hand), "ms", f"{SINGLES}, in turns"),
            _ratio("spawn to registered, ours / by hand", ours, hand),
            *await _cpu(bench),
        ]
        for count in BURSTS:
            found += await _bursts(bench, arrivals, count)
        return found
    finally:
        arrivals.forget()
        server.close()
        await bench.close()


async def _one(bench: RealMicroVmBench, arrivals: Arrivals, number: int) -> float:
    arrivals.forget()
    start = time.perf_counter()
    await bench.backend.spawn(an_order(an_id(number), Kind.LIVES), lambda _: None)
    took = await arrivals.last_of(1) - start
    await bench.backend.destroy(an_id(number), ScaleDownReason.IDLE)
    return took * 1000


async def _cpu(bench: RealMicroVmBench) -> list[Row]:
    """Processor time without the VMM and its guest, which are nobody's children by the time they work."""
    own, programs = _used(resource.RUSAGE_SELF), _used(resource.RUSAGE_CHILDREN)
    for number in range(200, 200 + SINGLES):
        await bench.backend.spawn(an_order(an_id(number), Kind.LIVES), lambda _: None)
        await bench.backend.destroy(an_id(number), ScaleDownReason.IDLE)
    own, programs = _used(resource.RUSAGE_SELF) - own, _used(resource.RUSAGE_CHILDREN) - programs
    how = f"{SINGLES} spawns and their ends"
    return [
        Row("our own CPU for each spawn", own * 1000 / SINGLES, "ms", f"{how}, this process"),
        Row("CPU of ip, nft and the jailer for each spawn", programs * 1000 / SINGLES, "ms", f"{how}, children"),
    ]


def _used(whose: int) -> float:
    found = resource.getrusage(whose)
    return found.ru_utime + found.ru_stime


async def _bursts(bench: RealMicroVmBench, arrivals: Arrivals, count: int) -> list[Row]:
    mine, theirs, late, late_by_hand = [], [], 0, 0
    for _ in range(BURST_TURNS):
        mine.append(await _burst(bench, arrivals, count))
        late += arrivals.missing
        theirs.append(await _burst_by_hand(bench, arrivals, count))
        late_by_hand += arrivals.missing
    how = f"{BURST_TURNS} times, in turns"
    return [
        Row(f"{count} at once, all registered, ours, p50", _p50(mine), "ms", f"{how}; {late} gave up"),
        Row(f"{count} at once, all registered, by hand, p50", _p50(theirs), "ms", f"{how}; {late_by_hand} gave up"),
        _ratio(f"{count} at once, ours / by hand", mine, theirs),
    ]


async def _burst(bench: RealMicroVmBench, arrivals: Arrivals, count: int) -> float:
    arrivals.forget()
    ids = [an_id(1000 + number) for number in range(count)]
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for vm_id in ids:
            group.create_task(bench.backend.spawn(an_order(vm_id, Kind.LIVES), lambda _: None))
    last = await arrivals.last_of(count)
    for vm_id in ids:
        await bench.backend.destroy(vm_id, ScaleDownReason.IDLE)
    return (last - start) * 1000


async def _burst_by_hand(bench: RealMicroVmBench, arrivals: Arrivals, count: int) -> float:
    arrivals.forget()
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_start_by_hand(bench, number)) for number in range(count)]
    last = await arrivals.last_of(count)
    for number, task in enumerate(tasks):
        await _end_by_hand(bench, number, task.result())
    return (last - start) * 1000


async def _by_hand(bench: RealMicroVmBench, arrivals: Arrivals, number: int) -> float:
    arrivals.forget()
    start = time.perf_counter()
    pid = await _start_by_hand(bench, number)
    took = await arrivals.last_of(1) - start
    await _end_by_hand(bench, number, pid)
    return took * 1000


async def _start_by_hand(bench: RealMicroVmBench, number: int) -> int:
    """The same machine with the fewest steps that make it: files, an interface, the jailer, the requests."""
    vm_id = f"hand-{number:03}"
    root = bench.folder / "hand/firecracker" / vm_id / "root"
    root.mkdir(parents=True)
    shutil.copy(guest_folder() / "tiny-guest.elf", root / "kernel")
    shutil.copy(guest_folder() / "rootfs.ext4", root / "rootfs.ext4")
    with (root / "overlay.ext4").open("wb") as file:
        file.truncate(8 * 2**20)
    os.chown(root / "overlay.ext4", UID, UID)
    tap = f"hand{number:03}"
    commands = HostCommands()
    script = f"tuntap add dev {tap} mode tap user {UID}\nlink set {tap} master {BRIDGE.name}\nlink set {tap} up\n"
    await commands.run("ip", "-batch", "-", stdin=script)
    # The bridge's own rules drop what was not admitted; a machine by hand gets the shortest way past them.
    address = BRIDGE.cidr[100 + number]
    rule = f"add element inet {BRIDGE.fence.table} agents_input {{ {address} : accept }}\n"
    await commands.run("nft", "-f", "-", stdin=rule)
    (root / "vmm.log").touch()
    os.chown(root / "vmm.log", UID, UID)
    jail = bench.jail
    words = ("--uid", str(UID), "--gid", str(UID), "--chroot-base-dir", str(bench.folder / "hand"), "--new-pid-ns")
    with (bench.folder / f"{vm_id}.console").open("ab") as console:
        process = await asyncio.create_subprocess_exec(
            jail.jailer,
            *("--id", vm_id, "--exec-file", jail.firecracker, *words, "--", "--api-sock", "/api.sock"),
            *("--log-path", "/vmm.log", "--level", "Warning"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )
    await process.wait()
    one = guest(vm_id, address)
    order = BootOrder(agent_id=vm_id, labels=("vm",), url="ws://10.200.0.1:4000/ws", token="sesame")
    calls = boot_calls(
        Machine(vcpus=1, mem_mib=64, overlay_mib=8, limits=NOTHING),
        type(one)(vm_id=vm_id, address=address, tap=tap, mac=one.mac),
        args=boot_args(one, BRIDGE),
        has_initrd=False,
        metadata=metadata(order, BRIDGE),
    )
    async with await _answering(root / "api.sock") as api:
        for call in calls:
            await api.send(call)
    return int((root / "firecracker.pid").read_text())


async def _answering(socket: Path) -> FirecrackerApi:
    while True:
        try:
            return await FirecrackerApi.open(socket)
        except Retryable:
            await asyncio.sleep(0.002)


async def _end_by_hand(bench: RealMicroVmBench, number: int, pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, 9)
    commands = HostCommands()
    await commands.run("ip", "link", "del", f"hand{number:03}")
    rule = f"delete element inet {BRIDGE.fence.table} agents_input {{ {BRIDGE.cidr[100 + number]} }}\n"
    await commands.run("nft", "-f", "-", stdin=rule)
    shutil.rmtree(bench.folder / "hand/firecracker" / f"hand-{number:03}", ignore_errors=True)


async def _drives() -> list[Row]:
    found = []
    with vm_host() as (folder, _):
        templates = OverlayTemplates(folder, HostCommands())
        for gib in (1, 4, 10):
            await templates.ensure(gib * 1024)
            copies, made = [], []
            for number in range(5):
                start = time.perf_counter()
                await templates.create(folder / f"copy-{number}", gib * 1024)
                copies.append((time.perf_counter() - start) * 1000)
                (folder / f"copy-{number}").unlink()
                start = time.perf_counter()
                with (folder / "made").open("wb") as file:
                    file.truncate(gib * 2**30)
                subprocess.run(("mkfs.ext4", "-q", "-F", str(folder / "made")), check=True)
                made.append((time.perf_counter() - start) * 1000)
                (folder / "made").unlink()
            found += [
                Row(f"overlay of {gib} GiB, by template, best", min(copies), "ms", "5 times"),
                Row(f"overlay of {gib} GiB, by mkfs, best", min(made), "ms", "5 times, defaults"),
                _ratio(f"overlay of {gib} GiB, by template / by mkfs", copies, made),
            ]
    return found


async def _sweep(bench: RealMicroVmBench) -> list[Row]:
    """Machines that died with their host: records and directories as a killed coordinator leaves them."""
    await bench.start()
    await bench.backend.recover(frozenset())
    records = bench.settings.data_dir / "microvms"
    records.mkdir(parents=True, exist_ok=True)
    for number in range(DEAD):
        vm_id = AgentId(f"scaler-firecracker-{number:08x}")
        root = bench.settings.base / "firecracker" / vm_id / "root"
        root.mkdir(parents=True)
        (root / "firecracker.pid").write_text("4194300")
        (root / "overlay.ext4").write_bytes(b"x" * 4096)
        told: dict[str, object] = {
            "vm_id": vm_id,
            "scaler": "vms",
            "vmm": "firecracker",
            "folder": str(root.parent),
            "label_set": [],
        }
        told |= {"labels": [], "gate": [], "token_id": None, "spawned_at": 0}
        (records / f"{vm_id}.json").write_text(json.dumps(told))
    start = time.perf_counter()
    count = await bench.backend.sweep()
    took = time.perf_counter() - start
    await bench.close()
    assert count == DEAD, count
    return [Row(f"sweep of {DEAD} dead chroots", took, "s", "once")]


def _ratio(measure: str, ours: list[float], theirs: list[float]) -> Row:
    pairs = [one / other for one, other in zip(ours, theirs, strict=True)]
    how = f"median of {len(pairs)} turns; {min(pairs):.2f} to {max(pairs):.2f}"
    return Row(measure, _p50(pairs), "", how)


def _p50(values: list[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    for row in rows():
        print(f"  {row.measure:48} {row.value:10.2f} {row.unit:3} {row.method}", flush=True)
