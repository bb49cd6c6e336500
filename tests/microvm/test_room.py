"""Room on the disk of a host of microVMs: dead ones are cleared away at the start, or by hand, and the living stay."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from tests.microvm.firecracker_download import firecracker_folder
from tests.microvm.real_bench import UID, RealMicroVmBench, guest_folder, real_microvms, vm_host

from kici.apps.microvm_room import guard
from kici.config.load import load_scalers
from kici.config.model import ScalersConfig
from kici.decide.disk import FREE_BYTES_MIN, DiskVerdict
from kici.domain.errors import Retryable
from kici.testing.contracts.backend import Kind, an_id
from kici.testing.programs import CoordinatorProgram
from kici.testing.sim_clock import SimClock

pytestmark = [pytest.mark.engine("firecracker"), pytest.mark.xdist_group("microvms"), pytest.mark.timeout(120)]
MIB = 1024 * 1024
DEAD = "scaler-firecracker-0000dead"


def scalers_file(folder: Path, base: Path, names: tuple[str, ...] = ("vms",)) -> Path:
    path = folder / "scalers.yaml"
    one = {
        "type": "firecracker",
        "maxAgents": 2,
        "firecrackerPath": str(firecracker_folder() / "firecracker"),
        "jailerPath": str(firecracker_folder() / "jailer"),
        "kernelPath": str(guest_folder() / "tiny-guest.elf"),
        "uid": UID,
        "gid": UID,
        "chrootBaseDir": str(base),
    }
    rootfs = str(guest_folder() / "rootfs.ext4")
    scalers = [{"name": name, **one, "labelSets": [{"labels": [name], "rootfsPath": rootfs}]} for name in names]
    path.write_text(yaml.safe_dump({"version": 1, "firecracker": {"cidr": "10.200.0.0/24"}, "scalers": scalers}))
    return path


def configuration(path: Path) -> ScalersConfig:
    loaded = load_scalers(path, None)
    assert loaded.config is not None, loaded.problems
    return loaded.config


def a_dead_machine(base: Path, data_dir: Path, *, scaler: str = "vms", name: str = DEAD, mib: int = 1) -> Path:
    """As a host that lost its power leaves one."""
    root = base / "firecracker" / name / "root"
    root.mkdir(parents=True)
    (root / "overlay.ext4").write_bytes(b"x" * mib * MIB)
    told: dict[str, object] = {"vm_id": name, "scaler": scaler, "vmm": "firecracker", "folder": str(root.parent)}
    told |= {"label_set": [], "labels": [], "gate": [], "token_id": None, "spawned_at": 0}
    records = data_dir / "microvms"
    records.mkdir(parents=True, exist_ok=True)
    data_dir.chmod(0o700)
    (data_dir / "lock").touch()
    (records / f"{name}.json").write_text(json.dumps(told))
    return root.parent


def templates(base: Path) -> tuple[Path, Path]:
    template = base / "firecracker/.overlay-templates/overlay-8mib.ext4"
    snapshot = base / "firecracker/.snapshots/0a/0b/snapshot.memory"
    for path in (template, snapshot):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    return template, snapshot


class Disk:
    """Tells how much is free: so much, and more when these are gone."""

    def __init__(self, free: int, frees: dict[Path, int] | None = None) -> None:
        self.free = free
        self.frees = frees or {}

    def __call__(self, path: Path) -> int:
        return self.free + sum(size for each, size in self.frees.items() if not each.exists())


async def look(folder: Path, measure: Callable[[Path], int], names: tuple[str, ...] = ("vms",)) -> DiskVerdict | None:
    config = configuration(scalers_file(folder, folder / "jail", names))
    return await guard(config, data_dir=folder / "data", clock=SimClock(), measure=measure)


@pytest.mark.spec("scaler 40")
async def test_with_room_nothing_is_removed() -> None:
    with vm_host() as (folder, _):
        dead = a_dead_machine(folder / "jail", folder / "data")
        verdict = await look(folder, Disk(2 * FREE_BYTES_MIN))
        assert verdict == DiskVerdict(recovered=True, free_bytes_after=2 * FREE_BYTES_MIN)
        assert dead.exists()


@pytest.mark.spec("scaler 40")
async def test_dead_machines_of_every_scaler_are_cleared_away_and_templates_stay() -> None:
    with vm_host() as (folder, _):
        first = a_dead_machine(folder / "jail", folder / "data")
        second = a_dead_machine(folder / "jail", folder / "data", scaler="others", name="scaler-firecracker-0000beef")
        kept = templates(folder / "jail")
        disk = Disk(100 * MIB, {first: FREE_BYTES_MIN, second: FREE_BYTES_MIN})
        verdict = await look(folder, disk, ("vms", "others"))
        assert verdict == DiskVerdict(reaped=2, recovered=True, free_bytes_after=2 * FREE_BYTES_MIN + 100 * MIB)
        assert not first.exists()
        assert not second.exists()
        assert all(path.exists() for path in kept)


@pytest.mark.spec("scaler 40")
async def test_what_can_be_made_again_goes_when_that_was_not_enough() -> None:
    with vm_host() as (folder, _):
        dead = a_dead_machine(folder / "jail", folder / "data")
        template, snapshot = templates(folder / "jail")
        disk = Disk(100 * MIB, {dead: MIB, template: MIB, snapshot: FREE_BYTES_MIN})
        verdict = await look(folder, disk)
        assert verdict is not None
        assert (verdict.reaped, verdict.recovered) == (3, True)
        assert not template.exists()


@pytest.mark.spec("scaler 40")
async def test_without_anything_to_remove_the_start_gives_up_after_a_pause_and_says_what_helps() -> None:
    with vm_host() as (folder, _):
        clock = SimClock()
        began = clock.monotonic()
        config = configuration(scalers_file(folder, folder / "jail"))
        with pytest.raises(Retryable, match=r"only 100 MiB are free for .*/jail, .* `kici-admin scaler reap-orphans`"):
            await guard(config, data_dir=folder / "data", clock=clock, measure=Disk(100 * MIB))
        assert clock.monotonic() - began >= 10


async def test_without_scalers_of_microvms_nobody_looks(tmp_path: Path) -> None:
    def fail(_: Path) -> int:
        raise AssertionError("nobody asked")

    assert await guard(ScalersConfig(scalers=()), data_dir=tmp_path, clock=SimClock(), measure=fail) is None


@pytest.mark.spec("scaler 40")
async def test_a_machine_that_runs_keeps_its_directory() -> None:
    async with real_microvms() as bench:
        assert isinstance(bench, RealMicroVmBench)
        await bench.backend.spawn(bench.order(an_id(1), Kind.LIVES), bench.heard.on_event)
        dead = a_dead_machine(bench.settings.base, bench.settings.data_dir)
        before = bench.vmm_pids()
        disk = Disk(100 * MIB, {dead: FREE_BYTES_MIN})
        verdict = await look(bench.folder, disk)
        assert verdict is not None
        assert verdict.reaped == 1
        assert bench.vmm_pids() == before
        assert (bench.settings.base / "firecracker" / an_id(1)).exists()
        assert bench.network.run("ip", "link", "show", f"kici-{an_id(1)[-8:]}"), "so does its network"


# ---------------------------------------------------------------------- the programs, on a small disk


@contextmanager
def small_disk(mib: int) -> Iterator[Path]:
    """A host whose machines have a disk of their own, of so many MiB."""
    with vm_host() as (folder, _):
        base = folder / "jail"
        base.mkdir()
        subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(base)), check=True)
        try:
            yield folder
        finally:
            subprocess.run(("umount", str(base)), check=True)


def reap(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "kici", "admin", "scaler", "reap-orphans", *more)
    options = ("--scalers", str(scalers_file(folder, folder / "jail")), "--data-dir", str(folder / "data"))
    return subprocess.run((*command, *options), capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.spec("scaler 40")
def test_by_hand_the_dead_are_cleared_away_and_the_figures_told() -> None:
    with small_disk(1100) as folder:
        dead = a_dead_machine(folder / "jail", folder / "data", mib=120)
        done = reap(folder)
        assert (done.returncode, done.stdout) == (0, "1 leftover was cleared away; 1.1 GiB are free.\n"), done.stderr
        assert not dead.exists()
        done = reap(folder, "--json")
        assert json.loads(done.stdout) == {"reaped": 0, "recovered": True, "freeBytesAfter": 1100 * MIB}


@pytest.mark.spec("scaler 40")
def test_a_coordinator_on_a_full_disk_clears_it_and_runs_and_by_hand_it_is_left_to_that() -> None:
    with small_disk(1100) as folder:
        dead = a_dead_machine(folder / "jail", folder / "data", mib=120)
        scalers = scalers_file(folder, folder / "jail")
        with CoordinatorProgram(folder / "data", extra=("--scalers", str(scalers))) as coordinator:
            assert not dead.exists()
            assert "vm.disk_cleared" in coordinator.log.read_text()
            late = a_dead_machine(folder / "jail", folder / "data", name="scaler-firecracker-0000feed")
            done = reap(folder)
            assert done.returncode == 1
            assert "a coordinator answers at http://127.0.0.1:" in done.stderr
            assert late.exists()
            forced = reap(folder, "--force")
            assert forced.returncode == 0, forced.stderr
            assert not late.exists()


@pytest.mark.spec("scaler 40")
def test_a_coordinator_that_finds_no_room_ends_and_says_why() -> None:
    with small_disk(100) as folder:
        scalers = scalers_file(folder, folder / "jail")
        command = (sys.executable, "-m", "kici", "up", "--port", "0", "--scalers", str(scalers))
        whole = (*command, "--data-dir", str(folder / "data"))
        done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode != 0
        assert "only 100 MiB are free for" in done.stderr
        assert "no leftovers were found to remove" in done.stderr
