"""What a backend of microVMs offers beyond the contract of all backends: its machines as an operator sees them."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kici.decide.classify import LiveVmSeen, StopResult, Tracker
from kici.domain.ids import AgentId


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


@runtime_checkable
class BootDataBackend(Protocol):
    """A backend that hands its agents' credentials to them by a way that can be closed."""

    async def boot_data_read(self, agent_id: AgentId) -> None:
        """The agent has it: nobody else is to read it.  An unknown id, or a compute that is gone: no-op."""
        ...
