"""What a scaler of microVMs is told, and what reaches the host for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kici.config.grammar import ExtraHost
from kici.decide.isolate import Needs, Policy
from kici.decide.microvm import Machine as Hardware
from kici.domain.ids import ScalerName
from kici.domain.resources import NOTHING, Amount
from kici.ports.addresses import Addresses
from kici.ports.backend import SpawnOrder
from kici.ports.clock import Clock
from kici.ports.drives import Drives
from kici.ports.entropy import Entropy
from kici.ports.files import Files
from kici.ports.host_network import HostNetwork
from kici.ports.vmm import Vmm, VmStart


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroVmSet:
    """One kind of guest."""

    labels: tuple[str, ...]
    kernel: Path
    initrd: Path | None
    rootfs: Path
    overlay_mib: int
    policy: Policy
    env: Mapping[str, str] = field(repr=False)
    """Variables of the agent, the operator's included, as far as they fit."""
    backpressure: str | None
    hardware: Callable[[Amount], tuple[int, int]]
    """Processors and MiB for these limits."""
    snapshot_start: bool = False
    """Start from a snapshot of a guest that was warmed up, where that can be done."""
    declared: Callable[[], Amount] = lambda: NOTHING
    """Limits of a job that asks for none: those of the set, or else of the scalers file in force."""

    @property
    def limits(self) -> Amount:
        """A snapshot has the hardware for these."""
        return self.declared()

    def settled(self) -> "MicroVmSet":
        """The same set, whatever becomes of the scalers file meanwhile."""
        limits = self.limits
        return replace(self, declared=lambda: limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroVmSettings:
    scaler: ScalerName
    """Name of the configuration entry."""
    max_agents: int
    """Most machines at once on this host."""
    sets: tuple[MicroVmSet, ...]
    """Settings of each label set."""
    base: Path
    """Folder that holds a folder for each VMM."""
    data_dir: Path
    """Where records are kept."""
    extra_hosts: tuple[ExtraHost, ...] = ()
    """Further names that guests can resolve."""
    auto_provision: bool = True
    """Make and mend the bridge by ourselves."""
    stop_seconds: float = 5.0
    """How long a guest may take to end when it is asked, before it is forced."""
    sweep_seconds: float = 900.0
    """Pause between two looks for what is left over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroVmTools:
    """How the backend reaches the host."""

    vmm: Vmm
    network: HostNetwork
    addresses: Addresses
    drives: Drives
    files: Files
    clock: Clock
    entropy: Entropy
    needs: Callable[[str], Needs]
    """What every agent must reach that connects to this address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A guest that waits for somebody to be."""

    key: str
    """Of all that it depends on."""
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One machine to make."""

    spawn: SpawnOrder
    chosen: MicroVmSet
    extra_hosts: tuple[ExtraHost, ...]
    start: VmStart = VmStart.BOOT
    snapshot: Snapshot | None = None
    """What it is restored from, where that is how it starts."""
    why_boots: str | None = None
    """Why there is no snapshot for it, where one is wished for."""

    @property
    def machine(self) -> Hardware:
        return hardware_of(self.chosen, self.spawn.limits)


def hardware_of(chosen: MicroVmSet, limits: Amount) -> Hardware:
    vcpus, mib = chosen.hardware(limits)
    return Hardware(vcpus=vcpus, mem_mib=mib, overlay_mib=chosen.overlay_mib, limits=limits)
