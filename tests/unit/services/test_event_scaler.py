"""An event scaler from the job that waits to the machine that is gone, on one or more coordinators."""

import asyncio
from dataclasses import replace

import pytest
from msgspec import to_builtins

from kici.config.model import BackendType
from kici.decide.fit import DOCKER_LABEL
from kici.domain.errors import Denied, Permanent, Retryable
from kici.domain.event import SCALE_DOWN, SCALE_UP
from kici.domain.ids import DEFAULT_ORG, AgentId
from kici.domain.job import JobStatus
from kici.domain.say import say
from kici.domain.secret import SecretRef
from kici.domain.spawn import SpawnState
from kici.domain.verdict import AtCap, InBackoff, SpawnBooting
from kici.ports.event_store import EventFilter
from kici.testing.cloud_bench import CLOUD, REF, CloudBench, Trouble, a_cloud_scaler, clouded
from kici.wire.messages import ClaimCredentials, ClaimCredentialsResponse, CloseCode, JobStart

NOBODY = "nobody subscribes"


@pytest.mark.spec("scaler 25.6.6", "scaler 22.5.1", "T5.5", "scaler 51.2")
@clouded()
async def test_a_job_gets_its_machine_and_the_machine_goes(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made()
    assert await agent.starts() == job.id
    assert bench.node.metric("kici_orch_scaler_external_provisioning_active", scaler="cloud") == 1
    agent.ends(job.id)
    await bench.passes()
    agent.leaves()
    await bench.all_gone(within=60)
    assert bench.node.metric("kici_orch_scaler_external_provisioning_active", scaler="cloud") == 0
    (up,), (down,) = bench.cloud.told(SCALE_UP), bench.cloud.told(SCALE_DOWN)
    assert (up["agentId"], up["jobId"], up["scalerName"]) == (agent.agent_id, job.id, CLOUD)
    assert {"cloud", "kici:agent:event", "kici:scaler:cloud"} <= set(up["labels"])
    assert (down["agentId"], down["reason"]) == (agent.agent_id, "job-complete")
    assert (await bench.job(job)).status is JobStatus.SUCCESS
    assert bench.node.metric("kici_orch_scaler_scale_up_emitted_total", scaler="cloud") == 1
    assert bench.node.metric("kici_orch_scaler_scale_down_emitted_total", scaler="cloud", reason="job-complete") == 1
    assert bench.node.coordinator.book.total.agents == 0


@pytest.mark.spec("T6.8")
@clouded()
async def test_a_log_in_at_a_registry_is_in_no_event(bench: CloudBench) -> None:
    password = "the-password-23"
    await bench.node.coordinator.secrets.put(DEFAULT_ORG, SecretRef("registry", "password"), password)
    log_in = {"username": "ci", "password": "registry:password"}
    job = await bench.submits(image="example.org/private:1", registry=log_in)
    agent = await bench.booted()
    agent.labels = [*agent.labels, DOCKER_LABEL]
    await agent.registers()
    assert await agent.starts() == job.id
    (start,) = agent.all(JobStart)
    assert password in str(to_builtins(start))  # it was needed
    agent.ends(job.id)
    await bench.passes()
    agent.leaves()
    await bench.all_gone(within=60)
    events = await bench.store.events(EventFilter())
    assert {event.name for event in events} == {call.name for call in bench.cloud.calls} == {SCALE_UP, SCALE_DOWN}
    shown = [*[event.payload for event in events], *[call.payload for call in bench.cloud.calls]]
    assert "claimCode" in str(shown)  # what is hidden elsewhere is seen here
    assert password not in str((shown, bench.events))


@pytest.mark.spec("T5.9", "H9", "D12")
@clouded(subscribed=False)
async def test_a_scale_up_that_nobody_subscribes_to_fails_at_once(bench: CloudBench) -> None:
    job = await bench.submits()
    await bench.passes(2)
    told = (await bench.job(job)).last_provisioning_error
    assert told is not None
    assert NOBODY in told
    assert REF in told
    assert await bench.spawns() == []
    assert isinstance((await bench.node.coordinator.explain.verdicts(await bench.job(job)))[0], InBackoff)
    await bench.subscribes()
    await bench.machine()  # recovery is automatic


@clouded()
async def test_a_webhook_that_is_down_is_told_to_the_job_and_tried_again(bench: CloudBench) -> None:
    bench.cloud.is_down = Retryable("webhook cloud cannot be reached: refused")
    job = await bench.submits()
    await bench.passes(3)
    assert "cannot be reached" in str((await bench.job(job)).last_provisioning_error)
    verdict = (await bench.node.coordinator.explain.verdicts(await bench.job(job)))[0]
    assert "cannot be reached" in say(verdict, now=bench.clock.now())
    bench.cloud.is_down = None
    await bench.until(lambda: bench.cloud.machines, within=120)


@pytest.mark.spec("scaler 51.3", "scaler 13.9.6")
@clouded()
async def test_a_cloud_that_refuses_defers_its_scaler(bench: CloudBench) -> None:
    bench.cloud.troubles.append(Trouble(Permanent("webhook cloud answered 422: no quota")))
    job = await bench.submits()
    await bench.passes(10)
    assert "no quota" in str((await bench.job(job)).last_provisioning_error)
    verdict = (await bench.node.coordinator.explain.verdicts(await bench.job(job)))[0]
    assert isinstance(verdict, InBackoff)
    assert verdict.is_external
    assert bench.cloud.made == 0
    assert len(bench.cloud.told(SCALE_UP)) == 1
    await bench.until(lambda: bench.cloud.made == 1, within=60)


@pytest.mark.spec("scaler 15.5.1", "scaler 15.5.8", "scaler 51.4", "T7.7")
@clouded()
async def test_a_cancelled_job_takes_its_machine_back_without_blame(bench: CloudBench) -> None:
    job = await bench.submits()
    up = await bench.machine()
    await bench.passes()
    await bench.node.coordinator.jobs.cancel_job(job.id, force=False, reason="no")
    await bench.all_gone(within=60)
    assert [down["reason"] for down in bench.cloud.told(SCALE_DOWN)] == ["job-complete"]
    assert await bench.store.deferrals(limit=9) == []
    with pytest.raises(Denied, match="invalid claim code"):
        await bench.node.coordinator.claims.redeem(up["claimCode"], caller="x")


@pytest.mark.spec("scaler 15.5.1", "scaler 15.5.9")
@clouded(nodes=2)
async def test_a_cancel_on_another_coordinator_takes_the_machine_back(bench: CloudBench) -> None:
    job = await bench.submits()
    await bench.machine()
    await bench.passes()
    await bench.nodes[1].coordinator.jobs.cancel_job(job.id, force=False, reason="no")
    await bench.all_gone(within=60)
    assert [down["reason"] for down in bench.cloud.told(SCALE_DOWN)] == ["job-complete"]


@pytest.mark.spec("scaler 24.7.8", "scaler 24.7.1")
@clouded()
async def test_the_agent_trades_its_code_on_its_socket(bench: CloudBench) -> None:
    await bench.submits()
    up = await bench.machine()
    agent = await bench.booted()
    agent.connects()
    agent.says(ClaimCredentials(request_id="1", claim_code=up["claimCode"]))
    answer = await agent.hears(ClaimCredentialsResponse)
    assert (answer.error, answer.credentials) == ("claim code already consumed", None)
    agent.agent_id = AgentId("scaler-event-0badc0de")
    await agent.tries_to_register()
    assert await agent.is_closed() in (CloseCode.AUTH_FAILED, CloseCode.INTERNAL)


@pytest.mark.spec("scaler 51.2", "scaler 24.7.5", "scaler 21.6.3", "scaler 14.6.5", "scaler 22.5.3", "T4.4")
@clouded(nodes=2)
async def test_another_coordinator_adopts_the_agent_and_ends_its_machine(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made(at=1)
    assert await agent.starts() == job.id
    await bench.passes(7)
    assert len(bench.nodes[0].coordinator.spawns) == 0  # its maker looked, and let go
    row = await bench.row(agent.agent_id)
    assert row is not None
    assert (row.owner_instance_id, row.adopted_by, row.state) == ("node-0", "node-1", SpawnState.REGISTERED)
    agent.ends(job.id)
    await bench.passes()
    agent.leaves()
    await bench.all_gone(within=60)
    assert len(bench.cloud.told(SCALE_DOWN)) == 1
    assert await bench.store.deferrals(limit=9) == []
    assert await bench.store.provision_adopter(agent.agent_id) == "node-1"


@clouded(nodes=2, agent_reconnect_grace_ms=10_000)
async def test_an_agent_that_blinks_at_its_second_coordinator_is_waited_for_by_that_one(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made(at=0)
    assert await agent.starts() == job.id
    agent.cut()
    await bench.passes(4)
    bench.moves(agent, to=1)
    await agent.registers((job.id, "running"))
    await bench.passes(4)
    agent.cut()
    await bench.passes(5)  # the grace of the first one is over, that of the second is not
    assert (await bench.job(job)).status is JobStatus.RECOVERING
    await agent.registers((job.id, "running"))
    assert (await bench.job(job)).status is JobStatus.RUNNING


@clouded(nodes=2)
async def test_a_restart_takes_up_no_reservation_of_a_machine_that_another_adopted(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made(at=1)
    assert await agent.starts() == job.id
    await bench.nodes[0].is_killed()
    await bench.nodes[0].starts()
    assert bench.nodes[0].coordinator.book.total.agents == 0


@clouded(nodes=2)
async def test_who_still_tracks_a_machine_that_another_adopted_lets_go(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made(at=1)
    assert await agent.starts() == job.id  # without a job it would leave soon
    row = await bench.row(agent.agent_id)
    assert row is not None
    here = bench.nodes[0].coordinator
    await bench.passes(7)
    here.events.watch.adopted(row)  # as a start does that reads the row before the other adopts it
    assert len(here.spawns) == 1
    await bench.passes(40)
    assert len(here.spawns) == 0
    assert len(bench.nodes[1].coordinator.spawns) == 1
    assert bench.cloud.told(SCALE_DOWN) == []


@clouded()
async def test_a_clock_that_is_ahead_expires_no_request(bench: CloudBench) -> None:
    bench.clock.skew_ms += 3_600_000  # that of the store stays
    await bench.submits()
    await bench.machine()
    assert await bench.dead_letters() == []


@pytest.mark.spec("scaler 23.7.1")
@clouded(a_cloud_scaler(max_agents=3), nodes=3)
async def test_the_cap_holds_for_all_coordinators_together(bench: CloudBench) -> None:
    jobs = [await bench.submits(by=number % 3) for number in range(12)]
    await bench.passes(30)
    assert len(bench.cloud.machines) == bench.cloud.made == 3
    served = {up["jobId"] for up in bench.cloud.told(SCALE_UP)}
    waiting = next(job for job in jobs if job.id not in served)
    verdicts = [await node.coordinator.explain.verdicts(await bench.job(waiting)) for node in bench.nodes]
    assert any(isinstance(each, AtCap) and each.limit == 3 for found in verdicts for each in found)
    for number in range(12):
        agent = await bench.made(number, at=number % 3)
        job_id = await agent.starts()
        agent.ends(job_id)
        await bench.passes()
        agent.leaves()
        await bench.machine(min(number + 1, 11))
        assert len(bench.cloud.machines) <= 3
    await bench.all_gone(within=120)
    assert {(await bench.job(job)).status for job in jobs} == {JobStatus.SUCCESS}


@pytest.mark.spec("T7.3", "scaler 25.6.5", "scaler 20.6.1")
@clouded()
async def test_a_restart_ends_no_machine(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made()
    await agent.starts()
    await bench.node.stops()
    await bench.passes(5)
    assert bench.cloud.told(SCALE_DOWN) == []
    await bench.node.starts()
    await agent.registers((job.id, "running"))
    agent.ends(job.id)
    await bench.passes()
    agent.leaves()
    await bench.all_gone(within=60)
    assert len(bench.cloud.told(SCALE_DOWN)) == 1
    assert (await bench.job(job)).status is JobStatus.SUCCESS


@pytest.mark.spec("T5.1", "T5.3")
@clouded(nodes=2)
async def test_another_coordinator_delivers_what_a_dead_one_wrote(bench: CloudBench) -> None:
    bench.nodes[0].coordinator.events.router._ticker.seconds = 1e9  # it dies before it delivers
    bench.nodes[0].coordinator.events.emitter.emitted = lambda: None
    await bench.submits()
    await bench.passes(0.2)
    await bench.nodes[0].is_killed()
    await bench.machine()


@pytest.mark.spec("T5.1")
@clouded(nodes=2)
async def test_a_coordinator_hears_of_what_another_wrote_and_gave_up(bench: CloudBench) -> None:
    writer, other = bench.nodes
    for node in bench.nodes:
        node.coordinator.events.router._ticker.seconds = 1e9  # nobody polls
        node.coordinator.events.watch._ticker.seconds = 1e9
    await bench.passes(10)  # the waits that began before are over
    writer.coordinator.events.router.nudge = lambda: None  # type: ignore[method-assign]
    bench.cloud.is_down = Permanent("no")
    job = await bench.submits()
    await bench.until(lambda: bench.cloud.calls, within=1)
    await bench.passes(1)
    assert not other.coordinator.manager.fleet.runtimes[CLOUD].backend.active_count()
    assert not writer.coordinator.manager.fleet.runtimes[CLOUD].backend.active_count()
    assert (await bench.job(job)).status is JobStatus.QUEUED


@pytest.mark.spec("T5.6")
@clouded()
async def test_a_scale_up_that_comes_twice_makes_one_machine(bench: CloudBench) -> None:
    bench.cloud.troubles.append(Trouble(Retryable("the answer was lost"), after_the_deed=True))
    await bench.submits()
    await bench.until(lambda: len(bench.cloud.told(SCALE_UP)) == 2, within=120)
    assert bench.cloud.made == 1


@pytest.mark.spec("T5.8", "scaler 22.5.7", "scaler 26.9.7", "D12")
@clouded(scaler_reap_reattempt_interval_ms=60_000, scaler_reap_interval_ms=5_000)
async def test_a_scale_down_in_the_dead_letters_is_sent_again_later(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made()
    await agent.starts()
    agent.ends(job.id)
    await bench.passes()
    bench.cloud.is_down = Permanent("webhook cloud answered 401")
    agent.leaves()
    await bench.until(lambda: bench.cloud.told(SCALE_DOWN), within=60)
    await bench.passes(30)
    assert (await bench.row(agent.agent_id)) is not None
    assert len(bench.cloud.told(SCALE_DOWN)) == 1
    bench.cloud.is_down = None
    await bench.passes(25)
    assert len(bench.cloud.told(SCALE_DOWN)) == 1
    await bench.all_gone(within=60)
    assert len(bench.cloud.told(SCALE_DOWN)) == 2


@pytest.mark.spec("scaler 22.5.4", "D12")
@clouded(scaler_reap_reattempt_interval_ms=60_000, scaler_reap_interval_ms=5_000)
async def test_a_scale_down_that_nobody_subscribes_to_keeps_the_row(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made()
    await agent.starts()
    agent.ends(job.id)
    await bench.passes()
    await bench.node.coordinator.events.workflows.delete(REF)
    agent.leaves()
    await bench.passes(20)
    row = await bench.row(agent.agent_id)
    assert row is not None
    assert row.state is SpawnState.ENDING
    assert any(name == "scale.down_undelivered" for name, _ in bench.events)
    await bench.subscribes()
    await bench.all_gone(within=120)


@pytest.mark.spec("scaler 14.6.4", "scaler 26.9.1", "T9.8")
@clouded()
async def test_a_machine_that_never_comes_is_given_back_and_counted_once(bench: CloudBench) -> None:
    job = await bench.submits()
    up = await bench.machine()
    await bench.passes(306)
    row = await bench.row(up["agentId"])
    assert row is not None
    assert row.state is SpawnState.ENDING
    assert bench.cloud.told(SCALE_DOWN) == []
    assert "did not register" in str((await bench.job(job)).last_provisioning_error)
    await bench.until(lambda: bench.cloud.told(SCALE_DOWN), within=130)
    assert bench.cloud.told(SCALE_DOWN)[0]["reason"] == "spawn-timeout"
    (deferral,) = await bench.store.deferrals(limit=9)
    assert deferral.deferral.failures == 1
    assert bench.node.metric("kici_orch_scaler_external_provision_timeout_total", scaler="cloud") == 1
    await bench.until(lambda: len(bench.cloud.told(SCALE_UP)) == 2, within=60)


@clouded(
    a_cloud_scaler("small", "cloud", max_agents=1),
    a_cloud_scaler("large", "cloud", "gpu", max_agents=4, targets=("acme/other",)),
)
async def test_a_job_whose_best_scaler_refuses_goes_to_the_next(bench: CloudBench) -> None:
    await bench.subscribes("acme/other")
    first, second = await bench.submits(), await bench.submits()
    await bench.machine(1)
    assert [up["scalerName"] for up in bench.cloud.told(SCALE_UP)] == ["small", "large"]
    assert {up["jobId"] for up in bench.cloud.told(SCALE_UP)} == {first.id, second.id}


@clouded(
    a_cloud_scaler("small", "cloud"),
    a_cloud_scaler("large", "cloud", "gpu", targets=("acme/other",)),
)
async def test_no_capacity_at_one_provider_sends_the_job_to_another(bench: CloudBench) -> None:
    await bench.subscribes("acme/other")
    bench.cloud.troubles.append(Trouble(Permanent("InsufficientInstanceCapacity")))
    job = await bench.submits()
    await bench.until(lambda: bench.cloud.machines, within=30)
    assert [up["scalerName"] for up in bench.cloud.told(SCALE_UP)] == ["small", "large"]
    verdicts = await bench.node.coordinator.explain.verdicts(await bench.job(job))
    assert isinstance(verdicts[0], SpawnBooting)
    assert verdicts[0].scaler == "large"
    assert isinstance(verdicts[1], InBackoff)
    assert verdicts[1].scaler == "small"


@pytest.mark.spec("D14", "scaler 50.12")
@clouded(nodes=2)
async def test_backoff_is_shared_and_one_machine_probes(bench: CloudBench) -> None:
    bench.cloud.troubles.append(Trouble(Permanent("no quota")))
    await bench.submits()
    await bench.passes(12)
    for number in range(6):
        await bench.submits(by=number % 2)
    await bench.passes(5)
    assert len(bench.cloud.told(SCALE_UP)) == 2  # the other coordinator is fresh, and probes; nobody else asks
    await bench.passes(60)
    assert len(bench.cloud.told(SCALE_UP)) == 2
    await bench.made(1)
    await bench.until(lambda: len(bench.cloud.machines) == 4, within=30)


@pytest.mark.spec("scaler 10.7.10")
@clouded(a_cloud_scaler(max_agents=1), nodes=2)
async def test_two_coordinators_share_the_cap_of_one_agent(bench: CloudBench) -> None:
    for number in range(2):
        await bench.submits(by=number)
    await bench.passes(60)
    assert bench.cloud.made == 1
    assert len(await bench.spawns()) == 1


@pytest.mark.spec("T4.3")
@clouded(a_cloud_scaler(max_agents=3), nodes=2)
async def test_jobs_that_come_to_two_coordinators_at_once_ask_for_no_more_than_the_cap(bench: CloudBench) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(bench.submits(by=number % 2))
    await bench.passes(60)
    assert len(bench.cloud.told(SCALE_UP)) == bench.cloud.made == 3


@pytest.mark.spec("scaler 9.6.8")
@clouded()
async def test_the_row_of_an_event_spawn_is_written_once(bench: CloudBench) -> None:
    spawner = bench.node.coordinator.manager._spawner
    real, written = spawner._store, []

    class Counting:
        def __getattr__(self, name: str) -> object:
            if name.startswith("insert_"):
                written.append(name)
            return getattr(real, name)

    spawner._store = Counting()  # type: ignore[assignment]  # as much of a store as is used
    await bench.submits()
    up = await bench.machine()
    await bench.passes(20)
    assert written == ["insert_cluster_spawn"]
    row = await bench.row(up["agentId"])
    assert row is not None


@pytest.mark.spec("scaler 21.6.2")
@clouded()
async def test_the_row_of_an_event_agent_stays_and_says_where_it_registered(bench: CloudBench) -> None:
    job = await bench.submits()
    agent = await bench.made()
    assert await agent.starts() == job.id
    row = await bench.row(agent.agent_id)
    assert row is not None
    assert (row.state, row.adopted_by) == (SpawnState.REGISTERED, bench.node.id)


@pytest.mark.spec("scaler 15.5.3")
@clouded()
async def test_a_job_that_ends_before_its_scale_up_is_out_asks_for_no_machine(bench: CloudBench) -> None:
    gate = bench.node.traps.hold("emit_scale_up", done=False)
    job = await bench.submits()
    await gate.reached()
    await bench.node.coordinator.jobs.cancel_job(job.id, force=False, reason="no")
    await bench.passes(40)
    assert bench.cloud.calls == []
    gate.open()
    await bench.all_gone(within=120)
    ups, downs = bench.cloud.told(SCALE_UP), bench.cloud.told(SCALE_DOWN)
    assert {up["agentId"] for up in ups} <= {down["agentId"] for down in downs}
    assert await bench.store.deferrals(limit=9) == []


@pytest.mark.spec("scaler 14.6.9")
@clouded()
async def test_a_machine_of_a_scaler_that_left_the_file_is_still_one_of_a_cloud(bench: CloudBench) -> None:
    job = await bench.submits(queue_timeout_ms=0)
    up = await bench.machine()
    await bench.passes()
    bench.scalers = ()
    assert (await bench.node.coordinator.reload_scalers()).retired == (CLOUD,)
    await bench.passes(290)
    assert (await bench.job(job)).status is JobStatus.QUEUED, "its machine may still come"
    await bench.passes(16)
    row = await bench.row(up["agentId"])
    assert row is not None
    assert row.state is SpawnState.ENDING
    assert bench.cloud.told(SCALE_DOWN) == []
    await bench.all_gone(within=200)
    assert [down["reason"] for down in bench.cloud.told(SCALE_DOWN)] == ["spawn-timeout"]


@pytest.mark.spec("scaler 19.8.9")
@clouded()
async def test_changed_targets_count_for_the_next_machine_and_rejected_ones_do_not(bench: CloudBench) -> None:
    await bench.subscribes("acme/other")
    await bench.submits()
    await bench.machine(0)
    bench.scalers = (a_cloud_scaler(targets=("acme/other",)),)
    assert (await bench.node.coordinator.reload_scalers()).updated == (CLOUD,)
    await bench.submits()
    await bench.machine(1)
    clash = replace(a_cloud_scaler(targets=("acme/third",)), type=BackendType.BARE_METAL)
    bench.scalers = (clash,)
    assert (await bench.node.coordinator.reload_scalers()).outcome == "rejected"
    await bench.submits()
    await bench.machine(2)
    targets = [(await bench.row(up["agentId"])) for up in bench.cloud.told(SCALE_UP)]
    assert [row and row.provisioning_targets for row in targets] == [(REF,), ("acme/other",), ("acme/other",)]
