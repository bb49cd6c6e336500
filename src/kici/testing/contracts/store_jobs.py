"""Contract cases of `ports.store.JobStore`: submission, claims, start, return to the queue."""

import asyncio
from dataclasses import replace
from typing import Final

from kici.domain.errors import Bug, Conflict
from kici.domain.ids import ClassId, Instant, JobId, OrgId, RunId
from kici.domain.job import JobBuild, JobSpec, JobStatus, Outcome
from kici.domain.resources import Ask, ResourceRequest
from kici.domain.spawn import SpawnState
from kici.ports.store import JobFilter, Offer, Store, Submitted
from kici.testing.builders import HERE, a_demand, a_new_job, a_new_run, a_reservation, a_session, a_spawn
from kici.testing.contracts.store_rules import (
    ACK_MS,
    ALL,
    RUNNING,
    SUCCESS,
    THERE,
    Case,
    a_claim,
    after,
    agent,
    class_of,
    ended,
    error_of,
    given,
    ids,
    job,
    offered,
    queued,
    shows,
    started,
    status,
    submit,
    together,
)


async def submits_jobs_in_order(store: Store) -> None:
    made = await submit(store, *(a_new_job(id) for id in ("c", "a", "b")), run="r", now=5)
    assert ids(made) == ["c", "a", "b"]
    assert made[0].seq < made[1].seq < made[2].seq
    assert [(each.status, each.created_at, each.queued_at) for each in made] == [
        (JobStatus.QUEUED, after(5), after(5))
    ] * 3
    assert await store.jobs(JobFilter(run_id=RunId("r"))) == made[::-1]
    run = given(await store.run(RunId("r")))
    assert (run.name, run.org, run.submitted_by, run.created_at, run.finished_at) == (
        "build",
        "default",
        "tester",
        after(5),
        None,
    )


async def keeps_every_field_of_a_job(store: Store) -> None:
    resources = ResourceRequest(requests=Ask(cpus=0.5, memory="512Mi"), limits=Ask(cpus=2.0))
    demand = replace(
        a_demand("gpu", "linux"),
        exclude=frozenset({"slow", "old"}),
        resources=resources,
        image="python:3.12",
        org=OrgId("acme"),
    )
    spec = JobSpec(
        command=("sh", "-c", "printf '\\0 \"%s\"' ☃"),
        env={"B": "2", "A": "line\nbreak \\u0000 'x'"},
        timeout_ms=1500,
        secrets={"TOKEN": "deploy:token"},
        image="python:3.12",
        registry={"password": "registry:password"},
        build=JobBuild(context={"ci/Dockerfile": "FROM a\n"}, target="test", args={"A": "1"}),
    )
    new = replace(a_new_job("a"), name="tést; DROP TABLE jobs --", demand=demand, spec=spec, expires_at=after(99))
    made = await store.submit(a_new_run(org=OrgId("acme")), [new], now=after(0))
    stored = await job(store, "a")
    assert made.jobs == (stored,)
    assert (stored.spec, stored.demand, stored.name, stored.org) == (spec, demand, new.name, "acme")
    assert (stored.expires_at, stored.attempts, stored.needs) == (after(99), 0, ())


async def queues_only_jobs_that_need_nothing(store: Store) -> None:
    a, b = await submit(store, a_new_job("a"), a_new_job("b", needs=(JobId("a"),)))
    assert (a.status, b.status) == (JobStatus.QUEUED, JobStatus.PENDING)
    assert (b.needs, b.queued_at) == (("a",), None)
    assert await store.claim_job(JobId("b"), a_claim(), now=after(0)) is None
    assert await store.queued_count() == 1


async def submits_a_job_as_claimed(store: Store) -> None:
    jobs = [a_new_job("a", claimed_by=agent(1)), a_new_job("b", claimed_by=agent(2)), a_new_job("c")]
    claim = a_claim(scaler="local")
    made = await store.submit(a_new_run(), jobs, claim=claim, now=after(0))
    a, b, c = made.jobs
    assert (a.status, a.agent_id, a.owner_instance_id, a.scaler) == (JobStatus.DISPATCHED, agent(1), HERE, "local")
    assert (a.dispatched_at, a.ack_deadline) == (after(0), after(ACK_MS))
    assert (b.agent_id, c.agent_id, c.status) == (agent(2), None, JobStatus.QUEUED)
    assert ids(await store.held_jobs(agent(1))) == ["a"]


async def submits_once_for_a_key(store: Store) -> None:
    run, jobs = a_new_run(id=RunId("r1")), [a_new_job("a"), a_new_job("b")]
    first = await store.submit(run, jobs, idempotency_key="k", now=after(0))
    other = replace(run, id=RunId("r2"))
    again = await store.submit(other, [a_new_job("c")], idempotency_key="k", now=after(1))
    assert (first.created, again.created) == (True, False)
    assert (again.run_id, again.jobs) == (first.run_id, first.jobs)
    assert await store.run(RunId("r2")) is None
    assert (await store.submit(other, [a_new_job("c")], idempotency_key="l", now=after(2))).created


async def submits_once_for_a_key_at_the_same_time(store: Store) -> None:
    async def one(number: int) -> Submitted:
        run = a_new_run(id=RunId(f"r{number}"))
        return await store.submit(run, [a_new_job(f"j{number}")], idempotency_key="k", now=after(0))

    answers = await together(one(number) for number in range(8))
    assert [answer.created for answer in answers].count(True) == 1
    assert len({answer.run_id for answer in answers}) == 1
    assert await store.queued_count() == 1


async def refuses_a_taken_id_as_a_whole(store: Store) -> None:
    await queued(store, "a")
    run = a_new_run(id=RunId("r2"))
    clash = store.submit(run, [a_new_job("b"), a_new_job("a")], idempotency_key="k", now=after(0))
    assert isinstance(await error_of(clash), Conflict)
    assert await store.run(RunId("r2")) is None
    assert await store.job(JobId("b")) is None
    assert (await store.submit(run, [a_new_job("b")], idempotency_key="k", now=after(0))).created


async def refuses_submissions_that_cannot_end(store: Store) -> None:
    hopeless = [
        [],
        [a_new_job("a"), a_new_job("a")],
        [a_new_job("a", needs=(JobId("a"),))],
        [a_new_job("a", needs=(JobId("elsewhere"),))],
        [a_new_job("a", claimed_by=agent())],
    ]
    for jobs in hopeless:
        assert isinstance(await error_of(store.submit(a_new_run(), jobs, now=after(0))), Bug)
    assert await store.runs(before=None, limit=ALL) == []


async def takes_equal_demands_for_one_class(store: Store) -> None:
    await submit(store, replace(a_new_job("a"), demand=a_demand("x", "y", cpus=1.0)))
    await submit(store, replace(a_new_job("b"), demand=a_demand("y", "x", cpus=1)))
    await submit(store, replace(a_new_job("c"), demand=a_demand("x", "y", cpus=1.0, org=OrgId("acme"))))
    assert await class_of(store, "a") == await class_of(store, "b") != await class_of(store, "c")
    assert [each.oldest_job for each in await store.waiting_classes(limit=ALL)] == ["a", "c"]


async def claims_the_oldest_of_the_classes(store: Store) -> None:
    for id, label in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "y")):
        await submit(store, a_new_job(id, label))
    x, y = ClassId(await class_of(store, "a")), ClassId(await class_of(store, "b"))
    claims = [await store.claim_oldest([y, x], a_claim(agent(n)), now=after(0)) for n in range(5)]
    assert [claimed and claimed.id for claimed in claims] == ["a", "b", "c", "e", None]
    assert await store.claim_oldest([], a_claim(), now=after(0)) is None


async def writes_the_claim_on_the_job(store: Store) -> None:
    await queued(store, "a")
    assert await store.set_provisioning_error(JobId("a"), "no room")
    claimed = given(await store.claim_job(JobId("a"), a_claim(instance_id=THERE, scaler="s"), now=after(7)))
    assert (claimed.status, claimed.agent_id, claimed.owner_instance_id) == (JobStatus.DISPATCHED, agent(), THERE)
    assert (claimed.dispatched_at, claimed.ack_deadline, claimed.scaler) == (after(7), after(7 + ACK_MS), "s")
    assert (claimed.last_provisioning_error, claimed.started_at) == (None, None)
    assert await job(store, "a") == claimed
    assert await store.claim_job(JobId("a"), a_claim(agent(2)), now=after(8)) is None
    assert await store.claim_job(JobId("unknown"), a_claim(), now=after(8)) is None


async def forgets_at_the_claim_why_it_waited(store: Store) -> None:
    await queued(store, "a", "b", "c")
    x = ClassId(await class_of(store, "a"))
    spawn = a_spawn(agent_id=agent(3), bound_job_id=JobId("c"))
    await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(0))
    await store.mark_unroutable(x, now=after(0))
    for id in ("b", "c"):
        await store.set_provisioning_error(JobId(id), "no room")
    oldest = [given(await store.claim_oldest([x], a_claim(agent(n)), now=after(1))) for n in range(2)]
    assert ids(oldest) == ["a", "b"]
    session = a_session(agent_id=agent(3))
    registered = given(await store.register_agent(session, needs_spawn=True, bound=a_claim(agent(3)), now=after(1)))
    for claimed in (*oldest, given(registered.job)):
        assert (claimed.unroutable_since, claimed.last_provisioning_error) == (None, None)


async def claims_nothing_that_has_expired(store: Store) -> None:
    await submit(store, a_new_job("a", expires_at=after(10)))
    await submit(store, a_new_job("b", expires_at=after(20)))
    x = ClassId(await class_of(store, "a"))
    assert await store.claim_job(JobId("a"), a_claim(), now=after(10)) is None
    assert ids(await store.queued_of_class(x, limit=ALL, now=after(10))) == ["b"]
    assert given(await store.claim_oldest([x], a_claim(), now=after(10))).id == "b"
    assert await store.claim_oldest([x], a_claim(), now=after(10)) is None
    assert given(await store.claim_job(JobId("a"), a_claim(), now=after(9))).id == "a"


@shows("T1.1")
async def gives_each_job_to_one_claimer(store: Store) -> None:
    labels = ("x", "y", "z")
    for number in range(200):
        await submit(store, a_new_job(f"j{number}", labels[number % 3]))
    classes = [each.class_id for each in await store.waiting_classes(limit=ALL)]
    assert len(classes) == len(labels)
    won: list[str] = []

    async def claimer(number: int) -> None:
        while claimed := await store.claim_oldest(classes, a_claim(agent(number)), now=after(0)):
            won.append(claimed.id)
            await asyncio.sleep(0)

    await together(claimer(number) for number in range(20))
    assert sorted(won) == sorted(f"j{number}" for number in range(200))


async def gives_one_job_to_one_of_many(store: Store) -> None:
    await queued(store, "a")
    claims = await together(store.claim_job(JobId("a"), a_claim(agent(n)), now=after(0)) for n in range(10))
    (won,) = [claimed for claimed in claims if claimed is not None]
    assert (await job(store, "a")).agent_id == won.agent_id


@shows("T1.2")
async def offers_the_oldest_and_returns_ahead_of_younger(store: Store) -> None:
    await queued(store, "a", "b", "c")
    x = ClassId(await class_of(store, "a"))
    first = given(await store.claim_oldest([x], a_claim(), now=after(1)))
    assert first.id == "a"
    back = given(
        await store.requeue_job(Offer(JobId("a"), agent()), reason="rejected", attempts_max=5, now=after(2))
    ).job
    assert (back.status, back.seq, back.queued_at) == (JobStatus.QUEUED, first.seq, first.queued_at)
    assert (back.attempts, back.reason) == (1, "rejected")
    order = [given(await store.claim_oldest([x], a_claim(agent(n)), now=after(3))).id for n in range(3)]
    assert order == ["a", "b", "c"]


async def starts_for_the_holder_only(store: Store) -> None:
    await queued(store, "a")
    assert await store.start_job(JobId("a"), agent(), now=after(0)) is None
    await offered(store, "a")
    assert await store.start_job(JobId("a"), agent(2), now=after(1)) is None
    running = given(await store.start_job(JobId("a"), agent(), now=after(2)))
    assert (running.status, running.started_at, running.ack_deadline) == (JobStatus.RUNNING, after(2), None)


async def starts_by_the_claim_that_was_acknowledged(store: Store) -> None:
    await queued(store, "a")
    first = given(await store.claim_job(JobId("a"), a_claim(agent())))
    await store.requeue_job(Offer(JobId("a"), agent()), reason="late", attempts_max=5)
    second = given(await store.claim_job(JobId("a"), a_claim(agent())))
    assert await store.start_job(JobId("a"), agent(), offer=first.offers) is None
    assert given(await store.start_job(JobId("a"), agent(), offer=second.offers)).status is JobStatus.RUNNING


async def answers_a_repeated_acknowledgement(store: Store) -> None:
    await queued(store, "a")
    running = await started(store, "a", now=1)
    assert await store.start_job(JobId("a"), agent(), now=after(9)) == running
    assert await store.start_job(JobId("a"), agent(2), now=after(9)) is None
    await store.finish_job(JobId("a"), SUCCESS, from_statuses=RUNNING, now=after(10))
    assert await store.start_job(JobId("a"), agent(), now=after(11)) is None


@shows("T1.4")
async def forgets_an_acknowledgement_that_is_late(store: Store) -> None:
    await queued(store, "a")
    await offered(store, "a")
    assert await store.requeue_job(Offer(JobId("a"), agent()), reason="no ack", attempts_max=5, now=after(1))
    assert await store.start_job(JobId("a"), agent(), now=after(2)) is None
    await offered(store, "a", to=agent(2), now=3)
    assert await store.start_job(JobId("a"), agent(), now=after(4)) is None
    assert (await job(store, "a")).agent_id == agent(2)


async def returns_only_what_was_offered_to_this_agent(store: Store) -> None:
    await queued(store, "a", "b")
    await offered(store, "a")
    assert await store.requeue_job(Offer(JobId("a"), agent(2)), reason="", attempts_max=5, now=after(1)) is None
    assert await store.requeue_job(Offer(JobId("b"), agent()), reason="", attempts_max=5, now=after(1)) is None
    await store.start_job(JobId("a"), agent(), now=after(2))
    assert await store.requeue_job(Offer(JobId("a"), agent()), reason="", attempts_max=5, now=after(3)) is None
    assert await store.requeue_job(Offer(JobId("a"), agent()), reason="", attempts_max=0, now=after(3)) is None
    assert await status(store, "a", "b") == [JobStatus.RUNNING, JobStatus.QUEUED]


async def a_late_return_takes_nothing_from_a_later_claim(store: Store) -> None:
    await queued(store, "a")
    first = given(await store.claim_job(JobId("a"), a_claim(), now=after(1)))
    back = given(
        await store.requeue_job(
            Offer(JobId("a"), agent(), first.offers), reason="", attempts_max=5, count_attempt=False, now=after(1)
        )
    )
    again = given(await store.claim_job(JobId("a"), a_claim(), now=after(1)))
    assert (first.offers, back.job.offers, again.offers) == (1, 1, 2)
    for attempts_max in (5, 0):
        late = await store.requeue_job(
            Offer(JobId("a"), agent(), first.offers), reason="", attempts_max=attempts_max, now=after(2)
        )
        assert late is None
    assert (await job(store, "a")) == again
    assert await store.requeue_job(Offer(JobId("a"), agent(), again.offers), reason="", attempts_max=5, now=after(2))


async def counts_every_way_to_claim_as_an_offer(store: Store) -> None:
    await submit(store, a_new_job("a"), a_new_job("b"), run="r")
    x = ClassId(await class_of(store, "a"))
    assert given(await store.claim_oldest([x], a_claim(), now=after(1))).offers == 1
    spawn = a_spawn(agent_id=agent(2), bound_job_id=JobId("b"))
    await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(1))
    session = a_session(agent_id=agent(2), scaler=spawn.scaler)
    registered = given(await store.register_agent(session, needs_spawn=True, bound=a_claim(agent(2)), now=after(2)))
    assert given(registered.job).offers == 1
    at_once = await store.submit(
        a_new_run(id=RunId("now")),
        [a_new_job("c", claimed_by=agent(3)), a_new_job("d")],
        claim=a_claim(agent(3)),
        now=after(3),
    )
    assert [each.offers for each in at_once.jobs] == [1, 0]


async def gives_the_agent_of_an_offer_its_time_anew(store: Store) -> None:
    await queued(store, "a")
    claimed = given(await store.claim_job(JobId("a"), a_claim(), now=after(1)))
    offer = claimed.offers
    assert await store.offer_again(Offer(JobId("a"), agent(2), offer), ack_ms=7_000, now=after(2)) is None
    assert await store.offer_again(Offer(JobId("a"), agent(), offer + 1), ack_ms=7_000, now=after(2)) is None
    told = given(await store.offer_again(Offer(JobId("a"), agent(), offer), ack_ms=7_000, now=after(2)))
    assert told == replace(claimed, ack_deadline=Instant(after(2) + 7_000))
    await store.start_job(JobId("a"), agent(), now=after(3))
    assert await store.offer_again(Offer(JobId("a"), agent(), offer), ack_ms=7_000, now=after(4)) is None


@shows("T1.5")
async def gives_up_after_the_last_attempt(store: Store) -> None:
    await submit(store, a_new_job("a"), a_new_job("b", needs=(JobId("a"),)), run="r")
    for number in range(5):
        await offered(store, "a", to=agent(number), now=number)
        back = given(
            await store.requeue_job(
                Offer(JobId("a"), agent(number)), reason="no ack", attempts_max=5, now=after(number)
            )
        )
        assert back.job.attempts == number + 1
        assert back.job.status is (JobStatus.FAILED if number == 4 else JobStatus.QUEUED)
    assert "5 dispatch attempts" in given((await job(store, "a")).reason)
    assert await store.claim_job(JobId("a"), a_claim(), now=after(9)) is None
    assert await status(store, "b") == [JobStatus.SKIPPED]


async def may_return_without_counting(store: Store) -> None:
    await queued(store, "a")
    for _ in range(3):
        await offered(store, "a")
        back = given(
            await store.requeue_job(
                Offer(JobId("a"), agent()), reason="drain", attempts_max=2, count_attempt=False, now=after(1)
            )
        )
        assert (back.job.status, back.job.attempts) == (JobStatus.QUEUED, 0)


async def ends_the_bound_spawn_of_a_returned_job(store: Store) -> None:
    await queued(store, "a", "b")
    spawns = {
        "a": a_spawn(agent_id=agent(1), bound_job_id=JobId("a")),
        "b": a_spawn(agent_id=agent(2), bound_job_id=JobId("b")),
    }
    for spawn in spawns.values():
        assert await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(0)) is None
    await offered(store, "a", to=agent(1))
    await offered(store, "b", to=agent(2))
    assert await store.requeue_job(Offer(JobId("a"), agent(2)), reason="", attempts_max=5, now=after(1)) is None
    assert given(await store.spawn(agent(1))).state is SpawnState.BOOTING
    assert await store.requeue_job(Offer(JobId("a"), agent(1)), reason="", attempts_max=5, now=after(2))
    assert await store.requeue_job(Offer(JobId("b"), agent(2)), reason="", attempts_max=1, now=after(2))
    for number in (1, 2):
        spawn = given(await store.spawn(agent(number)))
        assert (spawn.state, spawn.destroy_requested_at) == (SpawnState.ENDING, after(2))
    another = a_spawn(agent_id=agent(3), bound_job_id=JobId("a"))
    assert await store.insert_spawn(another, a_reservation(another), None, now=after(3)) is None


@shows("T1.10")
async def never_gives_a_job_of_a_cancelled_run(store: Store) -> None:
    await submit(store, a_new_job("a"), a_new_job("b"), run="r")
    spawn = a_spawn(agent_id=agent(1), bound_job_id=JobId("a"))
    await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(0))
    x = ClassId(await class_of(store, "a"))
    await store.cancel(RunId("r"), None, reason="by tester", now=after(1))
    session = a_session(agent_id=agent(1), scaler=spawn.scaler)
    registered = await store.register_agent(session, needs_spawn=True, bound=a_claim(agent(1)), now=after(2))
    assert given(registered).job is None
    assert await store.claim_job(JobId("a"), a_claim(), now=after(2)) is None
    assert await store.claim_oldest([x], a_claim(), now=after(2)) is None


async def clears_the_reason_of_a_return_at_the_start(store: Store) -> None:
    await queued(store, "a")
    await offered(store, "a")
    await store.requeue_job(Offer(JobId("a"), agent()), reason="rejected", attempts_max=5, now=after(1))
    assert (await ended(store, "a")).job.reason is None


async def keeps_free_text_that_no_database_can(store: Store) -> None:
    await queued(store, "a", "b")
    assert await store.set_provisioning_error(JobId("a"), "nul \0, half a character \ud800")
    assert given((await job(store, "a")).last_provisioning_error).startswith("nul ")
    await started(store, "b")
    outcome = Outcome(status=JobStatus.FAILED, exit_code=0xC000_0005, reason="\0")
    assert given(await store.finish_job(JobId("b"), outcome, from_statuses=RUNNING, now=after(1))).job.reason


CASES: Final[tuple[Case, ...]] = (
    submits_jobs_in_order,
    keeps_every_field_of_a_job,
    queues_only_jobs_that_need_nothing,
    submits_a_job_as_claimed,
    submits_once_for_a_key,
    submits_once_for_a_key_at_the_same_time,
    refuses_a_taken_id_as_a_whole,
    refuses_submissions_that_cannot_end,
    takes_equal_demands_for_one_class,
    claims_the_oldest_of_the_classes,
    writes_the_claim_on_the_job,
    forgets_at_the_claim_why_it_waited,
    claims_nothing_that_has_expired,
    gives_each_job_to_one_claimer,
    gives_one_job_to_one_of_many,
    offers_the_oldest_and_returns_ahead_of_younger,
    starts_for_the_holder_only,
    starts_by_the_claim_that_was_acknowledged,
    answers_a_repeated_acknowledgement,
    forgets_an_acknowledgement_that_is_late,
    returns_only_what_was_offered_to_this_agent,
    a_late_return_takes_nothing_from_a_later_claim,
    counts_every_way_to_claim_as_an_offer,
    gives_the_agent_of_an_offer_its_time_anew,
    gives_up_after_the_last_attempt,
    may_return_without_counting,
    ends_the_bound_spawn_of_a_returned_job,
    never_gives_a_job_of_a_cancelled_run,
    clears_the_reason_of_a_return_at_the_start,
    keeps_free_text_that_no_database_can,
)
