"""Drives, addresses and processes of microVMs: what the adapters promise, without any microVM."""

import asyncio
import os
import subprocess
import sys
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from kici.adapters import vm_processes
from kici.adapters.block_copy import copy_sparse, dig_holes
from kici.adapters.block_drives import HostDrives
from kici.adapters.block_templates import OverlayTemplates, is_template
from kici.adapters.host_commands import CommandFailed, HostCommands
from kici.adapters.ipam import AddressPool, MemoryAddresses, StoredAddresses
from kici.adapters.processes import LinuxProcesses
from kici.adapters.qemu_vmm import QemuTools, QemuVmm, lock_holder
from kici.decide.microvm import Bridge
from kici.decide.microvm_probe import GONE, Liveness, Probe
from kici.decide.microvm_qemu import QemuHost
from kici.domain.errors import Conflict, DeterministicRefusal, NoCapacity, Retryable
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.ports.addresses import AddressRow
from kici.ports.vmm import VmPlace

MIB = 1024 * 1024
SCALER = ScalerName("vms")
linux = pytest.mark.skipif(sys.platform != "linux", reason="microVMs are for Linux hosts")
pytestmark = linux


def vm(number: int) -> AgentId:
    return AgentId(f"scaler-firecracker-{number:08x}")


def bridge(cidr: str = "10.0.0.0/29") -> Bridge:
    network = IPv4Network(cidr)
    return Bridge(name="kici-br0", cidr=network, gateway=network[1], netmask=network.netmask, table="kici")


class Mkfs(HostCommands):
    """Formats by writing what tells a formatted drive from another, after a while."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.count = 0
        self.fails = fails

    async def run(self, *argv: str, stdin: str = "", seconds: float = 30.0) -> str:
        self.count += 1
        await asyncio.sleep(0.01)
        if self.fails:
            raise CommandFailed("mkfs.ext4 failed with code 1", output="")
        _mark(Path(argv[-1]))
        return ""


def _mark(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1080)
        file.write(b"\x53\xef")


@pytest.mark.spec("scaler 34.3.1")
async def test_many_first_uses_share_one_build(tmp_path: Path) -> None:
    commands = Mkfs()
    templates = OverlayTemplates(tmp_path, commands)
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(templates.create(tmp_path / f"drive-{number}", 4))
    assert commands.count == 1
    assert all(is_template(tmp_path / f"drive-{number}", 4) for number in range(5))


@pytest.mark.spec("scaler 34.3.2")
async def test_a_file_of_the_right_size_that_is_no_drive_is_built_anew(tmp_path: Path) -> None:
    templates = OverlayTemplates(tmp_path, Mkfs())
    templates.path(4).parent.mkdir()
    templates.path(4).write_bytes(b"\0" * 4 * MIB)
    assert is_template(await templates.ensure(4), 4)


@pytest.mark.spec("scaler 34.3.3")
@pytest.mark.spec("scaler 34.3.4")
async def test_a_build_that_fails_leaves_nothing_and_the_next_one_tries_again(tmp_path: Path) -> None:
    commands = Mkfs(fails=True)
    templates = OverlayTemplates(tmp_path, commands)
    with pytest.raises(Retryable, match="cannot make drive template"):
        await templates.ensure(4)
    assert list(templates.path(4).parent.iterdir()) == []
    commands.fails = False
    assert is_template(await templates.ensure(4), 4)


@pytest.mark.spec("scaler 34.3.5")
async def test_each_size_has_a_template_in_a_hidden_folder(tmp_path: Path) -> None:
    drives = HostDrives(tmp_path, Mkfs())
    for size in (4, 8):
        await drives.make_overlay(tmp_path / f"{size}", size, owner=None)
    names = sorted(path.name for path in (tmp_path / ".overlay-templates").iterdir())
    assert names == ["overlay-4mib.ext4", "overlay-8mib.ext4"]
    assert drives.folders(tmp_path) == {}, "what is hidden is no machine"


async def test_a_caller_that_leaves_does_not_end_the_build_of_the_others(tmp_path: Path) -> None:
    templates = OverlayTemplates(tmp_path, Mkfs())
    first = asyncio.create_task(templates.ensure(4))
    second = asyncio.create_task(templates.ensure(4))
    await asyncio.sleep(0)
    first.cancel()
    assert is_template(await second, 4)
    assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ is asyncio.CancelledError


def test_a_copy_has_the_same_content_and_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(64 * MIB)
        for at in (0, 20 * MIB, 63 * MIB):
            file.seek(at)
            file.write(os.urandom(5000))
    copy_sparse(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks * 512 < MIB
    with pytest.raises(FileExistsError):
        copy_sparse(source, target)


def test_a_copy_that_fails_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        copy_sparse(tmp_path / "absent", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("scaler 36.18.11")
async def test_an_image_is_linked_where_it_may_be_read_and_never_changed(tmp_path: Path) -> None:
    drives = HostDrives(tmp_path, HostCommands())
    source = tmp_path / "vmlinux"
    source.write_bytes(b"kernel")
    source.chmod(0o644)
    before = source.stat()
    await drives.bring(source, tmp_path / "linked", reader=65_100)
    assert (tmp_path / "linked").stat().st_ino == before.st_ino
    source.chmod(0o600)
    if os.geteuid() == 0:
        await drives.bring(source, tmp_path / "copied", reader=65_100)
        assert (tmp_path / "copied").stat().st_uid == 65_100
    after = source.stat()
    assert (after.st_uid, after.st_gid, after.st_mode & 0o777) == (before.st_uid, before.st_gid, 0o600)


async def test_an_image_behind_a_symbolic_link_is_brought_itself(tmp_path: Path) -> None:
    (tmp_path / "vmlinux-6.1").write_bytes(b"kernel")
    (tmp_path / "vmlinux-6.1").chmod(0o644)
    (tmp_path / "vmlinux").symlink_to("vmlinux-6.1")
    await HostDrives(tmp_path, HostCommands()).bring(tmp_path / "vmlinux", tmp_path / "brought", reader=65_100)
    assert not (tmp_path / "brought").is_symlink()
    assert (tmp_path / "brought").stat().st_ino == (tmp_path / "vmlinux-6.1").stat().st_ino


async def test_an_image_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path) -> None:
    drives = HostDrives(tmp_path, HostCommands())
    (tmp_path / "empty").touch()
    for name, why in (("absent", "cannot be read"), ("empty", "no file with content"), (".", "no file with content")):
        with pytest.raises(DeterministicRefusal, match=why):
            await drives.bring(tmp_path / name, tmp_path / "target", reader=None)


async def test_a_folder_that_is_there_is_somebody_elses(tmp_path: Path) -> None:
    drives = HostDrives(tmp_path, HostCommands())
    await drives.make_folder(tmp_path / "a/b")
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    with pytest.raises(Conflict):
        await drives.make_folder(tmp_path / "a/b")
    await drives.remove(tmp_path / "a/b")
    await drives.remove(tmp_path / "a/b")
    assert drives.folders(tmp_path / "absent") == {}


async def test_a_command_that_fails_tells_all_about_it() -> None:
    commands = HostCommands()
    assert await commands.run("cat", stdin="given") == "given"
    with pytest.raises(CommandFailed, match=r"sh -c 'echo no >&2; exit 3' failed with code 3 after .* s: no"):
        await commands.run("sh", "-c", "echo no >&2; exit 3")
    with pytest.raises(DeterministicRefusal, match="not installed on this host"):
        await commands.run("no-such-program")
    with pytest.raises(Retryable, match=r"did not end within 0\.05 s"):
        await commands.run("sleep", "10", seconds=0.05)


def test_sudo_stands_before_what_needs_it_and_nothing_else() -> None:
    assert HostCommands(sudo=True).prefix("ip") == ("sudo", "-n")
    assert HostCommands(sudo=True).prefix("mkfs.ext4") == ()
    assert HostCommands().prefix("ip") == ()


class Rows:
    """`ip_allocations` in memory, with a rival that is quicker a few times."""

    def __init__(self, *, rivals: int = 0) -> None:
        self.rows: list[AddressRow] = []
        self.rivals = rivals

    async def insert_address(self, row: AddressRow) -> bool:
        if self.rivals:
            self.rivals -= 1
            self.rows.append(
                AddressRow(
                    ip=row.ip,
                    vm_id=vm(900 + self.rivals),
                    scaler=row.scaler,
                    owner_instance_id=InstanceId("other"),
                    tap_device="",
                    mac_address="",
                )
            )
        if any(each.ip == row.ip or each.vm_id == row.vm_id for each in self.rows):
            return False
        self.rows.append(row)
        return True

    async def delete_address(self, vm_id: AgentId) -> bool:
        before = len(self.rows)
        self.rows = [row for row in self.rows if row.vm_id != vm_id]
        return len(self.rows) < before

    async def addresses(self, *, limit: int) -> list[AddressRow]:
        return list(self.rows)


def stored(rows: Rows, cidr: str = "10.0.0.0/29", instance: str = "me") -> StoredAddresses:
    return StoredAddresses(rows, bridge=bridge(cidr), scaler=SCALER, instance_id=InstanceId(instance))


def in_memory(pool: AddressPool | None = None, cidr: str = "10.0.0.0/29") -> MemoryAddresses:
    return MemoryAddresses(pool or AddressPool(), bridge=bridge(cidr), scaler=SCALER)


@pytest.mark.spec("scaler 33.2.1")
@pytest.mark.parametrize("make", [lambda: stored(Rows(), "10.0.0.0/30"), lambda: in_memory(cidr="10.0.0.0/30")])
async def test_a_network_that_is_full_is_named(make: "object") -> None:
    assert callable(make)
    addresses = make()
    assert await addresses.allocate(vm(1)) == IPv4Address("10.0.0.2")
    assert await addresses.allocate(vm(1)) == IPv4Address("10.0.0.2"), "a machine has one"
    with pytest.raises(NoCapacity, match=r"no available IPs: every address of 10\.0\.0\.0/30"):
        await addresses.allocate(vm(2))


@pytest.mark.spec("scaler 33.2.3")
@pytest.mark.parametrize("make", [lambda: stored(Rows()), in_memory])
async def test_the_lowest_address_that_came_back_is_given_next(make: "object") -> None:
    assert callable(make)
    addresses = make()
    given = [await addresses.allocate(vm(number)) for number in range(5)]
    await addresses.release(vm(2))
    await addresses.release(vm(2))
    assert await addresses.allocate(vm(7)) == given[2]
    assert await addresses.held() == {
        vm(0): given[0],
        vm(1): given[1],
        vm(3): given[3],
        vm(4): given[4],
        vm(7): given[2],
    }


@pytest.mark.spec("scaler 33.2.2")
async def test_two_that_want_one_address_get_two() -> None:
    rows = Rows(rivals=2)
    assert await stored(rows).allocate(vm(1)) == IPv4Address("10.0.0.4")
    assert await stored(rows, instance="other").held() != {}
    assert list(await stored(rows).held()) == [vm(1)], "what a peer holds is not ours to sweep"
    with pytest.raises(Retryable, match="16 times in a row"):
        await stored(Rows(rivals=99), "10.0.0.0/24").allocate(vm(1))


async def test_a_machine_that_was_found_keeps_its_address_in_memory() -> None:
    pool = AddressPool()
    in_memory(pool).restore(vm(1), IPv4Address("10.0.0.2"))
    assert await in_memory(pool).allocate(vm(2)) == IPv4Address("10.0.0.3")


def a_process(tmp_path: Path, *, name: str = "firecracker", started: int = 100, state: str = "S") -> Path:
    """A /proc with one process, 7."""
    root = tmp_path / "proc"
    (root / "7").mkdir(parents=True)
    (root / "stat").write_text("cpu 1\nbtime 1750000000\n")
    fields = [state, "1", "7", "7", *["0"] * 15, str(started), *["0"] * 10]
    (root / "7/stat").write_text(f"7 ({name}) {' '.join(fields)}\n")
    (root / "7/comm").write_text(f"{name}\n")
    return root


def probe(path: Path, root: Path, faults: tuple[str, ...] = ()) -> Probe | None:
    return vm_processes.probe_pid_file(path, name="firecracker", faults=lambda pid: faults, root=root)


def test_a_pid_file_and_proc_tell_whether_a_machine_runs(tmp_path: Path) -> None:
    root, path = a_process(tmp_path), tmp_path / "firecracker.pid"
    assert probe(path, root) is None
    path.write_text("7")
    os.utime(path, (1_750_000_002, 1_750_000_002))
    found = probe(path, root)
    assert found is not None
    assert (found.liveness, found.pid, found.started, found.is_confirmed) == (Liveness.RUNNING, 7, 100, True)
    assert probe(path, root, faults=("it has another root",)).is_confirmed is False  # type: ignore[union-attr]  # there is a file


@pytest.mark.parametrize("text", ["8", "0", "rubbish", ""])
def test_a_pid_file_that_names_nobody_means_gone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "firecracker.pid"
    path.write_text(text)
    assert probe(path, a_process(tmp_path)) == GONE


def test_a_zombie_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "firecracker.pid"
    path.write_text("7")
    assert probe(path, a_process(tmp_path, state="Z")) == GONE


def test_a_name_with_parentheses_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "firecracker.pid"
    path.write_text("7")
    found = probe(path, a_process(tmp_path, name="a) b (c"))
    assert found is not None
    assert found.detail == "process 7 is called 'a) b (c', not 'firecracker'"


@pytest.mark.spec("scaler 36.18.6")
def test_a_pid_file_that_cannot_be_read_is_no_evidence_of_an_end(tmp_path: Path) -> None:
    path = tmp_path / "firecracker.pid"
    path.mkdir()
    found = probe(path, a_process(tmp_path))
    assert found is not None
    assert found.is_running
    assert not found.is_confirmed


def test_the_holder_of_a_lock_is_known(tmp_path: Path) -> None:
    path = tmp_path / "qemu.pid"
    assert lock_holder(path) is None
    path.touch()
    assert lock_holder(path) == 0
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        (sys.executable, "-c", code, str(path)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert lock_holder(path) == holder.pid
        holder.communicate()


def test_a_machine_of_the_same_id_in_another_folder_is_somebody_elses(tmp_path: Path) -> None:
    """Coordinators that share a machine draw ids without asking each other."""
    ours, theirs = (VmPlace(vm(1), tmp_path / name / vm(1)) for name in ("ours", "theirs"))
    for place in (ours, theirs):
        place.root.mkdir(parents=True)
        place.console.touch()
    program = tmp_path / "qemu-system-x86_64"
    program.symlink_to("/bin/sh")
    host = QemuHost(arch="x64", has_kvm=False)
    tools = QemuTools(processes=LinuxProcesses(), commands=HostCommands(), boot="b", accel="tcg", host=host)
    words = ("-c", "echo up; read word", "-name", vm(1), "-S", "-kernel", str(theirs.root / "kernel"))
    with subprocess.Popen((program, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        vmm = QemuVmm(tools)
        assert vmm.probe(ours) == GONE
        found = vmm.probe(theirs)
        assert (found.pid, found.is_confirmed) == (other.pid, True), found
        (ours.root / "qemu.pid").write_text(str(other.pid))
        assert not vmm.probe(ours).is_confirmed, "whatever a PID file says"
        other.communicate()


def test_zeros_in_a_file_take_no_room_and_are_still_there(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    content = b"a" * 100_000 + bytes(8 * MIB) + b"b" * 5000 + bytes(3 * MIB) + b"c" + bytes(70_001)
    path.write_bytes(content)
    before = path.stat().st_blocks
    dig_holes(path)
    assert path.read_bytes() == content
    if before * 512 >= len(content):  # the file system does not do it by itself
        assert path.stat().st_blocks * 512 < MIB


@pytest.mark.parametrize("content", [b"", b"x", bytes(1), bytes(64 * 1024), b"y" * (16 * MIB + 1)])
def test_files_without_holes_to_dig_stay_as_they_are(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "memory"
    path.write_bytes(content)
    dig_holes(path)
    assert path.read_bytes() == content


async def test_what_a_guest_wrote_is_kept_for_reading_only(tmp_path: Path) -> None:
    drives = HostDrives(tmp_path, HostCommands())
    source, target = tmp_path / "written", tmp_path / "kept"
    source.write_bytes(b"memory" + bytes(MIB))
    source.chmod(0o666)
    await drives.keep(source, target, root=tmp_path)
    assert not source.exists()
    assert target.read_bytes() == b"memory" + bytes(MIB)
    assert target.stat().st_mode & 0o777 == 0o444
    with pytest.raises(DeterministicRefusal, match="cannot move"):
        await drives.keep(source, tmp_path / "again", root=tmp_path)
