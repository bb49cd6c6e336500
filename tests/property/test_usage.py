"""What agents hold of the caps is what their reservations add up to, whatever happens to jobs, agents and machines."""

from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kici.config.model import Cap, LabelSet
from kici.domain import knobs
from kici.domain.errors import Conflict
from kici.domain.ids import JobId
from kici.domain.resources import Ask, ResourceRequest
from kici.testing.bench_agent import BenchAgent
from kici.testing.coordinator_bench import Bench, Layout, a_bench, a_scaler
from kici.testing.fake_backend import SpawnScript, fails, refuses
from kici.testing.virtual_time import run_virtual
from kici.wire.messages import JobDispatch

SCRIPTS = {
    "works": SpawnScript(),
    "slowly": SpawnScript(seconds=20),
    "settles late": SpawnScript(settle_seconds=20),
    "fails": fails(after_seconds=3),
    "is refused": refuses(),
    "dies": SpawnScript(dies_after_seconds=5),
    "hangs": SpawnScript(seconds=float("inf")),
    "resists": SpawnScript(destroy_failures=2, destroy_seconds=2),
    "repeats itself": SpawnScript(dies_after_seconds=8, repeats_events=True),
}
LAYOUT = Layout(
    scalers=(
        a_scaler(
            "small",
            label_sets=(LabelSet(labels=("linux",), resources=ResourceRequest(requests=Ask(cpus=0.3, memory="512m"))),),
            max_agents=3,
        ),
        a_scaler("large", ("windows",), max_agents=4, resource_cap=Cap(max_cpu=4, max_memory_bytes=8 * 1024**3)),
    ),
    max_agents=5,
    cap=Cap(max_cpu=4.5),
    settings={
        knobs.SCALER_SPAWN_TIMEOUT_MS.name: 30_000,
        knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name: 1_000,
        knobs.SCALER_PROVISION_BACKOFF_MAX_MS.name: 2_000,
        knobs.AGENT_RECONNECT_GRACE_MS.name: 5_000,
        knobs.UNROUTABLE_GRACE_MS.name: 20_000,
    },
)
number = st.integers(0, 9)
step = st.one_of(
    st.tuples(
        st.just("submit"),
        st.sampled_from([("linux", None), ("windows", None), ("windows", 0.7), ("windows", 9)]),
        st.sampled_from(sorted(SCRIPTS)),
    ),
    st.tuples(
        st.sampled_from(["register", "start", "end", "reject", "cut", "return", "leave", "kill", "cancel"]), number
    ),
    st.tuples(st.just("outage"), st.sampled_from([1, 20])),
    st.tuples(st.just("pass"), st.sampled_from([0.1, 3, 12])),
)


class Walk:
    """One random sequence.  Steps that make no sense at the moment do nothing."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.scripts: list[SpawnScript] = []
        for backend in bench.backends.values():
            backend.scripts = self

    def __iter__(self) -> "Walk":
        return self

    def __next__(self) -> SpawnScript:
        return self.scripts.pop(0) if self.scripts else SpawnScript()

    async def take(self, kind: str, *rest: Any) -> None:
        match kind:
            case "submit":
                (label, cpus), script = rest
                self.scripts.append(SCRIPTS[script])
                await self.bench.submits(label, cpus=cpus, queue_timeout_ms=120_000)
            case "pass":
                await self.bench.passes(rest[0])
            case "outage":
                self.bench.faults.is_down = True
                await self.bench.passes(rest[0])
                self.bench.faults.is_down = False
            case "cancel":
                await self.cancel(rest[0])
            case _:
                await self.agent_does(kind, rest[0])
        await self.bench.passes(0.2)

    async def cancel(self, number: int) -> None:
        jobs = await self.bench.jobs()
        if number < len(jobs):
            with suppress(Conflict):  # it is over
                await self.bench.cancels(jobs[number])

    async def agent_does(self, kind: str, number: int) -> None:
        alive = list(self.bench.machines.alive)
        if number >= len(alive):
            return
        agent = await self.bench.booted([order.agent_id for order in self.bench.orders].index(alive[number]))
        if kind in ("register", "return"):
            await self.register(agent)
        elif kind == "kill":
            self.bench.machines.die(agent.agent_id, "was killed")
            if agent.wires:
                agent.cut()
        elif agent.wires and agent.closed_with is None:
            self.talk(agent, kind)

    async def register(self, agent: BenchAgent) -> None:
        offers = [JobId(offer.job_id) for offer in agent.all(JobDispatch)]
        if agent.wires and agent.closed_with is None:
            return
        await agent.tries_to_register(*((job_id, "running") for job_id in offers[-1:]))

    def talk(self, agent: BenchAgent, kind: str) -> None:
        offers = [JobId(offer.job_id) for offer in agent.all(JobDispatch)]
        match kind:
            case "cut":
                agent.cut()
            case "leave":
                agent.leaves()
            case "start" if offers:
                agent.acks(offers[-1])
            case "end" if offers:
                agent.ends(offers[-1], "failed", exit_code=1)
            case "reject" if offers:
                agent.rejects(offers[-1])
            case _:
                pass


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(steps=st.lists(step, max_size=25))
def test_usage_is_the_sum_of_the_reservations_within_the_caps_and_ends_at_zero(steps: list[Any]) -> None:
    async def walk() -> None:
        async with a_bench(LAYOUT) as bench:
            random = Walk(bench)
            for kind, *rest in steps:
                await random.take(kind, *rest)
                within_caps(bench)
            for each in range(len(await bench.jobs())):
                await random.cancel(each)
            for agent_id in list(bench.machines.alive):
                bench.machines.die(agent_id)
            for agent in bench.agents.values():
                for wire in agent.wires:
                    wire.cut()
            await bench.passes(400)
            assert {job.finished_at is not None for job in await bench.jobs()} <= {True}
            await bench.is_clean()

    run_virtual(walk)


def within_caps(bench: Bench) -> None:
    bench.checks()
    book = bench.coordinator.book
    assert book.total.agents <= 5
    assert book.of(LAYOUT.scalers[0].name).agents <= 3
    assert book.of(LAYOUT.scalers[1].name).cpu_micros <= 4_000_000
    assert book.total.cpu_micros <= 4_500_000
