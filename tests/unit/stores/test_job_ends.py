"""Steps that end a job: stale ones change nothing, even where they do not undo their unit."""

import pytest

from kici.domain.errors import Bug
from kici.domain.ids import JobId, RunId
from kici.domain.job import JobStatus, Outcome
from kici.stores.job_ends import STEPS_OF_END, End, finished
from kici.stores.sqlite.core import IN_MEMORY, Core
from kici.stores.sqlite.engine import Inline
from kici.stores.store import SqlStore
from kici.testing.builders import a_new_job
from kici.testing.contracts.store_rules import after, ended, given, job, submit


def expiry(job_id: str) -> End:
    return End(
        job_id=JobId(job_id),
        outcome=Outcome(status=JobStatus.TIMED_OUT),
        from_statuses=frozenset({JobStatus.QUEUED}),
        now=after(9),
    )


async def test_stale_ends_change_nothing_beside_others_that_do() -> None:
    database = Inline(Core(IN_MEMORY))
    store = SqlStore(database)
    await store.migrate()
    await submit(store, a_new_job("a"), run="r1")
    await submit(store, a_new_job("b"), a_new_job("c", needs=(JobId("b"),)), run="r2")
    await ended(store, "a", now=1)
    steps = [*expiry("a").steps(guard=False), *expiry("b").steps(guard=False), *expiry("gone").steps(guard=False)]
    results = given(await database.unit(steps))
    done = [finished(results[at : at + STEPS_OF_END]) for at in range(0, len(results), STEPS_OF_END)]
    assert [each and (each.job.id, each.skipped, each.run_over) for each in done] == [None, ("b", ("c",), True), None]
    assert (await job(store, "a")).status is JobStatus.SUCCESS
    assert given(await store.run(RunId("r1"))).finished_at == after(1)
    await store.close()


def test_an_illegal_end_is_a_bug_before_it_is_tried() -> None:
    with pytest.raises(Bug, match="cannot move from queued to success"):
        End(
            job_id=JobId("a"),
            outcome=Outcome(status=JobStatus.SUCCESS),
            from_statuses=frozenset({JobStatus.QUEUED, JobStatus.RUNNING}),
        )
