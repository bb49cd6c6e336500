"""What stands in for firecracker answers as firecracker does, and carries a Linux guest behind our client of it."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.microvm.firecracker_download import firecracker_folder
from tests.microvm.linux_guest import linux_guest
from tests.microvm.orchestra import PYTHON, orchestra, stand_in_entry
from tests.microvm.real_bench import guest_folder, vm_host
from tests.microvm.requests import SCRIPTS, Answer, Script, play
from tests.microvm.stand_in_lab import stand_in_programs

from kici.adapters.unix_sockets import connect

TAP = "tap-under-test"
pytestmark = [
    pytest.mark.engine("firecracker"),
    pytest.mark.engine("qemu"),
    pytest.mark.xdist_group("microvms"),
    pytest.mark.timeout(240),
]


@asynccontextmanager
async def running(program: Path, folder: Path, socket: Path) -> AsyncIterator[Path]:
    """The program with nothing told yet: its socket."""
    process = await asyncio.create_subprocess_exec(
        program,
        *("--id", "one", "--api-sock", str(socket)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=(log := (folder / "stderr").open("wb")),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(30):
            while not await listens(socket):
                assert process.returncode is None, (folder / "stderr").read_text()
                await asyncio.sleep(0.005)
        yield socket
    finally:
        log.close()
        with suppress(ProcessLookupError):  # some of what it was asked ends it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _fill(folder: Path, kernel: Path) -> None:
    folder.mkdir()
    shutil.copy(kernel, folder / "kernel")
    (folder / "garbage").write_bytes(b"x" * 4096)
    (folder / "drive").write_bytes(bytes(2**20))
    for name in ("log", "metrics"):
        (folder / name).touch()


async def listens(socket: Path) -> bool:
    try:
        _, writer = await connect(socket)
    except OSError:
        return False
    writer.close()
    return True


async def answers(program: Path, folder: Path, kernel: Path, script: Script) -> list[Answer]:
    _fill(folder, kernel)
    words = {"folder": str(folder), "tap": TAP}
    subprocess.run(("ip", "tuntap", "add", TAP, "mode", "tap"), check=True)
    try:
        async with running(program, folder, folder / "api.sock") as socket:
            found = await play(socket, script.requests, words)
        if script.then:
            async with running(program, folder, folder / "then.sock") as socket:
                found += await play(socket, script.then, words)
        return found
    finally:
        subprocess.run(("ip", "link", "del", TAP), check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
async def test_the_stand_in_answers_as_firecracker_does(script: Script) -> None:
    kernel = linux_guest() / "vmlinux" if script.starts else guest_folder() / "tiny-guest.elf"
    with vm_host() as (folder, _):
        real = await answers(
            firecracker_folder() / "firecracker", folder / "a", guest_folder() / "tiny-guest.elf", script
        )
        ours = await answers(stand_in_programs() / "firecracker", folder / "b", kernel, script)
    told = [f"{each.method} {each.path} {each.body}" for each in (*script.requests, *script.then)]
    assert [(what, answer.shape) for what, answer in zip(told, ours, strict=True)] == [
        (what, answer.shape) for what, answer in zip(told, real, strict=True)
    ]
    assert all(all(answer.body.values()) for answer in ours if answer.status == 400), "it says why"


READ_METADATA = """
import socket, subprocess
END = chr(13) + chr(10)
def ask(*lines):
    with socket.create_connection(("169.254.169.254", 80), timeout=10) as service:
        service.sendall((END.join(lines) + END + END).encode())
        answer = service.recv(65536).decode()
    return answer.split()[1], answer.split(END + END, 1)[1]
def blocked():
    try:
        ask("GET / HTTP/1.1")
    except OSError as error:
        return error.strerror
print("as left by the agent:", blocked())
subprocess.run(["ip", "route", "del", "prohibit", "169.254.169.254"], check=True)
status, token = ask("PUT /latest/api/token HTTP/1.1", "X-metadata-token-ttl-seconds: 60")
print("token:", status)
print("data:", *ask("GET /latest/meta-data HTTP/1.1", "Accept: application/json", "X-metadata-token: " + token))
print("without a token:", ask("GET /latest/meta-data HTTP/1.1")[0])
"""


@pytest.mark.spec("scaler 36.18.18")
def test_a_linux_guest_behind_our_client_reads_its_boot_data_once_and_leaves_nothing() -> None:
    with orchestra(stand_in_entry()) as one:
        done = one.coordinator.run("run", "-l", "vm", "--", *PYTHON, READ_METADATA, seconds=180)
        assert done.returncode == 0, done.stderr + done.stdout
        # It registered, so it had read its credential; a job that is root opens the way again, and finds nothing.
        assert done.stdout.splitlines() == [
            "as left by the agent: Permission denied",
            "token: 200",
            "data: 200 {}",
            "without a token: 401",
        ]
        one.until_clean()
