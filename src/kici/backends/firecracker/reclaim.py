"""Machines on this host that this process does not track: found, judged, taken down.

Everything here frees addresses and deletes by name, so the backend lets one piece of it run at a time (`lock`).  A
machine whose process runs is taken down only where its identity is proven and somebody has said that it is nobody's.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address
from pathlib import Path

from kici.backends.firecracker.machine import Machine
from kici.backends.firecracker.plan import Plan
from kici.backends.firecracker.records import VmRecord, VmRecords
from kici.backends.firecracker.settings import MicroVmTools
from kici.backends.firecracker.steps import Admitted, console_of
from kici.decide.classify import LiveVmSeen, StopOutcome, StopResult, Tracker, is_name
from kici.decide.isolate import name_of
from kici.decide.microvm import Guest, is_vm_id, mac_of, tap_of
from kici.decide.microvm_probe import Probe
from kici.decide.microvm_sweep import HostSight, plan_sweep
from kici.domain.errors import KiciError
from kici.domain.ids import AgentId, Instant, ScalerName
from kici.ports.vmm import VmPlace

log = logging.getLogger(__name__)


class Reclaimer:
    def __init__(
        self,
        *,
        scaler: ScalerName,
        base: Path,
        tools: MicroVmTools,
        records: VmRecords,
        plan: Plan,
        tracked: Callable[[], frozenset[AgentId]],
    ) -> None:
        self._scaler = scaler
        self._tools = tools
        self._records = records
        self._plan = plan
        self._tracked = tracked
        self.folder = base / tools.vmm.kind
        """Holds the directories of this scaler's machines, and those of others that share the base."""
        self.lock = asyncio.Lock()

    def mine(self) -> Iterator[VmRecord]:
        """Records of this scaler's machines that its VMM can judge."""
        return (record for record in self._records.of(self._scaler) if record.vmm == self._tools.vmm.kind)

    async def reap(self, vm_id: AgentId) -> bool:
        """Take down what this host holds for an id that nobody owns.  Whether there was something."""
        if vm_id in self._tracked() or not is_name(vm_id):
            return False
        record = self._records.read(vm_id)
        if record is None and vm_id not in self._tools.drives.folders(self.folder):
            return False
        if record is not None and (record.scaler != self._scaler or record.vmm != self._tools.vmm.kind):
            return False
        probe = self._tools.vmm.probe(self._place(vm_id))
        if probe.is_running and not probe.is_confirmed:
            log.warning("vm.unverified", extra={"kici": {"agent_id": vm_id, "why": probe.detail}})
            return False
        await self.take_down(record or await self._guessed(vm_id))
        return True

    async def clean_up(self, owned: frozenset[AgentId]) -> int:
        """End this scaler's machines that are neither tracked nor owned, then whatever is dead.  How many."""
        count = 0
        for record in list(self.mine()):
            if record.vm_id in self._tracked() or record.vm_id in owned:
                continue
            probe = self._tools.vmm.probe(record.place)
            if probe.is_running and probe.is_confirmed:
                count += await self._try_to_take_down(record)
        return count + await self.sweep(owned)

    async def sweep(self, owned: frozenset[AgentId] = frozenset()) -> int:
        """Take down what is dead and nobody's.  How many machines."""
        count = 0
        folders = {AgentId(name): at for name, at in self._tools.drives.folders(self.folder).items()}
        rows = await self._tools.addresses.held()
        taps = await self._tools.network.taps()
        admitted = await self._tools.network.admitted()
        # After everything else was listed: whatever was made meanwhile had its record and its row first.
        rows |= await self._tools.addresses.held()
        recorded = frozenset(record.vm_id for record in self.mine())
        sight = HostSight(
            recorded=recorded,
            others=frozenset(self._records.names()) - recorded,
            folders=folders,
            rows=rows,
            taps=taps,
            admitted=admitted,
            tracked=self._tracked() | owned,
            live=frozenset(vm_id for vm_id in {*folders, *recorded} if self._probe(vm_id).is_running),
        )
        plan = plan_sweep(sight, self._tools.clock.now())
        owners = set(admitted.values())
        for vm_id in plan.machines:
            if vm_id not in self._tracked():
                record = self._records.read(vm_id) or await self._guessed(vm_id)
                count += await self._try_to_take_down(record, has_rules=name_of(vm_id) in owners)
        for name in plan.taps:
            await self._tools.network.remove_tap(name)
        for address, owner in plan.rules:
            await self._tools.network.dismiss(_guest_of_rules(address, owner))
        if count:
            log.warning("vm.swept", extra={"kici": {"scaler": self._scaler, "count": count}})
        return count

    def live(self) -> list[LiveVmSeen]:
        """Machines in this scaler's folder whose process runs."""
        ids = {AgentId(name) for name in self._tools.drives.folders(self.folder)}
        return [seen for vm_id in sorted(ids) if (seen := self._seen(vm_id, self._probe(vm_id))) is not None]

    async def stop(self, vm_id: AgentId, trackers: Callable[[], Sequence[Tracker]]) -> StopResult:
        """End a live machine that nobody tracks.

        Between the last question who tracks it and the signal stands no await: tracking changes only between turns
        of the loop, and the process is held by its handle, so neither can change in between.
        """
        if not is_name(vm_id) or vm_id not in self._tools.drives.folders(self.folder):
            return StopResult(vm_id=vm_id, outcome=StopOutcome.NOT_FOUND, detail="there is no such microVM here")
        place = self._place(vm_id)
        probe = self._tools.vmm.probe(place)
        if not probe.is_running:
            return StopResult(vm_id=vm_id, outcome=StopOutcome.NOT_LIVE, detail="its process does not run")
        vm = self._tools.vmm.hold(place, probe) if probe.is_confirmed else None
        if vm is None:
            return StopResult(vm_id=vm_id, outcome=StopOutcome.UNVERIFIED, detail=probe.detail, pid=probe.pid)
        machine = Machine(record=self._records.read(vm_id) or await self._guessed(vm_id), vm=vm)
        known = list(trackers()) or ([Tracker.BACKEND] if vm_id in self._tracked() else [])
        if known:
            vm.close()
            why = ", ".join(known)
            return StopResult(vm_id=vm_id, outcome=StopOutcome.TRACKED, detail=f"tracked by {why}", pid=probe.pid)
        vm.kill_now()
        try:
            await self._end(machine)
        except KiciError as error:
            return StopResult(vm_id=vm_id, outcome=StopOutcome.ERROR, detail=str(error), pid=probe.pid)
        return StopResult(vm_id=vm_id, outcome=StopOutcome.STOPPED, pid=probe.pid)

    async def take_down(self, record: VmRecord, *, has_rules: bool = True) -> None:
        """End a machine that was found, and remove everything of it.  Raises `Retryable` with what resisted."""
        await self._end(Machine(record=record), has_rules=has_rules)

    async def _end(self, machine: Machine, *, has_rules: bool = True) -> None:
        machine.begun = [step for step in self._plan.all_begun() if has_rules or step != Admitted.name]
        machine.console = console_of(machine, self._tools)  # forwards what nobody has read yet
        try:
            await self._plan.undo(machine)
        finally:
            machine.let_go()

    async def _try_to_take_down(self, record: VmRecord, *, has_rules: bool = True) -> bool:
        try:
            await self.take_down(record, has_rules=has_rules)
        except KiciError as error:
            log.warning("vm.left", extra={"kici": {"agent_id": record.vm_id, "error": str(error)}})
            return False
        return True

    async def _guessed(self, vm_id: AgentId) -> VmRecord:
        """What can be known of a machine without a record."""
        address = (await self._tools.addresses.held()).get(vm_id)
        return VmRecord(
            vm_id=vm_id,
            scaler=self._scaler,
            vmm=self._tools.vmm.kind,
            folder=str(self.folder / vm_id),
            label_set=(),
            labels=(),
            gate=frozenset(),
            token_id=None,
            spawned_at=Instant(0),
            address=None if address is None else str(address),
        )

    def _seen(self, vm_id: AgentId, probe: Probe) -> LiveVmSeen | None:
        if not probe.is_running or not is_vm_id(vm_id):
            return None
        record = self._records.read(vm_id)
        return LiveVmSeen(
            vm_id=vm_id,
            scaler=self._scaler if record is None else record.scaler,
            pid=probe.pid or 0,
            started_at=probe.started_at or Instant(0),
            folder=str(self.folder / vm_id),
            is_confirmed=probe.is_confirmed,
            detail=probe.detail,
        )

    def _probe(self, vm_id: AgentId) -> Probe:
        return self._tools.vmm.probe(self._place(vm_id))

    def _place(self, vm_id: AgentId) -> VmPlace:
        return VmPlace(vm_id, self.folder / vm_id)


def _guest_of_rules(address: str, owner: str) -> Guest:
    """Whose rules they are is known as it stands in names of chains, which name the same chains again."""
    ip = IPv4Address(address)
    return Guest(vm_id=owner, address=ip, tap=tap_of(owner), mac=mac_of(ip))
