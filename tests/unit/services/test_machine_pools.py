"""Machine pools in the request path: the host's ledger has the last word, and nothing of a refusal is left."""

import asyncio
from dataclasses import replace
from typing import Final

import pytest

from kici.apps.surface import surface_of
from kici.config.model import Cap, LabelSet, MachinePool, ScalerEntry, ScalersConfig, WarmPool
from kici.decide.admit import Cap as CapOf
from kici.decide.ledger import Kind
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.domain.job import Job, JobStatus
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.spawn import Reservation
from kici.domain.verdict import AtCap, CapName, SpawnFailed
from kici.observe.events import Event
from kici.testing.builders import HERE, a_reservation, a_shape, a_spawn
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.fake_backend import SpawnScript, fails
from kici.testing.fake_ledger import FakeLedger
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim_clock import SIM_START
from kici.web.surface import CheckStatus, PoolUse

POOLS: Final = (MachinePool(name="ci", cap=Cap(max_cpu=4.0)),)
PEER: Final = InstanceId("peer")
SCALER: Final = a_scaler(machine_pool="ci")


class Neighbour:
    """Another coordinator on the same host."""

    def __init__(self, bench: Bench, *, cpus: float = 4.0) -> None:
        self._ledger = FakeLedger(bench.pooled, InstanceId("neighbour"))
        self._cap = CapOf(cpus=cpus)
        self._number = 0

    async def takes(self, cpus: float) -> str | None:
        """The agent that got it; None: refused."""
        self._number += 1
        reservation = Reservation(
            agent_id=AgentId(f"neighbour-{self._number}"),
            scaler=ScalerName("theirs"),
            shape=a_shape(cpus),
            machine_pool="ci",
            owner_instance_id=InstanceId("neighbour"),
            reserved_at=SIM_START,
        )
        outcome = await self._ledger.try_reserve("ci", self._cap, reservation, Kind.PROCESS)
        return None if outcome.refused else reservation.agent_id

    async def gives_back(self, agent: str | None) -> None:
        assert agent is not None
        await self._ledger.release("ci", AgentId(agent))


def in_use(bench: Bench, pool: str = "ci") -> float:
    """Cpus in the ledger, everybody's."""
    return sum(row.requests.cpus for row in bench.pooled.rows(pool))


def ours(bench: Bench, pool: str = "ci") -> set[AgentId]:
    return {row.agent_id for row in bench.pooled.rows(pool) if row.instance_id == HERE}


async def is_untouched(bench: Bench) -> None:
    """Nothing was reserved, in memory or in the ledger or in the store."""
    await bench.is_clean()
    assert bench.orders == []
    assert bench.ledger.held() == set()


async def verdict(bench: Bench, job: Job) -> AtCap:
    found = await bench.verdict(job)
    assert isinstance(found, AtCap)
    return found


@benched(SCALER, machine_pools=POOLS)
async def test_an_agent_is_in_the_ledger_from_before_it_is_made_until_it_is_gone(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(seconds=5, destroy_seconds=5)])
    job = await bench.submits("linux", cpus=2.0)
    await bench.passes()
    assert (in_use(bench), bench.orders) == (2.0, [])
    agent = await bench.made()
    assert bench.orders[0].proof == bench.ledger.descriptor(agent.agent_id)
    assert bench.orders[0].proof is not None
    await agent.starts()
    agent.ends(job.id)
    await bench.ended(job)
    agent.leaves()
    await bench.passes(4)
    assert in_use(bench) == 2.0, "its machine still runs"
    await bench.passes(4)
    assert in_use(bench) == 0.0
    await bench.is_clean()


@benched(a_scaler(), machine_pools=POOLS)
async def test_a_scaler_without_a_pool_is_billed_to_none(bench: Bench) -> None:
    await bench.submits("linux", cpus=2.0)
    await bench.machine()
    assert in_use(bench) == 0.0
    assert bench.orders[0].proof is None


@pytest.mark.spec("scaler 10.7.4")
@benched(SCALER, machine_pools=POOLS)
async def test_a_refusal_of_the_ledger_leaves_nothing_and_is_told_with_its_numbers(bench: Bench) -> None:
    await Neighbour(bench).takes(3.0)
    job = await bench.submits("linux", cpus=2.0)
    await bench.passes()
    await is_untouched(bench)
    found = await verdict(bench, job)
    assert (found.cap, found.pool, found.scaler) == (CapName.MACHINE_POOL, "ci", "local")
    assert (found.used, found.requested, found.limit) == (3.0, 2.0, 4.0)
    assert bench.metric("kici_orch_scaler_spawn_refusals_total") >= 1
    assert await bench.status(job) is JobStatus.QUEUED


@pytest.mark.spec("scaler 10.7.4", "scaler 50.14")
@benched(SCALER, machine_pools=POOLS)
async def test_a_ledger_that_fails_leaves_nothing_and_is_asked_again(bench: Bench) -> None:
    bench.ledger.faults = [Retryable("the disk is full")] * 4
    job = await bench.submits("linux", cpus=2.0)
    await bench.passes()
    await is_untouched(bench)
    found = await bench.verdict(job)
    assert isinstance(found, SpawnFailed)
    assert "the disk is full" in found.text
    assert len(bench.told(Event.LEDGER_FAILED)) == 1, "said once, not at each attempt"
    await bench.passes(4)
    assert bench.orders[0].bound_job_id == job.id


@benched(SCALER, machine_pools=POOLS)
async def test_what_a_neighbour_gives_back_is_noticed_within_seconds(bench: Bench) -> None:
    neighbour = Neighbour(bench)
    taken = await neighbour.takes(3.0)
    job = await bench.submits("linux", cpus=2.0)
    await bench.passes(3)
    assert bench.orders == []
    await neighbour.gives_back(taken)
    await bench.passes(1.5)
    assert bench.orders[0].bound_job_id == job.id


@benched(SCALER, machine_pools=POOLS)
async def test_an_agent_of_a_killed_neighbour_makes_room_when_it_ends(bench: Bench) -> None:
    neighbour = Neighbour(bench)
    taken = AgentId(await neighbour.takes(3.0) or "")
    bench.pooled.inherits(taken)
    bench.pooled.is_killed(InstanceId("neighbour"))
    await bench.submits("linux", cpus=2.0)
    await bench.passes(30)
    assert bench.orders == []
    bench.pooled.agent_ended(taken)
    await bench.passes(2)
    assert len(bench.orders) == 1


@benched(SCALER, machine_pools=POOLS, sweep_seconds=3600.0)
async def test_a_full_pool_is_not_asked_for_each_of_many_jobs(bench: Bench) -> None:
    await Neighbour(bench).takes(4.0)
    await bench.passes(31)
    before = bench.ledger.calls
    for _ in range(50):
        await bench.submits("linux", cpus=1.0)
    assert bench.ledger.calls - before <= 5


@benched(SCALER, machine_pools=POOLS, sweep_seconds=3600.0)
async def test_for_a_job_that_can_never_fit_nobody_looks_again_and_again(bench: Bench) -> None:
    job = await bench.submits("linux", cpus=5.0)
    await bench.passes(1)
    before = bench.ledger.calls
    await bench.passes(29)
    assert bench.ledger.calls - before <= 3
    assert (await verdict(bench, job)).is_hopeless


@benched(SCALER, machine_pools=POOLS)
async def test_what_is_being_reserved_counts_before_the_ledger_answers(bench: Bench) -> None:
    await bench.passes(1)
    bench.ledger.gate = gate = asyncio.Event()
    for _ in range(10):
        await bench.submits("linux", cpus=1.0)
    before = bench.ledger.calls
    gate.set()
    bench.ledger.gate = None
    await bench.passes(1)
    assert len(bench.orders) == 4
    assert bench.ledger.calls - before <= 10
    assert in_use(bench) == 4.0


@pytest.mark.spec("scaler 50.20")
@benched(SCALER, a_scaler("other", ("mac",)), machine_pools=(*POOLS, MachinePool(name="big", cap=Cap(max_cpu=64.0))))
async def test_a_scaler_that_moves_to_another_pool_gives_back_to_the_old_one(bench: Bench) -> None:
    first = await bench.submits("linux", cpus=2.0)
    old = await bench.made()
    await old.starts()
    await reload(bench, a_scaler(machine_pool="big"))
    await bench.submits("linux", cpus=3.0)
    await bench.made(1)
    assert (in_use(bench, "ci"), in_use(bench, "big")) == (2.0, 3.0)
    old.ends(first.id)
    await bench.ended(first)
    old.leaves()
    await bench.passes(2)
    assert (in_use(bench, "ci"), in_use(bench, "big")) == (0.0, 3.0)


async def reload(bench: Bench, *scalers: ScalerEntry, pools: tuple[MachinePool, ...] | None = None) -> None:
    assert isinstance(bench.file, ScalersConfig)
    bench.file = replace(
        bench.file, scalers=scalers, machine_pools=bench.file.machine_pools if pools is None else pools
    )
    report = await bench.coordinator.reload_scalers()
    assert report.outcome == "applied", report


@pytest.mark.spec("scaler 19.8.10")
@benched(a_scaler())
async def test_pools_that_a_reload_adds_are_in_force_at_once(bench: Bench) -> None:
    await Neighbour(bench).takes(3.0)
    await reload(bench, SCALER, pools=POOLS)
    job = await bench.submits("linux", cpus=2.0)
    await bench.passes()
    assert (await verdict(bench, job)).cap is CapName.MACHINE_POOL
    await bench.submits("linux", cpus=1.0)
    await bench.machine()
    assert in_use(bench) == 4.0


@pytest.mark.spec("scaler 50.15")
@benched(SCALER, machine_pools=POOLS)
async def test_a_cap_that_a_reload_changes_is_in_force_at_once(bench: Bench) -> None:
    for _ in range(6):
        await bench.submits("linux", cpus=1.0)
    await bench.passes(1)
    assert len(bench.orders) == 4
    await reload(bench, SCALER, pools=(MachinePool(name="ci", cap=Cap(max_cpu=5.0)),))
    await bench.passes(1)
    assert len(bench.orders) == 5
    await reload(bench, SCALER, pools=(MachinePool(name="ci", cap=Cap(max_cpu=2.0)),))
    assert bench.pooled.ledgers["ci"].caps == {HERE: CapOf(cpus=2.0)}, "the neighbours know before we ask for more"
    for number in range(3):
        bench.dies(await bench.made(number))
    await bench.passes(60)
    assert in_use(bench) <= 2.0


@pytest.mark.spec("scaler 38.7.7")
@benched(SCALER, machine_pools=POOLS)
async def test_a_neighbour_that_allows_less_binds_us_and_the_operator_is_told(bench: Bench) -> None:
    await Neighbour(bench, cpus=2.0).takes(0.0)
    job = await bench.submits("linux", cpus=3.0)
    await bench.passes()
    assert (await verdict(bench, job)).limit == 2.0
    await bench.passes(100)
    assert [told["in_force"] for told in bench.told(Event.LEDGER_DISPUTED)] == ["2 cpus"]


@benched(SCALER, machine_pools=POOLS)
async def test_a_killed_coordinator_finds_its_part_of_the_pool_again(bench: Bench) -> None:
    await bench.submits("linux", cpus=1.0)
    await bench.submits("linux", cpus=2.0)
    kept, lost = await bench.made(0), await bench.made(1)
    await bench.is_killed()
    assert in_use(bench) == 3.0, "its agents live"
    bench.machines.remove(lost.agent_id)
    await bench.starts()
    assert ours(bench) == {kept.agent_id}
    assert bench.coordinator.book.total.agents == 1
    bench.dies(kept)
    await bench.until(lambda: ours(bench) != {kept.agent_id})


@benched(SCALER, machine_pools=POOLS)
async def test_who_is_killed_before_the_row_is_written_holds_nothing(bench: Bench) -> None:
    gate = bench.traps.hold("insert_spawn", done=False)
    await bench.submits("linux", cpus=4.0)
    await gate.reached()
    assert in_use(bench) == 4.0
    await bench.is_killed()
    assert in_use(bench) == 0.0
    await bench.starts()


@benched(a_scaler(label_sets=(LabelSet(labels=("linux",), image="busybox"),), machine_pool="ci"), machine_pools=POOLS)
async def test_a_container_that_never_got_a_row_is_forgotten_at_the_next_start(bench: Bench) -> None:
    gate = bench.traps.hold("insert_spawn", done=False)
    job = await bench.submits("linux", cpus=4.0)
    await gate.reached()
    await bench.is_killed()
    assert in_use(bench) == 4.0, "nobody can tell whether it lives"
    bench.layout = replace(bench.layout, scalers=(), sweep_seconds=3600.0)  # so that nothing new takes its place
    await bench.starts()
    assert in_use(bench) == 0.0
    assert await bench.status(job) is JobStatus.QUEUED


@benched(SCALER, machine_pools=POOLS)
async def test_a_ledger_that_was_lost_is_written_again_at_the_next_start(bench: Bench) -> None:
    await bench.submits("linux", cpus=3.0)
    agent = await bench.made()
    await bench.is_killed()
    bench.pooled.ledgers.clear()
    await bench.starts()
    assert ours(bench) == {agent.agent_id}
    assert in_use(bench) == 3.0


@benched(SCALER, machine_pools=POOLS)
async def test_a_row_that_another_spawn_of_the_job_has_gives_back_what_was_taken(bench: Bench) -> None:
    """The store says so when another coordinator was faster."""
    gate = bench.traps.hold("insert_spawn", done=False)
    job = await bench.submits("linux", cpus=2.0)
    await gate.reached()
    theirs = a_spawn(agent_id=AgentId("scaler-bare-metal-0badcafe"), bound_job_id=job.id, owner_instance_id=PEER)
    assert await bench.store.insert_spawn(theirs, a_reservation(theirs), None) is None
    assert in_use(bench) == 2.0
    gate.open()
    await bench.passes(1)
    assert bench.orders == []
    assert in_use(bench) == 0.0
    assert bench.ledger.held() == set()


@pytest.mark.spec("scaler 10.7.4")
@pytest.mark.parametrize("done", [True, False])
@benched(SCALER, machine_pools=POOLS)
async def test_a_store_that_is_down_leaves_nothing_in_the_ledger(bench: Bench, done: bool) -> None:
    bench.traps.fail("insert_spawn", done=done)
    job = await bench.submits("linux", cpus=4.0)
    await bench.passes(20)
    assert bench.orders[0].bound_job_id == job.id, "the next one succeeds, so the first held nothing"
    assert ours(bench) == {bench.orders[0].agent_id}


@benched(SCALER, machine_pools=POOLS)
async def test_a_job_that_ends_while_the_ledger_is_asked_leaves_nothing(bench: Bench) -> None:
    bench.ledger.gate = gate = asyncio.Event()
    job = await bench.submits("linux", cpus=2.0)
    await bench.passes()
    assert in_use(bench) == 2.0
    await bench.cancels(job)
    gate.set()
    bench.ledger.gate = None
    await bench.passes(5)
    await bench.is_clean()


@benched(SCALER, machine_pools=POOLS)
async def test_a_spawn_that_fails_gives_back(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([fails(after_seconds=1)])
    job = await bench.submits("linux", cpus=4.0)
    await bench.until(lambda: bool(bench.orders))
    await bench.passes(1)
    assert ours(bench) <= {order.agent_id for order in bench.orders[1:]}
    await bench.cancels(job)
    await bench.passes(5)
    await bench.is_clean()


@benched(a_scaler(label_sets=(LabelSet(labels=("linux",), image="busybox"),), machine_pool="ci"), machine_pools=POOLS)
async def test_what_could_not_be_given_back_is_given_back_when_the_ledger_can_be_used(bench: Bench) -> None:
    job = await bench.submits("linux", cpus=4.0)
    agent = await bench.made()
    await agent.starts()
    agent.ends(job.id)
    await bench.passes(1)
    bench.ledger.faults = [Retryable("the disk is full")] * 3
    agent.leaves()
    await bench.until(lambda: not bench.ledger.faults)
    await bench.passes(3)
    assert in_use(bench) == 0.0


@benched(SCALER, machine_pools=POOLS)
async def test_a_compute_that_cannot_be_ended_keeps_its_part(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(destroy_failures=3)])
    job = await bench.submits("linux", cpus=4.0)
    agent = await bench.made()
    await agent.starts()
    agent.ends(job.id)
    agent.leaves()
    await bench.passes(2)
    assert in_use(bench) == 4.0
    waiting = await bench.submits("linux", cpus=4.0)
    await bench.passes(2)
    assert (await verdict(bench, waiting)).cap is CapName.MACHINE_POOL
    assert (await bench.made(1)).agent_id in ours(bench)
    assert in_use(bench) == 4.0


@benched(
    a_scaler(
        label_sets=(LabelSet(labels=("linux",), resources=ResourceRequest(requests=Ask(cpus=1.5))),),
        machine_pool="ci",
        warm_pool=WarmPool(enabled=True, size=5),
    ),
    machine_pools=POOLS,
)
async def test_warm_agents_are_billed_as_well(bench: Bench) -> None:
    await bench.passes(100)
    assert len(bench.orders) == 2
    assert in_use(bench) == 3.0


@benched(SCALER, machine_pools=POOLS)
async def test_an_orderly_stop_leaves_the_pool_empty(bench: Bench) -> None:
    for number in range(3):
        await bench.submits("linux", cpus=1.0)
        await bench.made(number)
    await bench.coordinator.shutdown(keep_agents=False)
    assert ours(bench) == set()
    assert HERE not in bench.pooled.ledgers["ci"].caps
    calls = bench.ledger.calls
    await bench.passes(100)
    assert bench.ledger.calls == calls, "who has left does not come back"


@benched(SCALER, machine_pools=POOLS)
async def test_a_stop_that_keeps_agents_keeps_their_part(bench: Bench) -> None:
    await bench.submits("linux", cpus=2.0)
    agent = await bench.made()
    await bench.stops(keep_agents=True)
    bench.pooled.is_killed(HERE)  # the program ends
    assert ours(bench) == {agent.agent_id}
    await bench.starts()
    assert ours(bench) == {agent.agent_id}


@benched(SCALER, machine_pools=POOLS)
async def test_metrics_show_what_the_whole_host_holds_of_a_pool(bench: Bench) -> None:
    await Neighbour(bench).takes(2.0)
    await bench.submits("linux", cpus=1.0)
    await bench.machine()
    row = {"scaler": "__pool__", "scalerType": "", "machinePool": "ci"}
    assert bench.metric("kici_orch_scaler_cpus_used", **row) == 3.0
    mine = {"scaler": "local", "scalerType": "bare-metal", "machinePool": "ci"}
    assert bench.metric("kici_orch_scaler_cpus_used", **mine) == 1.0
    everything = {"scaler": "__global__", "scalerType": "", "machinePool": ""}
    assert bench.metric("kici_orch_scaler_cpus_used", **everything) == 1.0


@benched(SCALER, a_scaler("free", ("mac",)), machine_pools=POOLS)
async def test_operators_see_what_is_held_of_a_pool_and_what_is_wrong_with_it(bench: Bench) -> None:
    neighbour = Neighbour(bench, cpus=3.0)
    await neighbour.takes(0.5)
    await bench.submits("linux", cpus=1.0)
    await bench.machine()
    surface = surface_of(bench.coordinator, version="1", stop=lambda keep: None)
    local, free = await surface.scalers.status()
    assert local.machine_pool == PoolUse(
        name="ci", cpus_used=1.5, cpus_max=3.0, memory_bytes_used=0, memory_bytes_max=None
    )
    assert free.machine_pool is None
    check = (await surface.scalers.diagnose(None))[-1]
    assert (check.name, check.status) == ("machine-pool:ci", CheckStatus.WARN)
    assert "neighbour: 3 cpus" in check.message
    bench.ledger.faults = [Retryable("the disk is full")] * 5
    await bench.coordinator.machine_pools.tick()
    check = (await surface.scalers.diagnose(None))[-1]
    assert (check.status, check.message) == (CheckStatus.FAIL, "the disk is full")
    await bench.passes(10)
    bench.pooled.is_killed(InstanceId("neighbour"))
    await bench.coordinator.machine_pools.tick()
    check = (await surface.scalers.diagnose(None))[-1]
    assert (check.status, check.message) == (CheckStatus.PASS, "1 agents of this host hold part of it")


@pytest.mark.spec("scaler 49.1")
@pytest.mark.parametrize("seed", range(25))
@benched(SCALER, a_scaler("second", ("mac",), machine_pool="ci"), machine_pools=POOLS, sweep_seconds=2.0)
async def test_whatever_happens_memory_and_ledger_agree_and_no_cap_is_exceeded(bench: Bench, seed: int) -> None:
    story = Story(bench, SeededEntropy(f"story/{seed}"))
    for _ in range(60):
        await story.goes_on()
    await story.ends()


class Story:
    """Jobs, agents, neighbours, outages and reloads in a random order."""

    def __init__(self, bench: Bench, entropy: SeededEntropy) -> None:
        self._bench = bench
        self._entropy = entropy
        self._neighbour = Neighbour(bench)
        self._taken: list[str] = []
        self._jobs: list[Job] = []
        for backend in bench.backends.values():
            backend.scripts = iter(self._script, None)

    async def goes_on(self) -> None:
        steps = (
            *(self._submit,) * 4,
            *(self._agent_ends,) * 3,
            self._cancel,
            self._neighbour_takes,
            self._neighbour_gives_back,
            self._ledger_fails,
            self._store_fails,
            self._reload,
            self._kill,
        )
        await self._entropy.choice(steps)()
        await self._bench.passes(self._entropy.uniform(0.0, 1.0))
        self._check()

    async def ends(self) -> None:
        """Everything calms down: what memory holds is what the ledger holds, and in the end neither holds anything."""
        bench = self._bench
        bench.ledger.faults.clear()
        for job in self._jobs:
            if (await bench.job(job)).finished_at is None:
                await bench.cancels(job, force=True)
        for agent_id in list(bench.machines.alive):
            bench.machines.die(agent_id)
        await bench.passes(400)
        for agent_id in list(bench.machines.alive):
            bench.machines.die(agent_id)
        await bench.passes(60)
        self._check()
        await bench.is_clean()
        assert bench.ledger.held() == set()

    def _check(self) -> None:
        bench = self._bench
        bench.checks()
        assert in_use(bench) <= 4.0
        made = sum(
            machine.order.requests.cpus for machine in bench.machines.alive.values()
        )  # what really runs, beside what the neighbour holds
        theirs = sum(row.requests.cpus for row in bench.pooled.rows("ci") if row.instance_id != HERE)
        assert made + theirs <= 4.0, "more runs than the pool allows"
        assert set(bench.machines.alive) <= ours(bench)

    def _script(self) -> SpawnScript:
        error = Retryable("it did not work") if self._entropy.chance(0.2) else None
        return SpawnScript(
            seconds=self._entropy.uniform(0, 2),
            error=error,
            destroy_seconds=self._entropy.uniform(0, 2),
            destroy_failures=int(self._entropy.chance(0.2)),
        )

    async def _submit(self) -> None:
        label = self._entropy.choice(("linux", "mac"))
        self._jobs.append(await self._bench.submits(label, cpus=self._entropy.choice((0.5, 1.0, 2.0, 5.0))))

    async def _agent_ends(self) -> None:
        alive = sorted(self._bench.machines.alive)
        if alive:
            self._bench.machines.die(self._entropy.choice(alive))

    async def _cancel(self) -> None:
        if self._jobs:
            job = self._entropy.choice(self._jobs)
            if (await self._bench.job(job)).finished_at is None:
                await self._bench.cancels(job, force=True)

    async def _neighbour_takes(self) -> None:
        taken = await self._neighbour.takes(self._entropy.choice((0.5, 1.5)))
        self._taken += [] if taken is None else [taken]

    async def _neighbour_gives_back(self) -> None:
        if self._taken:
            await self._neighbour.gives_back(self._taken.pop())

    async def _ledger_fails(self) -> None:
        self._bench.ledger.faults += [Retryable("the ledger is stuck")] * 2

    async def _store_fails(self) -> None:
        self._bench.traps.fail("insert_spawn", done=self._entropy.chance(0.5))

    async def _reload(self) -> None:
        most = self._entropy.choice((8, 16))
        assert isinstance(self._bench.file, ScalersConfig)
        scalers = tuple(replace(entry, max_agents=most) for entry in self._bench.file.scalers)
        self._bench.file = replace(self._bench.file, scalers=scalers)
        await self._bench.coordinator.reload_scalers()

    async def _kill(self) -> None:
        if self._entropy.chance(0.3):
            await self._bench.is_killed()
            self._check()
            await self._bench.starts()
            for backend in self._bench.backends.values():
                backend.scripts = iter(self._script, None)
