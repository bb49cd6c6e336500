"""Scalers of microVMs on this host: which implementations they are made of."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kici.adapters import proc
from kici.adapters.block_drives import HostDrives
from kici.adapters.entropy import SystemEntropy
from kici.adapters.files import RealFiles
from kici.adapters.firecracker_vmm import FirecrackerTools, FirecrackerVmm
from kici.adapters.host_commands import HostCommands
from kici.adapters.host_network import IpHostNetwork
from kici.adapters.ipam import AddressPool, MemoryAddresses, StoredAddresses
from kici.adapters.qemu_vmm import QemuTools, QemuVmm
from kici.adapters.this_host import resolvers
from kici.backends.firecracker.backend import MicroVmBackend
from kici.backends.firecracker.factory import bridge_of, settings_of
from kici.backends.firecracker.records import VmRecords
from kici.backends.firecracker.settings import MicroVmSettings, MicroVmTools
from kici.config.model import BackendType, FirecrackerNetwork, LabelSet, ScalerEntry, Vmm
from kici.decide.isolate import Needs, needs_of
from kici.decide.launch import CgroupSupport
from kici.decide.microvm_firecracker import Jail
from kici.domain.errors import Misconfigured
from kici.domain.ids import ScalerName
from kici.domain.resources import ResourceRequest
from kici.domain.spawn import Spawn
from kici.ports.addresses import Addresses
from kici.ports.backend import Backend
from kici.ports.clock import Clock
from kici.ports.processes import Processes
from kici.ports.vmm import Vmm as VmmPort

if TYPE_CHECKING:
    from kici.apps.backends import Site


class MicroVms:
    """Makes and changes backends of microVMs; all share one bridge."""

    def __init__(self, site: "Site", defaults: Callable[[], ResourceRequest]) -> None:
        """`defaults()`: resources that the scalers file in force gives to who declares none."""
        self._site = site
        self._defaults = defaults
        self._pool = AddressPool()
        self._networks: dict[ScalerName, FirecrackerNetwork] = {}
        self._places: dict[ScalerName, tuple[str, Vmm]] = {}

    def build(self, entry: ScalerEntry, network: FirecrackerNetwork) -> MicroVmBackend:
        site = self._site
        self._networks[entry.name] = network
        self._places[entry.name] = (entry.chroot_base_dir, entry.vmm)
        commands = HostCommands(sudo=entry.require_sudo)
        vmm = make_vmm(
            entry,
            processes=site.tools.processes,
            commands=commands,
            cgroups=site.tools.cgroups.support,
            socket_wait_ms=site.socket_wait_ms,
        )
        return MicroVmBackend(
            settings=self._settings(entry),
            tools=make_tools(entry, network, vmm, commands, addresses=self._addresses(entry), clock=site.clock),
            supervisor=site.supervisor,
            on_exit=site.on_exit,
        )

    def check(self, entry: ScalerEntry) -> None:
        """Raises `Misconfigured` for what cannot change while machines run."""
        now = (entry.chroot_base_dir, entry.vmm)
        if self._places.get(entry.name, now) != now:
            raise Misconfigured(
                f"scaler {entry.name}: chrootBaseDir and vmm cannot change while it runs; "
                "give the changed scaler another name, or restart the coordinator"
            )

    def apply(self, backend: Backend, entry: ScalerEntry) -> None:
        """Take over a changed entry.  The bridge stays as it is until the next start."""
        assert isinstance(backend, MicroVmBackend), backend
        backend.configure(self._settings(entry))

    def entry_of_records(self, row: Spawn) -> ScalerEntry | None:
        """Enough of a scaler that left the file to end a machine of it; None: no record says where that is."""
        record = VmRecords(RealFiles(), self._site.data_dir.resolve()).read(row.agent_id)
        if record is None:
            return None
        return ScalerEntry(
            name=row.scaler,
            type=BackendType.FIRECRACKER,
            max_agents=1,
            label_sets=(LabelSet(labels=row.label_set, rootfs_path="gone"),),
            vmm=Vmm(record.vmm),
            kernel_path="gone",
            firecracker_path="firecracker",
            jailer_path="jailer",
            chroot_base_dir=str(Path(record.folder).parents[1]),
        )

    def _settings(self, entry: ScalerEntry) -> MicroVmSettings:
        network = self._networks[entry.name]
        return settings_of(
            entry, network, data_dir=self._site.data_dir, environ=self._site.environ, defaults=self._defaults
        )

    def _addresses(self, entry: ScalerEntry) -> Addresses:
        bridge, store = bridge_of(self._networks[entry.name]), self._site.addresses
        if store is None:
            return MemoryAddresses(self._pool, bridge=bridge, scaler=entry.name)
        return StoredAddresses(store, bridge=bridge, scaler=entry.name, instance_id=self._site.instance_id)


def make_tools(  # a backend is made of these
    entry: ScalerEntry,
    network: FirecrackerNetwork,
    vmm: VmmPort,
    commands: HostCommands,
    *,
    addresses: Addresses,
    clock: Clock,
) -> MicroVmTools:
    """What a backend reaches this host by."""
    return MicroVmTools(
        vmm=vmm,
        network=IpHostNetwork(bridge_of(network), commands),
        addresses=addresses,
        drives=HostDrives(Path(entry.chroot_base_dir) / vmm.kind, commands),
        files=RealFiles(),
        clock=clock,
        entropy=SystemEntropy(),
        needs=partial(_needs, entry),
    )


def make_vmm(
    entry: ScalerEntry,
    *,
    processes: Processes,
    commands: HostCommands,
    cgroups: CgroupSupport,
    socket_wait_ms: Callable[[], int],
) -> VmmPort:
    """The driver of an entry."""
    boot = proc.boot_id() if sys.platform == "linux" else ""
    if entry.vmm is Vmm.QEMU:
        run_as = None if entry.uid is None else (entry.uid, entry.uid if entry.gid is None else entry.gid)
        return QemuVmm(
            QemuTools(
                processes=processes,
                commands=commands,
                boot=boot,
                accel=entry.accel.value,
                run_as=run_as,
                socket_wait_ms=socket_wait_ms,
            )
        )
    jail = Jail(
        jailer=entry.jailer_path or "",
        firecracker=entry.firecracker_path or "",
        base=entry.chroot_base_dir,
        uid=entry.uid or 0,
        gid=entry.gid or 0,
    )
    tools = FirecrackerTools(
        processes=processes, commands=commands, cgroups=cgroups, boot=boot, socket_wait_ms=socket_wait_ms
    )
    return FirecrackerVmm(jail, tools)


def _needs(entry: ScalerEntry, url: str) -> Needs:
    names = {extra.name: extra.address for extra in entry.extra_hosts}
    return needs_of(url, resolvers=resolvers(), names=names)
