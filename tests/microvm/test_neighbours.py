"""Several on one host: guests beside guests, scalers that share a folder, and coordinators that share the machine."""

import shutil
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from tests.microvm.lab import until
from tests.microvm.linux_guest import linux_guest
from tests.microvm.orchestra import GATEWAY, PORT, firecracker_entry, orchestra
from tests.microvm.qemu_bench import QemuBench
from tests.microvm.real_bench import BRIDGE, RealMicroVmBench, vm_host

from kici.domain.ids import AgentId, ScalerName
from kici.domain.spawn import ScaleDownReason
from kici.testing.contracts.backend import Kind, an_id

pytestmark = [pytest.mark.xdist_group("microvms"), pytest.mark.timeout(180)]
firecracker = pytest.mark.engine("firecracker")
OTHER = replace(BRIDGE, name="kici-br1", cidr=IPv4Network("10.201.0.0/24"), gateway=IPv4Address("10.201.0.1"))


def place(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


@firecracker
async def test_two_coordinators_on_one_host_do_not_interfere() -> None:
    """Bridges of their own; even the folder of the machines may be the same."""
    with vm_host() as (folder, network):
        first = RealMicroVmBench(place(folder, "a"), network)
        second = RealMicroVmBench(place(folder, "b"), network, bridge=OTHER)
        second.configure(base=first.settings.base)
        second.jail = replace(second.jail, base=first.jail.base)
        await first.start()
        await second.start()
        try:
            await first.backend.spawn(first.order(an_id(1), Kind.LIVES), first.heard.on_event)
            await second.backend.spawn(second.order(an_id(2), Kind.LIVES), second.heard.on_event)
            for bench in (first, second):
                assert await bench.backend.sweep() == 0
            await first.restart()
            assert await first.backend.cleanup_orphans(frozenset()) == 1, "its own, and no other"
            assert set(second.vmm_pids()) == {an_id(2)}
            assert (await second.host_network.health()).is_healthy
            assert list(await second.host_network.admitted()) == ["10.201.0.2"]
            assert await second.host_network.taps() == [f"kici-{an_id(2)[-8:]}"]
            assert not second.heard.failures(an_id(2))
        finally:
            await second.close()
            await first.close()
        assert not {kind: found for kind, found in first.leftovers().items() if found}


@firecracker
async def test_two_scalers_that_share_a_folder_list_one_machine_and_keep_each_others() -> None:
    with vm_host() as (folder, network):
        first = RealMicroVmBench(folder, network)
        second = RealMicroVmBench(folder, network, scaler=ScalerName("more"))
        await first.start()
        second.pool = first.pool
        await second.start()
        try:
            await first.backend.spawn(first.order(an_id(1), Kind.LIVES), first.heard.on_event)
            seen = [one for bench in (first, second) for one in await bench.backend.live_vms()]
            assert seen == []  # the contract's ids are not those of microVMs, so nothing is listed
            await second.restart()
            assert await second.backend.cleanup_orphans(frozenset()) == 0
            assert not await second.backend.reap_unowned(an_id(1)), "another scaler's record names it"
            assert set(first.vmm_pids()) == {an_id(1)}
            await first.backend.destroy(an_id(1), ScaleDownReason.IDLE)
        finally:
            await second.close()
            await first.close()


@firecracker
@pytest.mark.spec("scaler 34.3.6")
async def test_only_machines_are_listed_not_what_lies_beside_them() -> None:
    with vm_host() as (folder, network):
        bench = RealMicroVmBench(folder, network)
        await bench.start()
        vm_id = AgentId("scaler-firecracker-0000000a")
        try:
            await bench.backend.spawn(bench.order(vm_id, Kind.LIVES), bench.heard.on_event)
            templates = bench.settings.base / "firecracker/.overlay-templates"
            assert list(templates.iterdir()), "what drives are copied from"
            # Even one that looks just like a machine that runs.
            (templates / "root").mkdir()
            shutil.copy(bench.settings.base / "firecracker" / vm_id / "root/firecracker.pid", templates / "root")
            assert [one.vm_id for one in await bench.backend.live_vms()] == [vm_id]
            assert await bench.backend.sweep() == 0
            assert templates.exists()
            await bench.backend.destroy(vm_id, ScaleDownReason.IDLE)
        finally:
            await bench.close()


@firecracker
def test_a_guest_can_be_nobody_but_itself_and_reaches_no_neighbour() -> None:
    with orchestra(firecracker_entry()) as one:
        holder = one.coordinator.run("run", "-d", "-l", "tiny", "--", "hold").stdout.strip()
        until(lambda: one.coordinator.job(holder)["status"] == "running", seconds=120, what="it holds")
        done = one.coordinator.run("run", "-l", "tiny", "--", "probe", "10.200.0.2:22")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "10.200.0.2:22 unreachable\n"
        forged = one.coordinator.run("run", "-l", "tiny", "--", "forge", "10.200.0.2", f"{GATEWAY}:{PORT}")
        assert forged.returncode == 0, forged.stderr
        assert forged.stdout == "timeout\n", "what carries another's address is dropped"
        one.coordinator.run("cancel", holder, "--force")


@pytest.mark.engine("qemu")
async def test_a_machine_of_another_coordinator_with_the_same_id_is_left_alone() -> None:
    linux_guest()  # made while there is still a way out
    with vm_host() as (folder, network):
        first = QemuBench(place(folder, "a"), network)
        second = QemuBench(place(folder, "b"), network, bridge=OTHER)
        await first.start()
        await second.start()
        try:
            await first.backend.spawn(first.order(an_id(1), Kind.LIVES), first.heard.on_event)
            before = first.vmm_pids()
            # What a coordinator leaves that is killed before its QEMU has written down its number.
            (second.settings.base / "qemu" / an_id(1) / "root").mkdir(parents=True)
            (second.settings.base / "qemu" / an_id(1) / "console.log").touch()
            assert await second.backend.reap_unowned(an_id(1))
            assert first.vmm_pids() == before
            assert second.leftovers()["folders"] == set()
        finally:
            await second.close()
            await first.close()
