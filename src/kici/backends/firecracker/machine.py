"""One microVM in the backend's hands."""

import asyncio
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address

from kici.backends.firecracker.console import Console
from kici.backends.firecracker.records import VmRecord
from kici.backends.firecracker.settings import Order
from kici.decide.isolate import Policy
from kici.domain.ids import AgentId
from kici.ports.backend import Compute, ComputeState, OnEvent
from kici.ports.vmm import RunningVm, VmPlace, VmStart


@dataclass(slots=True, kw_only=True, eq=False)
class Machine:
    record: VmRecord
    order: Order | None = None
    """What to make; None: it was found."""
    policy: Policy | None = None
    """What it may reach; None: its label set is gone, and it keeps the rules that it has."""
    on_event: OnEvent | None = None
    state: ComputeState = ComputeState.SPAWNING
    registered: bool = False
    vm: RunningVm | None = None
    console: Console | None = None
    begun: list[str] = field(default_factory=list)
    """Steps of its making that may have left something."""
    is_tap_foreign: bool = False
    """An interface of its name was there before: not ours to take away."""
    last_output: list[str] = field(default_factory=list)
    """Filled when it ends."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Its `spawn` call is over, either way."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def is_template(self) -> bool:
        """It has no address, and its link stays down."""
        return self.order is not None and self.order.start is VmStart.WARM_UP

    @property
    def id(self) -> AgentId:
        return self.record.vm_id

    @property
    def place(self) -> VmPlace:
        return self.record.place

    @property
    def ref(self) -> str:
        return "" if self.vm is None else f"pid {self.vm.id.pid} in {self.record.folder}"

    def compute(self) -> Compute:
        return Compute(
            agent_id=self.id,
            label_set=self.record.label_set,
            ref=self.ref,
            spawned_at=self.record.spawned_at,
            state=self.state,
            registered=self.registered,
        )

    def has_address(self, address: IPv4Address) -> None:
        self.record = replace(self.record, address=str(address))

    def was_started(self) -> None:
        self.record = replace(self.record, is_started=True)

    def let_go(self) -> None:
        """Stop watching, and give the handle of its process back."""
        for task in self.tasks:
            task.cancel()
        self.tasks.clear()
        if self.vm is not None:
            self.vm.close()
