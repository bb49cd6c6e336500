"""What a backend of microVMs offers beyond the contract of all backends: its machines as an operator sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kici.decide.classify import LiveVm, LiveVmSeen, StopResult, Tracker
from kici.domain.errors import Permanent, Retryable
from kici.domain.ids import AgentId, InstanceId, ScalerName


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The live machines of one node."""

    instance_id: InstanceId
    scalers: tuple[ScalerName, ...]
    """Scalers of microVMs there."""
    vms: tuple[LiveVm, ...]


class NodeSilent(Retryable):
    """The node that was asked did not answer in time."""


class NodeFailed(Permanent):
    """The node that was asked could not do it."""


@runtime_checkable
class LiveVmBackend(Protocol):
    async def live_vms(self) -> list[LiveVmSeen]:
        """Every machine in this scaler's folder whose process runs, tracked or not."""
        ...

    def is_tracking(self, vm_id: AgentId) -> bool: ...

    async def holds_address(self, vm_id: AgentId) -> bool: ...

    async def stop_untracked(self, vm_id: AgentId, trackers: Callable[[], Sequence[Tracker]]) -> StopResult:
        """Stop a machine that nobody tracks; `trackers` is asked again directly before the signal."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeState:
    """The network of this host's microVMs."""

    name: str
    faults: tuple[str, ...]
    heals: bool
    """What is wrong is mended before the next machine is made."""


@runtime_checkable
class BridgedBackend(Protocol):
    async def bridge_state(self) -> BridgeState:
        """Looks at the host.  Never raises for what is missing."""
        ...


@runtime_checkable
class BootDataBackend(Protocol):
    """A backend that hands its agents' credentials to them by a way that can be closed."""

    async def boot_data_read(self, agent_id: AgentId) -> None:
        """The agent has it: nobody else can read it when this returns, and no job starts there before.

        An unknown id, or a compute that is gone: no-op.  Raises a `KiciError` when it may still be readable.
        """
        ...
