"""Which backends the entries of a file become, on a coordinator and on a worker."""

from ipaddress import IPv4Network
from pathlib import Path
from typing import Never, cast

import pytest

from kici.adapters.entropy import SystemEntropy
from kici.apps import worker
from kici.apps.backends import FleetBuilder, Site, local_tools
from kici.apps.provisioning import Provisioning
from kici.backends.firecracker.backend import MicroVmBackend
from kici.config.model import BackendType, Defaults, FirecrackerNetwork, LabelSet, ScalerEntry, ScalersConfig, Vmm
from kici.domain.errors import Misconfigured
from kici.domain.ids import InstanceId, ScalerName
from kici.domain.resources import Ask, ResourceRequest
from kici.kit.supervise import Supervisor
from kici.testing.cloud_bench import a_cloud_scaler
from kici.testing.sim_clock import SimClock


def nowhere() -> Never:
    raise AssertionError("nothing is sent")


def builder(folder: Path, supervisor: Supervisor) -> FleetBuilder:
    clock = SimClock()
    return FleetBuilder(
        Site(
            data_dir=folder,
            environ={},
            url="ws://10.0.0.1:4000/ws",
            clock=clock,
            supervisor=supervisor,
            on_exit=lambda agent_id, how: None,
            tools=local_tools(clock, None),
            instance_id=InstanceId("here"),
            provisioning=Provisioning(find_events=nowhere, find_claims=nowhere, entropy=SystemEntropy()),
        )
    )


def microvms(name: str, folder: Path) -> ScalerEntry:
    return ScalerEntry(
        name=ScalerName(name),
        type=BackendType.FIRECRACKER,
        max_agents=2,
        label_sets=(LabelSet(labels=(name,), rootfs_path=str(folder / "rootfs")),),
        vmm=Vmm.QEMU,
        kernel_path=str(folder / "kernel"),
        chroot_base_dir=str(folder / "vms"),
    )


@pytest.mark.spec("scaler 7.5")
async def test_a_scaler_that_a_reload_adds_is_built_for_the_network_of_the_new_file(tmp_path: Path) -> None:
    async with Supervisor("test") as supervisor:
        made = builder(tmp_path, supervisor)
        old = FirecrackerNetwork(cidr=IPv4Network("172.30.0.0/24"))
        first = made.fleet(ScalersConfig(scalers=(microvms("a", tmp_path),), firecracker=old)).runtimes["a"]  # type: ignore[index]
        made.network = FirecrackerNetwork(cidr=IPv4Network("172.31.0.0/24"))
        added = made.build(microvms("b", tmp_path))
        backends = [runtime.backend for runtime in (first, added)]
        assert all(isinstance(backend, MicroVmBackend) for backend in backends)
        bridges = [cast(MicroVmBackend, backend)._tools.network.bridge for backend in backends]
        assert [str(bridge.cidr) for bridge in bridges] == ["172.30.0.0/24", "172.31.0.0/24"]


async def test_snapshots_have_what_the_file_in_force_gives_to_who_declares_no_resources(tmp_path: Path) -> None:
    async with Supervisor("test") as supervisor:
        made = builder(tmp_path, supervisor)
        given = Defaults(resources=ResourceRequest(limits=Ask(memory="1g")))
        fleet = made.fleet(ScalersConfig(scalers=(microvms("a", tmp_path),), defaults=given))
        (chosen,) = cast(MicroVmBackend, fleet.runtimes[ScalerName("a")].backend).settings.sets
        assert chosen.limits.memory_bytes == 2**30
        made.defaults = ResourceRequest(limits=Ask(memory="2g"))  # as a reload does
        assert chosen.limits.memory_bytes == 2**31


@pytest.mark.spec("scaler 7.5")
def test_a_host_without_a_store_takes_no_event_scaler_and_says_where_it_belongs() -> None:
    with pytest.raises(Misconfigured, match=r"scaler cloud: .* move the entry to the file of a coordinator"):
        worker._check(ScalersConfig(scalers=(a_cloud_scaler(),)))
