"""The steps by which a microVM is made: record, address, files, interface, rules, link, VMM, guest.

The network and the VMM are made side by side; the guest waits for both.  Rules are there before the link goes up, so
there is no moment at which a guest could send what it may not.  The address is given back after everything that
carries it is gone, the record last of all.
"""

import logging

from kici.backends.firecracker.console import Console
from kici.backends.firecracker.machine import Machine
from kici.backends.firecracker.plan import Step
from kici.backends.firecracker.records import VmRecords
from kici.backends.firecracker.settings import MicroVmTools, Order
from kici.decide.microvm import Guest, tap_of
from kici.decide.microvm_boot import BootOrder, metadata
from kici.decide.microvm_snapshot import ENTROPY_BYTES, WARM_DOCUMENT, Renewal, renewed
from kici.domain.errors import Conflict, DeterministicRefusal, KiciError, Permanent, Retryable
from kici.ports.vmm import SnapshotUnusable, VmSpec, VmStart

log = logging.getLogger(__name__)


class _Base:
    name = ""
    after: tuple[str, ...] = ()
    outlives = False

    def is_wanted(self, machine: Machine) -> bool:
        return True

    async def verify(self, machine: Machine) -> None:
        return

    async def undo(self, machine: Machine) -> None:
        return


class Recorded(_Base):
    name = "record"
    outlives = True

    def __init__(self, records: VmRecords) -> None:
        self._records = records

    async def do(self, machine: Machine) -> None:
        self._records.write(machine.record)

    async def undo(self, machine: Machine) -> None:
        self._records.remove(machine.id)


class _OfGuests(_Base):
    """Nothing that a machine needs which only warms up to be copied."""

    def is_wanted(self, machine: Machine) -> bool:
        return not machine.is_template


class Addressed(_OfGuests):
    name = "address"
    after = ("record",)
    outlives = True

    def __init__(self, tools: MicroVmTools, records: VmRecords) -> None:
        self._tools = tools
        self._records = records

    async def do(self, machine: Machine) -> None:
        machine.has_address(await self._tools.addresses.allocate(machine.id))
        self._records.write(machine.record)

    async def undo(self, machine: Machine) -> None:
        await self._tools.addresses.release(machine.id)


class Housed(_Base):
    """Its directory: images that it shares, a drive of its own, files for what it prints."""

    name = "files"
    after = ("record",)
    outlives = True

    def __init__(self, tools: MicroVmTools) -> None:
        self._tools = tools

    async def do(self, machine: Machine) -> None:
        order, place = _order(machine), machine.place
        drives, vmm = self._tools.drives, self._tools.vmm
        reader = None if vmm.owner is None else vmm.owner[0]
        try:
            await drives.make_folder(place.folder)
        except Conflict:
            machine.begun.remove(self.name)
            raise
        await drives.make_folder(place.root)
        await drives.bring(order.chosen.kernel, place.root / vmm.files["kernel"], reader=reader)
        if order.chosen.initrd is not None:
            await drives.bring(order.chosen.initrd, place.root / vmm.files["initrd"], reader=reader)
        await drives.bring(order.chosen.rootfs, place.root / vmm.files["rootfs"], reader=reader)
        overlay = place.root / vmm.files["overlay"]
        if order.snapshot is None:
            await drives.make_overlay(overlay, order.chosen.overlay_mib, owner=vmm.owner)
        else:
            try:
                await drives.copy(order.snapshot.folder / vmm.files["overlay"], overlay, owner=vmm.owner)
                for name in vmm.snapshot_files:
                    await drives.bring(order.snapshot.folder / name, place.root / name, reader=reader)
            except KiciError as error:
                raise SnapshotUnusable(str(error)) from error
        await drives.make_file(place.console, owner=None)
        if "log" in vmm.files:
            await drives.make_file(place.root / vmm.files["log"], owner=vmm.owner)
        self._listen(machine)

    async def undo(self, machine: Machine) -> None:
        if machine.console is not None:
            machine.console.finish()
            machine.last_output = machine.console.last
        await self._tools.vmm.tidy(machine.place)
        await self._tools.drives.remove(machine.place.folder)

    def _listen(self, machine: Machine) -> None:
        machine.console = console_of(machine, self._tools)


class Wired(_Base):
    name = "interface"
    after = ("address",)

    def __init__(self, tools: MicroVmTools, *, heal: "Heal") -> None:
        self._network = tools.network
        self._vmm = tools.vmm
        self._heal = heal

    async def do(self, machine: Machine) -> None:
        owner = None if self._vmm.owner is None else self._vmm.owner[0]
        guest = _guest(machine)
        try:
            await self._network.make_tap(guest, owner=owner)
        except Conflict:
            machine.is_tap_foreign = True
            raise
        except Retryable as error:
            if not await self._heal.mended():
                raise
            try:
                await self._network.remove_tap(guest.tap)
                await self._network.make_tap(guest, owner=owner)
            except KiciError as again:
                raise again from error

    async def undo(self, machine: Machine) -> None:
        if not machine.is_tap_foreign:
            await self._network.remove_tap(tap_of(machine.id))


class Admitted(_OfGuests):
    name = "rules"
    after = ("interface",)

    def __init__(self, tools: MicroVmTools, *, heal: "Heal") -> None:
        self._tools = tools
        self._heal = heal

    async def do(self, machine: Machine) -> None:
        try:
            await self.admit(machine)
        except (Conflict, Retryable):
            if not await self._heal.mended():
                raise
            await self.admit(machine)

    async def admit(self, machine: Machine) -> None:
        if machine.policy is not None:
            needs = self._tools.needs(machine.record.url)
            await self._tools.network.admit(_guest(machine), policy=machine.policy, needs=needs)

    async def undo(self, machine: Machine) -> None:
        guest = machine.record.guest
        if guest is not None:
            await self._tools.network.dismiss(guest)


class Linked(_OfGuests):
    """Goes with its interface."""

    name = "link"
    after = ("rules",)

    def __init__(self, tools: MicroVmTools) -> None:
        self._network = tools.network

    async def do(self, machine: Machine) -> None:
        await self._network.link_up(_guest(machine))


class Launched(_Base):
    name = "vmm"

    def __init__(self, tools: MicroVmTools, records: VmRecords) -> None:
        self._tools = tools
        self._records = records
        self.after = ("files", "interface") if tools.vmm.opens_interface_at_launch else ("files", "address")

    async def do(self, machine: Machine) -> None:
        machine.vm = await self._tools.vmm.launch(spec_of(machine, self._tools, self._records))

    async def verify(self, machine: Machine) -> None:
        _must_live(machine)

    async def undo(self, machine: Machine) -> None:
        """KILL, to whatever is provably this machine's; what may be it but is not proven is left, with its files."""
        vmm = self._tools.vmm
        if machine.vm is None:
            probe = vmm.probe(machine.place)
            if not probe.is_running:
                return
            if not probe.is_confirmed:
                raise Retryable(f"process {probe.pid} may be that of microVM {machine.id}: {probe.detail}")
            machine.vm = vmm.hold(machine.place, probe)
        if machine.vm is not None:
            await machine.vm.kill()


class Booted(_Base):
    name = "guest"
    after = ("link", "vmm")

    def __init__(self, tools: MicroVmTools, records: VmRecords) -> None:
        self._tools = tools
        self._records = records

    async def do(self, machine: Machine) -> None:
        await self._tools.vmm.boot(spec_of(machine, self._tools, self._records))
        machine.was_started()
        self._records.write(machine.record)

    async def verify(self, machine: Machine) -> None:
        _must_live(machine)


class Heal:
    """Mends the bridge when a step finds it broken."""

    def __init__(self, tools: MicroVmTools, *, may_provision: bool) -> None:
        self._network = tools.network
        self.may_provision = may_provision

    async def mended(self) -> bool:
        """Whether it was broken and is not any more.  Never raises."""
        try:
            health = await self._network.health()
            if health.is_healthy:
                return False
            if not self.may_provision:
                raise Permanent(f"bridge {self._network.bridge.name} is not healthy: {health}")
            await self._network.provision()
        except KiciError as error:
            log.error("vm.bridge_not_mended", extra={"kici": {"error": str(error)}})
            return False
        return True


def all_steps(tools: MicroVmTools, records: VmRecords, heal: Heal) -> list[Step]:
    return [
        Recorded(records),
        Addressed(tools, records),
        Housed(tools),
        Wired(tools, heal=heal),
        Admitted(tools, heal=heal),
        Linked(tools),
        Launched(tools, records),
        Booted(tools, records),
    ]


def console_of(machine: Machine, tools: MicroVmTools) -> Console:
    log_name = tools.vmm.files.get("log")
    return Console(
        machine.id,
        tools.files,
        console=machine.place.console,
        vmm_log=None if log_name is None else machine.place.root / log_name,
    )


def spec_of(machine: Machine, tools: MicroVmTools, records: VmRecords) -> VmSpec:
    order = _order(machine)
    return VmSpec(
        place=machine.place,
        machine=order.machine,
        guest=_guest(machine),
        bridge=tools.network.bridge,
        has_initrd=order.chosen.initrd is not None,
        boot_data=_boot_data(machine, tools),
        mark=records.mark(machine.id),
        start=order.start,
    )


def _boot_data(machine: Machine, tools: MicroVmTools) -> dict[str, object]:
    order, bridge = _order(machine), tools.network.bridge
    if order.start is VmStart.WARM_UP:
        return WARM_DOCUMENT
    told = BootOrder(
        agent_id=machine.id,
        labels=order.spawn.labels,
        url=order.spawn.orchestrator_url,
        token=order.spawn.token,
        backpressure=order.chosen.backpressure,
        extra_hosts=order.extra_hosts,
        env=order.chosen.env,
    )
    document = metadata(told, bridge)
    if order.start is VmStart.BOOT:
        return document
    renewal = Renewal(entropy=tools.entropy.bytes(ENTROPY_BYTES), now=tools.clock.now())
    return renewed(document, renewal, _guest(machine), bridge)


def _order(machine: Machine) -> Order:
    assert machine.order is not None, f"microVM {machine.id} was found, not ordered"
    return machine.order


def _guest(machine: Machine) -> Guest:
    guest = machine.record.guest
    assert guest is not None, f"microVM {machine.id} has no address yet"
    return guest


def _must_live(machine: Machine) -> None:
    if machine.vm is None or not machine.vm.is_alive():
        console = machine.console
        if console is not None:
            console.look()
        said = "" if console is None or not console.last else "; its console says:\n" + "\n".join(console.last[-10:])
        raise DeterministicRefusal(f"the VMM of {machine.id} exited during boot{said}")
