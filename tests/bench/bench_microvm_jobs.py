"""A job in a Linux guest of QEMU, from its submission to its first output, beside the same machine booted by hand.

The coordinator is the real program on a host in a network namespace.  By hand is one script in a straight line: an
interface, a copied drive, QEMU with the same options, the same boot data; its time ends when the guest's agent asks
for its connection, so ours has to carry registration, dispatch and the job's own start on top.  Both are emulated and
take turns in one run, since a guest's boot is as slow as what else the machine has to do.
"""

import asyncio
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
from tests.bench.bench_coordinator import Bench
from tests.bench.row import Row
from tests.microvm.lab import until
from tests.microvm.linux_guest import linux_guest
from tests.microvm.orchestra import Orchestra, orchestra, qemu_entry

from kici.decide.microvm import Bridge, Machine, guest
from kici.decide.microvm_boot import BootOrder, boot_args, metadata
from kici.decide.microvm_qemu import BOOT_PIPE, QemuFiles, extra_boot_args, qemu_argv
from kici.domain.resources import NOTHING
from kici.testing import engines

TURNS = 5
PATIENCE_SECONDS = 120.0
PORT = 4001
BRIDGE = Bridge(
    name="hand0",
    cidr=IPv4Network("10.201.0.0/24"),
    gateway=IPv4Address("10.201.0.1"),
    netmask=IPv4Address("255.255.255.0"),
    table="hand",
)
_TICKS = os.sysconf("SC_CLK_TCK")


def rows() -> Iterator[Row]:
    reason = engines.absence("qemu")
    if reason is not None:
        print(f"  QEMU: {reason}; its figures are left out", flush=True)
        return
    entry = qemu_entry()
    cold = entry["labelSets"][0]
    entry["labelSets"] = [cold, {**cold, "labels": ["warm"], "snapshotStart": True}]
    with orchestra(entry) as one:
        yield from asyncio.run(_measure(one))


async def _measure(one: Orchestra) -> list[Row]:
    await asyncio.to_thread(lambda: until(lambda: _snapshots(one), seconds=PATIENCE_SECONDS, what="a snapshot is made"))
    _bridge_by_hand(one)
    token = (one.coordinator.data_dir / "owner-token").read_text().strip()
    base, headers = f"http://127.0.0.1:{one.coordinator.port}", {"Authorization": f"Bearer {token}"}
    ours: list[tuple[float, float]] = []
    warm: list[tuple[float, float]] = []
    hand: list[tuple[float, float]] = []
    async with aiohttp.ClientSession(base, headers=headers) as http:
        bench = Bench(one.coordinator, "", http)
        for number in range(TURNS):
            ours.append(await _job(one, bench, "vm"))
            warm.append(await _job(one, bench, "warm"))
            hand.append(await _by_hand(one, number))
    how = f"median of {TURNS}, in turns"
    found = []
    for name, figures in (("by booting", ours), ("from a snapshot", warm)):
        found.append(_row(f"submit to first output, VM job {name}", [wall for wall, _ in figures], how))
    found.append(_row("the same VM by hand, to its agent's request", [wall for wall, _ in hand], how))
    found += [
        _ratio("VM job by booting / the same VM by hand", ours, hand, 0),
        _ratio("VM job by booting / by hand, processor time of QEMU", ours, hand, 1),
        _ratio("VM job from a snapshot / by booting", warm, ours, 0),
        _ratio("VM job from a snapshot / by booting, processor time of QEMU", warm, ours, 1),
    ]
    return found


def _row(measure: str, seconds: list[float], how: str) -> Row:
    return Row(measure, statistics.median(seconds), "s", f"{how}; {min(seconds):.2f} to {max(seconds):.2f}")


def _ratio(measure: str, ours: list[tuple[float, float]], theirs: list[tuple[float, float]], which: int) -> Row:
    pairs = [one[which] / other[which] for one, other in zip(ours, theirs, strict=True)]
    return Row(
        measure, statistics.median(pairs), "", f"median of {len(pairs)} turns; {min(pairs):.2f} to {max(pairs):.2f}"
    )


def _snapshots(one: Orchestra) -> list[Path]:
    return list(one.base.glob("*/.snapshots/*/[0-9a-f]*/snapshot.state")) if not one.vm_processes() else []


async def _job(one: Orchestra, bench: Bench, label: str) -> tuple[float, float]:
    """Seconds to the first output of a job, and those that its QEMU was at work by then."""
    job, seconds = await bench.first_output(label)
    busy = sum(_busy(pid) for pid in one.vm_processes().values())
    await bench.over({job})
    await asyncio.to_thread(lambda: until(lambda: not one.vm_processes(), what="its machine is gone"))
    return seconds, busy


def _busy(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0


def _bridge_by_hand(one: Orchestra) -> None:
    commands = (
        f"link add {BRIDGE.name} type bridge",
        f"addr add {BRIDGE.gateway_cidr} dev {BRIDGE.name}",
        f"link set {BRIDGE.name} up",
    )
    one.host.run("ip", "-batch", "-", stdin="".join(f"{each}\n" for each in commands))
    overlay = one.folder / "overlay.ext4"
    with overlay.open("wb") as file:
        file.truncate(64 * 2**20)
    subprocess.run(("mkfs.ext4", "-q", "-F", str(overlay)), check=True)


async def _by_hand(one: Orchestra, number: int) -> tuple[float, float]:
    met = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readline()
        met.set()

    async with await asyncio.start_server(meet, str(BRIDGE.gateway), PORT):
        began = perf_counter()
        process = await _start_by_hand(one, number)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await met.wait()
            seconds, busy = perf_counter() - began, _busy(process.pid)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            for writer in writers:
                writer.close()
    one.host.run("ip", "link", "del", f"hand{number}tap")
    return seconds, busy


async def _start_by_hand(one: Orchestra, number: int) -> asyncio.subprocess.Process:
    folder = one.folder / f"hand{number}"
    folder.mkdir()
    images = linux_guest()
    machine = replace(guest(f"hand{number}", BRIDGE.cidr[10 + number]), tap=f"hand{number}tap")
    commands = f"tuntap add {machine.tap} mode tap\nlink set {machine.tap} master {BRIDGE.name} up\n"
    await asyncio.to_thread(one.host.run, "ip", "-batch", "-", stdin=commands)
    shutil.copy(one.folder / "overlay.ext4", folder / "overlay.ext4")
    pipe = folder / f"{BOOT_PIPE}.in"
    os.mkfifo(pipe, 0o600)
    (folder / f"{BOOT_PIPE}.out").symlink_to(os.devnull)
    argv = qemu_argv(
        "/usr/bin/qemu-system-x86_64",
        vm_id=machine.vm_id,
        arch="x64",
        accel="tcg",
        machine=Machine(vcpus=1, mem_mib=256, overlay_mib=64, limits=NOTHING),
        guest=machine,
        files=QemuFiles(
            kernel=str(images / "vmlinux"),
            initrd=str(images / "vmlinux.initrd"),
            rootfs=str(images / "rootfs.ext4"),
            overlay=str(folder / "overlay.ext4"),
            folder=str(folder),
        ),
        args=boot_args(machine, BRIDGE, more=extra_boot_args("tcg")),
        run_as=None,
    )
    process = await asyncio.create_subprocess_exec(
        *(word for word in argv if word != "-S"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    order = BootOrder(agent_id=machine.vm_id, labels=("vm",), url=f"ws://{BRIDGE.gateway}:{PORT}/ws", token="none")
    await _hand_over(pipe, metadata(order, BRIDGE))
    return process


async def _hand_over(pipe: Path, document: dict[str, Any]) -> None:
    while True:
        try:
            end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # QEMU does not listen yet
            await asyncio.sleep(0.005)
        else:
            os.write(end, json.dumps(document).encode() + b"\n")
            os.close(end)
            return


if __name__ == "__main__":
    for row in rows():
        print(f"  {row.measure:60} {row.value:8.3f} {row.unit:3} {row.method}", flush=True)
