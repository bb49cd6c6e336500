"""The backend of a worker's scaler keeps the contract of backends, and more than that over a link that is cut."""

import asyncio

import pytest
from tests.contract import remote_benches as benches
from tests.contract.remote_benches import RemoteBench, RemoteFakeBench, RemoteProcessBench, linked

from kici.domain.errors import NoCapacity, Retryable
from kici.domain.ids import InstanceId
from kici.domain.spawn import ScaleDownReason
from kici.ports.backend import Compute
from kici.ports.workers import Unanswered
from kici.services.worker_agents import LOOK_AGAIN_SECONDS
from kici.services.workers_channel import BLINK_SECONDS
from kici.testing.contracts.backend import CASES, MAX_AGENTS, Case, Kind, an_id, until
from kici.testing.fake_backend import SpawnScript
from kici.testing.virtual_time import virtual
from kici.wire.worker_messages import (
    Amounts,
    Answer,
    FaultKind,
    SpawnAgent,
    SweepOrphans,
    Used,
    WorkerLoad,
    WorkerMessage,
)

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
kinds = pytest.mark.parametrize("make", [RemoteFakeBench, RemoteProcessBench], ids=["machines", "processes"])
restarts = pytest.mark.parametrize("restarts_worker", [False, True], ids=["worker stays", "worker restarts too"])


@pytest.mark.spec("scaler 7.2", "D5")
@kinds
@restarts
@cases
@virtual
async def test_remote(case: Case, make: type[RemoteBench], restarts_worker: bool) -> None:
    async with benches.started(make, restarts_worker=restarts_worker) as bench:
        await case(bench)


def spawning(bench: RemoteBench, number: int, kind: Kind = Kind.LIVES) -> asyncio.Task[Compute]:
    order = bench.order(an_id(number), kind)
    return asyncio.create_task(bench.backend.spawn(order, bench.heard.on_event))


async def spawned(bench: RemoteBench, number: int, kind: Kind = Kind.LIVES) -> Compute:
    return await spawning(bench, number, kind)


@virtual
async def test_a_blink_of_the_link_costs_no_spawn_under_way() -> None:
    async with linked() as bench:
        task = spawning(bench, 1, Kind.SLOW)
        await asyncio.sleep(1)
        bench.cut()
        await asyncio.sleep(10)  # the machine is made meanwhile, and its answer is lost
        bench.channel.tick()
        bench.link()
        assert (await task).agent_id == an_id(1)
        assert len(bench.made_ever) == 1
        assert not bench.heard.failures(an_id(1))


@virtual
async def test_an_order_that_was_lost_with_the_link_is_sent_again() -> None:
    async with linked() as bench:
        task = spawning(bench, 1)
        await asyncio.sleep(0)  # on its way
        bench.cut()
        await asyncio.sleep(1)
        assert not bench.made_ever
        bench.link()
        assert (await task).agent_id == an_id(1)


@virtual
async def test_a_worker_that_stays_away_fails_its_spawns_and_leaves_a_doubt_until_it_confirms_their_end() -> None:
    async with linked() as bench:
        task = spawning(bench, 1, Kind.SLOW)
        await asyncio.sleep(1)
        bench.cut()
        await asyncio.sleep(BLINK_SECONDS)
        bench.channel.tick()
        with pytest.raises(Unanswered, match="away"):
            await task
        assert len(bench.heard.failures(an_id(1))) == 1
        assert bench.backend.active_count() == 0
        assert bench.on_host() == {an_id(1)}
        with pytest.raises(Retryable, match="not linked"):
            await bench.backend.destroy(an_id(1), ScaleDownReason.SPAWN_TIMEOUT)
        bench.link()
        await bench.backend.destroy(an_id(1), ScaleDownReason.SPAWN_TIMEOUT)
        assert not bench.on_host()


@virtual
async def test_a_spawn_called_off_while_the_worker_is_away_is_ended_when_it_is_back() -> None:
    async with linked() as bench:
        task = spawning(bench, 1, Kind.SLOW)
        await asyncio.sleep(1)
        bench.cut()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert len(bench.heard.failures(an_id(1))) == 1
        bench.link()
        await bench.backend.destroy(an_id(1), ScaleDownReason.SHUTDOWN)
        assert not bench.on_host()


@pytest.mark.spec("D5")
@virtual
async def test_a_lost_link_ends_no_agent_and_deaths_meanwhile_are_told_once_with_their_cause() -> None:
    async with linked() as bench:
        for number in (1, 2, 3):
            await spawned(bench, number)
        bench.backend.mark_registered(an_id(1))
        bench.backend.mark_registered(an_id(3))
        await asyncio.sleep(0)
        bench.cut()
        await asyncio.sleep(3600)
        assert bench.backend.active_count() == 3
        bench.machines.die(an_id(1), "was killed by signal 9")
        bench.machines.die(an_id(2), "exited with code 3")
        bench.link()
        await until(lambda: bench.heard.exits)
        assert bench.heard.exits == [(an_id(1), "was killed by signal 9")]
        (failure,) = bench.heard.failures(an_id(2))
        assert "exited with code 3" in failure.detail
        assert bench.backend.active_count() == 1
        assert bench.on_host() == {an_id(3)}


@pytest.mark.spec("D28")
@virtual
async def test_a_worker_that_restarts_goes_on_with_its_agents_and_knows_which_had_registered() -> None:
    async with linked() as bench:
        for number in (1, 2):
            await spawned(bench, number)
        bench.backend.mark_registered(an_id(1))
        await asyncio.sleep(0)
        bench.cut()
        await bench.restart_worker()
        bench.link()
        await asyncio.sleep(0.1)
        assert bench.backend.active_count() == 2
        assert {one.agent_id: one.registered for one in bench.agents.holdings} == {an_id(1): True, an_id(2): False}
        bench.machines.die(an_id(1), "was killed")
        await until(lambda: bench.heard.exits)
        await bench.backend.destroy(an_id(2), ScaleDownReason.IDLE)
        assert not bench.on_host()


@virtual
async def test_what_died_while_the_worker_was_down_is_told_when_it_is_back() -> None:
    async with linked() as bench:
        await spawned(bench, 1)
        bench.backend.mark_registered(an_id(1))
        bench.cut()
        await bench.restart_worker(lambda: bench.machines.die(an_id(1)))
        bench.link()
        await until(lambda: bench.heard.exits)
        assert "restart" in bench.heard.exits[0][1]
        assert not bench.on_host()


@virtual
async def test_an_agent_that_dies_before_its_answer_is_read_is_a_failed_spawn() -> None:
    async with linked() as bench:
        order = bench.order(an_id(1), Kind.LIVES)
        bench.local.scripts = iter([SpawnScript(dies_after_seconds=0.0)])
        task = asyncio.create_task(bench.backend.spawn(order, bench.heard.on_event))
        await asyncio.wait({task})
        await until(lambda: bench.backend.active_count() == 0)
        assert len(bench.heard.failures(an_id(1))) == 1
        assert not bench.on_host()


class Other:
    """A second coordinator that is linked to the same worker."""

    instance_id = InstanceId("another")

    def __init__(self) -> None:
        self.heard: list[WorkerMessage] = []

    def send(self, message: WorkerMessage) -> None:
        self.heard.append(message)

    def load(self) -> dict[str, Used]:
        return [message for message in self.heard if isinstance(message, WorkerLoad)][-1].scalers


def strange_order(request_id: str, number: int) -> SpawnAgent:
    return SpawnAgent(
        request_id=request_id,
        scaler="local",
        agent_id=an_id(number),
        label_set=("linux", "lives"),
        labels=("linux",),
        requests=Amounts(cpus=1.0),
    )


@pytest.mark.spec("D5", "scaler 43")
@virtual
async def test_coordinators_share_a_worker_whose_own_cap_refuses_what_neither_could_know() -> None:
    async with linked() as bench:
        other = Other()
        bench.host.attach(other)
        for number in range(1, MAX_AGENTS):
            await spawned(bench, number)
        assert other.load() == {"local": Used(agents=MAX_AGENTS - 1)}
        bench.local.scripts = iter([SpawnScript()] * 9)
        bench.host.ordered(other, strange_order("r1", 7))
        bench.host.ordered(other, strange_order("r2", 8))
        await asyncio.sleep(1)
        answers = {message.request_id: message for message in other.heard if isinstance(message, Answer)}
        assert answers["r1"].fault is None
        fault = answers["r2"].fault
        assert fault is not None
        assert fault.kind == FaultKind.NO_CAPACITY
        with pytest.raises(NoCapacity):
            await spawned(bench, 3)
        assert not bench.heard.failures(an_id(3)), "a refusal for want of room is no failure"
        await bench.backend.destroy(an_id(1), ScaleDownReason.IDLE)
        assert other.load() == {"local": Used(agents=MAX_AGENTS - 2)}, "room for the one that was refused"


@virtual
async def test_a_sweep_spares_agents_of_other_coordinators() -> None:
    async with linked() as bench:
        other = Other()
        bench.host.attach(other)
        bench.local.scripts = iter([SpawnScript()])
        bench.host.ordered(other, strange_order("r1", 7))
        await spawned(bench, 1)
        assert await bench.backend.cleanup_orphans(frozenset()) == 0
        await bench.backend.release_all()
        assert await bench.backend.cleanup_orphans(frozenset()) == 1
        assert bench.on_host() == {an_id(7)}
        assert len(await bench.backend.recover(frozenset({an_id(7)}))) == 1, "taken over"
        bench.host.ordered(other, SweepOrphans(request_id="r2", scaler="local", owned=()))
        await asyncio.sleep(1)
        assert bench.on_host() == {an_id(7)}


@virtual
async def test_a_sweep_spares_agents_whose_takeover_is_not_answered_yet() -> None:
    async with linked() as bench:
        other = Other()
        bench.host.attach(other)
        bench.host.ordered(other, strange_order("r1", 7))
        await asyncio.sleep(1)
        async with asyncio.TaskGroup() as group:
            taken = group.create_task(bench.backend.recover(frozenset({an_id(7)})))
            swept = group.create_task(bench.backend.cleanup_orphans(frozenset()))
        assert (len(taken.result()), swept.result()) == (1, 0)
        assert bench.on_host() == {an_id(7)}


@virtual
async def test_a_worker_that_was_given_up_is_asked_for_nothing() -> None:
    async with linked() as bench:
        await spawned(bench, 1)
        task = spawning(bench, 2, Kind.SLOW)
        await asyncio.sleep(1)
        bench.cut()
        bench.channel.give_up("worker revoked")
        with pytest.raises(Unanswered, match="revoked"):
            await task
        for number in (1, 2):
            await bench.backend.destroy(an_id(number), ScaleDownReason.SHUTDOWN)
        assert bench.backend.active_count() == 0


@virtual
async def test_a_scaler_that_cannot_be_looked_at_keeps_its_agents_until_it_can() -> None:
    async with linked() as bench:
        await spawned(bench, 1)
        bench.cut()
        bench.blind = True
        await bench.restart_worker()
        bench.link()
        await asyncio.sleep(1)
        assert bench.backend.active_count() == 1, "nobody says that it is gone"
        with pytest.raises(Retryable, match="cannot look"):
            await bench.backend.destroy(an_id(1), ScaleDownReason.IDLE)
        bench.local.blind = False
        looking = asyncio.create_task(bench.agents.run())
        await asyncio.sleep(LOOK_AGAIN_SECONDS + 1)
        looking.cancel()
        await bench.backend.destroy(an_id(1), ScaleDownReason.IDLE)
        assert not bench.on_host()
