"""What can go wrong with a microVM, made to happen on real firecracker; what an operator is told; what is left.

Each case arranges its fault on a bench and says which machine it is about.  `docs/microvms.md` shows the table that
comes of running them all.
"""

import asyncio
import ctypes
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from tests.microvm.real_bench import BRIDGE, SCALER, RealMicroVmBench, a_set

from kici.adapters.host_commands import HostCommands
from kici.adapters.ipam import AddressPool, MemoryAddresses
from kici.decide.microvm import Bridge
from kici.decide.microvm_firecracker import SOCKET
from kici.domain.errors import KiciError, Retryable
from kici.domain.spawn import ScaleDownReason
from kici.ports.backend import SpawnEventType
from kici.testing.contracts.backend import Kind, an_id, until

VM = an_id(1)
CAP_KILL = 5
_CAPABILITY_VERSION = 0x20080522


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    """What goes wrong."""
    arrange: Callable[[RealMicroVmBench], Awaitable[None] | None]
    """Before the machine is made, and before the bench starts where it changes how it is made."""
    told: str
    """A pattern that what the operator sees matches."""
    during: Callable[[RealMicroVmBench], Awaitable[None]] | None = None
    """Once the machine runs."""
    story: Callable[[RealMicroVmBench], Awaitable[str]] | None = None
    """Once the machine runs, where it is not its start that fails: it goes wrong and is over; what is told."""
    heals: bool = False
    """The machine is made in spite of it."""
    after: str = "nothing is left"
    seen: str = "a line in the log"
    """Where nothing is told."""
    when_started: bool = False
    """Arrange it after the bench has started and the bridge is up."""

    @property
    def runs(self) -> bool:
        """The machine is there in the end."""
        return self.heals and not self.told and self.story is None


def _set(bench: RealMicroVmBench, **changes: object) -> None:
    chosen = replace(a_set(Kind.LIVES), **changes)  # type: ignore[arg-type]  # as its caller knows
    bench.configure(sets=(chosen,))


def _script(bench: RealMicroVmBench, name: str, text: str) -> str:
    path = bench.folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def _jail(bench: RealMicroVmBench, **changes: object) -> None:
    bench.jail = replace(bench.jail, **changes)  # type: ignore[arg-type]  # as its caller knows


def _impatient(bench: RealMicroVmBench) -> None:
    _jail(bench, jailer=_script(bench, "jailer", "exec sleep 30"))
    bench.socket_wait_ms = 300


def _garbage(bench: RealMicroVmBench) -> None:
    kernel = bench.folder / "garbage"
    kernel.write_bytes(b"this is no kernel" * 100)
    kernel.chmod(0o644)
    _set(bench, kernel=kernel)


def _full_disk(bench: RealMicroVmBench) -> None:
    small = bench.folder / "small"
    small.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)), check=True)
    bench.configure(base=small / "jail")
    _jail(bench, base=str(small / "jail"))


async def _tap_taken(bench: RealMicroVmBench) -> None:
    bench.network.run("ip", "tuntap", "add", f"kici-{VM[-8:]}", "mode", "tap")


def _no_address(bench: RealMicroVmBench) -> None:
    narrow = IPv4Network("10.200.0.0/30")
    bench.bridge = Bridge(
        name=BRIDGE.name, cidr=narrow, gateway=BRIDGE.gateway, netmask=narrow.netmask, table=BRIDGE.table
    )
    bench.pool = AddressPool()
    MemoryAddresses(bench.pool, bridge=bench.bridge, scaler=SCALER).restore(an_id(9), narrow[2])


def _bad_template(bench: RealMicroVmBench) -> None:
    template = bench.settings.base / "firecracker/.overlay-templates/overlay-8mib.ext4"
    template.parent.mkdir(parents=True)
    template.write_bytes(b"\0" * 8 * 1024 * 1024)


class NoNft(HostCommands):
    """A host on which `nft` is not installed."""

    async def run(self, *argv: str, stdin: str = "", seconds: float = 30.0) -> str:
        words = ("nft-is-not-here", *argv[1:]) if argv[0] == "nft" else argv
        return await super().run(*words, stdin=stdin, seconds=seconds)


def _no_nft(bench: RealMicroVmBench) -> None:
    bench.commands = NoNft()


async def _rules_flushed(bench: RealMicroVmBench) -> None:
    bench.network.run("nft", "flush", "ruleset")


async def _bridge_gone(bench: RealMicroVmBench) -> None:
    bench.network.run("ip", "link", "del", BRIDGE.name)


async def _crash(bench: RealMicroVmBench) -> None:
    await until(lambda: "silent" in bench.backend.tail(VM, 5))  # the last that its guest has to say
    os.kill(bench.vmm_pids()[VM], signal.SIGKILL)


def _address_taken(bench: RealMicroVmBench) -> None:
    bench.pool = AddressPool()
    MemoryAddresses(bench.pool, bridge=bench.bridge, scaler=SCALER).restore(an_id(9), bench.bridge.cidr[2])


async def _agent_crashes(bench: RealMicroVmBench) -> str:
    """A coordinator that hangs up is the end of an agent without a coordinator, and so of its guest."""
    writers: list[asyncio.StreamWriter] = []
    met = asyncio.Event()

    def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        met.set()

    async with await asyncio.start_server(meet, "0.0.0.0", 4000):
        await met.wait()
        bench.backend.mark_registered(VM)
        for writer in writers:
            writer.close()
        await until(lambda: bool(bench.heard.exits))
    ((_, text),) = bench.heard.exits
    return text


async def _boot_data_stays(bench: RealMicroVmBench) -> str:
    """Its coordinator starts no job on it, and takes it down."""
    (bench.settings.base / "firecracker" / VM / "root" / SOCKET).unlink()
    with pytest.raises(Retryable) as caught:
        await bench.backend.boot_data_read(VM)
    await bench.backend.destroy(VM, ScaleDownReason.SHUTDOWN)
    return str(caught.value)


async def _no_right_to_kill(bench: RealMicroVmBench) -> str:
    pid = bench.vmm_pids()[VM]
    with without_capability(CAP_KILL), pytest.raises(Retryable) as caught:
        await bench.backend.destroy(VM, ScaleDownReason.IDLE)
    assert bench.vmm_pids() == {VM: pid}
    left = {kind for kind, found in bench.leftovers().items() if found}
    assert left == {"processes", "records", "folders", "control groups"}, "what it stands on stays, its network goes"
    await bench.backend.destroy(VM, ScaleDownReason.IDLE)
    return str(caught.value)


async def _pid_reused(bench: RealMicroVmBench) -> str:
    """It ends while nobody looks, and its number is another program's by the time somebody does."""
    await bench.restart()
    await bench.die(VM)
    pid_file = bench.settings.base / "firecracker" / VM / "root/firecracker.pid"
    other = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        await asyncio.to_thread(pid_file.write_text, str(other.pid))
        os.utime(pid_file, (time.time() - 3600, time.time() - 3600))
        assert await bench.backend.recover(frozenset({VM})) == ()
        await bench.backend.cleanup_orphans(frozenset())
        assert other.returncode is None, "it is not ours to end"
        return ""
    finally:
        other.kill()
        await other.wait()


def _boot(how: str) -> Callable[[RealMicroVmBench], None]:
    return lambda bench: _set(bench, env={"TG_BOOT": how})


FAULTS = (
    Fault("the jailer is missing", lambda b: _jail(b, jailer="/nowhere/jailer"), r"refuses to start /nowhere/jailer"),
    Fault(
        "the firecracker program is missing",
        lambda b: _jail(b, firecracker="/nowhere/firecracker"),
        r"(?s)the jailer exited with .* during boot; it said:.*/nowhere/firecracker: No such file",
    ),
    Fault(
        "the jailer fails",
        lambda b: _jail(b, jailer=_script(b, "jailer", "echo out of luck >&2; exit 7")),
        r"the jailer exited with code 7 during boot; it said:\nout of luck",
    ),
    Fault("the socket is late", _impatient, r"did not open its socket within 0\.3 s"),
    Fault(
        "the kernel is missing", lambda b: _set(b, kernel=Path("/nowhere/vmlinux")), r"/nowhere/vmlinux cannot be read"
    ),
    Fault("the kernel is no kernel", _garbage, r"firecracker refuses PUT /(boot-source|actions) with 400: .*"),
    Fault(
        "the root file system is missing",
        lambda b: _set(b, rootfs=Path("/nowhere/rootfs.ext4")),
        r"/nowhere/rootfs\.ext4 cannot be read",
    ),
    Fault("the disk is full", _full_disk, r"there is no space left on the disk of"),
    Fault("all addresses are taken", _no_address, r"no available IPs: every address of 10\.200\.0\.0/30 has a microVM"),
    Fault(
        "the lowest address is taken",
        _address_taken,
        "",
        heals=True,
        after="it gets the next one; it runs",
        seen="nothing",
    ),
    Fault(
        "an interface of its name exists",
        _tap_taken,
        r"there is an interface kici-00000001 already",
        when_started=True,
        after="the interface that was there stays; nothing else is left",
    ),
    Fault("nft is not installed", _no_nft, r"nft-is-not-here is not installed on this host"),
    Fault(
        "the packet filter was flushed", _rules_flushed, "", when_started=True, heals=True, after="made again; it runs"
    ),
    Fault("the bridge was deleted", _bridge_gone, "", when_started=True, heals=True, after="made again; it runs"),
    Fault("a drive template is corrupt", _bad_template, "", heals=True, after="built anew; it runs"),
    Fault(
        "the guest's first program ends",
        _boot("exit"),
        r"ended before it registered \(init-failure\); the end of its console:",
        heals=True,
    ),
    Fault("the guest's kernel panics", _boot("panic"), r"ended before it registered \(kernel-panic\)", heals=True),
    Fault(
        "the VMM is killed",
        lambda b: None,
        r"ended before it registered \(unknown\)",
        during=_crash,
        heals=True,
    ),
    Fault(
        "the agent crashes after it registered",
        lambda b: _set(b, env={}),
        r"microVM .* exited",
        story=_agent_crashes,
        heals=True,
    ),
    Fault(
        "what its guest was told cannot be cleared",
        lambda b: None,
        r"the metadata of .* could not be emptied",
        story=_boot_data_stays,
        heals=True,
        after="no job starts on it, another machine gets the job; nothing is left",
    ),
    Fault(
        "we have no right to end its process",
        lambda b: None,
        r"process \d+ of a microVM is another user's, and we may not end it: give us CAP_KILL",
        story=_no_right_to_kill,
        heals=True,
        after="its network goes at once, process and files stay tracked; nothing is left once we may",
    ),
    Fault(
        "its process is gone and the number another program's",
        lambda b: None,
        "",
        story=_pid_reused,
        heals=True,
        after="that program gets no signal; nothing is left of the machine",
    ),
)


async def play(bench: RealMicroVmBench, fault: Fault) -> str:
    """Let it go wrong; what the operator is told."""
    if not fault.when_started:
        await _done(fault.arrange(bench))
    await bench.start()
    if fault.when_started:
        await bench.backend.recover(frozenset())
        await _done(fault.arrange(bench))
    try:
        await bench.backend.spawn(bench.order(VM, Kind.LIVES), bench.heard.on_event)
    except KiciError as error:
        raised = str(error)
    else:
        raised = ""
    if raised:
        assert [one.detail for one in bench.heard.failures(VM)] == [raised], "told once, and as it was raised"
        return raised
    assert fault.heals, "the machine was made"
    if fault.story is not None:
        return await fault.story(bench)
    if fault.during is not None:
        await fault.during(bench)
    if not fault.told:
        return ""
    await until(lambda: bool(bench.heard.failures(VM)))
    (failure,) = bench.heard.failures(VM)
    assert failure.type is SpawnEventType.FAILED
    return failure.detail


@contextmanager
def without_capability(number: int) -> Iterator[None]:
    """This thread may not do what root may, as long as the block runs."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    data = ctypes.create_string_buffer(24)
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    before = data.raw
    (effective,) = struct.unpack_from("=I", before)
    assert libc.capset(header, struct.pack("=I", effective & ~(1 << number)) + before[4:]) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


async def _done(work: Awaitable[None] | None) -> None:
    if work is not None:
        await work


def plain(text: str, bench: RealMicroVmBench) -> str:
    """What differs from run to run, taken out: folders, times, numbers of processes."""
    from tests.microvm.firecracker_download import firecracker_folder
    from tests.microvm.real_bench import guest_folder

    text = (
        text.replace(str(bench.folder), "…").replace(str(firecracker_folder()), "…").replace(str(guest_folder()), "…")
    )
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+", "…", text)
    text = re.sub(r"after \d+\.\d+ s", "after … s", text)
    return re.sub(r"(process|pid|PID) \d+", r"\1 …", text)
