"""The machine ledger keeps its promises: on files with real processes, and in memory."""

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from kici.adapters.machine_ledger import FileLedger
from kici.decide.admit import Cap
from kici.decide.ledger import Kind
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.domain.spawn import Reservation
from kici.domain.verdict import AtCap, CapName, Dimension
from kici.ports.ledger import MachineLedger
from kici.services.machine_pools import MachinePools
from kici.testing.builders import a_shape
from kici.testing.contracts import service
from kici.testing.fake_ledger import FakeLedger, PooledHost
from kici.testing.sim_clock import SIM_START, SimClock
from kici.testing.virtual_time import run_virtual

GIB = 1 << 30
POOL = "ci"
CAP = Cap(cpus=4.0)
SCALER = ScalerName("local")


class Host(Protocol):
    """A machine on which coordinators and agents run."""

    def coordinator(self, name: str) -> MachineLedger: ...

    def kills(self, name: str) -> None:
        """As kill -9 of a coordinator; its agents live on."""

    def starts(self, by: MachineLedger, agent: str) -> None:
        """An agent's process, which inherits what proves that it lives."""

    def ends(self, agent: str) -> None: ...

    def reboots(self) -> None: ...


class RealHost:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._ledgers: dict[str, FileLedger] = {}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._boot = 1

    def coordinator(self, name: str) -> MachineLedger:
        ledger = FileLedger(instance_id=InstanceId(name), boot=f"boot-{self._boot}", folder=lambda: self._folder)
        self._ledgers[name] = ledger
        self._stack.callback(ledger.close)
        return ledger

    def kills(self, name: str) -> None:
        self._ledgers[name].close()

    def starts(self, by: MachineLedger, agent: str) -> None:
        descriptor = by.descriptor(AgentId(agent))
        assert descriptor is not None
        self._agents[agent] = subprocess.Popen(["sleep", "1000"], pass_fds=[descriptor])
        self._stack.callback(self.ends, agent)

    def ends(self, agent: str) -> None:
        if agent in self._agents:
            process = self._agents.pop(agent)
            process.kill()
            process.wait()

    def reboots(self) -> None:
        for name in self._ledgers:
            self.kills(name)
        for agent in list(self._agents):
            self.ends(agent)
        self._boot += 1


class FakeHost:
    def __init__(self, _folder: Path, _stack: ExitStack) -> None:
        self._host = PooledHost()

    def coordinator(self, name: str) -> MachineLedger:
        return FakeLedger(self._host, InstanceId(name))

    def kills(self, name: str) -> None:
        self._host.is_killed(InstanceId(name))

    def starts(self, by: MachineLedger, agent: str) -> None:
        assert by.descriptor(AgentId(agent)) is not None
        self._host.inherits(AgentId(agent))

    def ends(self, agent: str) -> None:
        self._host.agent_ended(AgentId(agent))

    def reboots(self) -> None:
        self._host.restarts("boot-2")


Test = Callable[[Host], Coroutine[Any, Any, None]]


def on_each_host(test: Test) -> Callable[..., None]:
    @pytest.mark.parametrize("make", [RealHost, FakeHost], ids=["files", "fake"])
    def run(make: Callable[[Path, ExitStack], Host], tmp_path: Path) -> None:
        with ExitStack() as stack:
            asyncio.run(test(make(tmp_path, stack)))

    run.__doc__ = test.__doc__
    return run


def held(agent: str, cpus: float = 1.0, memory_bytes: int = 0) -> Reservation:
    return Reservation(
        agent_id=AgentId(agent),
        scaler=SCALER,
        shape=a_shape(cpus, memory_bytes),
        machine_pool=POOL,
        owner_instance_id=InstanceId("whoever"),
        reserved_at=SIM_START,
    )


async def takes(
    ledger: MachineLedger,
    agent: str,
    cpus: float = 1.0,
    *,
    memory_bytes: int = 0,
    kind: Kind = Kind.PROCESS,
    cap: Cap = CAP,
) -> AtCap | None:
    """Why not; None: it did."""
    return (await ledger.try_reserve(POOL, cap, held(agent, cpus, memory_bytes), kind)).refused


async def agents(ledger: MachineLedger, cap: Cap | None = CAP) -> list[str]:
    return sorted(row.agent_id for row in (await ledger.refresh(POOL, cap)).rows)


@pytest.mark.spec("scaler 38.7.1")
@on_each_host
async def test_two_instances_share_one_cap(host: Host) -> None:
    one, other = host.coordinator("one"), host.coordinator("other")
    assert await takes(one, "a", 3) is None
    assert await takes(other, "b", 2) == AtCap(
        cap=CapName.MACHINE_POOL, dimension=Dimension.CPUS, used=3, requested=2, limit=4, scaler=SCALER, pool=POOL
    )
    assert await takes(other, "c", 1) is None, "reaching it exactly is allowed"
    assert await agents(one) == ["a", "c"]


@on_each_host
async def test_memory_is_capped_apart_from_cpus(host: Host) -> None:
    cap = Cap(memory_bytes=4 * GIB)
    one = host.coordinator("one")
    assert await takes(one, "a", 100, memory_bytes=3 * GIB, cap=cap) is None
    refused = await takes(one, "b", 1, memory_bytes=2 * GIB, cap=cap)
    assert refused is not None
    assert (refused.dimension, refused.used, refused.requested, refused.limit) == (
        Dimension.MEMORY,
        3 * GIB,
        2 * GIB,
        4 * GIB,
    )
    assert await takes(one, "c", 1, memory_bytes=0, cap=cap) is None


@pytest.mark.spec("scaler 38.7.9")
@on_each_host
async def test_of_twenty_at_one_moment_exactly_as_many_are_admitted_as_fit(host: Host) -> None:
    coordinators = [host.coordinator(f"instance-{number}") for number in range(4)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(takes(coordinators[number % 4], f"agent-{number}", cap=Cap(cpus=5.0)))
            for number in range(20)
        ]
    assert sum(task.result() is None for task in tasks) == 5
    assert len(await agents(coordinators[0], Cap(cpus=5.0))) == 5


@pytest.mark.spec("scaler 38.7.6")
@on_each_host
async def test_giving_back_twice_is_as_once_and_frees_what_was_held(host: Host) -> None:
    one = host.coordinator("one")
    assert await takes(one, "a", 3) is None
    assert await takes(one, "b", 1) is None
    for _ in range(2):
        assert [row.agent_id for row in (await one.release(POOL, AgentId("a"))).rows] == ["b"]
    await one.release(POOL, AgentId("never-there"))
    assert await takes(one, "c", 3) is None


@on_each_host
async def test_what_another_instance_holds_is_not_ours_to_give_back(host: Host) -> None:
    one, other = host.coordinator("one"), host.coordinator("other")
    assert await takes(one, "a") is None
    await other.release(POOL, AgentId("b"))
    assert await agents(other) == ["a"]


@pytest.mark.spec("scaler 38.7.3", "scaler 50.17")
@on_each_host
async def test_an_agent_that_nobody_proves_alive_is_dropped_whosever_it_was(host: Host) -> None:
    """In place of pids: dead rows of another instance go as well."""
    one, other = host.coordinator("one"), host.coordinator("other")
    assert await takes(one, "a", 3) is None
    assert await takes(other, "b", 1) is None
    host.kills("one")
    assert await agents(other) == ["b"], "killed between its reservation and the start of the agent"
    assert await takes(other, "c", 3) is None


@pytest.mark.spec("scaler 38.7.3", "scaler 50.17")
@on_each_host
async def test_an_agent_outlives_the_coordinator_that_made_it_and_counts_until_it_ends(host: Host) -> None:
    one, other = host.coordinator("one"), host.coordinator("other")
    assert await takes(one, "a", 3) is None
    host.starts(one, "a")
    host.kills("one")
    assert await agents(other) == ["a"]
    assert await takes(other, "b", 2) is not None
    host.ends("a")
    assert await agents(other) == []
    assert await takes(other, "b", 2) is None


@on_each_host
async def test_while_its_coordinator_runs_an_agent_counts_until_it_is_given_back(host: Host) -> None:
    """What it started may still run when the process itself has ended."""
    one, other = host.coordinator("one"), host.coordinator("other")
    assert await takes(one, "a") is None
    host.starts(one, "a")
    host.ends("a")
    assert await agents(other) == ["a"]
    await one.release(POOL, AgentId("a"))
    assert await agents(other) == []


@pytest.mark.spec("scaler 38.7.2")
@pytest.mark.parametrize("kind", list(Kind))
def test_a_reboot_ends_everything(kind: Kind, tmp_path: Path) -> None:
    async def main(host: Host) -> None:
        one = host.coordinator("one")
        assert await takes(one, "a", 4, kind=kind) is None
        host.reboots()
        other = host.coordinator("other")
        assert await agents(other) == []
        assert await takes(other, "b", 4, kind=kind) is None

    for make in (RealHost, FakeHost):
        with ExitStack() as stack:
            asyncio.run(main(make(tmp_path, stack)))


@pytest.mark.parametrize("kind", [Kind.CONTAINER, Kind.VM])
def test_a_container_counts_until_its_owner_is_back_and_knows_better(kind: Kind, tmp_path: Path) -> None:
    async def main(host: Host) -> None:
        one, other = host.coordinator("one"), host.coordinator("other")
        assert await takes(one, "a", kind=kind) is None
        assert await takes(one, "b", kind=kind) is None
        assert one.descriptor(AgentId("a")) is None, "it would not know what to do with it"
        host.kills("one")
        assert await agents(other) == ["a", "b"]
        again = host.coordinator("one")
        await again.restore(POOL, {AgentId("b"): (held("b"), kind)})
        assert await agents(other) == ["b"]

    for make in (RealHost, FakeHost):
        with ExitStack() as stack:
            asyncio.run(main(make(tmp_path, stack)))


@on_each_host
async def test_a_restarted_coordinator_takes_its_living_agents_up_again(host: Host) -> None:
    one = host.coordinator("one")
    assert await takes(one, "a") is None
    host.starts(one, "a")
    host.kills("one")
    again = host.coordinator("one")
    await again.restore(POOL, {AgentId("a"): (held("a"), Kind.PROCESS)})
    assert await agents(again) == ["a"]
    host.ends("a")
    await again.release(POOL, AgentId("a"))
    assert await agents(again) == []


@on_each_host
async def test_a_row_that_is_missing_is_written_again_whatever_the_cap_says(host: Host) -> None:
    one, other = host.coordinator("one"), host.coordinator("other")
    assert await takes(other, "a", 4) is None
    await one.restore(POOL, {AgentId("b"): (held("b", 2), Kind.PROCESS)})
    assert await agents(one) == ["a", "b"]
    await other.release(POOL, AgentId("a"))
    assert await takes(other, "c", 3) is not None, "what was taken up again counts"
    assert await takes(other, "d", 2) is None


@pytest.mark.spec("scaler 38.7.7")
@on_each_host
async def test_the_smallest_cap_of_those_that_run_is_in_force(host: Host) -> None:
    """In place of an error for who comes second."""
    small, large = host.coordinator("small"), host.coordinator("large")
    assert not (await large.refresh(POOL, Cap(cpus=8.0))).is_disputed
    ledger = await small.refresh(POOL, Cap(cpus=4.0, memory_bytes=GIB))
    assert ledger.is_disputed
    assert ledger.cap == Cap(cpus=4.0, memory_bytes=GIB)
    assert await takes(large, "a", 5, cap=Cap(cpus=8.0)) is not None
    host.kills("small")
    assert await takes(large, "a", 5, cap=Cap(cpus=8.0)) is None
    assert (await large.refresh(POOL, Cap(cpus=8.0))).cap == Cap(cpus=8.0)


@pytest.mark.spec("scaler 50.15")
@on_each_host
async def test_a_changed_cap_is_in_force_at_once(host: Host) -> None:
    one, other = host.coordinator("one"), host.coordinator("other")
    assert await takes(one, "a", 4) is None
    assert await takes(one, "b", 2, cap=Cap(cpus=6.0)) is None, "raised"
    await one.refresh(POOL, Cap(cpus=2.0))
    assert await takes(other, "c", 1, cap=Cap(cpus=6.0)) is not None, "lowered"
    await one.release(POOL, AgentId("a"))
    assert await takes(other, "c", 1, cap=Cap(cpus=6.0)) is not None, "still full"
    await one.release(POOL, AgentId("b"))
    assert await takes(other, "c", 2, cap=Cap(cpus=6.0)) is None


@on_each_host
async def test_who_leaves_a_pool_has_no_say_in_it(host: Host) -> None:
    one, other = host.coordinator("one"), host.coordinator("other")
    await one.refresh(POOL, Cap(cpus=1.0))
    assert await takes(other, "a", 2) is not None
    await one.refresh(POOL, None)
    assert await takes(other, "a", 2) is None


@on_each_host
async def test_at_its_end_a_coordinator_leaves_only_what_it_could_not_end(host: Host) -> None:
    one, other = host.coordinator("one"), host.coordinator("other")
    for agent in ("ended", "stubborn"):
        assert await takes(one, agent) is None
        host.starts(one, agent)
    assert await takes(one, "gone", kind=Kind.CONTAINER) is None
    assert await takes(one, "stuck", kind=Kind.CONTAINER) is None
    await one.refresh("another-pool", CAP)
    host.ends("ended")
    await one.leave(frozenset({AgentId("stubborn"), AgentId("stuck")}))
    assert await agents(other) == ["stubborn", "stuck"]
    assert list((await other.refresh(POOL, CAP)).caps) == ["other"]
    host.ends("stubborn")
    assert await agents(other) == ["stuck"]


@on_each_host
async def test_pools_do_not_see_each_other(host: Host) -> None:
    one = host.coordinator("one")
    assert await takes(one, "a", 4) is None
    outcome = await one.try_reserve("second", CAP, held("b", 4), Kind.PROCESS)
    assert outcome.refused is None
    assert await one.pools() == [POOL, "second"]


@on_each_host
async def test_sweeping_takes_nothing_from_the_living(host: Host) -> None:
    one, other = host.coordinator("one"), host.coordinator("other")
    for agent in ("a", "b"):
        assert await takes(one, agent) is None
    host.starts(one, "b")
    await other.sweep()
    assert await agents(other) == ["a", "b"]
    host.kills("one")
    await other.sweep()
    assert await agents(other) == ["b"]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    async def main() -> None:
        before = os.listdir("/proc/self/fd")
        ledger = FileLedger(instance_id=InstanceId("one"), boot="boot-1", folder=lambda: tmp_path)
        assert await takes(ledger, "a", 4) is None
        assert await takes(ledger, "b", 1) is not None
        assert ledger.descriptor(AgentId("b")) is None
        await ledger.release(POOL, AgentId("a"))
        await ledger.leave(frozenset())
        assert len(os.listdir("/proc/self/fd")) == len(before)
        assert list((tmp_path / "agents").iterdir()) == []

    asyncio.run(main())


@pytest.mark.parametrize("case", service.CASES, ids=lambda case: case.__name__)
def test_keeping_up_with_the_others_is_a_service(case: service.Case) -> None:
    def make() -> MachinePools:
        ledger = FakeLedger(PooledHost(), InstanceId("one"))
        return MachinePools(ledger=ledger, caps=lambda: {POOL: CAP}, clock=SimClock())

    run_virtual(lambda: case(make))
