"""Live microVMs of this host and of others: which there are, who knows them, and stopping those that nobody does.

Three circles of knowledge: this process (backends, spawns, registrations), which is asked again in the moment of a
kill; the store (rows of spawns, sessions and jobs, whoever wrote them); and the coordinators that are away, while
whose absence nothing is called an orphan.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from kici.decide.classify import (
    LiveVm,
    StopOutcome,
    StopResult,
    Tracker,
    VmStatus,
    classify,
    once,
    with_absent,
)
from kici.domain.agent import AgentSession
from kici.domain.errors import KiciError, NotFound
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.instance import Instance
from kici.domain.job import Job
from kici.domain.peer import RequestKind
from kici.domain.spawn import Spawn
from kici.ports.live_vms import Listing, LiveVmBackend, NodeFailed, NodeSilent
from kici.services.peers import PRESENT_MS, Requests
from kici.services.scaler_runtime import Fleet

INSTANCES_MAX: Final = 1000
WORKER_SECONDS: Final = 30.0


class Store(Protocol):
    """What of the store tells who knows a machine."""

    async def spawn(self, agent_id: AgentId) -> Spawn | None: ...

    async def session(self, agent_id: AgentId) -> AgentSession | None: ...

    async def held_jobs(self, agent_id: AgentId) -> list[Job]: ...

    async def instances(self, *, limit: int) -> list[Instance]: ...

    async def database_now(self) -> Instant: ...


class Serving(Protocol):
    @property
    def fleet(self) -> Fleet:
        """The scalers of the node."""
        ...


class Known(Protocol):
    """Agents that the node looks after in some way."""

    def get(self, agent_id: AgentId, /) -> object | None: ...


class WorkerVms(Protocol):
    """Asks workers that are linked to this coordinator."""

    def is_linked(self, worker_id: str) -> bool: ...

    async def ask_vms(self, worker_id: str, payload: Mapping[str, object], *, seconds: float) -> object:
        """The answer of a worker; None when none came in time."""
        ...

    async def linked_to(self, worker_id: str) -> Sequence[InstanceId]:
        """Coordinators that a worker is linked to, as the store has it."""
        ...


class LocalVms:
    """The machines of this node: what a coordinator and a worker both have."""

    def __init__(self, *, manager: Serving, spawns: Known, registry: Known) -> None:
        self._manager = manager
        self._spawns = spawns
        self._registry = registry

    def backends(self) -> list[tuple[ScalerName, LiveVmBackend]]:
        runtimes = self._manager.fleet.runtimes
        return [(name, each.backend) for name, each in runtimes.items() if isinstance(each.backend, LiveVmBackend)]

    def trackers(self, vm_id: AgentId) -> list[Tracker]:
        """Who of this process knows a machine, now.  No await: a kill depends on the answer."""
        known = []
        if any(backend.is_tracking(vm_id) for _, backend in self.backends()):
            known.append(Tracker.BACKEND)
        if self._spawns.get(vm_id) is not None:
            known.append(Tracker.SPAWNING)
        if self._registry.get(vm_id) is not None:
            known.append(Tracker.REGISTERED)
        return known

    async def live(self) -> list[LiveVm]:
        seen = [each for _, backend in self.backends() for each in await backend.live_vms()]
        return [classify(each, self.trackers(each.vm_id)) for each in once(seen)]

    async def stop(self, vm_ids: Sequence[AgentId]) -> list[StopResult]:
        """One after the other; what goes wrong with one is its result."""
        return [await self._stop(vm_id) for vm_id in vm_ids]

    async def answer(self, payload: Mapping[str, object], node: InstanceId) -> object:
        """What somebody asked of this node, which is called `node`.  Raises `NodeFailed`."""
        if payload.get("action") == "list":
            scalers = tuple(name for name, _ in self.backends())
            return msgspec.to_builtins(Listing(instance_id=node, scalers=scalers, vms=tuple(await self.live())))
        vm_ids = payload.get("vmIds")
        if payload.get("action") != "stop" or not isinstance(vm_ids, list):
            raise NodeFailed("a request about microVMs is `list`, or `stop` with vmIds")
        results = await self.stop([AgentId(str(vm_id)) for vm_id in vm_ids])
        return {"results": msgspec.to_builtins(results)}

    async def _stop(self, vm_id: AgentId) -> StopResult:
        result = StopResult(vm_id=vm_id, outcome=StopOutcome.NOT_FOUND, detail="there is no such microVM here")
        for backend in await self._in_order(vm_id):
            try:
                result = await backend.stop_untracked(vm_id, lambda: self.trackers(vm_id))
            except KiciError as error:
                result = StopResult(vm_id=vm_id, outcome=StopOutcome.ERROR, detail=str(error))
            if result.outcome is not StopOutcome.NOT_FOUND:
                break
        return result

    async def _in_order(self, vm_id: AgentId) -> list[LiveVmBackend]:
        """Whose folder holds it first, of those the one that holds its address first; then the rest."""
        ranked: list[tuple[bool, bool, int, LiveVmBackend]] = []
        for number, (_, backend) in enumerate(self.backends()):
            lists = vm_id in {each.vm_id for each in await backend.live_vms()}
            try:
                holds = await backend.holds_address(vm_id)
            except KiciError:
                holds = False
            ranked.append((not lists, not holds, number, backend))
        return [backend for *_, backend in sorted(ranked, key=lambda each: each[:3])]


class LiveVms:
    """What operators ask of any node."""

    def __init__(
        self,
        *,
        local: LocalVms,
        store: Store,
        instance_id: InstanceId,
        requests: Requests | None = None,
        workers: WorkerVms | None = None,
    ) -> None:
        self._workers = workers
        self._local = local
        self._store = store
        self._instance_id = instance_id
        self._requests = requests

    async def listing(self, target: InstanceId | None, *, seconds: float) -> Listing:
        """The live machines of a node.  Raises `NotFound`, `NodeSilent` or `NodeFailed`."""
        if target in (None, self._instance_id):
            scalers = tuple(name for name, _ in self._local.backends())
            listing = Listing(instance_id=self._instance_id, scalers=scalers, vms=tuple(await self._local.live()))
        else:
            assert target is not None
            answer = await self._asked(target, {"action": "list"}, seconds)
            listing = msgspec.convert(answer, Listing)
        absent = await self._absent(listing.instance_id)
        vms = [with_absent(await self._overlaid(vm), absent) for vm in listing.vms]
        return Listing(instance_id=listing.instance_id, scalers=listing.scalers, vms=tuple(vms))

    async def stop(self, target: InstanceId | None, vm_ids: Sequence[AgentId], *, seconds: float) -> list[StopResult]:
        """Stop machines that nobody tracks.  Asked of this process and the store first, then of the node itself."""
        node = target or self._instance_id
        absent = await self._absent(node)
        if absent:
            why = f"coordinators that may know it are away: {', '.join(sorted(absent))}"
            return [StopResult(vm_id=vm_id, outcome=StopOutcome.UNVERIFIED, detail=why) for vm_id in vm_ids]
        known = {vm_id: await self._stored_trackers(vm_id) for vm_id in vm_ids}
        wanted = [vm_id for vm_id in vm_ids if not known[vm_id]]
        answers = iter(await self._stop_on(node, wanted, seconds) if wanted else [])
        return [next(answers) if not known[vm_id] else _tracked(vm_id, known[vm_id]) for vm_id in vm_ids]

    async def answer(self, payload: Mapping[str, object]) -> object:
        """What another coordinator asked of this node, or of a worker that is linked to it."""
        worker_id = payload.get("target")
        if worker_id in (None, self._instance_id):
            return await self._local.answer(payload, self._instance_id)
        if self._workers is None or not self._workers.is_linked(str(worker_id)):
            raise NodeFailed(f"worker {worker_id} is not linked here any more; ask again")
        answer = await self._workers.ask_vms(str(worker_id), payload, seconds=WORKER_SECONDS)
        return {"error": f"worker {worker_id} did not answer within {WORKER_SECONDS:g} s"} if answer is None else answer

    async def _stop_on(self, node: InstanceId, vm_ids: Sequence[AgentId], seconds: float) -> list[StopResult]:
        if node == self._instance_id:
            return await self._local.stop(vm_ids)
        answer = await self._asked(node, {"action": "stop", "vmIds": list(vm_ids)}, seconds)
        return msgspec.convert(answer.get("results"), list[StopResult])

    async def _asked(self, target: InstanceId, payload: Mapping[str, object], seconds: float) -> dict[str, Any]:
        answer = await self._answer_of(target, payload, seconds)
        if answer is None:
            raise NodeSilent(f"{target} did not answer within {seconds:g} s")
        if not isinstance(answer, dict) or "error" in answer:
            raise NodeFailed(f"{target}: {answer.get('error') if isinstance(answer, dict) else answer}")
        return answer

    async def _answer_of(self, target: InstanceId, payload: Mapping[str, object], seconds: float) -> object:
        """Of another coordinator, or of a worker: over its link to us, or by way of one that it is linked to."""
        present = {one.id for one in await self._present()}
        if self._workers is not None and target not in present:
            if self._workers.is_linked(target):
                return await self._workers.ask_vms(target, payload, seconds=seconds)
            others = present - {self._instance_id}
            way = next((one for one in await self._workers.linked_to(target) if one in others), None)
            if way is not None and self._requests is not None:
                asked = {**payload, "target": target}
                return await self._requests.ask(way, RequestKind.LIVE_VMS, asked, seconds=seconds)
        if self._requests is None or target not in present:
            raise NotFound(f"no coordinator or linked worker {target} is present; `kici-admin peers` lists them")
        return await self._requests.ask(target, RequestKind.LIVE_VMS, payload, seconds=seconds)

    async def _overlaid(self, vm: LiveVm) -> LiveVm:
        """With what the store knows and its node may not."""
        if vm.status is VmStatus.TRACKED:
            return vm
        known = await self._stored_trackers(vm.seen.vm_id)
        return classify(vm.seen, known) if known else vm

    async def _stored_trackers(self, vm_id: AgentId) -> list[Tracker]:
        known = []
        if await self._store.spawn(vm_id) is not None:
            known.append(Tracker.SPAWNING)
        if await self._store.session(vm_id) is not None:
            known.append(Tracker.REGISTERED)
        if await self._store.held_jobs(vm_id):
            known.append(Tracker.BOUND_JOB)
        return known

    async def _present(self) -> list[Instance]:
        now = await self._store.database_now()
        return [one for one in await self._store.instances(limit=INSTANCES_MAX) if not _is_away(one, now)]

    async def _absent(self, node: InstanceId) -> list[InstanceId]:
        """Known coordinators that do not beat; neither this one nor the node that answered."""
        now = await self._store.database_now()
        known = await self._store.instances(limit=INSTANCES_MAX)
        return [one.id for one in known if _is_away(one, now) and one.id not in (node, self._instance_id)]


def _is_away(one: Instance, now: Instant) -> bool:
    return now - one.last_beat_at > PRESENT_MS


def _tracked(vm_id: AgentId, trackers: Iterable[Tracker]) -> StopResult:
    return StopResult(vm_id=vm_id, outcome=StopOutcome.TRACKED, detail=f"tracked by {', '.join(trackers)}")
