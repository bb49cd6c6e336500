"""Events of jobs and people: matched, limited, delivered, retried, given up."""

from dataclasses import replace

import pytest

from kici.domain.errors import Denied, Misconfigured, NoCapacity, NotFound, Permanent, Retryable
from kici.domain.event import SCALE_DOWN, SCALE_UP, EventId, EventState
from kici.domain.ids import AgentId
from kici.domain.job import JobStatus, RunStatus
from kici.domain.strict import Faulty
from kici.ports.event_store import EventFilter
from kici.ports.store import JobFilter
from kici.testing.bench_agent import BenchAgent
from kici.testing.cloud_bench import CloudBench, Trouble, a_cloud_scaler, clouded
from kici.testing.coordinator_bench import SOMEBODY
from kici.wire.messages import JobStart

DEPLOY = {"ref": "acme/deploy", "on": ["deployed"], "jobs": {"tell": {"run": "true", "runsOn": ["static"]}}}


async def a_static_agent(bench: CloudBench, at: int = 0) -> BenchAgent:
    node = bench.nodes[at]
    _, token = await node.coordinator.tokens.create_agent_token(
        name="static", labels=None, gate=frozenset(), expires_in_ms=None
    )
    agent = BenchAgent(
        AgentId("static"), labels=["static"], token=token, entropy=bench.entropy.fork("static"), accept=node.accept
    )
    await agent.registers()
    return agent


async def applies(bench: CloudBench, **document: object) -> None:
    await bench.node.coordinator.events.workflows.apply(document, SOMEBODY)


async def rows(bench: CloudBench, name: str = "deployed") -> list[tuple[str, EventState]]:
    return [(each.target, each.state) for each in await bench.store.events(EventFilter(name=name))]


@clouded()
async def test_an_event_runs_the_workflows_that_subscribe(bench: CloudBench) -> None:
    await applies(bench, **DEPLOY)
    await applies(bench, **{**DEPLOY, "ref": "acme/else", "on": ["other"]})
    agent = await a_static_agent(bench)
    emitted = await bench.node.coordinator.events.emitter.emit("deployed", {"version": "7"}, source="ci")
    assert emitted.targets == ("acme/deploy",)
    job_id = await agent.starts()
    job = await bench.store.job(job_id)
    assert job is not None
    assert job.spec.env["KICI_EVENT_VERSION"] == "7"
    assert job.spec.env["KICI_EVENT_ID"] == emitted.emission_id
    run = await bench.store.run(job.run_id)
    assert run is not None
    assert run.submitted_by == "workflow acme/deploy"
    assert await rows(bench) == [("acme/deploy", EventState.PROCESSED)]


JOB = DEPLOY["jobs"]["tell"]  # type: ignore[index]  # as it stands above


@pytest.mark.parametrize(
    "document",
    [
        {**DEPLOY, "jobs": {"tell": {**JOB, "secrets": {"TOKEN": "registry:token"}}}},
        {**DEPLOY, "jobs": {"tell": {**JOB, "secrets": {"TOKEN": "__event__:evt-1.claimCode"}}}},
        {"ref": "acme/hook", "on": ["deployed"], "webhook": {"url": "https://acme.example", "secret": "registry:hook"}},
    ],
    ids=["a job", "another event's", "a webhook"],
)
@clouded()
async def test_a_workflow_names_no_secret_that_its_author_may_not_use(
    bench: CloudBench, document: dict[str, object]
) -> None:
    workflows = bench.node.coordinator.events.workflows
    with pytest.raises(Denied):
        await workflows.apply(document, replace(SOMEBODY, secret_contexts=frozenset({"deploy"})))
    assert document["ref"] not in {each.ref for each in await workflows.workflows()}


@pytest.mark.spec("H9")
@clouded()
async def test_an_event_without_a_subscriber_is_seen(bench: CloudBench) -> None:
    emitted = await bench.node.coordinator.events.emitter.emit("deployed", {}, source="ci")
    assert emitted.targets == ()
    assert await rows(bench) == [("", EventState.UNMATCHED)]
    assert bench.node.metric("kici_orch_event_unmatched_total") == 1


@pytest.mark.spec("T5.5")
@clouded()
async def test_an_event_for_targets_reaches_no_other_subscriber(bench: CloudBench) -> None:
    for ref in ("acme/a", "acme/b"):
        await applies(bench, **{**DEPLOY, "ref": ref})
    emitter = bench.node.coordinator.events.emitter
    assert (await emitter.emit("deployed", {}, source="ci", targets=["acme/b", "acme/none"])).targets == ("acme/b",)


@pytest.mark.spec("T5.4")
@clouded()
async def test_nobody_else_emits_scale_events(bench: CloudBench) -> None:
    for name in (SCALE_UP, SCALE_DOWN, "__workflow_complete"):
        with pytest.raises(Denied, match="reserved"):
            await bench.node.coordinator.events.emitter.emit(name, {}, source="ci")


@pytest.mark.spec("T5.7")
@clouded()
async def test_a_source_has_a_hundred_events_of_one_name_in_a_minute(bench: CloudBench) -> None:
    emitter = bench.node.coordinator.events.emitter
    for _ in range(100):
        await emitter.emit("deployed", {}, source="ci")
    with pytest.raises(NoCapacity, match="100"):
        await emitter.emit("deployed", {}, source="ci")
    await emitter.emit("deployed", {}, source="cd")
    await bench.passes(61)
    await emitter.emit("deployed", {}, source="ci")


@pytest.mark.spec("T5.7")
@clouded()
async def test_a_chain_of_events_stops_at_ten(bench: CloudBench) -> None:
    emitter = bench.node.coordinator.events.emitter
    last = await emitter.emit("deployed", {}, source="ci")
    for _ in range(10):
        last = await emitter.emit("deployed", {}, source="ci", caused_by=last.emission_id)
    with pytest.raises(Denied, match="chain"):
        await emitter.emit("deployed", {}, source="ci", caused_by=last.emission_id)
    with pytest.raises(NotFound):
        await emitter.emit("deployed", {}, source="ci", caused_by=EventId("evt-none"))


@clouded()
async def test_a_payload_has_a_limit(bench: CloudBench) -> None:
    with pytest.raises(Misconfigured, match="65536"):
        await bench.node.coordinator.events.emitter.emit("deployed", {"x": "y" * 70_000}, source="ci")


@pytest.mark.spec("T5.2")
@clouded()
async def test_a_consumer_that_fails_twice_is_run_three_times(bench: CloudBench) -> None:
    await bench.subscribes("acme/hook", "deployed")
    bench.cloud.troubles.extend([Trouble(Retryable("503")), Trouble(Retryable("503"))])
    await bench.node.coordinator.events.emitter.emit("deployed", {"agentId": "x"}, source="ci")
    await bench.until(lambda: len(bench.cloud.calls) == 3, within=60)
    await bench.passes()
    assert await rows(bench) == [("acme/hook", EventState.PROCESSED)]
    assert len({call.id for call in bench.cloud.calls}) == 1
    assert bench.node.metric("kici_orch_event_retry_total") == 2


@pytest.mark.spec("T5.2")
@clouded()
async def test_five_failures_are_a_dead_letter_that_can_be_revived(bench: CloudBench) -> None:
    await bench.subscribes("acme/hook", "deployed")
    bench.cloud.is_down = Retryable("webhook cloud cannot be reached")
    await bench.node.coordinator.events.emitter.emit("deployed", {"agentId": "x"}, source="ci")
    await bench.until(lambda: bench.node.metric("kici_orch_event_dlq_total") == 1, within=600)
    (dead,) = await bench.dead_letters()
    assert (dead.attempts, dead.dead_reason, len(bench.cloud.calls)) == (5, "exhausted_retries", 5)
    assert "cannot be reached" in str(dead.last_error)
    bench.cloud.is_down = None
    assert await bench.store.revive_event(dead.id)
    await bench.until(lambda: len(bench.cloud.calls) == 6, within=10)
    await bench.passes()
    assert await bench.dead_letters() == []


@clouded()
async def test_what_cannot_pass_is_given_up_at_once(bench: CloudBench) -> None:
    await bench.subscribes("acme/hook", "deployed")
    bench.cloud.is_down = Permanent("webhook cloud answered 410")
    await bench.node.coordinator.events.emitter.emit("deployed", {"agentId": "x"}, source="ci")
    await bench.passes(1)
    (dead,) = await bench.dead_letters()
    assert (dead.attempts, dead.dead_reason) == (1, "non_retryable")


@pytest.mark.spec("T5.3")
@clouded(nodes=2)
async def test_what_a_dead_coordinator_had_claimed_is_delivered_after_its_lease(bench: CloudBench) -> None:
    await bench.subscribes("acme/hook", "deployed")
    for node in bench.nodes:
        node.coordinator.events.router._ticker.seconds = 2.0
    gate = bench.nodes[0].traps.hold("claim_events", done=True)
    bench.nodes[1].coordinator.events.router._ticker.seconds = 2.0
    await bench.nodes[0].coordinator.events.emitter.emit("deployed", {"agentId": "x"}, source="ci")
    await gate.reached()
    await bench.nodes[0].is_killed()
    await bench.passes(50)
    assert bench.cloud.calls == []
    await bench.until(lambda: bench.cloud.calls, within=20)
    assert bench.nodes[1].metric("kici_orch_event_lease_expirations_total") == 1


# --- workflows that provision


PROVISION = {
    "ref": "acme/cloud",
    "on": {
        SCALE_UP: {"jobs": {"up": {"run": "true", "runsOn": ["static"]}}},
        SCALE_DOWN: {"jobs": {"down": {"run": "true", "runsOn": ["static"]}}},
    },
}


@pytest.mark.spec("H11", "D27", "T5.9")
@clouded(subscribed=False)
async def test_a_workflow_gets_the_code_as_a_secret_and_a_failure_reaches_the_job(bench: CloudBench) -> None:
    await applies(bench, **PROVISION)
    agent = await a_static_agent(bench)
    waiting = await bench.submits()
    job_id = await agent.starts()
    job = await bench.store.job(job_id)
    assert job is not None
    code = (await bench.node.coordinator.event_secrets.fields(EventId(job.spec.env["KICI_EVENT_ID"])))["claimCode"]
    assert len(code) == 64
    assert code not in repr(job)
    (start,) = agent.all(JobStart)
    assert start.secrets == {"KICI_EVENT_CLAIM_CODE": code}
    assert code not in repr(start.env)
    agent.writes(job_id, b"starting\nInsufficientInstanceCapacity: no room in eu-1a\n")
    agent.ends(job_id, "failed", exit_code=3)
    await bench.passes(8)
    told = str((await bench.job(waiting)).last_provisioning_error)
    assert "no room in eu-1a" in told
    assert code not in told
    assert [each.deferral.failures for each in await bench.store.deferrals(limit=9)] == [1]
    down = await agent.starts()
    agent.ends(down)
    await bench.passes(3)
    assert await bench.spawns() == []
    events = await bench.store.events(EventFilter())
    assert [(each.name, each.state) for each in events] == [
        (SCALE_DOWN, EventState.PROCESSED),
        (SCALE_UP, EventState.DEAD),
    ]


@pytest.mark.spec("T5.8")
@clouded(subscribed=False)
async def test_a_teardown_that_fails_is_run_again(bench: CloudBench) -> None:
    await applies(bench, **PROVISION)
    agent = await a_static_agent(bench)
    waiting = await bench.submits()
    agent.ends(await agent.starts())
    await bench.passes(1)
    await bench.node.coordinator.jobs.cancel_job(waiting.id, force=False, reason="no")
    agent.ends(await agent.starts(within=60), "failed", exit_code=1)
    await bench.passes(1)
    assert await bench.spawns()
    agent.ends(await agent.starts(within=600))
    await bench.passes(3)
    assert await bench.spawns() == []


@clouded(subscribed=False)
async def test_a_withdrawn_scale_up_cancels_its_run_and_the_teardown_follows(bench: CloudBench) -> None:
    await applies(bench, **PROVISION)
    waiting = await bench.submits()
    await bench.passes(1)
    await bench.node.coordinator.jobs.cancel_job(waiting.id, force=False, reason="no")
    await bench.passes(3)
    runs = await bench.store.runs(before=None, limit=9)
    assert sorted(run.status for run in runs if "scale-up" in run.name) == [RunStatus.CANCELLED]
    agent = await a_static_agent(bench)
    job = await bench.store.job(await agent.starts(within=60))
    assert job is not None
    assert job.name == "down"
    agent.ends(job.id)
    await bench.passes(3)
    assert await bench.spawns() == []


@pytest.mark.spec("D12")
@clouded(a_cloud_scaler("cloud", "static"), subscribed=False)
async def test_a_workflow_that_needs_its_own_machines_is_refused(bench: CloudBench) -> None:
    with pytest.raises(Misconfigured, match="none would ever be made"):
        await applies(bench, **PROVISION)
    await a_static_agent(bench)
    await applies(bench, **PROVISION)  # somebody else can run it


@clouded(subscribed=False)
async def test_nobody_may_ask_for_the_secrets_of_events(bench: CloudBench) -> None:
    with pytest.raises(Denied, match="reserved"):
        await bench.submits(secrets={"X": "__event__:evt-1.claimCode"})


@clouded()
async def test_a_faulty_document_is_refused_as_a_whole(bench: CloudBench) -> None:
    with pytest.raises(Faulty) as caught:
        await applies(bench, ref="?", on=["a b"], jobs={})
    assert len(caught.value.faults) >= 2


@clouded()
async def test_a_deleted_workflow_gets_nothing_more(bench: CloudBench) -> None:
    await applies(bench, **DEPLOY)
    bench.node.coordinator.events.emitter.emitted = lambda: None
    await bench.node.coordinator.events.emitter.emit("deployed", {}, source="ci")
    await bench.node.coordinator.events.workflows.delete("acme/deploy")
    with pytest.raises(NotFound):
        await bench.node.coordinator.events.workflows.delete("acme/deploy")
    await bench.passes(5)
    (dead,) = await bench.dead_letters()
    assert "subscribes to deployed no longer" in str(dead.last_error)
    assert not [job for job in await bench.store.jobs(JobFilter()) if job.status is not JobStatus.QUEUED]


@clouded()
async def test_handled_events_are_forgotten_after_a_week_and_dead_letters_stay(bench: CloudBench) -> None:
    await bench.subscribes("acme/hook", "deployed")
    emitter = bench.node.coordinator.events.emitter
    await emitter.emit("deployed", {"agentId": "x"}, source="ci")
    await bench.passes(1)
    bench.cloud.is_down = Permanent("410")
    await emitter.emit("deployed", {"agentId": "x"}, source="ci")
    await bench.passes(1)
    retention = bench.node.coordinator.events._retention
    await bench.store.patch_settings(None, {"event_router_event_ttl_seconds": 3600})
    await bench.passes(3700)
    assert await retention.tick() == 0
    assert await rows(bench) == [("acme/hook", EventState.DEAD)]
    assert bench.node.metric("kici_orch_event_dlq_depth") == 1
