"""Live microVMs in memory, for tests of the HTTP API and its clients."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kici.decide.classify import LiveVm, LiveVmSeen, StopOutcome, StopResult, Tracker, classify
from kici.domain.errors import NotFound
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.ports.live_vms import Listing, NodeFailed, NodeSilent


def a_live_vm(
    number: int = 1, *, trackers: Sequence[Tracker] = (), is_confirmed: bool = True, detail: str = ""
) -> LiveVm:
    vm_id = AgentId(f"scaler-firecracker-{number:08x}")
    seen = LiveVmSeen(
        vm_id=vm_id,
        scaler=ScalerName("vms"),
        pid=1000 + number,
        started_at=Instant(1_750_000_000_000),
        folder=f"/srv/jailer/firecracker/{vm_id}",
        is_confirmed=is_confirmed,
        detail=detail,
    )
    return classify(seen, trackers)


@dataclass
class FakeLiveVms:
    me: InstanceId
    vms: dict[AgentId, LiveVm] = field(default_factory=dict)
    outcomes: dict[AgentId, StopOutcome] = field(default_factory=dict)
    """What a stop of a machine comes to; otherwise it is stopped."""
    fault: NodeSilent | NodeFailed | None = None
    stops: list[tuple[InstanceId | None, list[AgentId]]] = field(default_factory=list)

    def add(self, *vms: LiveVm) -> None:
        self.vms.update({vm.seen.vm_id: vm for vm in vms})

    async def listing(self, target: InstanceId | None, *, seconds: float) -> Listing:
        self._reach(target)
        return Listing(instance_id=target or self.me, scalers=(ScalerName("vms"),), vms=tuple(self.vms.values()))

    async def stop(self, target: InstanceId | None, vm_ids: Sequence[AgentId], *, seconds: float) -> list[StopResult]:
        self._reach(target)
        self.stops.append((target, list(vm_ids)))
        return [self._stop(vm_id) for vm_id in vm_ids]

    def _stop(self, vm_id: AgentId) -> StopResult:
        outcome = self.outcomes.get(vm_id, StopOutcome.STOPPED)
        vm = self.vms.get(vm_id)
        if vm is None:
            return StopResult(vm_id=vm_id, outcome=StopOutcome.NOT_FOUND, detail="there is no such microVM here")
        if outcome is StopOutcome.STOPPED:
            del self.vms[vm_id]
        return StopResult(vm_id=vm_id, outcome=outcome, pid=vm.seen.pid)

    def _reach(self, target: InstanceId | None) -> None:
        if self.fault is not None:
            raise self.fault
        if target is not None and target.startswith("no-"):
            raise NotFound(f"no coordinator {target} is present")
