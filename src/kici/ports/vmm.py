"""Programs that run microVMs: what differs between them, behind one port.

A machine lives in its directory.  Its process is started so that it outlives whoever started it, writes its console
to a file, and can be found again from the directory alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from kici.decide.microvm import Bridge, Guest, Machine
from kici.decide.microvm_probe import Probe
from kici.domain.errors import DeterministicRefusal
from kici.domain.ids import AgentId
from kici.ports.processes import Exit, ProcessId


@dataclass(frozen=True, slots=True)
class VmPlace:
    """Where one machine lives."""

    vm_id: AgentId
    folder: Path
    """Everything of it on disk."""

    @property
    def root(self) -> Path:
        """What the VMM itself can see."""
        return self.folder / "root"

    @property
    def console(self) -> Path:
        """What the guest prints."""
        return self.folder / "console.log"


class SnapshotUnusable(DeterministicRefusal):
    """The machine cannot be what a snapshot says; it could still boot."""


class VmStart(Enum):
    """How a guest begins."""

    BOOT = auto()
    WARM_UP = auto()
    """It boots, to become a snapshot: it has no address, and its link is down."""
    RESTORE = auto()
    """It goes on where another one was stopped; `Vmm.snapshot_files` are in its root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmSpec:
    """One machine to start.  Its files are in place."""

    place: VmPlace
    machine: Machine
    guest: Guest
    bridge: Bridge
    has_initrd: bool
    boot_data: Mapping[str, object] = field(repr=False)
    mark: str
    """Value of `ports.processes.MARK` for programs whose environment is ours to set."""
    start: VmStart = VmStart.BOOT


class RunningVm(Protocol):
    """The process of one machine.  Holding it keeps a handle of the host's; `close` gives it back."""

    @property
    def id(self) -> ProcessId: ...

    def is_alive(self) -> bool: ...

    async def wait(self) -> Exit: ...

    def kill_now(self) -> bool:
        """Send KILL before anything else can happen.  False: the host does not let us; `kill` may know a way.

        One that is gone counts as killed.
        """
        ...

    async def kill(self) -> None:
        """End it by force, and return when it is gone.  Raises `Retryable` naming what would help."""
        ...

    def close(self) -> None: ...


class Vmm(Protocol):
    """One program and how this scaler runs it."""

    @property
    def kind(self) -> str:
        """Also the name of the folder below the base that its machines live in."""
        ...

    @property
    def owner(self) -> tuple[int, int] | None:
        """uid and gid that machines run as; None: ours."""
        ...

    @property
    def opens_interface_at_launch(self) -> bool:
        """The guest's interface has to be there before the program starts, not only before the guest does."""
        ...

    @property
    def files(self) -> Mapping[str, str]:
        """File names below a machine's root: `kernel`, `initrd`, `rootfs`, `overlay`, `log`."""
        ...

    async def launch(self, spec: VmSpec) -> RunningVm:
        """Start the program; the guest does not run yet.  A cancelled or failed call leaves no process behind."""
        ...

    async def boot(self, spec: VmSpec) -> None:
        """Tell it what machine to be, hand over the boot data, and start the guest.

        Here or in `launch`: raises `SnapshotUnusable` when it cannot be restored.
        """
        ...

    @property
    def snapshot_files(self) -> tuple[str, ...]:
        """Names below a machine's root of what `snapshot` writes and a restore reads."""
        ...

    def fingerprint(self) -> str:
        """Which program it is, and on which processor; another one does not read our snapshots."""
        ...

    async def snapshot(self, place: VmPlace) -> None:
        """Stop a guest, and write what it is to files.  The machine is of no use afterwards but to be ended.

        Raises `DeterministicRefusal` when this program could not give the copies what they need.
        """
        ...

    async def forget_boot_data(self, place: VmPlace) -> None:
        """Make what was handed over unreadable in the guest.  A machine that is gone: no-op."""
        ...

    async def ask_to_stop(self, place: VmPlace) -> bool:
        """Ask the guest to end.  False: it cannot be asked."""
        ...

    def probe(self, place: VmPlace) -> Probe:
        """What runs for this machine, now."""
        ...

    def hold(self, place: VmPlace, probe: Probe) -> RunningVm | None:
        """The process that a probe saw; None when it is gone by now."""
        ...

    async def tidy(self, place: VmPlace) -> None:
        """Take away what the program leaves outside of the machine's directory."""
        ...

    async def problems(self) -> list[str]:
        """What this host lacks to run machines: a sentence each."""
        ...
