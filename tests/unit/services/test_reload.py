"""A changed scalers file: all of it or nothing, and what leaves it finishes its work first."""

from dataclasses import replace

import pytest

from kici.config.model import BackendType, Defaults, ScalerEntry
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId
from kici.domain.job import JobStatus
from kici.domain.resources import Ask, ResourceRequest
from kici.observe.events import Event
from kici.services.config_watch import ReloadSignals
from kici.services.reload import ReloadReport
from kici.testing.coordinator_bench import Bench, a_scaler, benched
from kici.testing.fake_backend import SpawnScript


async def reload(bench: Bench, *scalers: ScalerEntry) -> ReloadReport:
    bench.file = replace(bench._config(), scalers=scalers)
    return await bench.coordinator.reload_scalers()


def serving(bench: Bench) -> list[str]:
    return sorted(bench.coordinator.manager.fleet.runtimes)


@benched(a_scaler("a", ("linux", "a")))
async def test_an_added_scaler_serves_waiting_jobs_at_once(bench: Bench) -> None:
    job = await bench.submits("linux", "b")
    report = await reload(bench, a_scaler("a", ("linux", "a")), a_scaler("b", ("linux", "b")))
    assert (report.outcome, report.added) == ("applied", ("b",))
    order = await bench.machine()
    assert order.bound_job_id == job.id


@pytest.mark.spec("scaler 19.8.4")
@benched(a_scaler("a", ("linux", "a")))
async def test_a_removed_scaler_finishes_its_job_and_then_goes(bench: Bench) -> None:
    job = await bench.submits("linux", "a")
    agent = await bench.made()
    assert await agent.starts() == job.id
    report = await reload(bench)
    assert report.retired == ("a",)
    assert serving(bench) == ["a"]
    waiting = await bench.submits("linux", "a")
    await bench.passes()
    assert len(bench.orders) == 1, "no new work"
    agent.ends(job.id)
    assert (await bench.ended(job)).status is JobStatus.SUCCESS
    agent.leaves()
    agent.closes()
    await bench.passes(35)
    assert serving(bench) == []
    assert bench.told(Event.SCALER_RETIRED)[0]["seconds"] > 0
    assert await bench.status(waiting) is JobStatus.QUEUED


@pytest.mark.spec("scaler 19.8.5")
@benched(a_scaler("a", ("linux", "a")))
async def test_a_scaler_that_returns_while_it_retires_goes_on_with_what_it_has(bench: Bench) -> None:
    job = await bench.submits("linux", "a")
    agent = await bench.made()
    assert await agent.starts() == job.id
    await reload(bench)
    report = await reload(bench, a_scaler("a", ("linux", "a")))
    assert report.resurrected == ("a",)
    assert bench.coordinator.book.total.agents == 1
    await bench.submits("linux", "a")
    await bench.passes()
    assert len(bench.orders) == 2


@pytest.mark.spec("scaler 19.8.1", "scaler 19.8.2", "scaler 49.5")
@benched(a_scaler("a", ("linux", "a"), max_agents=3))
async def test_a_file_that_cannot_be_served_changes_nothing(bench: Bench) -> None:
    fleet = bench.coordinator.manager.fleet
    bench.unbuildable.add("b")
    report = await reload(bench, a_scaler("a", ("linux", "new"), max_agents=9), a_scaler("b", ("linux", "b")))
    assert report.outcome == "rejected"
    assert "b" in report.problems[0]
    assert bench.coordinator.manager.fleet is fleet
    assert fleet.runtimes[next(iter(fleet.runtimes))].caps.agents_max == 3
    assert bench.metric("kici_orch_scaler_config_reloads_total", result="failed") == 1


@pytest.mark.spec("scaler 19.8.3")
@benched(a_scaler("a", ("linux", "a")))
async def test_a_change_of_type_is_refused(bench: Bench) -> None:
    changed = replace(a_scaler("a", ("linux", "a")), type=BackendType.CONTAINER)
    report = await reload(bench, changed)
    assert report.outcome == "rejected"
    assert "container" in report.problems[0]


@benched(a_scaler("a", ("linux", "a")))
async def test_an_invalid_file_is_rejected_with_its_problems(bench: Bench) -> None:
    bench.file = ("scalers.yaml:3:1: found x, expected y",)
    report = await bench.coordinator.reload_scalers()
    assert report.problems == ("scalers.yaml:3:1: found x, expected y",)
    assert serving(bench) == ["a"]


@pytest.mark.spec("scaler 19.8.8")
@benched(a_scaler("a", ("linux", "a"), max_agents=2))
async def test_a_lowered_cap_kills_nobody_and_admits_nobody(bench: Bench) -> None:
    for _ in range(2):
        await bench.submits("linux", "a")
    for number in range(2):
        await (await bench.made(number)).starts()
    await reload(bench, a_scaler("a", ("linux", "a"), max_agents=1))
    third = await bench.submits("linux", "a")
    await bench.passes(20)
    assert len(bench.machines.alive) == 2
    assert len(bench.orders) == 2
    assert (await bench.verdict(third)).__class__.__name__ in ("AtCap", "AgentsBusy")


@pytest.mark.spec("scaler 19.8.7")
@benched(a_scaler("a", ("linux", "a")))
async def test_a_changed_width_counts_for_new_spawns(bench: Bench) -> None:
    runtime = next(iter(bench.coordinator.manager.fleet.runtimes.values()))
    before = runtime.gateway
    await reload(bench, replace(a_scaler("a", ("linux", "a")), max_concurrent_spawns=2))
    assert runtime.gateway is not before
    assert runtime.spawns_at_once == 2


@pytest.mark.spec("scaler 19.8.6")
@benched(a_scaler("a", ("linux", "a"), max_concurrent_spawns=1))
async def test_a_spawn_that_stands_in_line_is_not_lost_with_its_scaler(bench: Bench) -> None:
    bench.backends["a"].scripts = iter([SpawnScript(seconds=60)])
    jobs = [await bench.submits("linux", "a", queue_timeout_ms=0) for _ in range(2)]
    await bench.passes()
    assert (await reload(bench)).retired == ("a",)
    agents = [await bench.made(number) for number in range(2)]
    assert bench.clock.monotonic() > 60
    assert {await agent.starts() for agent in agents} == {job.id for job in jobs}
    for agent, job in zip(agents, jobs, strict=True):
        agent.ends(job.id)
        await bench.passes()
        agent.leaves()
    await bench.passes(35)
    assert serving(bench) == []


@pytest.mark.spec("scaler 19.8.12")
@benched(a_scaler("a", ("linux", "a")))
async def test_what_fails_after_a_reload_is_told_and_the_reload_stands(bench: Bench) -> None:
    bench.backends["a"].backend_type = "container"  # of these, leftovers are looked for

    async def fails(owned: frozenset[AgentId]) -> int:
        raise Retryable("the host does not answer")

    bench.backends["a"].cleanup_orphans = fails  # type: ignore[method-assign]
    report = await reload(bench, a_scaler("a", ("linux", "a")), a_scaler("b", ("linux", "b")))
    assert report.outcome == "applied"
    await bench.until(lambda: bool(bench.told(Event.ORPHANS_LEFT)), within=10)
    assert bench.told(Event.ORPHANS_LEFT)[0]["error"] == "the host does not answer"
    await bench.submits("linux", "b")
    await bench.machine()


@benched(a_scaler("a", ("linux", "a")))
async def test_what_the_file_gives_to_all_is_told_to_those_who_make_backends(bench: Bench) -> None:
    configuration = bench.coordinator.given.configuration
    assert configuration is not None
    given = Defaults(resources=ResourceRequest(limits=Ask(memory="1g")))
    bench.file = replace(bench._config(), defaults=given, global_max_agents=7)
    assert (await bench.coordinator.reload_scalers()).outcome == "applied"
    assert configuration.builder.defaults == given.resources
    bench.file = replace(bench._config(), scalers=(a_scaler("a", type=BackendType.CONTAINER),))
    assert (await bench.coordinator.reload_scalers()).outcome == "rejected"
    assert configuration.builder.defaults == given.resources


@benched(a_scaler("a", ("linux", "a")))
async def test_an_equal_file_is_unchanged(bench: Bench) -> None:
    assert (await reload(bench, a_scaler("a", ("linux", "a")))).outcome == "unchanged"


@benched(a_scaler("a", ("linux", "a")))
async def test_what_a_scaler_has_that_was_taken_out_while_we_were_down_goes_after_a_grace(bench: Bench) -> None:
    await bench.submits("linux", "a")
    await bench.made()
    await bench.is_killed()
    bench.layout = replace(bench.layout, scalers=())
    await bench.starts()
    await bench.passes(200)
    await bench.is_clean()


@pytest.mark.spec("scaler 19.8.11")
@benched(a_scaler("a", ("linux", "a")))
async def test_signals_that_come_together_reload_once_and_a_later_one_again(bench: Bench) -> None:
    signals = ReloadSignals(reload=bench.coordinator.reload_scalers, clock=bench.clock)
    bench.supervisor.service("signals", signals.run)

    def attempts() -> float:
        return bench.metric("kici_orch_scaler_config_reloads_total", result="attempted")

    signals.signal()
    await bench.passes(0.1)
    signals.signal()
    await bench.passes(1)
    assert attempts() == 1
    signals.signal()
    await bench.passes(1)
    assert attempts() == 2
