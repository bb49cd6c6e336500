"""A coordinator with workers: jobs run on their hosts, and no fault of a link, a worker or a coordinator loses one."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import repeat
from typing import Any, Final

import pytest
from msgspec import structs

from kici.apps.surface import surface_of
from kici.config.model import BackendType, LabelSet, ScalerEntry, WarmPool
from kici.decide.classify import LiveVmSeen, VmStatus
from kici.domain import knobs
from kici.domain.errors import KiciError, Retryable, StoreDown
from kici.domain.ids import AgentId, InstanceId, ScalerName, scaler_agent_id
from kici.domain.job import Job, JobStatus
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.spawn import Spawn, SpawnState
from kici.domain.verdict import AtCap, CapName, InBackoff, NoScalerMatches
from kici.observe.events import Event
from kici.services import worker_links
from kici.services.workers_credentials import NotAdmitted
from kici.testing.bench_agent import BenchAgent
from kici.testing.bench_worker import BenchWorker
from kici.testing.builders import HERE, a_reservation, a_spawn
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.fake_backend import SpawnScript, refuses
from kici.testing.sim_link import CLOSE_SECONDS
from kici.wire.messages import CloseCode, ConfigAck, JobStart
from kici.wire.worker_messages import (
    DestroyAgent,
    RecoverAgents,
    SpawnAgent,
    WorkerHello,
    WorkerJoin,
    WorkerLeaving,
    WorkerMessage,
    WorkerProof,
)
from kici.wire.worker_pulse import SILENCE_SECONDS

LINUX: Final = a_scaler("linux", ("linux", "far"), max_agents=3)
DONE: Final = JobStatus.SUCCESS


async def a_worker(bench: Bench, name: str = "w1", *scalers: ScalerEntry, max_agents: int = 100) -> BenchWorker:
    worker = BenchWorker(bench, name, scalers or (LINUX,), max_agents=max_agents)
    await worker.joins()
    return worker


async def a_running_job(bench: Bench, number: int = 0) -> tuple[Job, BenchAgent]:
    job = await bench.submits("far")
    agent = await bench.made(number)
    assert await agent.starts() == job.id
    return job, agent


async def comes_to_its_end(bench: Bench, job: Job, agent: BenchAgent) -> None:
    agent.ends(job.id)
    found = await bench.ended(job)
    assert (found.status, found.attempts) == (DONE, 0), found
    agent.leaves()


async def restarts(bench: Bench, *workers: BenchWorker, down_seconds: float = 2.0) -> None:
    """The coordinator is killed and started again; its links break."""
    for worker in workers:
        worker.cut_off()
    await bench.is_killed()
    await bench.passes(down_seconds)
    await bench.starts()
    for worker in workers:
        worker.reaches(bench.coordinator.workers.links)


# --- work


@benched()
async def test_scalers_of_a_worker_are_shown_as_on_its_host(bench: Bench) -> None:
    worker = await a_worker(bench)
    shown = await surface_of(bench.coordinator, version="test", stop=lambda keep: None).scalers.status()
    assert [(row.name, row.instance_id) for row in shown] == [("w1/linux", worker.worker_id)]


@pytest.mark.spec("D5")
@benched()
async def test_a_job_runs_on_the_host_of_a_worker(bench: Bench) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    (row,) = await bench.spawns()
    assert (row.worker_id, row.scaler, row.owner_instance_id) == (worker.worker_id, "w1/linux", HERE)
    assert bench.orders[0].orchestrator_url == "ws://w1/ws", "where agents connect to is for the worker to say"
    await comes_to_its_end(bench, job, agent)
    await bench.passes(5)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_live_machines_of_a_workers_host_are_listed_over_its_link(bench: Bench) -> None:
    worker = await a_worker(bench)
    backend = worker.backends["linux"]
    order: list[AgentId] = []

    async def live_vms() -> list[LiveVmSeen]:
        name, since = ScalerName("linux"), bench.clock.now()
        return [
            LiveVmSeen(vm_id=each, scaler=name, pid=pid, started_at=since, folder=f"/{each}", is_confirmed=True)
            for pid, each in enumerate(order, 7)
        ]

    async def holds_address(vm_id: AgentId) -> bool:
        return False

    for name, act in (
        ("live_vms", live_vms),
        ("holds_address", holds_address),
        ("is_tracking", lambda vm_id: False),
        ("stop_untracked", lambda vm_id, trackers: None),
    ):
        setattr(backend, name, act)  # as microVMs have it
    job, agent = await a_running_job(bench)
    order += [agent.agent_id, AgentId("scaler-firecracker-00000000")]
    listing = await bench.coordinator.cluster.live_vms.listing(InstanceId(worker.worker_id), seconds=5)
    assert (listing.instance_id, listing.scalers) == (worker.worker_id, ("linux",))
    assert [one.status for one in listing.vms] == [VmStatus.TRACKED, VmStatus.ORPHANED]
    await comes_to_its_end(bench, job, agent)


@pytest.mark.spec("T8.7")
@benched()
async def test_a_changed_life_of_tokens_counts_for_the_next_agent_of_a_worker(bench: Bench) -> None:
    await a_worker(bench)
    await bench.coordinator.settings.patch(None, {"agent_token_ttl_ms": 7_200_000})
    await bench.passes(12)
    before = bench.clock.now()
    await a_running_job(bench)
    (row,) = await bench.spawns()
    assert row.token_id is not None
    (token,) = [each for each in await bench.store.agent_tokens(limit=10) if each.id == row.token_id]
    assert token.expires_at is not None
    assert token.expires_at - before == pytest.approx(7_200_000, abs=5_000)


@benched(a_scaler("near", ("linux", "near")), max_agents=1)
async def test_scalers_of_this_host_and_of_workers_are_asked_alike_each_under_its_hosts_caps(bench: Bench) -> None:
    worker = await a_worker(bench)
    jobs = [await bench.submits(label) for label in ("far", "near", "far")]
    await bench.machine(2)
    by_job = {row.bound_job_id: row.scaler for row in await bench.spawns()}
    assert [by_job[job.id] for job in jobs] == ["w1/linux", "near", "w1/linux"]
    assert (len(worker.machines.alive), len(bench.machines.alive)) == (2, 1)
    await bench.submits("near")
    await bench.passes(15)
    assert len(bench.machines.alive) == 1, "the host's own cap"
    await worker.leaves()


@benched()
async def test_workers_with_the_same_file_share_the_jobs(bench: Bench) -> None:
    workers = [await a_worker(bench, name) for name in ("w1", "w2", "w3")]
    assert sorted(bench.coordinator.manager.fleet.runtimes) == ["w1/linux", "w2/linux", "w3/linux"]
    for _ in range(6):
        await bench.submits("far")
    await bench.machine(5)
    assert [len(worker.machines.alive) for worker in workers] == [2, 2, 2]
    for worker in workers:
        await worker.leaves()


@benched()
async def test_a_worker_has_caps_of_its_own_over_all_its_scalers(bench: Bench) -> None:
    worker = await a_worker(bench, "w1", LINUX, a_scaler("more", ("linux", "more")), max_agents=2)
    for label in ("far", "more"):
        await bench.submits(label)
    job = await bench.submits("far")
    await bench.machine(1)
    await bench.passes(15)
    assert len(worker.machines.alive) == 2
    verdict = await bench.verdict(job)
    assert isinstance(verdict, AtCap)
    assert (verdict.cap, verdict.limit) == (CapName.GLOBAL_MAX_AGENTS, 2)
    await worker.leaves()


@pytest.mark.spec("scaler 13")
@benched()
async def test_a_host_that_refuses_a_launch_is_left_alone_for_a_while_as_any_other(bench: Bench) -> None:
    worker = await a_worker(bench)
    worker.backends["linux"].scripts = iter([refuses("no such program"), SpawnScript()])
    job = await bench.submits("far")
    await bench.passes(5)
    verdict = await bench.verdict(job)
    assert isinstance(verdict, InBackoff)
    assert (verdict.scaler, verdict.last_error) == ("w1/linux", "no such program")
    agent = await bench.made(0)
    await agent.starts()
    await comes_to_its_end(bench, job, agent)
    await worker.leaves()


@pytest.mark.spec("D5", "scaler 43")
@benched()
async def test_a_worker_that_others_fill_refuses_and_nobody_is_blamed(bench: Bench) -> None:
    worker = await a_worker(bench, "w1", a_scaler("linux", ("linux", "far"), max_agents=1))
    seat = Stranger()
    worker.host.attach(seat)
    worker.backends["linux"].scripts = repeat(SpawnScript(seconds=1.0))
    worker.host.ordered(seat, an_order("linux", 7))  # what the coordinator thinks that there is is a moment old
    job = await bench.submits("far")
    await bench.passes(0.2)
    verdict = await bench.verdict(job)
    assert isinstance(verdict, AtCap)
    assert verdict.scaler == "w1/linux"
    assert not bench.told(Event.SPAWN_FAILED)
    assert not bench.metric("kici_orch_scaler_spawn_failures_total", backend="bare-metal", bound="true")
    worker.host.ordered(seat, DestroyAgent(request_id="r9", agent_id=an_id(7), reason="idle"))
    agent = await bench.made(1)
    await agent.starts(within=30)
    await comes_to_its_end(bench, job, agent)
    await worker.leaves()


@pytest.mark.parametrize(
    "before",
    [
        RecoverAgents(request_id="r9", scaler="linux", known=(scaler_agent_id("bare-metal", f"{7:08x}"),)),
        DestroyAgent(request_id="r9", agent_id=scaler_agent_id("bare-metal", f"{7:08x}"), reason="idle"),
    ],
    ids=["looked for", "ended"],
)
def test_an_order_that_comes_after_another_coordinator_took_over_makes_nothing(
    before: RecoverAgents | DestroyAgent,
) -> None:
    @benched()
    async def scenario(bench: Bench) -> None:
        worker = await a_worker(bench)
        seat = Stranger()
        worker.host.attach(seat)
        worker.host.ordered(seat, before)
        await bench.passes(1)
        worker.host.ordered(seat, an_order("linux", 7))
        await bench.passes(5)
        worker.is_clean()
        await worker.leaves()

    scenario()


# --- boot data of microVMs

VMS: Final = a_scaler("vms", ("linux", "far"), type=BackendType.FIRECRACKER)


class BootData:
    """What agents of a worker's microVMs were told at their boot, and when it is cleared."""

    def __init__(self) -> None:
        self.asked: list[AgentId] = []
        self.may_go = asyncio.Event()
        self.error: KiciError | None = None

    async def read(self, agent_id: AgentId) -> None:
        self.asked.append(agent_id)
        await self.may_go.wait()
        if self.error is not None:
            raise self.error


async def a_worker_of_vms(bench: Bench) -> tuple[BenchWorker, BootData]:
    worker, data = await a_worker(bench, "w1", VMS), BootData()
    worker.backends["vms"].boot_data_read = data.read  # type: ignore[attr-defined]  # as microVMs have it
    return worker, data


@pytest.mark.spec("scaler 36.18.18")
@benched()
async def test_no_job_starts_on_a_workers_host_before_the_boot_data_of_its_machine_is_gone(bench: Bench) -> None:
    worker, data = await a_worker_of_vms(bench)
    job = await bench.submits("far")
    agent = await bench.made()
    agent.says(ConfigAck())
    agent.acks(await agent.is_offered())
    await bench.passes(5)
    assert data.asked == [agent.agent_id]
    assert agent.all(JobStart) == []
    data.may_go.set()
    assert (await agent.hears(JobStart)).job_id == job.id
    assert data.asked == [agent.agent_id], "once is enough"
    await comes_to_its_end(bench, job, agent)
    await worker.leaves()


@benched()
async def test_an_agent_that_says_nothing_of_its_configuration_gets_no_job_either(bench: Bench) -> None:
    worker, data = await a_worker_of_vms(bench)
    await bench.submits("far")
    agent = await bench.made()
    agent.acks(await agent.is_offered())
    await bench.passes(5)
    assert data.asked == [agent.agent_id]
    assert agent.all(JobStart) == []
    await worker.leaves()


@benched()
async def test_an_agent_whose_boot_data_its_worker_cannot_clear_is_taken_down_and_its_job_goes_elsewhere(
    bench: Bench,
) -> None:
    worker, data = await a_worker_of_vms(bench)
    data.error = Retryable("the metadata of vm could not be emptied")
    data.may_go.set()
    job = await bench.submits("far")
    agent = await bench.made(0)
    agent.says(ConfigAck())
    assert await agent.is_closed() == CloseCode.DISMISSED
    assert agent.all(JobStart) == []
    (told,) = [each for each in bench.told(Event.AGENT_REFUSED) if each["agent_id"] == agent.agent_id]
    assert "the metadata of vm could not be emptied" in told["reason"]
    data.error = None
    other = await bench.made(1)
    assert agent.agent_id not in worker.machines.alive
    assert await other.starts() == job.id
    other.ends(job.id)
    await bench.ended(job)
    other.leaves()
    await bench.passes(5)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_a_worker_that_is_away_for_a_moment_is_asked_again_to_clear_boot_data(bench: Bench) -> None:
    worker, data = await a_worker_of_vms(bench)
    job = await bench.submits("far")
    agent = await bench.made()
    agent.acks(await agent.is_offered())
    await bench.passes(0.5)
    worker.dialer.cut()
    await bench.passes(0.1)
    data.may_go.set()
    await agent.hears(JobStart)
    assert len(data.asked) == 2
    await comes_to_its_end(bench, job, agent)
    await worker.leaves()


@benched()
async def test_an_agent_whose_worker_stays_away_before_its_boot_data_is_cleared_gets_no_job(bench: Bench) -> None:
    worker, data = await a_worker_of_vms(bench)
    job = await bench.submits("far")
    agent = await bench.made()
    agent.acks(await agent.is_offered())
    await bench.passes(0.5)
    worker.cut_off()
    assert await agent.is_closed() == CloseCode.DISMISSED
    assert agent.all(JobStart) == []
    found = await bench.job(job)
    assert (found.status, found.attempts) == (JobStatus.QUEUED, 1)
    data.may_go.set()
    worker.reaches(bench.coordinator.workers.links)
    other = await bench.made(1)
    assert await other.starts(within=60) == job.id
    await bench.passes(60)
    assert agent.agent_id not in worker.machines.alive
    await worker.leaves()


@benched()
async def test_an_agent_that_is_back_with_a_job_that_waits_for_its_start_gets_none_before_either(bench: Bench) -> None:
    worker, data = await a_worker_of_vms(bench)
    job = await bench.submits("far")
    agent = await bench.made()
    agent.acks(await agent.is_offered())
    await bench.passes(0.5)
    agent.cut()
    await restarts(bench, worker)
    await worker.is_linked()
    await agent.registers((job.id, "acked"))
    await bench.passes(2)
    assert len(data.asked) == 2
    assert agent.all(JobStart) == []
    data.may_go.set()
    assert (await agent.hears(JobStart)).job_id == job.id
    await comes_to_its_end(bench, job, agent)
    await worker.leaves()


@benched()
async def test_a_running_job_does_not_end_because_its_worker_is_away(bench: Bench) -> None:
    worker, data = await a_worker_of_vms(bench)
    data.may_go.set()
    job, agent = await a_running_job(bench)
    worker.cut_off()
    agent.cut()
    await agent.registers((job.id, "running"))
    agent.says(ConfigAck())
    await bench.passes(30)
    assert await bench.status(job) is JobStatus.RUNNING
    await comes_to_its_end(bench, job, agent)
    await worker.leaves()


@benched()
async def test_the_agent_of_another_coordinator_gets_no_job_before_its_worker_has_cleared_its_boot_data(
    bench: Bench,
) -> None:
    worker, data = await a_worker_of_vms(bench)
    await bench.store.link_workers([worker.worker_id], PEER)
    token, plain = await bench.coordinator.tokens.create_agent_token(
        name="theirs", labels=None, gate=frozenset(), expires_in_ms=None
    )
    theirs = scaler_agent_id("firecracker", "00000007")
    row = a_spawn(
        agent_id=theirs,
        scaler=ScalerName("w1/vms"),
        backend_type="firecracker",
        label_set=("linux", "far"),
        labels=("linux", "far"),
        token_id=token.id,
        owner_instance_id=PEER,
        worker_id=worker.worker_id,
        spawned_at=bench.clock.now(),
    )
    await bench.store.insert_spawn(row, a_reservation(row), None)
    worker.host.ordered(Stranger(), structs.replace(an_order("vms", 7), agent_id=theirs))
    agent = bench.program(theirs, ("linux", "far"), plain)
    await agent.registers()
    agent.says(ConfigAck())
    job = await bench.submits("far")
    agent.acks(await agent.is_offered())
    await bench.passes(3)
    assert data.asked == [theirs]
    assert agent.all(JobStart) == []
    data.may_go.set()
    assert (await agent.hears(JobStart)).job_id == job.id
    await worker.leaves()


@benched()
async def test_microvms_of_a_worker_that_is_too_old_to_say_that_it_cleared_them_get_no_jobs(bench: Bench) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_links, "WORKER_PROTOCOL", 1)
        worker = await a_worker(bench, "w1", VMS, a_scaler("rest", ("linux", "rest")))
        assert isinstance(await bench.verdict(await bench.submits("far")), NoScalerMatches)
        told = [each["reason"] for each in bench.told(Event.WORKER_REFUSED)]
        assert any("scaler vms" in reason for reason in told)
        job = await bench.submits("rest")
        agent = await bench.made()
        assert await agent.starts() == job.id
    await comes_to_its_end(bench, job, agent)
    await worker.leaves()


# --- links


@pytest.mark.spec("D5", "T4.7")
@benched()
async def test_a_lost_link_stops_new_spawns_and_no_running_agent(bench: Bench) -> None:
    worker = await a_worker(bench)
    running = [await a_running_job(bench, number) for number in range(2)]
    worker.cut_off()
    await bench.passes()
    late = await bench.submits("far")
    assert isinstance(await bench.verdict(late), NoScalerMatches)
    await comes_to_its_end(bench, *running[0])
    await bench.passes(100)
    assert await bench.status(running[1][0]) is JobStatus.RUNNING
    assert len(bench.orders) == 2
    worker.reaches(bench.coordinator.workers.links)
    await worker.is_linked()
    agent = await bench.made(2)
    await agent.starts(within=30)
    await comes_to_its_end(bench, late, agent)
    await comes_to_its_end(bench, *running[1])
    await bench.passes(40)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_a_link_that_blinks_while_agents_boot_costs_nothing(bench: Bench) -> None:
    worker = await a_worker(bench)
    worker.backends["linux"].scripts = repeat(SpawnScript(seconds=4.0))
    job = await bench.submits("far")
    await bench.passes(1)
    worker.dialer.cut()
    agent = await bench.made(0)
    await agent.starts(within=30)
    await comes_to_its_end(bench, job, agent)
    assert len(bench.orders) == 1
    await worker.leaves()


@benched()
async def test_an_order_that_is_lost_with_its_link_is_carried_out_when_the_worker_is_back(bench: Bench) -> None:
    worker = await a_worker(bench)
    job = await bench.submits("far")
    for _ in range(10_000):
        if bench.told(Event.SPAWN_ADMITTED):
            break  # the order is on its way, which takes a millisecond at least
        await bench.passes(0.0001)
    worker.dialer.cut()
    assert not bench.orders
    await bench.passes(5)
    (row,) = await bench.spawns()
    assert [order.agent_id for order in bench.orders] == [row.agent_id], "the same agent, made once"
    agent = await bench.made(0)
    await agent.starts()
    await comes_to_its_end(bench, job, agent)
    await worker.leaves()


@benched(settings={knobs.SCALER_SPAWN_TIMEOUT_MS.name: 300_000})
async def test_a_worker_that_vanishes_while_agents_boot_gives_their_jobs_to_others(bench: Bench) -> None:
    first = await a_worker(bench, "w1")
    first.backends["linux"].scripts = repeat(SpawnScript(seconds=100.0))
    job = await bench.submits("far")
    await bench.passes(1)
    first.cut_off()
    second = await a_worker(bench, "w2")
    agent = await bench.made(0)
    await agent.starts(within=60)
    await comes_to_its_end(bench, job, agent)
    await bench.passes(100)
    first.reaches(bench.coordinator.workers.links)
    await bench.passes(60)
    for worker in (first, second):
        worker.is_clean()
        await worker.leaves()
    await bench.is_clean()


@benched()
async def test_a_worker_that_vanishes_before_it_answers_costs_nothing_once_the_agent_is_there(bench: Bench) -> None:
    worker = await a_worker(bench)
    worker.backends["linux"].scripts = repeat(SpawnScript(settle_seconds=5.0))
    job, agent = await a_running_job(bench)
    worker.cut_off()
    await bench.passes(60)
    assert not bench.told(Event.SPAWN_FAILED)
    worker.reaches(bench.coordinator.workers.links)
    await worker.is_linked()
    await bench.passes(20)
    assert await bench.status(job) is JobStatus.RUNNING
    await comes_to_its_end(bench, job, agent)
    await bench.passes(10)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_a_link_that_only_looks_open_is_noticed_by_both_sides(bench: Bench) -> None:
    worker = await a_worker(bench)
    worker.dialer.wires[-1].half_open()
    workers = bench.coordinator.workers.links
    await bench.passes(SILENCE_SECONDS + CLOSE_SECONDS + 5)
    assert len(worker.dialer.wires) == 2
    await worker.is_linked()
    assert workers.is_linked(worker.worker_id)
    await bench.passes(300)
    assert len(worker.dialer.wires) == 2, "a link that nobody uses stays"
    await worker.leaves()


@benched()
async def test_the_newest_link_of_a_worker_counts(bench: Bench) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    twin = BenchWorker(bench, "w1", (LINUX,))
    twin.keys, twin.machines, twin.files = worker.keys, worker.machines, worker.files
    await worker.is_killed()  # its coordinator has not noticed: the wire only goes silent
    await twin.starts()
    await twin.is_linked()
    await comes_to_its_end(bench, job, agent)
    await bench.passes(5)
    twin.is_clean()
    await twin.leaves()


# --- a worker ends


@pytest.mark.spec("D28")
@benched()
async def test_a_killed_worker_costs_no_running_job(bench: Bench) -> None:
    worker = await a_worker(bench)
    running = [await a_running_job(bench, number) for number in range(3)]
    await worker.is_killed()
    await bench.passes(10)
    await worker.starts()
    await worker.is_linked()
    assert len(worker.agents.holdings) == 3
    for job, agent in running:
        await comes_to_its_end(bench, job, agent)
    await bench.passes(5)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_a_host_that_is_gone_costs_its_jobs_after_their_grace_and_nothing_more(bench: Bench) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    await worker.is_killed()
    agent.cut()
    await bench.passes(30)
    assert await bench.status(job) is JobStatus.RECOVERING
    assert (await bench.ended(job, within=60)).status is JobStatus.FAILED
    (row,) = await bench.spawns()
    assert row.state is SpawnState.ENDING, "it is not known to be gone"
    worker.machines.die(agent.agent_id)
    await worker.starts()
    await bench.passes(60)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_an_agent_that_died_with_its_worker_down_settles_its_job_when_it_is_back(bench: Bench) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    await worker.is_killed()
    worker.machines.die(agent.agent_id)
    agent.cut()
    await bench.passes(5)
    await worker.starts()
    found = await bench.ended(job, within=10)
    assert found.status is JobStatus.FAILED
    assert "worker's restart" in (found.reason or "")
    await worker.leaves()


def recorded(told: list[str], name: str, act: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        told.append(name)
        await act()

    return call


@pytest.mark.spec("D28")
@pytest.mark.parametrize("keep_agents", [True, False])
def test_a_worker_that_is_stopped(keep_agents: bool) -> None:
    @benched()
    async def stopped(bench: Bench) -> None:
        worker = await a_worker(bench)
        job, agent = await a_running_job(bench)
        backend, told = worker.backends["linux"], list[str]()
        for name in ("shutdown_all", "release_all"):
            setattr(backend, name, recorded(told, name, getattr(backend, name)))
        await worker.stops(keep_agents=keep_agents)
        assert told == ["release_all" if keep_agents else "shutdown_all"], "what it keeps beside agents goes too"
        await bench.passes(5)
        if not keep_agents:
            found = await bench.ended(job)
            assert found.status is JobStatus.FAILED
            assert "worker was stopped" in (found.reason or "")
            worker.is_clean()
        else:
            await worker.starts()
            await worker.is_linked()
            await comes_to_its_end(bench, job, agent)
            await bench.passes(5)
            worker.is_clean()
            await worker.leaves()
        await bench.is_clean()

    stopped()


@benched()
async def test_a_worker_that_is_about_to_stop_gets_no_job(bench: Bench) -> None:
    worker = await a_worker(bench)
    worker.links.host._seats[HERE].send(WorkerLeaving(reason="soon"))
    await bench.passes()
    job = await bench.submits("far")
    assert isinstance(await bench.verdict(job), NoScalerMatches)
    await worker.leaves()


# --- the coordinator ends


@pytest.mark.spec("D28", "T4.9")
@benched()
async def test_a_killed_coordinator_costs_no_job_of_its_workers(bench: Bench) -> None:
    worker = await a_worker(bench)
    running = [await a_running_job(bench, number) for number in range(3)]
    await restarts(bench, worker)
    for job, agent in running:
        ack = await agent.registers((job.id, "running"))
        assert [verdict.action for verdict in ack.jobs] == ["resume"]
    await worker.is_linked()
    await bench.passes(90)
    for job, agent in running:
        await comes_to_its_end(bench, job, agent)
    await bench.passes(5)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_a_coordinator_that_stops_leaves_the_agents_of_its_workers_running(bench: Bench) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    await bench.stops()
    worker.cut_off()
    assert len(worker.machines.alive) == 1
    await bench.starts()
    worker.reaches(bench.coordinator.workers.links)
    await agent.registers((job.id, "running"))
    await worker.is_linked()
    await comes_to_its_end(bench, job, agent)
    await bench.passes(5)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_what_died_while_the_coordinator_was_down_is_settled_when_the_worker_tells(bench: Bench) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    worker.cut_off()
    await bench.is_killed()
    worker.machines.die(agent.agent_id, "was killed by signal 9")
    await bench.starts()
    worker.reaches(bench.coordinator.workers.links)
    found = await bench.ended(job, within=30)
    assert found.status is JobStatus.FAILED
    assert "signal 9" in (found.reason or "")
    await bench.passes(5)
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_agents_that_boot_while_the_coordinator_is_down_serve_their_jobs_afterwards(bench: Bench) -> None:
    worker = await a_worker(bench)
    worker.backends["linux"].scripts = repeat(SpawnScript(seconds=5.0))
    job = await bench.submits("far")
    await bench.passes(1)
    await restarts(bench, worker, down_seconds=10)
    agent = await bench.made(0)
    await agent.starts(within=30)
    await comes_to_its_end(bench, job, agent)
    assert len(bench.orders) == 1
    await bench.passes(20)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_a_worker_that_never_comes_back_after_a_restart_keeps_its_agents_jobs_while_they_live(
    bench: Bench,
) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    worker.cut_off()
    await bench.is_killed()
    await bench.starts()
    await agent.registers((job.id, "running"))  # it reaches the coordinator by itself
    await bench.passes(80)
    await comes_to_its_end(bench, job, agent)
    await bench.passes(5)
    (row,) = await bench.spawns()
    assert row.state is SpawnState.ENDING
    await worker.leaves()
    await bench.is_killed()


# --- whose agents are whose


@pytest.mark.spec("D5")
@benched()
async def test_an_agent_that_no_row_explains_is_ended(bench: Bench) -> None:
    worker = await a_worker(bench)
    worker.host.ordered(Stranger(), an_order("linux", 7))
    await bench.passes()
    assert len(worker.machines.alive) == 1
    worker.dialer.cut()
    await bench.passes(5)
    worker.is_clean()
    assert [fields["agent_id"] for fields in bench.told(Event.WORKER_STRAY)] == [an_id(7)]
    await worker.leaves()


PEER = InstanceId("instance-b")


async def an_agent_of_a_peer(bench: Bench, worker: BenchWorker, number: int = 7) -> None:
    """Another coordinator, linked to the worker, has an agent there."""
    await bench.store.link_workers([worker.worker_id], PEER)
    row = a_spawn(
        agent_id=an_id(number),
        scaler=ScalerName("w1/linux"),
        label_set=("linux", "far"),
        owner_instance_id=PEER,
        worker_id=worker.worker_id,
        spawned_at=bench.clock.now(),
    )
    await bench.store.insert_spawn(row, a_reservation(row), None)
    worker.host.ordered(Stranger(), an_order("linux", number))
    await bench.passes()


@pytest.mark.spec("D5", "T4.8")
@benched()
async def test_agents_of_another_coordinator_are_left_alone_until_it_is_gone_and_then_taken_over(
    bench: Bench,
) -> None:
    worker = await a_worker(bench)
    await an_agent_of_a_peer(bench, worker)
    worker.dialer.cut()
    await bench.passes(50)
    assert len(worker.machines.alive) == 1
    assert len(bench.coordinator.spawns) == 0
    await bench.passes(30)
    tracked = bench.coordinator.spawns.get(an_id(7))
    assert tracked is not None
    assert tracked.spawn.owner_instance_id == HERE
    assert worker.host.owner_of(an_id(7)) == HERE
    assert bench.coordinator.book.total.agents == 1
    await bench.passes(400)  # its agent never comes
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@pytest.mark.parametrize("lost", ["take_over_worker_spawns", "database_now"])
@benched()
async def test_agents_are_looked_after_whose_takeover_was_written_and_not_answered(bench: Bench, lost: str) -> None:
    worker = await a_worker(bench)
    await an_agent_of_a_peer(bench, worker)
    calls: list[str] = []

    async def unanswered(*args: Any, **kwargs: Any) -> Any:
        answer = await method(*args, **kwargs)
        if not calls and (await bench.spawns())[0].owner_instance_id == HERE:
            calls.append(lost)
            raise StoreDown(f"{lost}: the answer was lost")
        return answer

    method = getattr(bench.store, lost)
    setattr(bench.store, lost, unanswered)
    await bench.passes(100)
    assert calls == [lost]
    assert bench.coordinator.spawns.get(an_id(7)) is not None
    await bench.passes(400)  # its agent never comes
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_a_takeover_that_outlasts_its_link_goes_on_with_the_next_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await a_worker(bench)
    await an_agent_of_a_peer(bench, worker)
    method, reached, opened = bench.store.take_over_worker_spawns, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **kwargs: Any) -> list[Spawn]:
        rows = await method(*args, **kwargs)
        if rows:
            reached.set()
            await opened.wait()
        return rows

    monkeypatch.setattr(bench.store, "take_over_worker_spawns", slow)
    links = bench.coordinator.workers.links
    worker.cut_off()
    await bench.passes(70)
    worker.reaches(links)
    await reached.wait()
    worker.cut_off()
    await bench.passes(5)
    worker.reaches(links)
    await worker.is_linked()
    worker.machines.die(an_id(7))
    await bench.passes(10)
    opened.set()
    await bench.passes(100)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_a_row_of_a_coordinator_that_is_gone_whose_agent_is_gone_too_is_settled(bench: Bench) -> None:
    worker = await a_worker(bench)
    await an_agent_of_a_peer(bench, worker)
    worker.machines.die(an_id(7))
    await bench.passes(100)
    worker.is_clean()
    await bench.is_clean()
    await worker.leaves()


@benched()
async def test_an_agent_that_another_coordinator_has_ended_is_not_kept(bench: Bench) -> None:
    worker = await a_worker(bench)
    _, agent = await a_running_job(bench)
    assert await bench.store.delete_spawn(agent.agent_id)
    await bench.passes(15)
    assert bench.coordinator.spawns.get(agent.agent_id) is None
    assert bench.coordinator.book.total.agents == 0
    worker.is_clean()


@benched()
async def test_agents_that_another_coordinator_has_taken_over_are_let_go(bench: Bench) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    worker.cut_off()
    await bench.passes(70)
    await bench.store.link_workers([worker.worker_id], PEER)
    moved = await bench.store.take_over_worker_spawns(worker.worker_id, PEER, fresh_ms=60_000)
    assert [row.agent_id for row in moved] == [agent.agent_id]
    await bench.passes(15)
    assert bench.coordinator.spawns.get(agent.agent_id) is None
    assert bench.coordinator.book.total.agents == 0
    assert len(worker.machines.alive) == 1
    await comes_to_its_end(bench, job, agent)
    await bench.passes(5)
    (row,) = await bench.spawns()
    assert row.state is SpawnState.ENDING, "whoever looks after it is asked to end it"
    await worker.leaves()


# --- who is a worker


@pytest.mark.spec("T4.1")
@benched()
async def test_a_join_token_makes_one_worker(bench: Bench) -> None:
    first = await a_worker(bench)
    second = BenchWorker(bench, "w2", (LINUX,))
    second.keys.token = first.keys.token
    await second.starts()
    await bench.passes(20)
    assert second.given_up == ["Invalid token"]
    assert second.keys.kept is None
    first.keys.kept = None  # its answer was lost
    await first.is_killed()
    await first.starts()
    await first.is_linked()
    for worker in (first, second):
        await worker.leaves()


@benched()
async def test_an_attempt_to_join_that_is_carried_out_late_does_not_lock_the_worker_out(bench: Bench) -> None:
    worker = await a_worker(bench)
    assert worker.keys.token is not None
    hello = WorkerHello(worker_id=worker.worker_id, name="w1", nonce="x")
    late = WorkerJoin(token=worker.keys.token)
    judged = await bench.coordinator.workers.credentials.judge(hello, late, nonce="n", remote="10.0.0.1")
    assert not isinstance(judged, NotAdmitted)
    worker.dialer.cut()
    await bench.passes(20)
    await worker.is_linked()
    assert worker.given_up == []
    await worker.leaves()


@pytest.mark.spec("T4.2")
@benched()
async def test_wrong_credentials_are_refused_with_the_reason_and_the_sixth_try_in_a_minute_is_throttled(
    bench: Bench,
) -> None:
    worker = await a_worker(bench)
    await worker.is_killed()
    worker.keys.kept, worker.keys.token = "something else", None
    credentials = bench.coordinator.workers.credentials
    hello = WorkerHello(worker_id=worker.worker_id, name="w1", nonce="x")
    told = [await credentials.judge(hello, WorkerProof(proof="wrong"), nonce="n", remote="10.0.0.1") for _ in range(6)]
    assert [each.reason for each in told if isinstance(each, NotAdmitted)][:5] == ["Invalid proof"] * 5
    assert isinstance(told[5], NotAdmitted)
    assert (told[5].reason[:17], told[5].is_permanent) == ("Too many failures", False)
    other = WorkerHello(worker_id="w9", name="w9", nonce="x")
    throttled = await credentials.judge(other, WorkerProof(proof="wrong"), nonce="n", remote="10.0.0.1")
    assert isinstance(throttled, NotAdmitted)
    assert not throttled.is_permanent, "the address, too"
    elsewhere = await credentials.judge(other, WorkerProof(proof="wrong"), nonce="n", remote="10.0.0.2")
    assert elsewhere == NotAdmitted("Unknown credential")
    await bench.passes(61)
    again = await credentials.judge(hello, WorkerProof(proof="wrong"), nonce="n", remote="10.0.0.1")
    assert again == NotAdmitted("Invalid proof")


@benched()
async def test_a_worker_comes_back_with_its_credential_and_no_token(bench: Bench) -> None:
    worker = await a_worker(bench)
    await worker.is_killed()
    worker.keys.token = None
    await worker.starts()
    await worker.is_linked()
    await worker.leaves()


@benched()
async def test_a_store_that_is_down_refuses_for_the_moment(bench: Bench) -> None:
    worker = await a_worker(bench)
    worker.dialer.cut()
    bench.faults.is_down = True
    await bench.passes(30)
    assert not bench.coordinator.workers.links.is_linked(worker.worker_id)
    assert not worker.given_up
    bench.faults.is_down = False
    await worker.is_linked()
    await worker.leaves()


@pytest.mark.spec("D5", "surroundings 4.2")
@benched()
async def test_a_revoked_worker_is_cut_off_and_its_agents_are_nobodys(bench: Bench) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    booting = await bench.submits("far")
    await bench.machine(1)
    assert await bench.coordinator.workers.revoke(worker.worker_id)
    await bench.passes(5)
    assert worker.given_up == ["Credential revoked"]
    found = await bench.ended(job)
    assert found.status is JobStatus.FAILED
    assert "revoked" in (found.reason or "")
    assert await agent.is_closed()
    assert await bench.spawns() == []
    assert await bench.status(booting) is JobStatus.QUEUED
    assert not await bench.coordinator.workers.revoke(worker.worker_id)
    await worker.leaves()


@benched()
async def test_a_worker_that_is_revoked_elsewhere_while_it_is_away_is_given_up(bench: Bench) -> None:
    worker = await a_worker(bench)
    job, agent = await a_running_job(bench)
    worker.cut_off()
    agent.cut()
    await bench.store.revoke_worker(worker.worker_id)
    await bench.passes(15)
    assert (await bench.ended(job)).status is JobStatus.FAILED
    await bench.passes(5)
    assert await bench.spawns() == []
    await worker.leaves()


@benched()
async def test_a_revoked_worker_may_join_anew(bench: Bench) -> None:
    worker = await a_worker(bench)
    await bench.coordinator.workers.revoke(worker.worker_id)
    await bench.passes(5)
    await worker.is_killed()
    await worker.joins()
    job, agent = await a_running_job(bench)
    await comes_to_its_end(bench, job, agent)
    await worker.leaves()


# --- what agents are told


@benched()
async def test_agents_of_workers_are_not_sent_to_what_their_host_calls_loopback(bench: Bench) -> None:
    addresses = ["ws://127.0.0.1:4000/ws", "ws://coordinator/ws"]
    bench.coordinator.registration._coordinators = lambda: addresses
    worker = await a_worker(bench)
    await bench.submits("far")
    agent = await bench.booted(0)
    ack = await agent.registers()
    assert ack.coordinators == ["ws://coordinator/ws"]
    static = await bench.a_program("static")
    assert (await static.registers()).coordinators == addresses
    await worker.leaves()
    await bench.is_killed()


class Stranger:
    """A coordinator that nobody here knows."""

    instance_id = InstanceId("a-stranger")

    def send(self, message: WorkerMessage) -> None:
        pass


def an_id(number: int) -> AgentId:
    return scaler_agent_id("bare-metal", f"{number:08x}")


def an_order(scaler: str, number: int) -> SpawnAgent:
    return SpawnAgent(
        request_id=f"r{number}",
        scaler=scaler,
        agent_id=an_id(number),
        label_set=("linux", "far"),
        labels=("linux", "far"),
    )


# --- warm pools


WARM: Final = a_scaler(
    "warm",
    label_sets=(LabelSet(labels=("linux", "warm"), resources=ResourceRequest(requests=Ask(cpus=1))),),
    max_agents=4,
    warm_pool=WarmPool(enabled=True, size=2),
)


def warm_agents(worker: BenchWorker) -> int:
    return len(worker.machines.alive)


@pytest.mark.spec("D5", "D6")
@benched()
async def test_the_warm_pool_of_a_worker_is_filled_and_filled_again(bench: Bench) -> None:
    worker = await a_worker(bench, "w1", WARM)
    agents = [await bench.made(0), await bench.made(1)]
    await bench.passes(60)
    assert warm_agents(worker) == 2
    assert bench.coordinator.pools.of_scaler(ScalerName("w1/warm")) == (2, 2)
    job = await bench.submits("warm")
    given = (await bench.job(job)).agent_id
    (taken,) = [agent for agent in agents if agent.agent_id == given]
    assert await taken.starts() == job.id
    third = await bench.made(2)
    await bench.passes(40)
    assert warm_agents(worker) == 3, "one works, two are ready"
    await comes_to_its_end(bench, job, taken)
    await bench.passes(5)
    assert warm_agents(worker) == 2
    assert third.agent_id in worker.machines.alive
    await worker.stops()
    await bench.passes(5)


@benched()
async def test_another_coordinator_that_fills_the_pool_of_a_worker_is_not_doubled(bench: Bench) -> None:
    other = InstanceId("other")
    assert await bench.store.acquire_lease("pools id-of-w1", other, ttl_ms=60_000)
    worker = await a_worker(bench, "w1", WARM)
    await bench.passes(50)
    assert warm_agents(worker) == 0
    await bench.passes(60)
    assert warm_agents(worker) == 2, "the other one has gone"
    await worker.stops()
    await bench.passes(5)


@benched()
async def test_warm_agents_of_a_worker_outlive_the_coordinator_that_wanted_them(bench: Bench) -> None:
    worker = await a_worker(bench, "w1", WARM)
    agents = [await bench.made(0), await bench.made(1)]
    await bench.passes(5)
    await restarts(bench, worker)
    await worker.is_linked()
    for agent in agents:
        await agent.registers()
    await bench.passes(120)
    assert set(worker.machines.alive) == {agent.agent_id for agent in agents}
    await worker.stops()
    await bench.passes(5)


@benched()
async def test_a_warm_agent_gives_way_to_a_job_that_its_workers_cap_refuses(bench: Bench) -> None:
    both = (WARM, a_scaler("cold", ("linux", "cold"), max_agents=4))
    worker = await a_worker(bench, "w1", *both, max_agents=2)
    _ = [await bench.made(0), await bench.made(1)]
    await bench.passes(5)
    job = await bench.submits("cold")
    agent = await bench.made(2)
    assert await agent.starts() == job.id
    await bench.passes(60)
    assert warm_agents(worker) == 2, "the pool does not take back what the job needs"
    await comes_to_its_end(bench, job, agent)
    await bench.until(lambda: len(bench.orders) == 4, within=90)
    await worker.stops()
    await bench.passes(5)
