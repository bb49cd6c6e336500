"""Why a job is where it is: every reason that holds, the nearest to running first."""

import pytest

from kici.config.model import Cap
from kici.domain import knobs
from kici.domain.job import Job
from kici.domain.say import say
from kici.domain.verdict import (
    AgentsBusy,
    AtCap,
    CapName,
    Dispatched,
    Draining,
    InBackoff,
    NoScalerMatches,
    Running,
    SpawnBooting,
    SpawnFailed,
    Unroutable,
    Verdict,
    WaitingForNeeds,
)
from kici.observe.events import Event
from kici.testing.coordinator_bench import Bench, a_request, a_scaler, benched
from kici.testing.fake_backend import SpawnScript, refuses

BACKOFF = knobs.SCALER_PROVISION_BACKOFF_BASE_MS.name

pytestmark = pytest.mark.spec("D16")


async def why(bench: Bench, job: Job) -> list[Verdict]:
    verdicts = await bench.coordinator.explain.verdicts(await bench.job(job))
    for verdict in verdicts:
        assert say(verdict, now=bench.clock.now()).endswith(".")
    return verdicts


@benched(a_scaler())
async def test_labels_that_nobody_has_name_what_the_nearest_set_lacks(bench: Bench) -> None:
    job = await bench.submits("linux", "gpu")
    (verdict,) = await why(bench, job)
    assert isinstance(verdict, NoScalerMatches)
    assert verdict.nearest[0].missing == ("gpu",)
    assert "it lacks gpu" in say(verdict, now=bench.clock.now())


@benched(a_scaler("gpus", ("linux", "gpu"), mandatory_labels=("gpu",)))
async def test_a_gate_names_what_the_job_must_name(bench: Bench) -> None:
    (verdict,) = await why(bench, await bench.submits("linux"))
    assert isinstance(verdict, NoScalerMatches)
    assert verdict.nearest[0].gate == ("gpu",)


@benched(a_scaler())
async def test_an_excluded_label_names_the_set_that_has_it(bench: Bench) -> None:
    (verdict,) = await why(bench, await bench.submits("linux", exclude=frozenset({"x64"})))
    assert isinstance(verdict, NoScalerMatches)
    assert verdict.nearest[0].excluded == ("x64",)


@benched(a_scaler())
async def test_a_spawn_that_boots_names_its_agent_and_since_when(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([SpawnScript(seconds=30)])
    job = await bench.submits("linux")
    await bench.passes(7)
    (verdict,) = await why(bench, job)
    assert isinstance(verdict, SpawnBooting)
    assert verdict.scaler == "local"
    assert "for 7 s" in say(verdict, now=bench.clock.now())


@benched(a_scaler("local", max_agents=1))
async def test_a_cap_names_how_much_is_used(bench: Bench) -> None:
    await bench.submits("linux")
    await bench.made()
    waiting = await bench.submits("linux")
    await bench.passes()
    verdicts = await why(bench, waiting)
    at_cap = next(verdict for verdict in verdicts if isinstance(verdict, AtCap))
    assert (at_cap.cap, at_cap.used, at_cap.limit) == (CapName.MAX_AGENTS, 1, 1)


@benched(a_scaler("local", resource_cap=Cap(max_cpu=2)))
async def test_a_job_that_can_never_fit_is_told_to_ask_for_less(bench: Bench) -> None:
    job = await bench.submits("linux", cpus=8)
    (verdict,) = await why(bench, job)
    assert isinstance(verdict, AtCap)
    assert verdict.is_hopeless
    assert "ask for less" in say(verdict, now=bench.clock.now())


@pytest.mark.spec("scaler 50.7")
@benched(a_scaler(), settings={BACKOFF: 60_000})
async def test_a_backoff_names_until_when_and_the_failure_of_the_jobs_own_spawn(bench: Bench) -> None:
    bench.backends["local"].scripts = iter([refuses("no such program: kici-agent")])
    job = await bench.submits("linux")
    await bench.until(lambda: bool(bench.told(Event.SPAWN_DESTROYED)))
    backoff, failed = await why(bench, job)
    assert isinstance(backoff, InBackoff)
    assert isinstance(failed, SpawnFailed)
    assert "no such program: kici-agent" in failed.text
    assert backoff.until > bench.clock.now()


@benched()
async def test_busy_agents_are_counted(bench: Bench) -> None:
    for name in ("a", "b"):
        agent = await bench.an_agent(name)
        await bench.submits("linux")
        await agent.starts()
    waiting = await bench.submits("linux")
    nearest, _ = await why(bench, waiting)
    assert isinstance(nearest, AgentsBusy)
    assert nearest.count == 2


@benched(a_scaler())
async def test_a_draining_coordinator_says_so(bench: Bench) -> None:
    bench.coordinator.drain.draining = True
    job = await bench.submits("linux")
    (verdict,) = await why(bench, job)
    assert isinstance(verdict, Draining)


@benched()
async def test_a_job_that_waits_for_others_names_those_that_are_not_over(bench: Bench) -> None:
    agent = await bench.an_agent()
    jobs = await bench.submits_run({"a": a_request("a"), "b": a_request("b"), "c": a_request("c", needs=["a", "b"])})
    await agent.starts()
    agent.ends(jobs[0].id)
    await bench.ended(jobs[0])
    (verdict,) = await why(bench, jobs[2])
    assert isinstance(verdict, WaitingForNeeds)
    assert verdict.needs == (jobs[1].id,)


@benched()
async def test_an_offered_and_a_running_job_name_their_agent(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    await agent.is_offered()
    (offered,) = await why(bench, job)
    assert isinstance(offered, Dispatched)
    agent.acks(job.id)
    await bench.passes()
    (running,) = await why(bench, job)
    assert isinstance(running, Running)
    assert running.agent_id == agent.agent_id


@benched()
async def test_a_job_that_is_over_has_nothing_to_explain(bench: Bench) -> None:
    agent = await bench.an_agent()
    job = await bench.submits("linux")
    agent.ends(await agent.starts())
    await bench.ended(job)
    assert await why(bench, job) == []


@benched(settings={knobs.UNROUTABLE_GRACE_MS.name: 60_000})
async def test_an_unroutable_job_says_when_it_is_given_up(bench: Bench) -> None:
    job = await bench.submits("linux")
    await bench.passes(20)
    last = (await why(bench, job))[-1]
    assert isinstance(last, Unroutable)
    assert last.ends_at is not None
    assert last.ends_at - last.since == 60_000
