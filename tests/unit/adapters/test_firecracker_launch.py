"""How our driver waits for a VMM that takes its time, and what its client says of a refusal; no firecracker needed."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from kici.adapters import proc
from kici.adapters.firecracker_api import ApiRefused, FirecrackerApi
from kici.adapters.firecracker_vmm import FirecrackerTools, FirecrackerVmm
from kici.adapters.host_commands import HostCommands
from kici.adapters.processes import LinuxProcesses
from kici.decide.launch import CgroupSupport
from kici.decide.microvm import Bridge, Machine, guest
from kici.decide.microvm_firecracker import ApiCall, Jail
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId
from kici.domain.resources import NOTHING
from kici.ports.vmm import VmPlace, VmSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="microVMs are for Linux hosts")
VM = AgentId("scaler-firecracker-0000000a")
BRIDGE = Bridge(
    name="kici-br0",
    cidr=IPv4Network("10.0.0.0/24"),
    gateway=IPv4Address("10.0.0.1"),
    netmask=IPv4Address("255.255.255.0"),
    table="kici",
)
LATE_VMM = """
import os, socket, sys, time
time.sleep(float(sys.argv[1]))
listener = socket.socket(socket.AF_UNIX)
listener.bind("api.sock")
listener.listen()
while True:
    connection, _ = listener.accept()
    while connection.recv(65536):
        body = '{"fault_message": "not today"}' if sys.argv[2] == "400" else "{}"
        head = f"HTTP/1.1 {sys.argv[2]} -\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
        connection.sendall((head + body).encode())
"""
JAILER = """#!/bin/sh
cd {root}
{python} -c "$(cat {script})" {pause} {status} </dev/null &
printf %s $! >firecracker.pid
"""


def a_host(folder: Path, *, pause: float, status: int = 200) -> tuple[FirecrackerVmm, VmSpec]:
    """A jailer whose VMM opens its socket so many seconds later."""
    place = VmPlace(VM, folder / "firecracker" / VM)
    place.root.mkdir(parents=True)
    place.console.touch()
    script, jailer = folder / "vmm.py", folder / "jailer"
    script.write_text(LATE_VMM)
    jailer.write_text(JAILER.format(root=place.root, python=sys.executable, script=script, pause=pause, status=status))
    jailer.chmod(0o755)
    jail = Jail(jailer=str(jailer), firecracker="firecracker", base=str(folder), uid=0, gid=0)
    tools = FirecrackerTools(
        processes=LinuxProcesses(),
        commands=HostCommands(),
        cgroups=CgroupSupport(),
        boot=proc.boot_id(),
        socket_wait_ms=lambda: 10_000,
    )
    spec = VmSpec(
        place=place,
        machine=Machine(vcpus=1, mem_mib=64, overlay_mib=8, limits=NOTHING),
        guest=guest(VM, IPv4Address("10.0.0.2")),
        bridge=BRIDGE,
        has_initrd=False,
        boot_data={},
        mark="none",
    )
    return FirecrackerVmm(jail, tools), spec


@pytest.mark.spec("scaler 35")
@pytest.mark.spec("scaler 36.18.3")
async def test_a_socket_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    """The jailer has ended with 0 by then, which says nothing of the guest."""
    vmm, spec = a_host(tmp_path, pause=0.35)
    started = time.monotonic()
    running = await vmm.launch(spec)
    try:
        assert running.is_alive()
        assert time.monotonic() - started >= 0.35
    finally:
        await running.kill()
        running.close()


@pytest.mark.spec("scaler 35")
async def test_a_start_that_is_called_off_does_not_wait_for_the_socket(tmp_path: Path) -> None:
    vmm, spec = a_host(tmp_path, pause=3600)
    pid_file = spec.place.root / "firecracker.pid"
    launch = asyncio.create_task(vmm.launch(spec))
    while not pid_file.exists() or not pid_file.read_text():  # noqa: ASYNC110  # a file tells nobody
        await asyncio.sleep(0.005)
    launch.cancel()
    done, _ = await asyncio.wait({launch}, timeout=5)
    assert done, "it would wait for ten seconds"
    assert launch.cancelled()
    assert not vmm.probe(spec.place).is_running, "its VMM is gone"


@pytest.mark.spec("scaler 35")
async def test_a_refusal_holds_what_the_vmm_said(tmp_path: Path) -> None:
    vmm, spec = a_host(tmp_path, pause=0.0, status=400)
    with pytest.raises(Exception, match="with 400: not today"):
        await vmm.launch(spec)
    assert not vmm.probe(spec.place).is_running


async def test_nobody_who_listens_is_no_refusal(tmp_path: Path) -> None:
    with pytest.raises(Retryable, match="no VMM listens on"):
        await FirecrackerApi.open(tmp_path / "api.sock")
    error = ApiRefused(ApiCall(method="PUT", path="/vm", body={"secret": 1}), 400, "no")
    assert str(error) == "firecracker refuses PUT /vm with 400: no"


@asynccontextmanager
async def a_vmm_that_hangs_up(place: VmPlace, times: int) -> AsyncIterator[list[bytes]]:
    """Answers only after so many connections that it cut off; what it was asked in all of them."""
    asked: list[bytes] = []

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if len(asked) > times:
            writer.write(b"HTTP/1.1 204 -\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    folder = os.open(place.root, os.O_PATH)  # the whole name is too long for a socket
    try:
        async with await asyncio.start_unix_server(met, f"/proc/self/fd/{folder}/api.sock"):
            yield asked
    finally:
        os.close(folder)


@pytest.mark.parametrize(("times", "is_emptied"), [(0, True), (2, True), (99, False)])
async def test_metadata_that_was_not_emptied_at_once_is_emptied_or_said_to_be_there(
    tmp_path: Path, times: int, is_emptied: bool
) -> None:
    vmm, spec = a_host(tmp_path, pause=0)
    (spec.place.root / "firecracker.pid").mkdir()  # nothing can be told of its process, so it may run
    async with a_vmm_that_hangs_up(spec.place, times) as asked:
        if is_emptied:
            await vmm.forget_boot_data(spec.place)
        else:
            with pytest.raises(Retryable, match=f"the metadata of {VM} could not be emptied"):
                await vmm.forget_boot_data(spec.place)
    assert len(asked) == min(times + 1, 3)
    assert all(each.startswith(b"PUT /mmds HTTP/1.1") for each in asked)


async def test_metadata_of_a_machine_that_is_gone_is_gone(tmp_path: Path) -> None:
    vmm, spec = a_host(tmp_path, pause=0)
    async with a_vmm_that_hangs_up(spec.place, 99) as asked:
        await vmm.forget_boot_data(spec.place)
    assert len(asked) == 1
