"""What people read in a job's output about the making of its agent."""

from collections.abc import Sequence

import pytest

from kici.config.model import LabelSet, WarmPool
from kici.domain.job import Job
from kici.domain.logs import NewChunk, Stream
from kici.domain.resources import Ask, ResourceRequest
from kici.services.spawn_book import STORY_LINES_MAX
from kici.services.spawn_story import GATHER_SECONDS
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.fake_backend import SpawnScript, fails

WARM = a_scaler(
    "local",
    label_sets=(LabelSet(labels=("linux",), resources=ResourceRequest(requests=Ask(cpus=1.0))),),
    warm_pool=WarmPool(enabled=True, size=1, idle_timeout_seconds=300),
)
MADE = ["making a machine", "the machine runs"]


async def story(bench: Bench, job: Job) -> list[str]:
    """Lines of the orchestrator about its agents, without the agents' names."""
    chunks = await bench.store.read_log(job.id, after=0, bytes_max=1 << 20)
    text = b"".join(chunk.data for chunk in chunks if chunk.stream is Stream.SYSTEM).decode()
    return [line.partition(": ")[2] for line in text.splitlines() if line.startswith("scaler-")]


@benched(a_scaler())
async def test_a_job_is_told_how_its_agent_is_made(bench: Bench) -> None:
    job = await bench.submits("linux")
    await bench.machine()
    await bench.passes(1)
    assert await story(bench, job) == MADE


@benched(a_scaler())
async def test_slow_progress_is_told_while_it_lasts(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(seconds=100)])
    job = await bench.submits("linux", queue_timeout_ms=0)
    await bench.passes(5)
    assert await story(bench, job) == MADE[:1]
    await bench.machine()
    await bench.passes(1)
    assert await story(bench, job) == MADE


@benched(a_scaler())
async def test_lines_of_many_jobs_are_written_together(bench: Bench) -> None:
    """However their machines are spread over a moment."""
    writes: list[int] = []
    append = bench.coordinator.logs._store.append_log

    async def counted(chunks: Sequence[NewChunk]) -> object:
        writes.append(len({chunk.job_id for chunk in chunks}))
        return await append(chunks)

    bench.coordinator.logs._store.append_log = counted  # type: ignore[method-assign, assignment]
    began_at = bench.clock.monotonic()
    jobs = []
    for _ in range(14):
        jobs.append(await bench.submits("linux", queue_timeout_ms=0))
        await bench.passes(0.04)
    beats = (bench.clock.monotonic() - began_at) / GATHER_SECONDS + 1
    await bench.passes(2)
    assert sum(writes) >= len(jobs)
    assert len(writes) <= 2 * beats


@benched(a_scaler("local", max_agents=1))
async def test_a_failure_and_the_next_try_are_told_in_order(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([fails("the registry hung up")])
    job = await bench.submits("linux")
    await bench.machine(1)
    await bench.passes(1)
    assert await story(bench, job) == ["making a machine", "the registry hung up", *MADE]


@pytest.mark.spec("scaler 16.5.4")
@benched(WARM)
async def test_what_happened_to_a_warm_agent_is_told_to_its_first_job_once_and_in_order(bench: Bench) -> None:
    agent = await bench.made(0)
    await bench.passes(5)
    job = await bench.submits("linux", queue_timeout_ms=0)
    assert await agent.starts() == job.id
    await bench.passes(1)
    assert await story(bench, job) == MADE
    tracked = bench.coordinator.spawns.get(agent.agent_id)
    assert tracked is not None
    bench.coordinator.stories.heard(tracked, "more of it")
    await bench.passes(1)
    assert await story(bench, job) == [*MADE, "more of it"]


@benched(WARM)
async def test_of_an_agent_that_nobody_asks_for_little_is_remembered(bench: Bench) -> None:
    agent = await bench.made(0)
    tracked = bench.coordinator.spawns.get(agent.agent_id)
    assert tracked is not None
    for number in range(STORY_LINES_MAX + 5):
        bench.coordinator.stories.heard(tracked, f"line {number}")
    job = await bench.submits("linux", queue_timeout_ms=0)
    await agent.starts()
    await bench.passes(1)
    told = await story(bench, job)
    assert told == [f"line {number}" for number in range(5, STORY_LINES_MAX + 5)]


@pytest.mark.spec("scaler 39.4.7")
@benched(WARM)
async def test_the_log_knows_the_job_of_an_agent_from_the_moment_that_it_is_given(bench: Bench) -> None:
    warm, work_of = await bench.made(0), bench.coordinator.work_of
    assert work_of(warm.agent_id) == work_of("nobody") == {}
    job = await bench.submits("linux", queue_timeout_ms=0)
    await warm.starts()
    assert work_of(warm.agent_id) == {"job_id": job.id, "run_id": job.run_id}


@benched(a_scaler())
async def test_the_log_knows_the_job_that_an_agent_is_made_for_and_that_of_a_static_one(bench: Bench) -> None:
    job = await bench.submits("linux")
    order = await bench.machine()
    assert bench.coordinator.work_of(order.agent_id) == {"job_id": job.id, "run_id": job.run_id}
    static = await bench.an_agent("mine", "gpu")
    other = await bench.submits("gpu")
    await static.starts()
    assert bench.coordinator.work_of("mine") == {"job_id": other.id, "run_id": other.run_id}
