"""Asking a scaler for an agent: its five answers, the caps, and one live spawn for each job."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kici.config.model import BackendType, Cap, LabelSet, ScalerEntry
from kici.domain import knobs
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId, OrgId, ScalerName
from kici.domain.job import Job, JobStatus
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.scale import AtCapacity, Failed, NoBackend, ScaleAnswer, Skipped, Spawning
from kici.domain.spawn import SpawnState
from kici.domain.verdict import AtCap, CapName, Dimension, Draining, InBackoff, NoScalerMatches
from kici.observe.events import Event
from kici.testing.coordinator_bench import Bench, a_request, a_scaler, benched
from kici.testing.fake_backend import SpawnScript, fails, refuses

LOCAL = ScalerName("local")
DEADLINE = knobs.SCALER_SPAWN_TIMEOUT_MS.name
BACKOFF = knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name
TWO_CPUS = (LabelSet(labels=("linux",), resources=ResourceRequest(requests=Ask(cpus=2))),)


def slow(seconds: float) -> SpawnScript:
    return SpawnScript(seconds=seconds)


async def queued(bench: Bench, *labels: str, **fields: object) -> Job:
    """A job that waits, and for which no scaler was asked yet."""
    bench.coordinator.drain.draining = True
    job = await bench.submits(*labels, **fields)
    await bench.passes(0.02)
    bench.coordinator.drain.draining = False
    return job


async def asked(bench: Bench, jobs: list[Job]) -> list[ScaleAnswer]:
    """Answers to requests made at the same moment."""
    async with asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(bench.coordinator.manager.request(job)) for job in jobs]
    return [request.result() for request in requests]


def count(answers: list[ScaleAnswer], kind: type[object]) -> int:
    return sum(isinstance(answer, kind) for answer in answers)


# --- answers


@pytest.mark.spec("T0.1", "scaler 9.6.1")
@benched(a_scaler())
async def test_while_draining_every_request_is_skipped_and_nothing_is_made(bench: Bench) -> None:
    jobs = [await queued(bench, *labels) for labels in (("linux",), ("nobody-has-this",))]
    bench.coordinator.drain.draining = True
    for answer in await asked(bench, jobs):
        assert isinstance(answer, Skipped)
        assert isinstance(answer.verdict, Draining)
    assert not bench.coordinator.book.reservations
    assert not await bench.spawns()


@pytest.mark.spec("scaler 9.6.2")
@benched(a_scaler())
async def test_labels_that_no_scaler_has_are_named(bench: Bench) -> None:
    (answer,) = await asked(bench, [await queued(bench, "linux", "gpu")])
    assert isinstance(answer, NoBackend)
    assert isinstance(answer.verdict, NoScalerMatches)
    assert answer.verdict.labels == ("gpu", "linux")
    assert answer.verdict.nearest[0].missing == ("gpu",)


@pytest.mark.spec("scaler 9.6.3", "D13")
@benched(a_scaler(), settings={BACKOFF: 10_000})
async def test_a_scaler_in_backoff_says_until_when_and_reserves_nothing(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([refuses()])
    await bench.submits("linux")
    await bench.until(lambda: bool(bench.told(Event.SPAWN_FAILED)))
    await bench.passes(6)
    (answer,) = await asked(bench, [await queued(bench, "linux")])
    assert isinstance(answer, Skipped)
    assert isinstance(answer.verdict, InBackoff)
    assert answer.retry_after_ms == pytest.approx(4_000, abs=200)
    assert not bench.coordinator.book.reservations


@pytest.mark.spec("scaler 9.6.4", "scaler 13.9.2")
@benched(a_scaler("one", ("linux",)), a_scaler("two", ("windows",)))
async def test_the_backoff_of_one_scaler_does_not_concern_another(bench: Bench) -> None:
    bench.coordinator.failures.defer(ScalerName("one"), AgentId("somebody"), "it did not work")
    answers = await asked(bench, [await queued(bench, "linux"), await queued(bench, "windows")])
    assert [type(answer) for answer in answers] == [Skipped, Spawning]


@pytest.mark.spec("scaler 9.6.5")
@benched(a_scaler())
async def test_an_agent_that_is_being_made_has_an_id_of_the_known_form(bench: Bench) -> None:
    (answer,) = await asked(bench, [await queued(bench, "linux")])
    assert isinstance(answer, Spawning)
    assert re.fullmatch(r"scaler-bare-metal-[0-9a-f]{8}", answer.agent_id)
    assert answer.backend_type == "bare-metal"


@benched(
    a_scaler("local", label_sets=(LabelSet(labels=("linux",), resources=ResourceRequest(requests=Ask(memory="lots"))),))
)
async def test_a_memory_string_that_cannot_be_read_fails_the_request_and_the_job_says_why(bench: Bench) -> None:
    job = await bench.submits("linux")
    (answer,) = await asked(bench, [job])
    assert isinstance(answer, Failed)
    assert "local" in answer.error
    assert "lots" in answer.error
    await bench.passes(15)
    assert "lots" in ((await bench.job(job)).last_provisioning_error or "")
    fine = await bench.an_agent()
    assert await fine.starts(within=15) == job.id


# --- one live spawn for each job


@pytest.mark.spec("T1.13", "H13", "D3")
@benched(a_scaler("local", max_agents=10), sweep_seconds=1.0, settings={BACKOFF: 1_000})
async def test_a_slow_boot_starts_no_second_agent_and_a_failed_one_starts_exactly_one_more(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([fails("it did not work", after_seconds=60), slow(60)])
    job = await bench.submits("linux")
    for _ in range(59):
        await bench.passes(1)
        assert len(await bench.spawns()) == 1
    await bench.passes(10)
    assert len(await bench.spawns()) == 1
    await bench.passes(30)
    assert len(bench.told(Event.SPAWN_ADMITTED)) == 2
    agent = await bench.made(1)
    assert await agent.starts() == job.id


@pytest.mark.spec("T1.13", "D3")
@benched(a_scaler())
async def test_a_second_request_for_a_job_answers_with_the_agent_that_is_under_way(bench: Bench) -> None:
    job = await queued(bench, "linux")
    answers = await asked(bench, [job, job, job])
    assert count(answers, Spawning) == 3
    assert len({answer.agent_id for answer in answers if isinstance(answer, Spawning)}) == 1
    assert len(await bench.spawns()) == 1
    assert bench.coordinator.book.total.agents == 1


@pytest.mark.spec("D3")
@benched(a_scaler())
async def test_a_live_row_that_only_the_store_knows_answers_and_leaves_no_reservation(bench: Bench) -> None:
    job = await queued(bench, "linux")
    await asked(bench, [job])
    (row,) = await bench.spawns()
    tracked = bench.coordinator.spawns.get(row.agent_id)
    assert tracked is not None
    bench.coordinator.spawns.remove(tracked)
    (answer,) = await asked(bench, [job])
    assert isinstance(answer, Spawning)
    assert answer.agent_id == row.agent_id
    assert list(bench.coordinator.book.reservations) == [row.agent_id]
    bench.coordinator.spawns.add(tracked)


# --- what happens around the spawn


@pytest.mark.spec("D15", "H12")
@benched(a_scaler())
async def test_the_row_is_written_before_anything_is_made(bench: Bench) -> None:
    gate = bench.traps.hold("insert_spawn", done=False)
    await bench.submits("linux")
    await gate.reached()
    await bench.passes(5)
    assert not bench.machines.made
    gate.open()
    await bench.machine()
    (row,) = await bench.spawns()
    assert row.state is SpawnState.BOOTING


@pytest.mark.spec("D15", "H12")
@pytest.mark.parametrize("done", [False, True], ids=["before the commit", "after the commit"])
@benched(a_scaler())
async def test_a_row_that_cannot_be_written_means_no_agent_and_everything_is_undone(bench: Bench, done: bool) -> None:
    job = await queued(bench, "linux")
    bench.traps.fail("insert_spawn", done=done)
    (answer,) = await asked(bench, [job])
    assert isinstance(answer, Failed)
    assert "could not be written" in answer.error
    await bench.passes(0.2)
    assert not bench.machines.made
    await bench.is_clean()
    assert await (await bench.made()).starts() == job.id


@benched(a_scaler())
async def test_an_outage_while_the_row_is_written_is_undone_once_the_store_is_back(bench: Bench) -> None:
    job = await queued(bench, "linux")
    bench.faults.loses_answers = True
    (answer,) = await asked(bench, [job])
    assert isinstance(answer, Failed)
    await bench.passes(20)
    assert not bench.machines.made
    bench.faults.loses_answers = False
    assert await (await bench.made()).starts() == job.id
    assert len(await bench.spawns()) == 1


@benched(a_scaler())
async def test_a_spawn_row_that_comes_and_goes_fails_this_request_and_not_the_sweep(bench: Bench) -> None:
    job = await queued(bench, "linux")
    gate = bench.traps.hold("insert_spawn", done=False)
    asking = asyncio.create_task(bench.coordinator.manager.request(job))
    await gate.reached()
    gate._error = Retryable("spawns of the job come and go")  # type: ignore[assignment]  # another kind of trouble
    gate._opened.set()
    assert isinstance(await asking, Failed)
    assert not bench.coordinator.book.reservations
    assert await (await bench.made()).starts() == job.id


@pytest.mark.spec("scaler 9.6.6")
@benched(a_scaler("local", max_agents=1))
async def test_a_failed_spawn_leaves_nothing_and_the_next_request_succeeds(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([fails("it did not work")])
    job = await bench.submits("linux")
    await bench.until(lambda: bool(bench.told(Event.SPAWN_DESTROYED)))
    assert not bench.coordinator.book.reservations or len(bench.told(Event.SPAWN_ADMITTED)) == 2
    agent = await bench.made(1)
    assert await agent.starts() == job.id
    assert len(await bench.spawns()) == 1


@pytest.mark.spec("scaler 9.6.7", "T0.6")
@benched(a_scaler(), settings={BACKOFF: 60_000})
async def test_a_refused_launch_defers_the_scaler_and_the_job_carries_the_error(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([refuses("no such program: kici-agent")])
    job = await bench.submits("linux")
    await bench.passes(5)
    assert not bench.machines.made
    assert (await bench.job(job)).last_provisioning_error == "no such program: kici-agent"
    (answer,) = await asked(bench, [await queued(bench, "linux")])
    assert isinstance(answer, Skipped)


@pytest.mark.spec("T0.6", "T1.9")
@benched(a_scaler(), settings={BACKOFF: 5_000, knobs.UNROUTABLE_GRACE_MS.name: 10_000})
async def test_a_job_whose_spawns_keep_failing_expires_with_the_last_error_and_is_not_called_unroutable(
    bench: Bench,
) -> None:
    bench.backends["local"].scripts = forever(refuses("no such program: kici-agent"))
    job = await bench.submits("linux", queue_timeout_ms=300_000)
    found = await bench.ended(job, within=310)
    assert found.status is JobStatus.TIMED_OUT
    assert "no such program: kici-agent" in (found.reason or "")


def forever(script: SpawnScript) -> Iterator[SpawnScript]:
    while True:
        yield script


# --- caps


@pytest.mark.spec("T0.2", "scaler 10.7.1")
@benched(a_scaler("local", max_agents=1))
async def test_of_ten_requests_at_one_moment_for_one_slot_one_is_served(bench: Bench) -> None:
    answers = await asked(bench, [await queued(bench, "linux") for _ in range(10)])
    assert (count(answers, Spawning), count(answers, AtCapacity)) == (1, 9)
    assert bench.metric("kici_orch_scaler_spawn_refusals_total") == 9


@pytest.mark.spec("scaler 10.7.2")
@benched(a_scaler("one", ("linux",)), a_scaler("two", ("windows",)), max_agents=2)
async def test_the_host_has_a_cap_over_all_scalers(bench: Bench) -> None:
    jobs = [await queued(bench, *labels) for labels in (("linux",), ("windows",), ("linux",))]
    answers = await asked(bench, jobs)
    assert [type(answer) for answer in answers] == [Spawning, Spawning, AtCapacity]
    refused = answers[2]
    assert isinstance(refused, AtCapacity)
    assert isinstance(refused.verdict, AtCap)
    assert refused.verdict.cap is CapName.GLOBAL_MAX_AGENTS


@pytest.mark.spec("scaler 10.7.3")
@benched(a_scaler("local", label_sets=TWO_CPUS, resource_cap=Cap(max_cpu=4)))
async def test_a_cap_on_cpus_may_be_reached_exactly_and_not_exceeded(bench: Bench) -> None:
    answers = await asked(bench, [await queued(bench, "linux") for _ in range(3)])
    assert (count(answers, Spawning), count(answers, AtCapacity)) == (2, 1)
    assert bench.coordinator.book.of(LOCAL).cpu_micros == 4_000_000
    assert bench.metric("kici_orch_scaler_cpus_used", scaler="local", scalerType="bare-metal", machinePool="") == 4


@pytest.mark.spec("scaler 10.7.3")
@benched(a_scaler(), cap=Cap(max_memory_bytes=3 * 1024**3))
async def test_the_host_has_a_cap_on_memory_and_a_job_that_can_never_fit_is_told_so(bench: Bench) -> None:
    jobs = [await queued(bench, "linux", memory=memory) for memory in ("2g", "2g", "4g")]
    answers = await asked(bench, jobs)
    assert [type(answer) for answer in answers] == [Spawning, AtCapacity, AtCapacity]
    too_large = answers[2]
    assert isinstance(too_large, AtCapacity)
    assert isinstance(too_large.verdict, AtCap)
    assert too_large.verdict.dimension is Dimension.MEMORY
    assert too_large.verdict.is_hopeless


@pytest.mark.spec("scaler 10.7.8")
@benched(a_scaler("local", label_sets=TWO_CPUS, resource_cap=Cap(max_cpu=100)))
async def test_a_dimension_without_a_cap_never_refuses(bench: Bench) -> None:
    answers = await asked(bench, [await queued(bench, "linux", memory="1000g") for _ in range(3)])
    assert count(answers, Spawning) == 3


@pytest.mark.spec("scaler 10.7.5")
@benched(a_scaler("local", label_sets=TWO_CPUS))
async def test_a_reservation_is_given_back_once_however_often_the_end_is_told(bench: Bench) -> None:
    await bench.submits("linux")
    first, other = await bench.made(0), await bench.submits("linux")
    await bench.machine(1)
    tracked = bench.coordinator.spawns.get(first.agent_id)
    assert tracked is not None
    for _ in range(3):
        bench.coordinator.manager.agent_gone(first.agent_id, "shutdown")  # type: ignore[arg-type]  # any reason
    bench.dies(first)
    await bench.passes(5)
    usage = bench.coordinator.book.of(LOCAL)
    live = [row for row in await bench.spawns() if row.state is not SpawnState.ENDING]
    assert usage.agents == len(live)
    assert usage.cpu_micros == 2_000_000 * len(live)
    assert other.id in {row.bound_job_id for row in live}


@benched(a_scaler())
async def test_an_id_that_is_taken_is_minted_anew(bench: Bench) -> None:
    minted = iter(["00000000", "00000000", "00000001"])
    entropy = bench.coordinator.given.entropy
    real = entropy.hex
    entropy.hex = lambda nbytes: next(minted) if nbytes == 4 else real(nbytes)  # type: ignore[method-assign]  # a collision
    answers = [(await asked(bench, [await queued(bench, "linux")]))[0] for _ in range(2)]
    ids = [answer.agent_id[-8:] for answer in answers if isinstance(answer, Spawning)]
    assert ids == ["00000000", "00000001"]
    assert bench.coordinator.book.total.agents == 2


# --- width and deadline of spawns


@pytest.mark.spec("scaler 9.6.9", "scaler 11.3.1")
@benched(a_scaler("local", max_concurrent_spawns=2))
async def test_no_more_spawns_run_than_the_width_and_they_go_in_order(bench: Bench) -> None:
    bench.backends["local"].scripts = forever(slow(10))
    jobs = [await queued(bench, "linux") for _ in range(5)]
    began_at = bench.clock.monotonic()
    answers = [(await asked(bench, [job]))[0] for job in jobs]
    assert count(answers, Spawning) == 5
    assert bench.clock.monotonic() - began_at < 1
    for made in (2, 4, 5):
        await bench.passes(9)
        assert bench.backends["local"].active_count() <= made
        await bench.passes(1.5)
        assert len(bench.orders) == made
    for first in (0, 2, 4):  # two at a time
        made_together = {order.bound_job_id for order in bench.orders[first : first + 2]}
        assert made_together == {job.id for job in jobs[first : first + 2]}


@pytest.mark.spec("scaler 11.3.2")
@benched(a_scaler("local", max_agents=1), settings={DEADLINE: 20_000})
async def test_a_spawn_that_hangs_is_called_off_at_the_deadline_and_its_place_is_free(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([slow(float("inf"))])
    job = await bench.submits("linux")
    await bench.passes(19)
    assert bench.coordinator.book.total.agents == 1
    await bench.until(lambda: bool(bench.told(Event.SPAWN_FAILED)), within=5)
    assert bench.told(Event.SPAWN_FAILED)[0]["error"] == "scaler spawn timed out after 20000 ms"
    assert await (await bench.made(0)).starts() == job.id
    assert len(bench.coordinator.spawns) == 1


@benched(a_scaler("local", max_agents=1), settings={DEADLINE: 20_000})
async def test_a_spawn_whose_agent_is_there_already_has_no_deadline_any_more(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(settle_seconds=60.0)])
    job = await bench.submits("linux")
    agent = await bench.made(0)
    assert await agent.starts() == job.id
    await bench.passes(40)
    assert await bench.status(job) is JobStatus.RUNNING
    assert not bench.told(Event.SPAWN_FAILED)
    await bench.passes(40)
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("scaler 11.3.3")
@benched(a_scaler("local", max_agents=1), settings={DEADLINE: 20_000})
async def test_what_a_backend_raises_after_the_deadline_does_not_hide_it(bench: Bench) -> None:
    async def stubborn(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(5)
            raise Retryable("undoing it failed")

    backend = bench.backends["local"]
    real, backend.spawn = backend.spawn, stubborn  # type: ignore[method-assign, assignment]  # slow to give up
    job = await bench.submits("linux")
    await bench.until(lambda: bool(bench.told(Event.SPAWN_FAILED)), within=30)
    backend.spawn = real  # type: ignore[method-assign]  # mended
    assert bench.told(Event.SPAWN_FAILED)[0]["error"] == "scaler spawn timed out after 20000 ms"
    assert await (await bench.made()).starts(within=30) == job.id


@benched(a_scaler())
async def test_a_timeout_within_a_backend_is_not_called_the_deadline(bench: Bench) -> None:
    async def slow_engine(*_: object) -> None:
        raise TimeoutError("the engine did not answer within 10 s")

    bench.backends["local"].spawn = slow_engine  # type: ignore[method-assign, assignment]  # it leaks its own
    job = await bench.submits("linux")
    await bench.until(lambda: bool(bench.told(Event.SPAWN_FAILED)), within=30)
    assert "the engine did not answer" in ((await bench.job(job)).last_provisioning_error or "")


@pytest.mark.spec("scaler 11.3.4")
@benched(a_scaler(), settings={DEADLINE: 60_000})
async def test_an_org_has_its_own_deadline_for_spawns(bench: Bench) -> None:
    bench.backends["local"].scripts = forever(slow(float("inf")))
    hasty = OrgId("hasty")
    await bench.coordinator.settings.patch(hasty, {DEADLINE: 1_000})
    await bench.coordinator.settings.view(hasty)
    (job,) = await bench.submits_run({"a": a_request("a", org=hasty)}, org=hasty)
    other = await bench.submits("linux")
    await bench.until(lambda: bool(bench.told(Event.SPAWN_FAILED)), within=10)
    (failed,) = bench.told(Event.SPAWN_FAILED)
    assert (failed["job_id"], failed["error"]) == (job.id, "scaler spawn timed out after 1000 ms")
    await bench.until(lambda: any(fields["job_id"] == other.id for fields in bench.told(Event.SPAWN_FAILED)), within=70)


@pytest.mark.spec("scaler 11.3.5")
@benched(a_scaler("local", max_concurrent_spawns=1))
async def test_an_exception_in_a_spawn_frees_its_place_in_the_line(bench: Bench) -> None:
    async def explodes(*_: object) -> None:
        raise RuntimeError("a bug in the backend")

    backend = bench.backends["local"]
    real, backend.spawn = backend.spawn, explodes  # type: ignore[method-assign, assignment]  # a backend with a bug
    job = await bench.submits("linux")
    await bench.until(lambda: bool(bench.told(Event.SPAWN_CRASHED)))
    backend.spawn = real  # type: ignore[method-assign]  # mended
    assert await (await bench.made()).starts(within=30) == job.id


# --- an agent and its spawn


@pytest.mark.spec("scaler 12")
@benched(a_scaler())
async def test_an_agent_may_register_before_its_spawn_returns(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(settle_seconds=20)])
    job = await bench.submits("linux")
    agent = await bench.made()
    assert await agent.starts() == job.id
    await bench.passes(30)
    assert await bench.status(job) is JobStatus.RUNNING
    assert not bench.backends["local"].destroyed
    (row,) = await bench.spawns()
    assert row.state is SpawnState.REGISTERED


@benched(a_scaler())
async def test_a_job_that_another_agent_takes_ends_the_agent_that_was_made_for_it_or_gives_it_another(
    bench: Bench,
) -> None:
    bench.backends["local"].scripts = iter([slow(30)])
    job = await bench.submits("linux")
    static = await bench.an_agent()
    static.ends(await static.starts())
    await bench.ended(job)
    await bench.passes(1)
    await bench.is_clean()


# --- the cap of a cluster

CLOUD = ScalerEntry(
    name=ScalerName("cloud"),
    type=BackendType.EVENT,
    max_agents=1,
    label_sets=(LabelSet(labels=("cloud",)),),
    provisioning_targets=("acme/cloud",),
)


@pytest.mark.spec("scaler 10.7.11")
@benched(a_scaler())
async def test_a_local_spawn_is_counted_by_nobody_else(bench: Bench) -> None:
    bench.traps.fail("insert_cluster_spawn", done=False, times=99)
    await bench.submits("linux")
    await bench.machine()


@pytest.mark.spec("scaler 10.7.12")
@benched(a_scaler(), CLOUD)
async def test_a_count_that_takes_long_keeps_no_other_scaler_waiting(bench: Bench) -> None:
    gate = bench.traps.hold("insert_cluster_spawn", done=False)
    await bench.submits("cloud")
    await gate.reached()
    await bench.submits("linux")
    await bench.passes(0.5)
    assert [order.label_set for order in bench.orders] == [("linux", "x64")]
    gate.open()


# --- images of jobs


@pytest.mark.spec("scaler 9.6.11")
@benched(replace(a_scaler("local", ("linux",)), type=BackendType.CONTAINER))
async def test_the_image_of_a_job_reaches_the_backend_that_runs_it(bench: Bench) -> None:
    request = a_request("job", "linux", image="python:3.12")
    await bench.submits_run({"job": replace(request, spec=replace(request.spec, image="python:3.12"))})
    order = await bench.machine()
    assert order.container is not None
    assert order.container.image == "python:3.12"
    (row,) = await bench.spawns()
    assert row.job_image
