"""Starting from snapshots, on a host in memory: when one is made, used, thrown away and removed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.microvm.fake_bench import SETTINGS, FakeMicroVmBench, an_order

from kici.backends.firecracker.factory import microvm_set
from kici.backends.firecracker.settings import MicroVmSet
from kici.config.model import BackendType, LabelSet, ScalerEntry
from kici.decide.microvm_snapshot import ABANDONED_MS
from kici.domain.errors import KiciError, Retryable
from kici.domain.ids import AgentId, Instant
from kici.domain.resources import Amount, Ask, ResourceRequest, resolve
from kici.domain.spawn import ScaleDownReason
from kici.ports.backend import SpawnEventType
from kici.ports.vmm import VmStart
from kici.testing.contracts.backend import Kind, an_id
from kici.testing.fake_microvms import GuestScript
from kici.testing.sim_clock import SimClock
from kici.testing.virtual_time import virtual

VM = an_id(1)
SNAPSHOTS = Path("/srv/jailer/firecracker/.snapshots")


def a_snapshot_set(**changes: object) -> MicroVmSet:
    chosen = replace(SETTINGS.sets[0], snapshot_start=True, env={"SECRET": "of the label set"})
    return replace(chosen, **changes)  # type: ignore[arg-type]  # as its caller knows


@asynccontextmanager
async def snapshots(
    chosen: MicroVmSet | None = None, script: GuestScript | None = None
) -> AsyncIterator[FakeMicroVmBench]:
    bench = FakeMicroVmBench()
    bench.with_settings(sets=(chosen or a_snapshot_set(),))
    if script is not None:
        bench.host.script = script
    await bench.start()
    await bench.backend.recover(frozenset())
    yield bench
    bench.host.faults.clear()
    await bench.close()
    assert not bench.on_host()
    assert not kept(bench), "a scaler that ends takes its snapshots with it"


def kept(bench: FakeMicroVmBench) -> list[str]:
    """Files of snapshots."""
    return sorted(path.name for path in bench.host.files.contents if SNAPSHOTS in path.parents)


async def spawn(bench: FakeMicroVmBench, vm_id: AgentId = VM, **changes: object) -> VmStart:
    order = replace(an_order(vm_id, Kind.LIVES), **changes)  # type: ignore[arg-type]  # as its caller knows
    await bench.backend.spawn(order, bench.heard.on_event)
    start = bench.host.processes[vm_id].start
    assert start is not None
    return start


def told(bench: FakeMicroVmBench, vm_id: AgentId = VM) -> str:
    """What people see of how it starts."""
    (event,) = [one for one in bench.heard.events if one.agent_id == vm_id and one.type is SpawnEventType.READY]
    return event.detail


@virtual
async def test_the_first_machine_boots_and_later_ones_go_on_from_a_snapshot() -> None:
    async with snapshots() as bench:
        assert await spawn(bench) is VmStart.BOOT
        assert told(bench).endswith("since its snapshot is not made yet")
        await asyncio.sleep(5)
        assert kept(bench) == ["memory", "overlay", "state"]
        assert await spawn(bench, an_id(2)) is VmStart.RESTORE
        assert "goes on from a snapshot" in told(bench, an_id(2))
        assert bench.host.calls.count("snapshot") == 1


@virtual
async def test_a_scaler_that_ends_takes_its_snapshots_with_it_where_a_machine_resists_too() -> None:
    async with snapshots() as bench:
        await asyncio.sleep(5)
        await spawn(bench)
        bench.host.processes[VM].resists = True
        with pytest.raises(Retryable):
            await bench.backend.shutdown_all()
        assert not kept(bench)
        bench.host.processes[VM].resists = False


@virtual
async def test_what_is_copied_was_told_nothing_and_what_is_restored_is_told_what_no_other_has() -> None:
    async with snapshots() as bench:
        await asyncio.sleep(0.5)
        (template,) = bench.host.running().values()
        assert template.boot_data == {"latest": {"meta-data": {"kici-warm": "1"}}}
        await asyncio.sleep(5)
        assert not bench.on_host(), "the template is gone, with its interface"
        seen = []
        for number in (1, 2):
            await spawn(bench, an_id(number))
            data = bench.host.processes[an_id(number)].boot_data
            assert data is not None
            seen.append(data["latest"]["meta-data"])
        for key in ("kici-address", "kici-mac", "kici-entropy", "kici-agent-id"):
            assert seen[0][key] != seen[1][key]
        assert (seen[0]["kici-address"], seen[0]["kici-mac"]) == ("10.0.0.2", "06:00:AC:00:00:02")
        assert len(bytes.fromhex(seen[0]["kici-entropy"])) == 64
        assert seen[0]["kici-env"] == {"SECRET": "of the label set"}
        assert seen[0]["kici-agent-token"] == "sesame"
        await bench.backend.boot_data_read(VM)
        assert bench.host.processes[VM].boot_data is None


@virtual
async def test_a_guest_that_cannot_renew_something_is_not_copied() -> None:
    script = GuestScript(warms="kici-init: warm address mac\n")
    async with snapshots(script=script) as bench:
        await asyncio.sleep(5)
        assert await spawn(bench) is VmStart.BOOT
        assert told(bench).endswith("since its guest cannot renew: clock, entropy")
        await asyncio.sleep(3600)
        assert bench.host.calls.count("launch") == 2, "what is refused is not tried again"


@virtual
async def test_a_guest_that_does_not_know_what_to_warm_up_is_not_copied() -> None:
    async with snapshots(script=GuestScript(warms=None)) as bench:
        await asyncio.sleep(5)
        assert await spawn(bench) is VmStart.BOOT
        assert "its guest ended instead of waiting" in told(bench)


@virtual
async def test_what_the_scalers_file_gives_to_all_is_the_hardware_of_a_snapshot_too() -> None:
    declared = ResourceRequest(limits=Ask(memory="512m"))

    def by_file() -> Amount:
        """Limits of a job that declares none, as the router resolves them."""
        return resolve(None, label_set.resources, declared).limits

    label_set = LabelSet(labels=("linux", Kind.LIVES.value), rootfs_path="/opt/rootfs.ext4", snapshot_start=True)
    entry = ScalerEntry(
        name=SETTINGS.scaler,
        type=BackendType.FIRECRACKER,
        max_agents=4,
        label_sets=(label_set,),
        kernel_path="/opt/vmlinux",
    )
    async with snapshots(microvm_set(entry, label_set, {}, lambda: declared)) as bench:
        await asyncio.sleep(5)
        assert await spawn(bench, limits=by_file()) is VmStart.RESTORE
        declared = ResourceRequest(limits=Ask(memory="1g"))  # a reload
        assert await spawn(bench, an_id(2), limits=by_file()) is VmStart.BOOT
        await asyncio.sleep(5)
        assert await spawn(bench, an_id(3), limits=by_file()) is VmStart.RESTORE
        assert len({path.parent for path in bench.host.files.contents if SNAPSHOTS in path.parents}) == 1


@virtual
async def test_other_hardware_boots() -> None:
    async with snapshots(a_snapshot_set(hardware=lambda limits: (1, limits.memory_bytes // 2**20 or 128))) as bench:
        await asyncio.sleep(5)
        assert await spawn(bench, limits=Amount(memory_bytes=256 * 2**20)) is VmStart.BOOT
        assert told(bench).endswith("the job asks for 1 processors and 256 MiB, and the snapshot has 1 and 128")
        assert await spawn(bench, an_id(2)) is VmStart.RESTORE


@virtual
async def test_a_snapshot_is_of_its_images_its_vmm_and_nothing_else() -> None:
    async with snapshots() as bench:
        await asyncio.sleep(5)
        bench.host.images[Path("/opt/rootfs.ext4")] = "written anew"
        assert await spawn(bench) is VmStart.BOOT
        await asyncio.sleep(5)
        assert await spawn(bench, an_id(2)) is VmStart.RESTORE
        bench.host.fingerprint = "the next version"
        assert await spawn(bench, an_id(3)) is VmStart.BOOT
        await asyncio.sleep(5)
        assert kept(bench) == ["memory", "overlay", "state"], "what is of no use any more is gone"
        assert bench.host.calls.count("snapshot") == 3


@virtual
async def test_a_label_set_that_goes_takes_its_snapshot_with_it() -> None:
    async with snapshots() as bench:
        await asyncio.sleep(5)
        bench.with_settings(sets=SETTINGS.sets)
        bench.backend.configure(bench.settings)
        await asyncio.sleep(1)
        assert not kept(bench)


@virtual
async def test_what_a_crash_left_half_made_is_removed() -> None:
    async with snapshots() as bench:
        await asyncio.sleep(5)
        (owner,) = {path.parents[1] for path in bench.host.files.contents if SNAPSHOTS in path.parents}
        half = owner / "new-0123456789abcdef"
        bench.host.folders[half] = SimClock().now()
        await asyncio.sleep(905)
        assert half not in bench.host.folders
        assert kept(bench) == ["memory", "overlay", "state"]


@virtual
async def test_a_folder_of_a_scaler_that_is_gone_is_removed_after_a_day() -> None:
    async with snapshots() as bench:
        others = SNAPSHOTS / "0123456789abcdef"
        bench.host.folders[others] = Instant(SimClock().now() - ABANDONED_MS + 7_200_000)
        await asyncio.sleep(7000)
        assert others in bench.host.folders, "its scaler may run, in another coordinator"
        await asyncio.sleep(2000)
        assert others not in bench.host.folders


@virtual
async def test_a_snapshot_that_cannot_be_restored_is_thrown_away_and_the_machine_boots() -> None:
    async with snapshots() as bench:
        for number in (1, 2, 3):
            await asyncio.sleep(5)
            for path in bench.host.files.contents:
                if SNAPSHOTS in path.parents and path.name == "state":
                    bench.host.files.contents[path] = b"torn"
            assert await spawn(bench, an_id(number)) is VmStart.BOOT
        assert "state is no snapshot" in told(bench)
        assert "2 snapshots went wrong, the last one because state is no snapshot" in told(bench, an_id(3))
        assert not kept(bench)
        assert bench.host.calls.count("snapshot") == 2


@virtual
async def test_a_snapshot_whose_guest_never_comes_is_thrown_away() -> None:
    async with snapshots() as bench:
        await asyncio.sleep(5)
        await spawn(bench)
        await bench.backend.destroy(VM, ScaleDownReason.SPAWN_TIMEOUT)
        assert not kept(bench)
        assert await spawn(bench, an_id(2)) is VmStart.BOOT
        await asyncio.sleep(5)
        assert await spawn(bench, an_id(3)) is VmStart.RESTORE
        bench.host.processes[an_id(3)].end()
        await asyncio.sleep(5)
        assert not kept(bench)
        assert await spawn(bench, an_id(4)) is VmStart.BOOT
        assert told(bench, an_id(4)).endswith("the last one because its guest ended before it registered")


@virtual
async def test_a_guest_that_registered_or_is_not_needed_any_more_says_nothing_of_its_snapshot() -> None:
    async with snapshots() as bench:
        await asyncio.sleep(5)
        for number, reason in ((1, ScaleDownReason.SPAWN_TIMEOUT), (2, ScaleDownReason.JOB_COMPLETE)):
            await spawn(bench, an_id(number))
            if number == 1:
                bench.backend.mark_registered(an_id(number))
            await bench.backend.destroy(an_id(number), reason)
        assert kept(bench)


@virtual
async def test_without_room_none_is_made_until_there_is() -> None:
    bench = FakeMicroVmBench()
    bench.with_settings(sets=(a_snapshot_set(),))
    bench.host.free_bytes = 2**30
    await bench.start()
    await bench.backend.recover(frozenset())
    assert await spawn(bench) is VmStart.BOOT
    await asyncio.sleep(5)
    assert await spawn(bench, an_id(2)) is VmStart.BOOT
    assert told(bench, an_id(2)).endswith("since 1.1 GiB are needed on the disk, 1.0 GiB are free")
    bench.host.free_bytes = 2**40
    await asyncio.sleep(905)
    assert await spawn(bench, an_id(3)) is VmStart.RESTORE
    await bench.close()


@pytest.mark.parametrize("call", ["make_folder", "make_tap", "launch", "boot", "snapshot", "keep"])
@virtual
async def test_a_build_that_fails_leaves_nothing(call: str) -> None:
    bench = FakeMicroVmBench()
    bench.with_settings(sets=(a_snapshot_set(),))
    bench.host.faults[call] = KiciError(f"{call} does not work")
    await bench.start()
    await bench.backend.recover(frozenset())
    await asyncio.sleep(5)
    assert not bench.on_host()
    assert not kept(bench)
    bench.host.faults.clear()
    assert await spawn(bench) is VmStart.BOOT
    assert told(bench).endswith(f"since {call} does not work")
    await bench.close()
    assert not bench.on_host()


@virtual
async def test_a_coordinator_that_dies_during_a_build_finds_the_template_and_makes_another() -> None:
    async with snapshots(script=GuestScript(warm_seconds=50.0)) as bench:
        await asyncio.sleep(5)
        (template,) = bench.host.running()
        assert bench.backend.is_tracking(template), "an operator is not to take it for an orphan"
        bench.host.processes[template].resists = True
        await bench.restart()
        assert template in bench.host.running()
        bench.host.processes[template].resists = False
        await bench.backend.recover(frozenset())
        await asyncio.sleep(5)
        assert template in bench.host.running(), "what is left is not taken for nobody's by the way"
        await bench.backend.cleanup_orphans(frozenset())
        await asyncio.sleep(100)
        assert kept(bench) == ["memory", "overlay", "state"]


@virtual
async def test_a_restart_that_keeps_agents_finds_the_snapshot_again() -> None:
    async with snapshots() as bench:
        await asyncio.sleep(5)
        await bench.backend.release_all()
        await bench.restart()
        assert await spawn(bench) is VmStart.RESTORE
        assert bench.host.calls.count("snapshot") == 1
