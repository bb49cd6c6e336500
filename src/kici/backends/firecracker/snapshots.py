"""Snapshots of warmed-up guests: one for each label set that wishes for it, made beside the spawns, never waited for.

What may be copied, and why not, is `decide.microvm_snapshot`.  Here a template is made by the same steps as any other
machine, stopped, written to disk and ended; a restart finds what is whole, and what belongs to nobody is removed.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Final

from kici.backends.ending import to_its_end
from kici.backends.firecracker.machine import Machine
from kici.backends.firecracker.plan import Plan
from kici.backends.firecracker.records import VmRecord, VmRecords
from kici.backends.firecracker.settings import (
    MicroVmSet,
    MicroVmSettings,
    MicroVmTools,
    Order,
    Snapshot,
    hardware_of,
)
from kici.decide.microvm_snapshot import (
    ADDRESS,
    FOLDER,
    SPOILED_MAX,
    Make,
    abandoned,
    hardware_problem,
    make_key,
    owner_key,
    renewal_problem,
    space_problem,
    template_id,
    told_warm,
)
from kici.domain.errors import DeterministicRefusal, KiciError, Retryable
from kici.domain.ids import AgentId
from kici.domain.resources import NOTHING
from kici.kit.supervise import Supervisor
from kici.kit.version import VERSION
from kici.ports.backend import SpawnOrder
from kici.ports.vmm import VmStart

log = logging.getLogger(__name__)

WARM_SECONDS: Final = 180.0
"""Longest that a guest may take to boot and to load what its agent needs."""
PASS_SECONDS: Final = 0.1
END_SECONDS_MAX: Final = 150.0


class Snapshots:
    """Those of one scaler."""

    def __init__(
        self, settings: MicroVmSettings, tools: MicroVmTools, records: VmRecords, plan: Plan, supervisor: Supervisor
    ) -> None:
        self._settings = settings
        self._tools = tools
        self._records = records
        self._plan = plan
        self._supervisor = supervisor
        self._all = settings.base / tools.vmm.kind / FOLDER
        self._owner = owner_key(settings.scaler, str(settings.data_dir))
        self._templates: dict[AgentId, Machine] = {}
        self._refused: dict[str, str] = {}
        """Why there is none of a make, and will be none."""
        self._failed: dict[str, str] = {}
        """Why there is none of a make yet."""
        self._spoiled: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._is_wanted_again = False

    @property
    def _folder(self) -> Path:
        return self._all / self._owner

    def templates(self) -> frozenset[AgentId]:
        """Machines under way that serve nobody."""
        return frozenset(self._templates)

    def configure(self, settings: MicroVmSettings) -> None:
        self._settings = settings

    def choose(self, order: Order) -> Order:
        """The same order, with how its machine starts."""
        chosen = order.chosen.settled()
        if not chosen.snapshot_start:
            return order
        problem = hardware_problem(order.machine, hardware_of(chosen, chosen.limits))
        if problem is not None:
            return replace(order, why_boots=problem)
        try:
            key = self._key(chosen)
        except KiciError as error:
            return replace(order, why_boots=str(error))
        why = self._refused.get(key) or self._failed.get(key)
        if why is None and key in self._tools.drives.folders(self._folder):
            snapshot = Snapshot(key=key, folder=self._folder / key)
            return replace(order, start=VmStart.RESTORE, snapshot=snapshot)
        if why is None:
            self.keep_up()
        return replace(order, why_boots=why or "its snapshot is not made yet")

    async def spoiled(self, snapshot: Snapshot, why: str) -> None:
        """Nobody starts from this one any more."""
        self._spoiled[snapshot.key] += 1
        log.warning("vm.snapshot_spoiled", extra={"kici": {"scaler": self._settings.scaler, "why": why}})
        if self._spoiled[snapshot.key] >= SPOILED_MAX:
            self._refused[snapshot.key] = f"{SPOILED_MAX} snapshots went wrong, the last one because {why}"
        await self._remove(snapshot.folder)
        self.keep_up()

    def keep_up(self) -> None:
        """Make what is missing and remove what is none of ours, soon; once, however often it is asked for.

        What failed is tried again; what was refused is not, until what it is made of changes.
        """
        self._is_wanted_again = True
        if self._task is None or self._task.done():
            self._task = self._supervisor.spawn(f"snapshots of {self._settings.scaler}", self._keep_up())

    async def stop(self) -> None:
        """Nothing is under way when this returns."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # noqa: TID251  # how it ended does not matter
            self._task = None

    async def remove_all(self) -> None:
        await self._remove(self._folder)

    async def _keep_up(self) -> None:
        while self._is_wanted_again:
            self._is_wanted_again = False
            keys = {}
            for chosen in (each.settled() for each in self._settings.sets):
                if chosen.snapshot_start:
                    try:
                        keys[self._key(chosen)] = chosen
                    except KiciError as error:
                        self._say(chosen, str(error))
            await self._remove_others(frozenset(keys))
            for key, chosen in keys.items():
                if key not in self._refused and key not in self._tools.drives.folders(self._folder):
                    await self._try(chosen, key)

    async def _try(self, chosen: MicroVmSet, key: str) -> None:
        try:
            await self._make(chosen, key)
        except DeterministicRefusal as error:
            self._refused[key] = str(error)
            self._say(chosen, str(error))
        except KiciError as error:
            self._failed[key] = str(error)
            self._say(chosen, str(error))
        else:
            self._failed.pop(key, None)
            fields = {"scaler": self._settings.scaler, "label_set": list(chosen.labels), "key": key}
            log.info("vm.snapshot_made", extra={"kici": fields})

    async def _make(self, chosen: MicroVmSet, key: str) -> None:
        drives, vmm = self._tools.drives, self._tools.vmm
        problem = space_problem(hardware_of(chosen, chosen.limits), drives.free_bytes(self._all))
        if problem is not None:
            raise Retryable(problem)
        machine = self._template(chosen, key)
        if self._records.read(machine.id) is not None or machine.place.folder.name in drives.folders(
            machine.place.folder.parent
        ):
            raise Retryable(f"microVM {machine.id}, of an earlier attempt, is not cleared away yet")
        self._templates[machine.id] = machine
        fresh = self._folder / f"new-{key}"
        try:
            await self._plan.run(machine)
            await self._until_warm(machine)
            await vmm.snapshot(machine.place)
            assert machine.vm is not None, "the plan started it"
            await machine.vm.kill()
            await drives.remove(fresh)
            await drives.make_folder(fresh)
            for name in (vmm.files["overlay"], *vmm.snapshot_files):
                await drives.keep(machine.place.root / name, fresh / name, root=machine.place.root)
            drives.rename(fresh, self._folder / key)
        finally:
            await to_its_end(self._end(machine, fresh), seconds=END_SECONDS_MAX, what=f"ending template {machine.id}")

    async def _end(self, machine: Machine, fresh: Path) -> None:
        try:
            await self._plan.undo(machine)
            await self._tools.drives.remove(fresh)
        except KiciError as error:  # it has a record: the sweep tries again
            log.warning("vm.left", extra={"kici": {"agent_id": machine.id, "error": str(error)}})
        finally:
            self._templates.pop(machine.id, None)
            machine.let_go()

    async def _until_warm(self, machine: Machine) -> None:
        vm, console = machine.vm, machine.console
        assert vm is not None and console is not None, "the plan made both"  # noqa: PT018  # one fact
        try:
            async with asyncio.timeout(WARM_SECONDS):
                while (can := told_warm(console.last)) is None:
                    if not vm.is_alive():
                        raise DeterministicRefusal(f"its guest ended instead of waiting{_said(console.last)}")
                    await self._tools.clock.sleep(PASS_SECONDS)
                    console.look()
        except TimeoutError as error:
            raise DeterministicRefusal(
                f"its guest did not say within {WARM_SECONDS:g} s that it waits: the agent in its root file system "
                f"may be older than this one{_said(console.last)}"
            ) from error
        problem = renewal_problem(can)
        if problem is not None:
            raise DeterministicRefusal(problem)

    def _template(self, chosen: MicroVmSet, key: str) -> Machine:
        settings, vm_id = self._settings, template_id(self._owner, key)
        folder = settings.base / self._tools.vmm.kind / vm_id
        record = VmRecord(
            vm_id=vm_id,
            scaler=settings.scaler,
            vmm=self._tools.vmm.kind,
            folder=str(folder),
            label_set=chosen.labels,
            labels=(),
            gate=frozenset(),
            token_id=None,
            spawned_at=self._tools.clock.now(),
            address=str(ADDRESS),
        )
        spawn = SpawnOrder(
            agent_id=vm_id,
            label_set=chosen.labels,
            labels=(),
            gate=frozenset(),
            token=None,
            orchestrator_url="",
            limits=chosen.limits,
            requests=NOTHING,
        )
        order = Order(spawn=spawn, chosen=chosen, extra_hosts=(), start=VmStart.WARM_UP)
        return Machine(record=record, order=order)

    def _key(self, chosen: MicroVmSet) -> str:
        images = [each for each in (chosen.kernel, chosen.initrd, chosen.rootfs) if each is not None]
        make = Make(
            labels=chosen.labels,
            images=tuple(self._tools.drives.identity(each) for each in images),
            vmm=self._tools.vmm.fingerprint(),
            machine=hardware_of(chosen, chosen.limits),
            version=VERSION,
        )
        return make_key(make)

    async def _remove_others(self, keys: frozenset[str]) -> None:
        """What no label set is made of any more, and what scalers left that are gone."""
        drives = self._tools.drives
        drives.touch(self._folder)
        for name in drives.folders(self._folder):
            if name not in keys:
                await self._remove(self._folder / name)
        for name in abandoned(drives.folders(self._all), self._owner, self._tools.clock.now()):
            await self._remove(self._all / name)

    async def _remove(self, folder: Path) -> None:
        try:
            await self._tools.drives.remove(folder)
        except KiciError as error:
            log.warning("vm.snapshot_left", extra={"kici": {"folder": str(folder), "error": str(error)}})
            self._failed[folder.name] = f"the last one could not be removed: {error}"

    def _say(self, chosen: MicroVmSet, why: str) -> None:
        fields = {"scaler": self._settings.scaler, "label_set": list(chosen.labels), "why": why}
        log.warning("vm.snapshot_refused", extra={"kici": fields})


def _said(lines: list[str]) -> str:
    return "; its console says:\n" + "\n".join(lines[-10:]) if lines else ""
