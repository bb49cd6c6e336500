"""Contract cases of `ports.store.JobStore`: how jobs and runs end, are cancelled, and survive a lost agent."""

from dataclasses import replace
from typing import Final

from kici.domain.errors import Bug
from kici.domain.ids import JobId, RunId
from kici.domain.job import STARTED, JobStatus, NewJob, Outcome, RunStatus
from kici.ports.store import Cancelled, Store
from kici.testing.builders import a_new_job
from kici.testing.contracts.store_rules import (
    ALL,
    FAILURE,
    RUNNING,
    SUCCESS,
    THERE,
    Case,
    a_claim,
    after,
    agent,
    ended,
    error_of,
    given,
    ids,
    job,
    offered,
    queued,
    run_status,
    shows,
    started,
    status,
    submit,
    together,
)

NOTHING: Final = Cancelled(ended=(), told=())


def needing(id: str, *needs: str) -> NewJob:
    return a_new_job(id, needs=tuple(JobId(need) for need in needs))


async def ends_a_job_with_its_outcome(store: Store) -> None:
    await queued(store, "a", "b")
    assert (await ended(store, "a", now=3)).run_over
    a = await job(store, "a")
    assert (a.status, a.exit_code, a.signal, a.finished_at) == (JobStatus.SUCCESS, 0, None, after(3))
    killed = Outcome(status=JobStatus.FAILED, signal=9, reason="killed")
    await ended(store, "b", killed)
    b = await job(store, "b")
    assert (b.status, b.exit_code, b.signal, b.reason, b.agent_id) == (JobStatus.FAILED, None, 9, "killed", agent())
    assert [await run_status(store, run) for run in ("run-of-a", "run-of-b")] == [RunStatus.SUCCESS, RunStatus.FAILED]
    assert given(await store.run(RunId("run-of-a"))).finished_at == after(3)


async def ends_nothing_on_a_stale_decision(store: Store) -> None:
    await queued(store, "a")
    await started(store, "a")
    a = JobId("a")
    by_other = store.finish_job(a, SUCCESS, agent_id=agent(2), from_statuses=RUNNING, now=after(1))
    from_other = store.finish_job(a, FAILURE, from_statuses=frozenset({JobStatus.DISPATCHED}), now=after(1))
    assert [await by_other, await from_other] == [None, None]
    assert await status(store, "a") == [JobStatus.RUNNING]
    assert await store.finish_job(a, SUCCESS, agent_id=agent(), from_statuses=RUNNING, now=after(1))
    assert await store.finish_job(a, FAILURE, from_statuses=RUNNING, now=after(2)) is None
    assert await store.finish_job(JobId("unknown"), FAILURE, from_statuses=RUNNING, now=after(2)) is None
    assert (await job(store, "a")).finished_at == after(1)


async def refuses_illegal_ends(store: Store) -> None:
    await queued(store, "a")
    for outcome, source in (
        (SUCCESS, JobStatus.QUEUED),
        (FAILURE, JobStatus.SUCCESS),
        (Outcome(status=JobStatus.UNROUTABLE), JobStatus.RUNNING),
        (Outcome(status=JobStatus.RUNNING), JobStatus.CANCELLING),
    ):
        finish = store.finish_job(JobId("a"), outcome, from_statuses=frozenset({source}), now=after(0))
        assert isinstance(await error_of(finish), Bug)
    assert await status(store, "a") == [JobStatus.QUEUED]


async def ends_a_job_once(store: Store) -> None:
    await queued(store, "a")
    await started(store, "a")
    ends = await together(
        store.finish_job(JobId("a"), outcome, from_statuses=RUNNING, now=after(n))
        for n, outcome in enumerate([SUCCESS, FAILURE] * 5)
    )
    (won,) = [end for end in ends if end is not None]
    assert (await job(store, "a")) == won.job


async def releases_what_needs_nothing_more(store: Store) -> None:
    await submit(store, a_new_job("a"), a_new_job("b"), needing("c", "a", "b", "a"), needing("d", "b"), run="r")
    a = await ended(store, "a", now=1)
    assert (a.released, a.skipped, a.run_over) == ((), (), False)
    b = await ended(store, "b", now=2)
    assert (b.released, b.skipped, b.run_over) == (("c", "d"), (), False)
    assert ((await job(store, "c")).queued_at, (await job(store, "c")).needs) == (after(2), ("a", "b"))
    assert not (await ended(store, "c", now=3)).run_over
    assert (await ended(store, "d", now=4)).run_over
    assert await run_status(store, "r") is RunStatus.SUCCESS


async def skips_what_needs_a_failure(store: Store) -> None:
    await submit(
        store, a_new_job("a"), a_new_job("b"), needing("c", "a"), needing("d", "c", "b"), needing("e", "b"), run="r"
    )
    a = await ended(store, "a", FAILURE, now=1)
    assert (a.released, a.skipped, a.run_over) == ((), ("c", "d"), False)
    c = await job(store, "c")
    assert (c.status, c.finished_at) == (JobStatus.SKIPPED, after(1))
    assert "a" in given(c.reason)
    assert (await ended(store, "b")).released == ("e",)
    assert (await ended(store, "e")).run_over
    assert await run_status(store, "r") is RunStatus.FAILED


async def skips_once_what_needs_two_failures(store: Store) -> None:
    await submit(store, a_new_job("a"), a_new_job("b"), needing("c", "a", "b"), run="r")
    assert (await ended(store, "a", FAILURE)).skipped == ("c",)
    last = await ended(store, "b", FAILURE)
    assert (last.skipped, last.run_over) == ((), True)


async def ends_jobs_of_a_run_at_the_same_time(store: Store) -> None:
    """Nothing is lost between ends that meet: dependents are released once, and one end is the run's last."""
    width = 12
    firsts = [a_new_job(f"a{n}") for n in range(width)]
    seconds = [needing(f"b{n}", *(first.id for first in firsts)) for n in range(width)]
    await submit(store, *seconds, *firsts, run="r")
    for layer in (firsts, seconds):
        for each in layer:
            await started(store, each.id)
        ends = [
            given(end)
            for end in await together(
                store.finish_job(each.id, SUCCESS, from_statuses=RUNNING, now=after(1)) for each in layer
            )
        ]
        released = [name for end in ends for name in end.released]
        assert sorted(released) == sorted(each.id for each in seconds if layer is firsts)
        assert [end.run_over for end in ends].count(True) == (layer is seconds)
    assert await run_status(store, "r") is RunStatus.SUCCESS


async def ends_and_cancels_at_the_same_time(store: Store) -> None:
    """A cancelled run keeps nothing waiting, whatever its jobs were doing at that moment."""
    for turn in range(6):
        run = RunId(f"r{turn}")
        firsts = [a_new_job(f"{turn}-a{n}") for n in range(5)]
        seconds = [needing(f"{turn}-b{n}", firsts[n].id, firsts[(n + 1) % 5].id) for n in range(5)]
        await submit(store, *seconds, *firsts, run=run)
        for each in firsts:
            await started(store, each.id)

        async def finish(each: NewJob, outcome: Outcome) -> None:
            any_of = frozenset({JobStatus.RUNNING, JobStatus.CANCELLING})
            assert await store.finish_job(each.id, outcome, from_statuses=any_of, now=after(1))

        async def cancel(run: RunId = run) -> None:
            await store.cancel(run, None, reason="by tester", now=after(1))

        ends = [finish(each, FAILURE if n == turn else SUCCESS) for n, each in enumerate(firsts)]
        await together([*ends[:turn], cancel(), *ends[turn:]])
        assert given(await store.run(run)).finished_at is not None


async def cancels_a_whole_run(store: Store) -> None:
    await submit(store, *(a_new_job(id) for id in "abcd"), needing("e", "a"), run="r")
    await offered(store, "b")
    await started(store, "c")
    await started(store, "d", by=agent(2))
    await store.recover_job(JobId("d"), agent(2), deadline=after(50))
    moved = await store.cancel(RunId("r"), None, reason="by tester", now=after(5))
    assert ids(moved.ended) == ["a", "b", "e"]
    assert {each.status for each in moved.ended} == {JobStatus.CANCELLED}
    assert (moved.ended[1].agent_id, moved.ended[1].finished_at, moved.ended[1].reason) == (
        agent(),
        after(5),
        "by tester",
    )
    assert [(each.id, each.status, each.agent_id) for each in moved.told] == [
        ("c", JobStatus.CANCELLING, agent()),
        ("d", JobStatus.CANCELLING, agent(2)),
    ]
    run = given(await store.run(RunId("r")))
    assert (run.status, run.cancel_requested_at) == (RunStatus.CANCELLING, after(5))
    assert (await job(store, "c")).cancel_requested_at == after(5)
    assert await store.cancel(RunId("r"), None, reason="again", now=after(6)) == NOTHING
    cancelled = Outcome(status=JobStatus.CANCELLED)
    cancelling = frozenset({JobStatus.CANCELLING})
    c = given(await store.finish_job(JobId("c"), cancelled, from_statuses=cancelling, now=after(7)))
    assert (c.run_over, c.job.reason) == (False, "by tester")
    assert given(await store.finish_job(JobId("d"), SUCCESS, from_statuses=cancelling, now=after(8))).run_over
    assert await run_status(store, "r") is RunStatus.CANCELLED


async def cancels_a_run_that_nobody_started(store: Store) -> None:
    await submit(store, a_new_job("a"), a_new_job("b"), run="r")
    assert ids((await store.cancel(RunId("r"), None, reason="", now=after(1))).ended) == ["a", "b"]
    run = given(await store.run(RunId("r")))
    assert (run.status, run.finished_at) == (RunStatus.CANCELLED, after(1))
    assert await store.cancel(RunId("r"), None, reason="", now=after(2)) == NOTHING
    assert await store.cancel(RunId("unknown"), None, reason="", now=after(2)) == NOTHING


async def leaves_an_ended_run_alone(store: Store) -> None:
    await queued(store, "a")
    await ended(store, "a")
    assert await store.cancel(RunId("run-of-a"), None, reason="", now=after(1)) == NOTHING
    assert await store.cancel(RunId("run-of-a"), JobId("a"), reason="", now=after(1)) == NOTHING
    assert await run_status(store, "run-of-a") is RunStatus.SUCCESS


async def ends_a_cancelled_run_by_what_its_jobs_did(store: Store) -> None:
    for id, outcome, expected in (
        ("a", SUCCESS, RunStatus.SUCCESS),
        ("b", FAILURE, RunStatus.FAILED),
        ("c", Outcome(status=JobStatus.CANCELLED), RunStatus.CANCELLED),
    ):
        await queued(store, id)
        await started(store, id)
        assert ids((await store.cancel(RunId(f"run-of-{id}"), None, reason="", now=after(1))).told) == [id]
        await store.finish_job(JobId(id), outcome, from_statuses=frozenset({JobStatus.CANCELLING}), now=after(2))
        assert await run_status(store, f"run-of-{id}") is expected


async def cancels_one_job(store: Store) -> None:
    await submit(store, a_new_job("a"), a_new_job("b"), a_new_job("c"), needing("d", "a"), needing("e", "d"), run="r")
    a = await store.cancel(RunId("r"), JobId("a"), reason="by tester", now=after(1))
    assert (ids(a.ended), a.told) == (["a", "d", "e"], ())
    assert await status(store, "a", "d", "e") == [JobStatus.CANCELLED, JobStatus.SKIPPED, JobStatus.SKIPPED]
    await offered(store, "b")
    b = await store.cancel(RunId("r"), JobId("b"), reason="by tester", now=after(2))
    assert [(each.id, each.agent_id, each.cancel_requested_at) for each in b.ended] == [("b", agent(), after(2))]
    await started(store, "c")
    c = await store.cancel(RunId("r"), JobId("c"), reason="by tester", now=after(3))
    assert (c.ended, ids(c.told)) == ((), ["c"])
    assert (await job(store, "c")).reason == "by tester"
    assert await run_status(store, "r") is RunStatus.RUNNING
    await store.finish_job(JobId("c"), SUCCESS, from_statuses=frozenset({JobStatus.CANCELLING}), now=after(4))
    assert await run_status(store, "r") is RunStatus.FAILED


async def cancels_no_job_of_another_run(store: Store) -> None:
    await queued(store, "a", "b")
    assert await store.cancel(RunId("run-of-a"), JobId("b"), reason="", now=after(1)) == NOTHING
    assert await status(store, "a", "b") == [JobStatus.QUEUED, JobStatus.QUEUED]


@shows("T2.8")
async def recovers_and_resumes(store: Store) -> None:
    await queued(store, "a")
    await started(store, "a")
    a = JobId("a")
    assert await store.recover_job(a, agent(), deadline=after(60))
    lost = await job(store, "a")
    assert (lost.status, lost.recovery_deadline, lost.agent_id) == (JobStatus.RECOVERING, after(60), agent())
    assert await store.resume_job(a, agent(2), THERE, now=after(2)) is None
    back = given(await store.resume_job(a, agent(), THERE, now=after(2)))
    assert (back.status, back.recovery_deadline, back.owner_instance_id) == (JobStatus.RUNNING, None, THERE)
    assert await store.resume_job(a, agent(), THERE, now=after(3)) == back
    assert await store.finish_job(a, SUCCESS, agent_id=agent(), from_statuses=RUNNING, now=after(4))
    assert await store.resume_job(a, agent(), THERE, now=after(5)) is None


@shows("T2.8")
async def leaves_a_job_alone_that_is_not_where_it_was_seen(store: Store) -> None:
    await queued(store, "a")
    await started(store, "a")
    a = JobId("a")
    seen = await job(store, "a")
    assert await store.recover_job(a, agent(), deadline=after(60), seen=seen)
    assert await store.finish_job(a, FAILURE, from_statuses=STARTED, seen=seen, now=after(2)) is None
    lost = await job(store, "a")
    back = given(await store.resume_job(a, agent(), THERE, now=after(3)))
    for stale in (seen, lost):
        assert not await store.recover_job(a, agent(), deadline=after(61), seen=stale)
        assert await store.finish_job(a, FAILURE, from_statuses=STARTED, seen=stale, now=after(4)) is None
    assert await job(store, "a") == back
    assert await store.finish_job(a, FAILURE, from_statuses=STARTED, seen=back, now=after(5))


async def recovers_only_what_this_agent_started(store: Store) -> None:
    await queued(store, "a", "b")
    await offered(store, "a")
    await started(store, "b", by=agent(2))
    assert not await store.recover_job(JobId("a"), agent(), deadline=after(60))
    assert not await store.recover_job(JobId("b"), agent(), deadline=after(60))
    assert await store.resume_job(JobId("a"), agent(), THERE, now=after(1)) is None
    assert await status(store, "a", "b") == [JobStatus.DISPATCHED, JobStatus.RUNNING]


async def keeps_a_lost_job_cancelling(store: Store) -> None:
    await queued(store, "a")
    await started(store, "a")
    await store.cancel(RunId("run-of-a"), None, reason="", now=after(1))
    assert await store.recover_job(JobId("a"), agent(), deadline=after(60))
    assert ids(await store.overdue_recoveries(limit=ALL, now=after(60))) == ["a"]
    back = given(await store.resume_job(JobId("a"), agent(), THERE, now=after(3)))
    assert (back.status, back.recovery_deadline) == (JobStatus.CANCELLING, None)


async def lists_overdue_recoveries(store: Store) -> None:
    await queued(store, "a", "b", "c")
    for number, id in enumerate(("a", "b", "c")):
        await started(store, id, by=agent(number))
        deadline = after(30 - 10 * number)
        await store.recover_job(JobId(id), agent(number), deadline=deadline)
    assert ids(await store.overdue_recoveries(limit=ALL, now=after(9))) == []
    assert ids(await store.overdue_recoveries(limit=ALL, now=after(20))) == ["c", "b"]
    assert ids(await store.overdue_recoveries(limit=1, now=after(30))) == ["c"]
    recovering = frozenset({JobStatus.RECOVERING})
    assert await store.finish_job(JobId("c"), FAILURE, agent_id=agent(2), from_statuses=recovering, now=after(31))
    assert ids(await store.overdue_recoveries(limit=ALL, now=after(30))) == ["b", "a"]


@shows("T1.6")
async def lists_overdue_acknowledgements(store: Store) -> None:
    await queued(store, "a", "b", "c")
    for id, ack_ms in (("a", 20), ("b", 10), ("c", 5)):
        await store.claim_job(JobId(id), replace(a_claim(), ack_ms=ack_ms), now=after(0))
    await store.start_job(JobId("c"), agent(), now=after(1))
    assert ids(await store.overdue_acks(limit=ALL, now=after(9))) == []
    assert ids(await store.overdue_acks(limit=ALL, now=after(20))) == ["b", "a"]
    assert ids(await store.overdue_acks(limit=1, now=after(20))) == ["b"]


CASES: Final[tuple[Case, ...]] = (
    ends_a_job_with_its_outcome,
    ends_nothing_on_a_stale_decision,
    refuses_illegal_ends,
    ends_a_job_once,
    releases_what_needs_nothing_more,
    skips_what_needs_a_failure,
    skips_once_what_needs_two_failures,
    ends_jobs_of_a_run_at_the_same_time,
    ends_and_cancels_at_the_same_time,
    cancels_a_whole_run,
    cancels_a_run_that_nobody_started,
    leaves_an_ended_run_alone,
    ends_a_cancelled_run_by_what_its_jobs_did,
    cancels_one_job,
    cancels_no_job_of_another_run,
    recovers_and_resumes,
    leaves_a_job_alone_that_is_not_where_it_was_seen,
    recovers_only_what_this_agent_started,
    keeps_a_lost_job_cancelling,
    lists_overdue_recoveries,
    lists_overdue_acknowledgements,
)
