"""Agents in microVMs.  Rules of every backend: `ports.backend.Backend`.

A machine is made by a plan of steps (`steps`), remembered in a record (`records`), and ended by the same steps in
reverse.  Its process is held by a handle that tells when it ends.  What this process does not track but finds on
the host is the `reclaim`er's; both take machines down by the same plan.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from kici.backends.ending import LastOutputs, end_all, to_its_end
from kici.backends.firecracker.console import PASS_SECONDS
from kici.backends.firecracker.machine import Machine
from kici.backends.firecracker.plan import OnStep, Plan
from kici.backends.firecracker.reclaim import Reclaimer
from kici.backends.firecracker.records import VmRecord, VmRecords
from kici.backends.firecracker.settings import MicroVmSet, MicroVmSettings, MicroVmTools, Order
from kici.backends.firecracker.snapshots import Snapshots
from kici.backends.firecracker.steps import Admitted, Heal, all_steps, console_of
from kici.decide.classify import LiveVmSeen, StopResult, Tracker
from kici.decide.microvm_boot import failure_of, url_problem
from kici.domain.errors import DeterministicRefusal, KiciError, NoCapacity, Permanent, Retryable
from kici.domain.ids import AgentId, ScalerName
from kici.domain.labels import set_key
from kici.domain.spawn import ScaleDownReason
from kici.kit.finish import finish
from kici.kit.supervise import Supervisor
from kici.ports.backend import Compute, ComputeState, OnEvent, OnExit, SpawnEvent, SpawnEventType, SpawnOrder
from kici.ports.live_vms import BridgeState
from kici.ports.processes import Exit
from kici.ports.vmm import SnapshotUnusable, VmStart

log = logging.getLogger(__name__)

T = TypeVar("T")
END_SECONDS_MAX: Final = 150.0
"""Bound of any clean-up: asking, forcing, a directory of any size."""
TAIL_CHARACTERS: Final = 2048
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class MicroVmBackend:
    def __init__(
        self,
        *,
        settings: MicroVmSettings,
        tools: MicroVmTools,
        supervisor: Supervisor,
        on_exit: OnExit,
        on_step: OnStep | None = None,
    ) -> None:
        self._settings = settings
        self._tools = tools
        self._supervisor = supervisor
        self._on_exit = on_exit
        self._machines: dict[AgentId, Machine] = {}
        self._gone = LastOutputs()
        self._records = VmRecords(tools.files, settings.data_dir)
        self._heal = Heal(tools, may_provision=settings.auto_provision)
        self._plan = Plan(all_steps(tools, self._records, self._heal), on_step)
        self._snapshots = Snapshots(settings, tools, self._records, self._plan, supervisor)
        self._reclaimer = Reclaimer(
            scaler=settings.scaler,
            base=settings.base,
            tools=tools,
            records=self._records,
            plan=self._plan,
            tracked=lambda: frozenset(self._machines) | self._snapshots.templates(),
        )
        self._sets: Mapping[str, MicroVmSet] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._readying = asyncio.Lock()
        self._is_ready = False
        self.configure(settings)

    @property
    def type(self) -> str:
        return "firecracker"

    @property
    def spawns_on_local_host(self) -> bool:
        return True

    @property
    def name(self) -> ScalerName:
        return self._settings.scaler

    @property
    def settings(self) -> MicroVmSettings:
        return self._settings

    def configure(self, settings: MicroVmSettings) -> None:
        """Serve a changed entry from now on; running machines are not touched.  Folders cannot change."""
        assert settings.scaler == self._settings.scaler, "a scaler keeps its name"
        assert (settings.base, settings.data_dir) == (self._settings.base, self._settings.data_dir), (
            "machines are looked for where they were made"
        )
        self._settings = settings
        self._heal.may_provision = settings.auto_provision
        self._sets = {set_key(chosen.labels): chosen for chosen in settings.sets}
        self._snapshots.configure(settings)
        if self._is_ready:
            self._snapshots.keep_up()

    def active_count(self) -> int:
        return len(self._machines)

    def computes(self) -> tuple[Compute, ...]:
        return tuple(machine.compute() for machine in self._machines.values())

    # ------------------------------------------------------------------ making

    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        try:
            machine = self._admit(order, on_event)
        except (NoCapacity, Permanent) as error:
            self._report(order.agent_id, on_event, SpawnEventType.FAILED, str(error))
            raise
        try:
            self._report(machine.id, on_event, SpawnEventType.PROVISIONING, "making a microVM on this host")
            await self._make_ready()
            await self._make(machine)
            await self._tools.clock.sleep(0)  # an abort during the last step counts
        except BaseException as error:
            await to_its_end(self._undo(machine), seconds=END_SECONDS_MAX, what=f"undoing microVM {machine.id}")
            self._report(machine.id, on_event, SpawnEventType.FAILED, str(error) or "the start was called off")
            raise
        finally:
            machine.settled.set()
        machine.state = ComputeState.RUNNING
        self._watch(machine)
        self._report(machine.id, on_event, SpawnEventType.READY, _how_it_starts(machine))
        self._report(machine.id, on_event, SpawnEventType.CONNECTING, machine.ref)
        return machine.compute()

    async def _make(self, machine: Machine) -> None:
        """From its snapshot; where that is of no use, by booting."""
        try:
            await self._plan.run(machine)
        except SnapshotUnusable as error:
            order = machine.order
            assert order is not None and order.snapshot is not None, "only what has one can be restored"  # noqa: PT018  # one fact
            await self._snapshots.spoiled(order.snapshot, str(error))
            await self._plan.undo(machine)
            machine.order = replace(order, start=VmStart.BOOT, snapshot=None, why_boots=str(error))
            await self._plan.run(machine)

    def _admit(self, order: SpawnOrder, on_event: OnEvent) -> Machine:
        """Check and track, before the first await."""
        settings = self._settings
        chosen = self._sets.get(set_key(order.label_set))
        if chosen is None:
            raise Permanent(f"scaler {settings.scaler} has no label set [{', '.join(order.label_set)}] any more")
        if len(self._machines) >= settings.max_agents:
            raise NoCapacity(f"scaler {settings.scaler} already has its maximum of {settings.max_agents} microVMs here")
        problem = url_problem(order.orchestrator_url)
        if problem is not None:
            raise DeterministicRefusal(f"scaler {settings.scaler}: {problem}")
        assert order.agent_id not in self._machines, f"agent id {order.agent_id} is minted once"
        record = VmRecord(
            vm_id=order.agent_id,
            scaler=settings.scaler,
            vmm=self._tools.vmm.kind,
            folder=str(self._reclaimer.folder / order.agent_id),
            label_set=order.label_set,
            labels=order.labels,
            gate=order.gate,
            token_id=order.token_id,
            spawned_at=self._tools.clock.now(),
            url=order.orchestrator_url,
            bound_job_id=order.bound_job_id,
            run_id=order.run_id,
            is_started=False,
        )
        machine = self._machines[order.agent_id] = Machine(
            record=record,
            policy=chosen.policy,
            order=self._snapshots.choose(Order(spawn=order, chosen=chosen, extra_hosts=settings.extra_hosts)),
            on_event=on_event,
        )
        return machine

    async def _make_ready(self) -> None:
        """The host's bridge, the first time.  What cannot be mended now is met by the step that needs it."""
        async with self._readying:
            if self._is_ready:
                return
            self._begin_sweeping()
            try:
                await self._ready_host()
            except DeterministicRefusal:
                raise
            except KiciError as error:
                log.error("vm.host_not_ready", extra={"kici": {"scaler": self.name, "error": str(error)}})
            else:
                self._is_ready = True
                self._snapshots.keep_up()

    async def _ready_host(self) -> None:
        for size in sorted({chosen.overlay_mib for chosen in self._settings.sets}):
            self._supervisor.start(f"drive template {size} MiB", self._tools.drives.prewarm(size))
        if not self._settings.auto_provision:
            return
        network = self._tools.network
        health = await network.health()
        if health.is_healthy:
            return
        log.warning("vm.bridge_provisioned", extra={"kici": {"bridge": network.bridge.name, "faults": str(health)}})
        await network.provision()
        await network.probe_isolation()
        await self._admit_again()

    async def _admit_again(self) -> None:
        """Rules of machines that run, on a bridge that has just been mended."""
        step = Admitted(self._tools, heal=self._heal)
        for machine in list(self._machines.values()):
            if "link" in machine.begun:
                try:
                    await step.admit(machine)
                except KiciError as error:
                    log.error("vm.rules_lost", extra={"kici": {"agent_id": machine.id, "error": str(error)}})

    async def _undo(self, machine: Machine) -> None:
        """Take back a start that failed.  What resists stays on record, for the sweep."""
        try:
            await self._plan.undo(machine)
        except Retryable as error:
            log.warning("spawn.undo_failed", extra={"kici": {"agent_id": machine.id, "error": str(error)}})
        self._forget(machine)

    # ------------------------------------------------------------------ ending

    async def destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        machine = self._machines.get(agent_id)
        if machine is not None:
            await machine.settled.wait()
            if reason is ScaleDownReason.SPAWN_TIMEOUT:
                await self._doubt(machine, "its guest did not register in time")
            await to_its_end(
                self._end(machine, is_asked=True), seconds=END_SECONDS_MAX, what=f"ending microVM {agent_id} ({reason})"
            )

    def mark_registered(self, agent_id: AgentId) -> None:
        machine = self._machines.get(agent_id)
        if machine is not None:
            machine.registered = True

    async def boot_data_read(self, agent_id: AgentId) -> None:
        """Its agent has what it needs: nobody else in the guest is to read it.

        Also where the machine could not be taken up after a restart, but its record is there.
        """
        machine = self._machines.get(agent_id)
        record = self._records.read(agent_id) if machine is None else machine.record
        if record is not None:
            await self._tools.vmm.forget_boot_data(record.place)

    async def _end(self, machine: Machine, *, is_asked: bool) -> None:
        async with machine.ending:
            if self._machines.get(machine.id) is machine:
                machine.state = ComputeState.DESTROYING
                if is_asked:
                    await self._ask(machine)
                await self._plan.undo(machine)
                self._forget(machine)

    async def _doubt(self, machine: Machine, why: str) -> None:
        """The snapshot of a guest that never came is not given to another."""
        order = machine.order
        if order is not None and order.snapshot is not None and not machine.registered:
            await self._snapshots.spoiled(order.snapshot, why)

    async def _ask(self, machine: Machine) -> None:
        seconds = self._settings.stop_seconds
        if not machine.registered or seconds <= 0 or machine.vm is None or not machine.vm.is_alive():
            return  # a guest that boots has nothing to save
        if await self._tools.vmm.ask_to_stop(machine.place):
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await machine.vm.wait()

    def _forget(self, machine: Machine) -> None:
        if self._machines.pop(machine.id, None) is machine:
            self._gone.keep(machine.id, machine.last_output)
        machine.let_go()

    async def shutdown_all(self) -> None:
        self._stop_sweeping()
        await self._snapshots.stop()
        try:
            await end_all(self._machines, self.destroy)
        finally:
            await self._snapshots.remove_all()

    async def release_all(self) -> None:
        self._stop_sweeping()
        await self._snapshots.stop()
        for machine in list(self._machines.values()):
            await machine.settled.wait()
            if self._machines.pop(machine.id, None) is machine:
                machine.let_go()

    # ------------------------------------------------------------------ watching

    def _watch(self, machine: Machine) -> None:
        assert machine.console is not None, "its directory has been made"
        spawn = self._supervisor.spawn
        machine.tasks = [
            spawn(f"console of {machine.id}", machine.console.follow(self._tools.clock)),
            spawn(f"watch {machine.id}", self._until_gone(machine)),
        ]

    async def _until_gone(self, machine: Machine) -> None:
        """Wait for a machine to end by itself; then clear up, then tell."""
        assert machine.vm is not None, "only what was started is watched"
        how = await machine.vm.wait()
        was_asked = machine.state is ComputeState.DESTROYING
        machine.tasks = [task for task in machine.tasks if task is not asyncio.current_task()]
        if not was_asked and not machine.registered:
            await self._tools.clock.sleep(PASS_SECONDS)  # its last words may still be on their way into the file
        try:
            if not was_asked:
                await self._doubt(machine, "its guest ended before it registered")
            await self._end(machine, is_asked=False)
        except KiciError as error:
            log.warning("spawn.remains", extra={"kici": {"agent_id": machine.id, "error": str(error)}})
        if not was_asked:
            self._tell_gone(machine, how)

    def _tell_gone(self, machine: Machine, how: Exit) -> None:
        if machine.registered or machine.on_event is None:
            self._on_exit(machine.id, f"microVM {machine.id} {how}")
            return
        failure = failure_of(machine.last_output)
        detail = f"microVM {machine.id} ended before it registered ({failure})"
        tail = _CONTROL.sub("", "\n".join(machine.last_output))[-TAIL_CHARACTERS:]
        detail += f"; the end of its console:\n{tail}" if tail else "; its console is empty"
        self._report(machine.id, machine.on_event, SpawnEventType.FAILED, detail)

    def tail(self, agent_id: AgentId, lines: int) -> list[str]:
        if lines <= 0:
            return []
        machine = self._machines.get(agent_id)
        if machine is None:
            return (self._gone.of(agent_id) or [])[-lines:]
        if machine.console is None:
            return []
        machine.console.look()
        return machine.console.last[-lines:]

    # ------------------------------------------------------------------ after a restart

    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        try:
            await self._make_ready()
        except KiciError as error:  # each spawn will say so; what lives here is to be found all the same
            log.error("vm.host_refused", extra={"kici": {"scaler": self.name, "error": str(error)}})
        found: list[Compute] = []
        for record in self._reclaimer.mine():
            if record.guest is not None and record.guest.address in self._tools.network.bridge.cidr:
                self._tools.addresses.restore(record.vm_id, record.guest.address)
        for record in self._reclaimer.mine():
            if record.vm_id in known and record.vm_id not in self._machines:
                machine = await self._taken_up(record)
                if machine is not None:
                    found.append(machine.compute())
        return tuple(found)

    async def _taken_up(self, record: VmRecord) -> Machine | None:
        """None: it is gone, or was of no use and is now, or nothing proves that what runs there is it."""
        if not record.is_started:
            try:
                await self._clear(record)
            except KiciError as error:  # it is taken up to be ended later
                log.warning("vm.left", extra={"kici": {"agent_id": record.vm_id, "error": str(error)}})
            else:
                return None
        machine = self._found(record)
        if machine is None and not self._tools.vmm.probe(record.place).is_running:
            await self._clear(record)
        return machine

    async def _clear(self, record: VmRecord) -> None:
        what = f"clearing microVM {record.vm_id}"
        await to_its_end(self._reclaimer.take_down(record), seconds=END_SECONDS_MAX, what=what)

    def _found(self, record: VmRecord) -> Machine | None:
        probe = self._tools.vmm.probe(record.place)
        vm = self._tools.vmm.hold(record.place, probe) if probe.is_running and probe.is_confirmed else None
        if vm is None:
            return None
        chosen = self._sets.get(set_key(record.label_set))
        machine = Machine(record=record, state=ComputeState.RUNNING, vm=vm, begun=self._plan.all_begun())
        machine.policy = None if chosen is None else chosen.policy
        machine.console = console_of(machine, self._tools)
        machine.settled.set()
        self._machines[machine.id] = machine
        self._watch(machine)
        return machine

    async def reap_unowned(self, agent_id: AgentId) -> bool:
        return await self._locked(self._reclaimer.reap(agent_id), f"reclaiming microVM {agent_id}")

    async def cleanup_orphans(self, owned: frozenset[AgentId]) -> int:
        count = await self._locked(self._reclaimer.clean_up(owned), f"orphans of scaler {self.name}")
        if self._is_ready:
            self._snapshots.keep_up()
        return count

    async def sweep(self) -> int:
        """Take down what is dead and nobody's.  How many machines."""
        return await self._locked(self._reclaimer.sweep(), f"sweeping for scaler {self.name}")

    async def discard(self) -> int:
        """Remove what can be made again: for a host whose disk is full.  How many things."""
        return await self._tools.drives.discard()

    async def live_vms(self) -> list[LiveVmSeen]:
        """Every machine in this scaler's folder whose process runs, tracked or not."""
        return self._reclaimer.live()

    def is_tracking(self, vm_id: AgentId) -> bool:
        return vm_id in self._machines or vm_id in self._snapshots.templates()

    async def holds_address(self, vm_id: AgentId) -> bool:
        return vm_id in await self._tools.addresses.held()

    async def stop_untracked(self, vm_id: AgentId, trackers: Callable[[], Sequence[Tracker]]) -> StopResult:
        """Stop a machine that nobody tracks, at an operator's word; `trackers` is asked again at the last moment."""
        return await self._locked(self._reclaimer.stop(vm_id, trackers), f"stopping microVM {vm_id}")

    async def bridge_state(self) -> BridgeState:
        network = self._tools.network
        health = await network.health()
        return BridgeState(name=network.bridge.name, faults=health.faults, heals=self._settings.auto_provision)

    async def problems(self) -> list[str]:
        """What this host lacks for the scaler's machines: a sentence each."""
        found = await self._tools.vmm.problems()
        health = await self._tools.network.health()
        if not health.is_healthy and not self._settings.auto_provision:
            found.append(f"bridge {self._tools.network.bridge.name}: {health}; run `kici-admin firecracker provision`")
        return found

    async def _locked(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """One reclaim at a time: each frees addresses and deletes by name."""
        try:
            async with self._reclaimer.lock:
                return await finish(work, seconds=END_SECONDS_MAX, what=what)
        except TimeoutError as error:
            raise Retryable(str(error)) from error
        finally:
            work.close()

    def _begin_sweeping(self) -> None:
        if self._sweeper is None:
            self._sweeper = self._supervisor.spawn(f"microVM sweep of {self.name}", self._sweep_for_ever())

    def _stop_sweeping(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
            self._is_ready = False

    async def _sweep_for_ever(self) -> None:
        while True:
            await self._tools.clock.sleep(self._settings.sweep_seconds)
            self._snapshots.keep_up()
            try:
                await self.sweep()
            except KiciError as error:
                log.warning("vm.sweep_failed", extra={"kici": {"scaler": self.name, "error": str(error)}})

    def _report(self, agent_id: AgentId, on_event: OnEvent, kind: SpawnEventType, detail: str) -> None:
        on_event(SpawnEvent(agent_id=agent_id, type=kind, detail=detail, at=self._tools.clock.now()))


def _how_it_starts(machine: Machine) -> str:
    order, address = machine.order, machine.record.address
    assert order is not None, "it was ordered"
    if order.snapshot is not None:
        return f"the guest goes on from a snapshot at {address}"
    return f"the guest boots at {address}" + (f", since {order.why_boots}" if order.why_boots else "")
