"""Contract cases of `ports.store`: listings, sweeps over waiting jobs, retention, job output."""

import asyncio
from typing import Final

from kici.domain.ids import ClassId, JobId, OrgId, RunId
from kici.domain.job import JobStatus, RunStatus
from kici.domain.logs import NewChunk, Stream
from kici.domain.paging import Mark
from kici.domain.spawn import SERVING
from kici.ports.store import JobFilter, Offer, Store
from kici.testing.builders import HERE, a_demand, a_new_job, a_new_run, a_reservation, a_spawn
from kici.testing.contracts.store_rules import (
    ALL,
    FAILURE,
    THERE,
    Case,
    a_claim,
    after,
    agent,
    class_of,
    ended,
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


async def lists_jobs_by_filter_newest_first(store: Store) -> None:
    await submit(store, a_new_job("a"), a_new_job("b"), run="r1")
    acme = a_new_job("d", demand=a_demand(org=OrgId("acme")))
    await store.submit(a_new_run(id=RunId("r2"), org=OrgId("acme")), [a_new_job("c"), acme], now=after(0))
    await started(store, "b")
    for which, expected in (
        (JobFilter(), ["d", "c", "b", "a"]),
        (JobFilter(limit=2), ["d", "c"]),
        (JobFilter(org=OrgId("acme")), ["d", "c"]),
        (JobFilter(status=JobStatus.RUNNING), ["b"]),
        (JobFilter(status=JobStatus.QUEUED, org=OrgId("default")), ["a"]),
        (JobFilter(run_id=RunId("r1")), ["b", "a"]),
        (JobFilter(run_id=RunId("r1"), status=JobStatus.QUEUED), ["a"]),
        (JobFilter(run_id=RunId("r1"), org=OrgId("acme")), []),
    ):
        assert ids(await store.jobs(which)) == expected, which


async def pages_jobs_and_runs(store: Store) -> None:
    for number, id in enumerate("abcde"):
        await queued(store, id, now=number // 2)
    first = await store.jobs(JobFilter(limit=2))
    for which in (JobFilter(limit=2, before_seq=first[-1].seq), JobFilter(status=JobStatus.QUEUED, limit=2)):
        assert len(await store.jobs(which)) == 2
    assert ids(await store.jobs(JobFilter(before_seq=first[-1].seq))) == ["c", "b", "a"]
    queued_only = JobFilter(status=JobStatus.QUEUED, before_seq=first[-1].seq)
    assert ids(await store.jobs(queued_only)) == ["c", "b", "a"]
    of_run = JobFilter(run_id=RunId("run-of-a"), before_seq=first[-1].seq)
    assert ids(await store.jobs(of_run)) == ["a"]
    runs = await store.runs(before=None, limit=2)
    assert [run.id for run in runs] == ["run-of-e", "run-of-d"]  # d and c are of one millisecond
    more = await store.runs(before=Mark(runs[-1].created_at, runs[-1].id), limit=ALL)
    assert [run.id for run in more] == ["run-of-c", "run-of-b", "run-of-a"]


async def answers_none_for_strangers(store: Store) -> None:
    assert await store.job(JobId("x")) is None
    assert await store.run(RunId("x")) is None
    assert await store.jobs(JobFilter()) == []
    assert await store.waiting_classes(limit=ALL) == []


async def counts_jobs(store: Store) -> None:
    assert (await store.queued_count(), dict(await store.counts_by_status())) == (0, {})
    await submit(store, *(a_new_job(id) for id in "abc"), a_new_job("d", needs=(JobId("a"),)))
    await offered(store, "b")
    assert await store.queued_count() == 2
    assert await store.counts_by_status() == {JobStatus.QUEUED: 2, JobStatus.DISPATCHED: 1, JobStatus.PENDING: 1}


async def lists_waiting_classes_by_their_oldest_job(store: Store) -> None:
    for id, label in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "w")):
        await submit(store, a_new_job(id, label))
    await offered(store, "a")
    await started(store, "d")
    classes = await store.waiting_classes(limit=ALL)
    assert [(each.oldest_job, each.demand) for each in classes] == [
        ("b", a_demand("y")),
        ("c", a_demand("x")),
        ("e", a_demand("w")),
    ]
    assert [each.oldest_seq for each in classes] == [(await job(store, id)).seq for id in ("b", "c", "e")]
    assert [each.class_id for each in classes] == [await class_of(store, id) for id in ("b", "c", "e")]
    assert [each.oldest_job for each in await store.waiting_classes(limit=2)] == ["b", "c"]


async def lists_the_oldest_of_a_class(store: Store) -> None:
    await queued(store, "a", "b", "c", "d")
    await submit(store, a_new_job("other", "x"))
    await offered(store, "a")
    x = ClassId(await class_of(store, "a"))
    assert ids(await store.queued_of_class(x, limit=ALL, now=after(0))) == ["b", "c", "d"]
    assert ids(await store.queued_of_class(x, limit=2, now=after(0))) == ["b", "c"]


@shows("T1.13")
async def leaves_out_jobs_that_a_live_spawn_serves(store: Store) -> None:
    await queued(store, "a", "b", "c")
    for number, id in enumerate(("a", "b")):
        spawn = a_spawn(agent_id=agent(number), bound_job_id=JobId(id))
        await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(0))
    x = ClassId(await class_of(store, "a"))
    unserved = await store.queued_of_class(x, limit=2, unserved=True, now=after(0))
    assert ids(unserved) == ["c"]
    await store.end_spawn(agent(0), reason="failed", from_states=frozenset({given(await store.spawn(agent(0))).state}))
    assert ids(await store.queued_of_class(x, limit=ALL, unserved=True, now=after(0))) == ["a", "c"]
    assert ids(await store.queued_of_class(x, limit=ALL, now=after(0))) == ["a", "b", "c"]


async def lists_what_an_agent_holds(store: Store) -> None:
    await queued(store, "a", "b", "c", "d", "e")
    await offered(store, "a")
    await started(store, "b")
    await store.recover_job(JobId("b"), agent(), deadline=after(9))
    await started(store, "c")
    await store.cancel(RunId("run-of-c"), None, reason="", now=after(1))
    await started(store, "d", by=agent(2))
    await ended(store, "e")
    assert ids(await store.held_jobs(agent())) == ["a", "b", "c"]
    assert ids(await store.held_jobs(agent(2))) == ["d"]


@shows("T1.12")
async def lists_what_an_instance_claimed(store: Store) -> None:
    await queued(store, "a", "b", "c")
    await offered(store, "a", by=HERE)
    await offered(store, "b", to=agent(2), by=THERE)
    assert ids(await store.jobs_owned_by(HERE, limit=ALL)) == ["a"]
    assert ids(await store.jobs_owned_by(THERE, limit=ALL)) == ["b"]
    await offered(store, "c", to=agent(3), by=HERE)
    assert ids(await store.jobs_owned_by(HERE, limit=1)) == ["a"]


async def tells_which_jobs_are_over(store: Store) -> None:
    await queued(store, "a", "b", "c")
    await ended(store, "a")
    await store.cancel(RunId("run-of-b"), None, reason="", now=after(1))
    assert await store.ended_jobs([JobId(id) for id in ("a", "b", "c", "unknown")]) == {"a", "b"}
    assert await store.ended_jobs([]) == frozenset()


async def ends_what_waited_too_long(store: Store) -> None:
    await submit(
        store, a_new_job("a", expires_at=after(10)), a_new_job("b", needs=(JobId("a"),), expires_at=after(99)), run="r"
    )
    await submit(store, a_new_job("c", expires_at=after(11)))
    await queued(store, "d")
    assert await store.expire_queued(limit=ALL, now=after(9)) == []
    over = await store.expire_queued(limit=ALL, now=after(10))
    assert [(each.job.id, each.job.status, each.skipped, each.run_over) for each in over] == [
        ("a", JobStatus.TIMED_OUT, ("b",), True)
    ]
    assert (over[0].job.finished_at, over[0].job.started_at) == (after(10), None)
    assert ids(each.job for each in await store.expire_queued(limit=ALL, now=after(11))) == ["c"]
    assert await status(store, "a", "b", "c", "d") == [
        JobStatus.TIMED_OUT,
        JobStatus.SKIPPED,
        JobStatus.TIMED_OUT,
        JobStatus.QUEUED,
    ]
    assert await run_status(store, "r") is RunStatus.FAILED


async def ends_pending_jobs_that_waited_too_long(store: Store) -> None:
    needing = [a_new_job(id, needs=(JobId("a"),), expires_at=after(5)) for id in ("b", "c")]
    await submit(store, a_new_job("a"), *needing, run="r")
    await started(store, "a")
    assert len(await store.expire_queued(limit=1, now=after(5))) == 1
    assert len(await store.expire_queued(limit=ALL, now=after(5))) == 1
    assert await status(store, "b", "c") == [JobStatus.TIMED_OUT] * 2
    assert await run_status(store, "r") is RunStatus.RUNNING


async def expires_nothing_that_an_agent_holds(store: Store) -> None:
    await submit(store, a_new_job("a", expires_at=after(10)))
    await offered(store, "a")
    assert await store.expire_queued(limit=ALL, now=after(11)) == []
    await store.requeue_job(Offer(JobId("a"), agent()), reason="", attempts_max=5, now=after(12))
    assert len(await store.expire_queued(limit=ALL, now=after(12))) == 1


@shows("T0.6", "T1.9")
async def gives_the_provisioning_error_as_reason(store: Store) -> None:
    await submit(store, a_new_job("a", expires_at=after(10)))
    await submit(store, a_new_job("b", expires_at=after(10)))
    assert await store.set_provisioning_error(JobId("a"), "no image foo:1")
    over = await store.expire_queued(limit=ALL, now=after(10))
    assert "no image foo:1" in given(over[0].job.reason)
    assert "fail" not in given(over[1].job.reason)


async def notes_provisioning_errors_of_queued_jobs_only(store: Store) -> None:
    await queued(store, "a")
    await offered(store, "a")
    assert not await store.set_provisioning_error(JobId("a"), "no")
    assert not await store.set_provisioning_error(JobId("unknown"), "no")


@shows("T1.8")
async def ends_what_nobody_can_serve(store: Store) -> None:
    await queued(store, "a", "b", "c")
    await submit(store, a_new_job("other", "x"))
    x = ClassId(await class_of(store, "a"))
    await store.set_provisioning_error(JobId("b"), "no room")
    assert await store.mark_unroutable(x, now=after(0)) == 2
    await queued(store, "d")
    assert await store.mark_unroutable(x, now=after(50)) == 1
    assert [(await job(store, id)).unroutable_since for id in "abcd"] == [after(0), None, after(0), after(50)]
    early = await store.expire_unroutable(x, grace_ms=120, reason="no", limit=ALL, now=after(119))
    assert early == []
    over = await store.expire_unroutable(x, grace_ms=120, reason="no set has gpu", limit=ALL, now=after(120))
    assert [(each.job.id, each.job.reason, each.run_over) for each in over] == [
        ("a", "no set has gpu", True),
        ("c", "no set has gpu", True),
    ]
    assert await status(store, "a", "b", "c", "d", "other") == [
        JobStatus.UNROUTABLE,
        JobStatus.QUEUED,
        JobStatus.UNROUTABLE,
        JobStatus.QUEUED,
        JobStatus.QUEUED,
    ]


async def spares_a_job_that_an_agent_is_being_made_for(store: Store) -> None:
    await queued(store, "a", "b")
    x = ClassId(await class_of(store, "a"))
    spawn = a_spawn(bound_job_id=JobId("a"))
    await store.insert_spawn(spawn, a_reservation(spawn), None, now=after(0))
    await store.mark_unroutable(x, now=after(0))
    over = await store.expire_unroutable(x, grace_ms=10, reason="no", limit=ALL, now=after(20))
    assert [each.job.id for each in over] == ["b"]
    await store.end_spawn(spawn.agent_id, reason="x", from_states=SERVING, now=after(21))
    over = await store.expire_unroutable(x, grace_ms=10, reason="no", limit=ALL, now=after(22))
    assert [each.job.id for each in over] == ["a"]


async def forgets_the_stamp_of_what_can_be_served_again(store: Store) -> None:
    await queued(store, "a", "b")
    x = ClassId(await class_of(store, "a"))
    assert await store.mark_unroutable(x, now=after(0)) == 2
    assert await store.clear_unroutable(x) == 2
    assert await store.clear_unroutable(x) == 0
    assert await store.expire_unroutable(x, grace_ms=0, reason="", limit=ALL, now=after(9)) == []
    assert await store.mark_unroutable(x, now=after(10)) == 2
    await store.set_provisioning_error(JobId("a"), "no room")
    await offered(store, "b")
    assert [(await job(store, id)).unroutable_since for id in "ab"] == [None, None]
    assert await store.expire_unroutable(x, grace_ms=0, reason="", limit=ALL, now=after(99)) == []


async def ends_as_many_as_it_may(store: Store) -> None:
    await queued(store, *(f"j{number}" for number in range(5)))
    x = ClassId(await class_of(store, "j0"))
    await store.mark_unroutable(x, now=after(0))
    assert len(await store.expire_unroutable(x, grace_ms=0, reason="", limit=3, now=after(1))) == 3
    assert len(await store.expire_unroutable(x, grace_ms=0, reason="", limit=3, now=after(1))) == 2


async def forgets_old_runs(store: Store) -> None:
    for number, id in enumerate("abcd"):
        await submit(store, a_new_job(id), a_new_job(f"{id}2", needs=(JobId(id),)), now=number)
        await store.append_log([_chunk(id, 0, b"out")], now=after(number))
    for number, id in enumerate("abc"):
        await ended(store, id, FAILURE, now=10 + number)
    assert await store.prune_jobs(older_than=after(10), limit=ALL) == 0
    assert await store.prune_jobs(older_than=after(12), limit=1) == 2
    assert [await store.job(JobId(id)) for id in ("a", "a2")] == [None, None]
    assert await store.prune_jobs(older_than=after(12), limit=ALL) == 2
    assert [run.id for run in await store.runs(before=None, limit=ALL)] == ["run-of-d", "run-of-c"]
    assert await store.read_log(JobId("a"), after=0, bytes_max=ALL) == []
    assert len(await store.read_log(JobId("c"), after=0, bytes_max=ALL)) == 1


async def forgets_a_run_without_a_trace(store: Store) -> None:
    """What was deleted may be submitted again, with the same ids and the same key."""
    run, jobs = a_new_run(), [a_new_job("a"), a_new_job("b", needs=(JobId("a"),))]
    await store.submit(run, jobs, idempotency_key="k", now=after(0))
    await ended(store, "a", FAILURE, now=1)
    assert await store.prune_jobs(older_than=after(2), limit=ALL) == 2
    assert (await store.submit(run, jobs, idempotency_key="k", now=after(3))).created
    assert (await ended(store, "a", now=4)).released == ("b",)


async def forgets_classes_that_no_job_has(store: Store) -> None:
    day = 86_400_000
    for number, id in enumerate("abcd"):
        await submit(store, a_new_job(id, f"only-{id}"), now=number)
    for id in "acd":
        await ended(store, id, FAILURE, now=10)
    await submit(store, a_new_job("c2", "only-c"), now=5 * day)
    cutoff = after(4 * day)
    assert await store.prune_classes(older_than=cutoff, limit=ALL) == 0
    assert await store.prune_jobs(older_than=cutoff, limit=ALL) == 3
    assert await store.prune_classes(older_than=after(day), limit=ALL) == 0
    assert await store.prune_classes(older_than=cutoff, limit=1) == 1
    assert [await store.prune_classes(older_than=cutoff, limit=ALL) for _ in range(2)] == [1, 0]
    assert [(await job(store, id)).demand.labels for id in ("b", "c2")] == [{"only-b"}, {"only-c"}]
    await submit(store, a_new_job("a2", "only-a"), now=6 * day)
    assert (await job(store, "a2")).demand.labels == {"only-a"}


async def keeps_a_class_that_is_submitted_while_it_is_deleted(store: Store) -> None:
    day = 86_400_000
    for number in range(20):
        await submit(store, a_new_job(f"old-{number}", f"only-{number}"), now=0)
        await ended(store, f"old-{number}", FAILURE, now=1)
    await store.prune_jobs(older_than=after(4 * day), limit=ALL)
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(submit(store, a_new_job(f"new-{number}", f"only-{number}"), now=5 * day))
            group.create_task(store.prune_classes(older_than=after(4 * day), limit=2))
    for number in range(20):
        assert (await job(store, f"new-{number}")).demand.labels == {f"only-{number}"}


def _chunk(job_id: str, offset: int, data: bytes, stream: Stream = Stream.STDOUT) -> NewChunk:
    return NewChunk(job_id=JobId(job_id), stream=stream, offset=offset, data=data)


async def keeps_output_byte_for_byte(store: Store) -> None:
    await queued(store, "a", "b")
    chunks = [
        _chunk("a", 0, bytes(range(256))),
        _chunk("a", 0, b"err\xff", Stream.STDERR),
        _chunk("a", 256, b"more"),
    ]
    await store.append_log([*chunks, _chunk("b", 0, b"other")], now=after(5))
    read = await store.read_log(JobId("a"), after=0, bytes_max=ALL)
    assert [(each.stream, each.offset, each.data, each.received_at) for each in read] == [
        (chunk.stream, chunk.offset, chunk.data, after(5)) for chunk in chunks
    ]
    assert read[0].position < read[1].position < read[2].position
    assert await store.log_ends(JobId("a")) == {Stream.STDOUT: 260, Stream.STDERR: 4}
    assert await store.log_ends(JobId("unknown")) == {}


async def stores_no_gap_and_no_overlap(store: Store) -> None:
    await queued(store, "a")
    a = JobId("a")
    ends = await store.append_log([_chunk("a", 0, b"one"), _chunk("a", 3, b"two")], now=after(0))
    assert ends == {a: {Stream.STDOUT: 6}}
    before = await store.read_log(a, after=0, bytes_max=ALL)
    wrong = [_chunk("a", 3, b"TWO"), _chunk("a", 3, b"TWO!"), _chunk("a", 7, b"gap"), _chunk("a", 0, b"onetwo and")]
    for chunk in wrong:
        assert await store.append_log([chunk], now=after(1)) == {a: {Stream.STDOUT: 6}}
    assert await store.read_log(a, after=0, bytes_max=ALL) == before
    mixed = [_chunk("a", 3, b"two"), _chunk("a", 6, b"three"), _chunk("a", 12, b"gap"), _chunk("a", 11, b"four")]
    assert await store.append_log(mixed, now=after(2)) == {a: {Stream.STDOUT: 15}}
    read = await store.read_log(a, after=0, bytes_max=ALL)
    assert read[:2] == before
    assert b"".join(each.data for each in read) == b"onetwothreefour"
    assert await store.append_log([], now=after(3)) == {}


async def takes_lines_of_the_orchestrator_at_any_offset(store: Store) -> None:
    await queued(store, "a", "b")
    lines = [_chunk("a", offset, b"line", Stream.SYSTEM) for offset in (900, 5, 70_000_000_000)]
    ends = await store.append_log([*lines, lines[1], _chunk("b", 0, b"x")], now=after(0))
    assert set(ends) == {"a", "b"}
    read = await store.read_log(JobId("a"), after=0, bytes_max=ALL)
    assert [each.offset for each in read] == [900, 5, 70_000_000_000]


async def stores_no_output_of_jobs_that_are_gone(store: Store) -> None:
    await store.append_log([_chunk("gone", 0, b"late")], now=after(0))
    assert await store.read_log(JobId("gone"), after=0, bytes_max=ALL) == []


async def reads_output_in_pieces(store: Store) -> None:
    await queued(store, "a")
    await store.append_log([_chunk("a", n * 10, b"0123456789") for n in range(6)], now=after(0))
    seen, position = [], 0
    while piece := await store.read_log(JobId("a"), after=position, bytes_max=25):
        assert len(piece) == 2
        seen += [each.offset for each in piece]
        position = piece[-1].position
    assert seen == [0, 10, 20, 30, 40, 50]
    assert [each.offset for each in await store.read_log(JobId("a"), after=0, bytes_max=1)] == [0]


async def appends_from_several_at_once(store: Store) -> None:
    """Whoever comes second sees where the first one ended: a stream is one piece, and no line is lost."""
    await queued(store, "a", "b")

    async def write(number: int, order: str) -> None:
        chunks = [_chunk(id, 2 * n, bytes([number] * 2)) for id in order for n in range(4)]
        lines = [_chunk(id, number, b"line", Stream.SYSTEM) for id in order]
        ends = await store.append_log([*chunks, *lines], now=after(0))
        assert [ends[JobId(id)][Stream.STDOUT] for id in order] == [8, 8]

    await together(write(number, "ab" if number % 2 else "ba") for number in range(20))
    for id in ("a", "b"):
        read = await store.read_log(JobId(id), after=0, bytes_max=ALL)
        assert [each.offset for each in read if each.stream is Stream.STDOUT] == [0, 2, 4, 6]
        assert len([each for each in read if each.stream is Stream.SYSTEM]) == 20


async def claims_while_classes_are_marked(store: Store) -> None:
    """Sweeps and claims step around what is being moved, and no move is lost."""
    await queued(store, *(f"j{number}" for number in range(30)))
    x = ClassId(await class_of(store, "j0"))

    async def claim(number: int) -> None:
        while await store.claim_oldest([x], a_claim(agent(number)), now=after(1)) is None:
            assert await store.queued_count() > 0

    async def sweep() -> None:
        await store.mark_unroutable(x, now=after(1))
        await store.clear_unroutable(x)

    await together([*(claim(n) for n in range(15)), *(sweep() for _ in range(5)), *(claim(n) for n in range(15, 30))])
    assert await store.counts_by_status() == {JobStatus.DISPATCHED: 30}


CASES: Final[tuple[Case, ...]] = (
    lists_jobs_by_filter_newest_first,
    pages_jobs_and_runs,
    answers_none_for_strangers,
    counts_jobs,
    lists_waiting_classes_by_their_oldest_job,
    lists_the_oldest_of_a_class,
    leaves_out_jobs_that_a_live_spawn_serves,
    lists_what_an_agent_holds,
    lists_what_an_instance_claimed,
    tells_which_jobs_are_over,
    ends_what_waited_too_long,
    ends_pending_jobs_that_waited_too_long,
    expires_nothing_that_an_agent_holds,
    gives_the_provisioning_error_as_reason,
    notes_provisioning_errors_of_queued_jobs_only,
    ends_what_nobody_can_serve,
    spares_a_job_that_an_agent_is_being_made_for,
    forgets_the_stamp_of_what_can_be_served_again,
    ends_as_many_as_it_may,
    forgets_old_runs,
    forgets_a_run_without_a_trace,
    forgets_classes_that_no_job_has,
    keeps_a_class_that_is_submitted_while_it_is_deleted,
    keeps_output_byte_for_byte,
    stores_no_gap_and_no_overlap,
    takes_lines_of_the_orchestrator_at_any_offset,
    stores_no_output_of_jobs_that_are_gone,
    reads_output_in_pieces,
    appends_from_several_at_once,
    claims_while_classes_are_marked,
)
