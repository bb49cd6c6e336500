"""Listing and stopping live microVMs: who is asked, in which order, and what is left alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kici.decide.classify import LiveVmSeen, StopOutcome, StopResult, Tracker, VmStatus
from kici.domain.agent import AgentSession
from kici.domain.errors import KiciError, NotFound, Retryable
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.instance import Instance
from kici.domain.job import Job
from kici.domain.peer import RequestKind
from kici.domain.spawn import Spawn
from kici.ports.live_vms import NodeFailed, NodeSilent
from kici.services.live_vms import LiveVms, LocalVms
from kici.services.registry import AgentRegistry
from kici.services.scaler_manager import ScalerManager
from kici.services.spawn_book import SpawnBook
from kici.testing.builders import a_job, an_instance

ME, OTHER = InstanceId("instance-1"), InstanceId("instance-2")
NOW = Instant(1_750_000_100_000)


def vm(number: int) -> AgentId:
    return AgentId(f"scaler-firecracker-{number:08x}")


def seen(number: int, scaler: str = "vms", *, is_confirmed: bool = True) -> LiveVmSeen:
    return LiveVmSeen(
        vm_id=vm(number),
        scaler=ScalerName(scaler),
        pid=100 + number,
        started_at=NOW,
        folder=f"/srv/{number}",
        is_confirmed=is_confirmed,
    )


@dataclass
class Backend:
    """One scaler of microVMs."""

    live: list[LiveVmSeen] = field(default_factory=list)
    tracked: set[AgentId] = field(default_factory=set)
    holds: set[AgentId] = field(default_factory=set)
    dead: set[AgentId] = field(default_factory=set)
    fault: KiciError | None = None
    asked: list[AgentId] = field(default_factory=list)

    async def live_vms(self) -> list[LiveVmSeen]:
        return list(self.live)

    def is_tracking(self, vm_id: AgentId) -> bool:
        return vm_id in self.tracked

    async def holds_address(self, vm_id: AgentId) -> bool:
        return vm_id in self.holds

    async def stop_untracked(self, vm_id: AgentId, trackers: Callable[[], Sequence[Tracker]]) -> StopResult:
        self.asked.append(vm_id)
        if self.fault is not None:
            raise self.fault
        if vm_id in self.dead:
            return StopResult(vm_id=vm_id, outcome=StopOutcome.NOT_LIVE)
        if vm_id not in {one.vm_id for one in self.live}:
            return StopResult(vm_id=vm_id, outcome=StopOutcome.NOT_FOUND)
        if trackers():
            return StopResult(vm_id=vm_id, outcome=StopOutcome.TRACKED)
        self.live = [one for one in self.live if one.vm_id != vm_id]
        return StopResult(vm_id=vm_id, outcome=StopOutcome.STOPPED, pid=1)


@dataclass
class Rows:
    """What the store tells."""

    spawns: dict[AgentId, Spawn] = field(default_factory=dict)
    sessions: dict[AgentId, AgentSession] = field(default_factory=dict)
    jobs: dict[AgentId, list[Job]] = field(default_factory=dict)
    known: list[Instance] = field(default_factory=lambda: [replace(an_instance(id=ME), last_beat_at=NOW)])

    async def spawn(self, agent_id: AgentId) -> Spawn | None:
        return self.spawns.get(agent_id)

    async def session(self, agent_id: AgentId) -> AgentSession | None:
        return self.sessions.get(agent_id)

    async def held_jobs(self, agent_id: AgentId) -> list[Job]:
        return self.jobs.get(agent_id, [])

    async def instances(self, *, limit: int) -> list[Instance]:
        return self.known[:limit]

    async def database_now(self) -> Instant:
        return NOW


@dataclass
class Peers:
    """Other coordinators; each request goes through JSON, as in a row."""

    nodes: dict[InstanceId, LiveVms] = field(default_factory=dict)
    answer: object = ...
    asked: list[Mapping[str, object]] = field(default_factory=list)

    async def ask(
        self, target: InstanceId, kind: RequestKind, payload: Mapping[str, object], *, seconds: float
    ) -> object:
        assert kind is RequestKind.LIVE_VMS
        self.asked.append(payload)
        if self.answer is not ...:
            return self.answer
        try:
            given = await self.nodes[target].answer(msgspec.json.decode(msgspec.json.encode(payload)))
        except KiciError as error:
            given = {"error": str(error)}
        return msgspec.json.decode(msgspec.json.encode(given))


class Node:
    def __init__(self, name: InstanceId = ME, rows: Rows | None = None, peers: Peers | None = None) -> None:
        self.backends: dict[str, Backend] = {"vms": Backend()}
        self.rows = rows or Rows()
        self.spawning: set[AgentId] = set()
        self.registered: set[AgentId] = set()
        fleet = SimpleNamespace(runtimes=_Runtimes(self.backends))
        local = LocalVms(
            manager=cast(ScalerManager, SimpleNamespace(fleet=fleet)),  # the only part of it that is looked at
            spawns=cast(SpawnBook, _Known(self.spawning)),  # as above
            registry=cast(AgentRegistry, _Known(self.registered)),  # as above
        )
        self.vms = LiveVms(local=local, store=self.rows, instance_id=name, requests=peers)

    async def statuses(self, target: InstanceId | None = None) -> dict[AgentId, VmStatus]:
        listing = await self.vms.listing(target, seconds=1)
        return {one.seen.vm_id: one.status for one in listing.vms}

    async def outcomes(self, *vm_ids: AgentId, target: InstanceId | None = None) -> list[StopOutcome]:
        return [one.outcome for one in await self.vms.stop(target, vm_ids, seconds=1)]


class _Runtimes:
    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends

    def items(self) -> list[tuple[str, Any]]:
        return [(name, SimpleNamespace(backend=backend)) for name, backend in self._backends.items()]


class _Known:
    def __init__(self, ids: set[AgentId]) -> None:
        self._ids = ids

    def get(self, agent_id: AgentId) -> object | None:
        return agent_id if agent_id in self._ids else None


async def test_everybody_in_the_process_and_in_the_store_can_track_a_machine() -> None:
    node = Node()
    node.backends["vms"].live = [seen(number) for number in range(7)]
    node.backends["vms"].tracked = {vm(0)}
    node.spawning |= {vm(1)}
    node.registered |= {vm(2)}
    node.rows.spawns[vm(3)] = cast(Spawn, object())  # only whether there is one counts
    node.rows.sessions[vm(4)] = cast(AgentSession, object())  # as above
    node.rows.jobs[vm(5)] = [a_job()]
    listing = await node.vms.listing(None, seconds=1)
    assert [one.trackers for one in listing.vms] == [
        (Tracker.BACKEND,),
        (Tracker.SPAWNING,),
        (Tracker.REGISTERED,),
        (Tracker.SPAWNING,),
        (Tracker.REGISTERED,),
        (Tracker.BOUND_JOB,),
        (),
    ]
    assert listing.vms[-1].status is VmStatus.ORPHANED
    assert listing.scalers == ("vms",)


@pytest.mark.spec("scaler 42.7.5")
async def test_a_machine_with_a_job_is_not_sent_to_be_stopped() -> None:
    node = Node()
    node.backends["vms"].live = [seen(1), seen(2)]
    node.rows.jobs[vm(1)] = [a_job()]
    assert await node.outcomes(vm(1), vm(2)) == [StopOutcome.TRACKED, StopOutcome.STOPPED]
    assert node.backends["vms"].asked == [vm(2)]


@pytest.mark.spec("scaler 37.6.6")
@pytest.mark.spec("scaler 42.7.9")
async def test_the_process_is_asked_again_when_it_comes_to_the_kill() -> None:
    node = Node()
    node.backends["vms"].live = [seen(1)]
    assert await node.statuses() == {vm(1): VmStatus.ORPHANED}
    node.registered.add(vm(1))
    assert await node.outcomes(vm(1)) == [StopOutcome.TRACKED]


@pytest.mark.spec("scaler 37.6.8")
async def test_a_machine_that_is_named_twice_is_stopped_once() -> None:
    node = Node()
    node.backends["vms"].live = [seen(1)]
    assert await node.outcomes(vm(1), vm(1)) == [StopOutcome.STOPPED, StopOutcome.NOT_FOUND]


async def test_the_scaler_that_holds_the_address_is_asked_first() -> None:
    node = Node()
    first, second = node.backends["vms"], Backend()
    node.backends["more"] = second
    first.live = second.live = [seen(1)]
    second.holds = {vm(1)}
    assert await node.outcomes(vm(1)) == [StopOutcome.STOPPED]
    assert (first.asked, second.asked) == ([], [vm(1)])
    assert len((await node.vms.listing(None, seconds=1)).vms) == 1, "first still lists it, once"


async def test_a_machine_that_nobody_lists_is_looked_for_everywhere() -> None:
    node = Node()
    node.backends["more"] = Backend(dead={vm(1)})
    assert await node.outcomes(vm(1), vm(2)) == [StopOutcome.NOT_LIVE, StopOutcome.NOT_FOUND]


async def test_what_fails_is_the_result_of_one_machine() -> None:
    node = Node()
    node.backends["vms"].live = [seen(1)]
    node.backends["vms"].fault = Retryable("the disk is away")
    (result,) = await node.vms.stop(None, [vm(1)], seconds=1)
    assert (result.outcome, result.detail) == (StopOutcome.ERROR, "the disk is away")


@pytest.mark.spec("scaler 42.7.6")
@pytest.mark.spec("scaler 42.7.10")
async def test_while_a_coordinator_is_away_nobody_is_an_orphan_and_nothing_is_stopped() -> None:
    node = Node()
    node.backends["vms"].live = [seen(1)]
    node.rows.known.append(replace(an_instance(id=OTHER), last_beat_at=Instant(NOW - 61_000)))
    assert await node.statuses() == {vm(1): VmStatus.UNVERIFIED}
    assert await node.outcomes(vm(1)) == [StopOutcome.UNVERIFIED]
    assert node.backends["vms"].asked == []


@pytest.mark.spec("scaler 42.7.8")
async def test_a_node_without_scalers_lists_and_finds_nothing() -> None:
    node = Node()
    node.backends.clear()
    assert await node.statuses() == {}
    assert await node.outcomes(vm(1)) == [StopOutcome.NOT_FOUND]


def two_nodes() -> tuple[Node, Node, Peers]:
    rows, peers = Rows(), Peers()
    rows.known.append(replace(an_instance(id=OTHER), last_beat_at=NOW))
    here, there = Node(ME, rows, peers), Node(OTHER, rows, peers)
    peers.nodes = {ME: here.vms, OTHER: there.vms}
    return here, there, peers


async def test_another_node_is_asked_for_its_machines() -> None:
    here, there, _ = two_nodes()
    there.backends["vms"].live = [seen(1), seen(2)]
    here.rows.jobs[vm(2)] = [a_job()]
    assert await here.statuses(OTHER) == {vm(1): VmStatus.ORPHANED, vm(2): VmStatus.TRACKED}
    assert await here.statuses() == {}
    assert await here.outcomes(vm(2), vm(1), target=OTHER) == [StopOutcome.TRACKED, StopOutcome.STOPPED]


@pytest.mark.spec("scaler 42.7.4")
async def test_a_node_that_is_not_there_is_not_found_and_one_that_is_silent_is_said_to_be() -> None:
    here, _, peers = two_nodes()
    with pytest.raises(NotFound, match="no coordinator or linked worker nobody is present"):
        await here.vms.listing(InstanceId("nobody"), seconds=1)
    peers.answer = None
    with pytest.raises(NodeSilent, match="did not answer within 1 s"):
        await here.vms.listing(OTHER, seconds=1)
    peers.answer = {"error": "out of order"}
    with pytest.raises(NodeFailed, match="out of order"):
        await here.vms.stop(OTHER, [vm(1)], seconds=1)


async def test_a_request_that_makes_no_sense_is_refused() -> None:
    node = Node()
    for payload in ({"action": "stop"}, {"action": "dance"}, {}):
        with pytest.raises(NodeFailed, match="a request about microVMs is"):
            await node.vms.answer(payload)


@dataclass
class Workers:
    """Workers that are linked here, and where others are linked."""

    here: dict[str, LocalVms] = field(default_factory=dict)
    elsewhere: dict[str, tuple[InstanceId, ...]] = field(default_factory=dict)
    silent: bool = False

    def is_linked(self, worker_id: str) -> bool:
        return worker_id in self.here

    async def linked_to(self, worker_id: str) -> tuple[InstanceId, ...]:
        return self.elsewhere.get(worker_id, ())

    async def ask_vms(self, worker_id: str, payload: Mapping[str, object], *, seconds: float) -> object:
        if self.silent:
            return None
        answer = await self.here[worker_id].answer(payload, InstanceId(worker_id))
        return msgspec.json.decode(msgspec.json.encode(answer))


WORKER = InstanceId("w1")


@pytest.mark.spec("scaler 42.7.4")
async def test_machines_of_a_worker_are_listed_and_stopped_over_its_link() -> None:
    node, host = Node(), Node(WORKER)
    workers = Workers(here={WORKER: host.vms._local})
    node.vms._workers = workers
    host.backends["vms"].live = [seen(1), seen(2)]
    host.spawning |= {vm(2)}
    listing = await node.vms.listing(WORKER, seconds=1)
    assert (listing.instance_id, listing.scalers) == (WORKER, ("vms",))
    assert {one.seen.vm_id: one.status for one in listing.vms} == {
        vm(1): VmStatus.ORPHANED,
        vm(2): VmStatus.TRACKED,
    }
    node.rows.jobs[vm(1)] = [a_job()]
    assert await node.statuses(WORKER) == {vm(1): VmStatus.TRACKED, vm(2): VmStatus.TRACKED}
    node.rows.jobs.clear()
    assert await node.outcomes(vm(1), vm(2), target=WORKER) == [StopOutcome.STOPPED, StopOutcome.TRACKED]
    workers.silent = True
    with pytest.raises(NodeSilent):
        await node.vms.listing(WORKER, seconds=1)


async def test_machines_of_a_worker_that_is_linked_elsewhere_are_asked_for_there() -> None:
    other, host = Node(OTHER), Node(WORKER)
    rows = Rows()
    rows.known.append(replace(an_instance(id=OTHER), last_beat_at=NOW))
    node = Node(rows=rows, peers=Peers({OTHER: other.vms}))
    other.vms._workers = Workers(here={WORKER: host.vms._local})
    node.vms._workers = Workers(elsewhere={WORKER: (OTHER,)})
    host.backends["vms"].live = [seen(1)]
    assert await node.statuses(WORKER) == {vm(1): VmStatus.ORPHANED}
    other.vms._workers = Workers()
    with pytest.raises(NodeFailed, match="not linked here any more"):
        await node.vms.listing(WORKER, seconds=1)
    node.vms._workers = Workers()
    with pytest.raises(NotFound, match="linked worker w1"):
        await node.vms.listing(WORKER, seconds=1)
