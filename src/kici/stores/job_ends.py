"""How jobs leave their agents: back to the queue, to their end, or cancelled; and how runs end with them.

A job that no other job needs ends in one query, together with its run's counters.  Any other end is a few steps
of one unit: lock the run, end the job, move what needs it, count the run anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kici.domain.ids import AgentId, Instant, JobId, RunId
from kici.domain.job import JOB_MOVES, Job, JobStatus, Outcome
from kici.domain.moves import check_move
from kici.ports.store import Cancelled, Finished, Offer, Requeued
from kici.stores.database import Params, Part, Rows, Step, Value
from kici.stores.query import Query
from kici.stores.rows import clean_text, job_from, to_json

_NOT_STARTED: Final = frozenset({JobStatus.PENDING, JobStatus.QUEUED, JobStatus.DISPATCHED})


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a job, and the state that it was decided on.  Raises `Bug` when the move is illegal."""

    job_id: JobId
    outcome: Outcome
    from_statuses: frozenset[JobStatus]
    agent_id: AgentId | None = None
    """Holds the job; None: whoever does."""
    offer: int | None = None
    """Holds it by this claim; None: by any."""
    counts_attempt: bool = False
    unroutable_grace_ms: int | None = None
    """Was stamped unroutable longer ago than this; None: need not be."""
    seen: Job | None = None
    """As it was read: taken up since by whoever its agent went to, it stays; None: whatever happened to it."""
    now: Instant | None = None

    def __post_init__(self) -> None:
        for status in self.from_statuses:
            check_move(JOB_MOVES, status, self.outcome.status, what=f"job {self.job_id}")

    def params(self) -> dict[str, Value]:
        reason = self.outcome.reason
        return {
            "job_id": self.job_id,
            "status": self.outcome.status,
            "exit_code": self.outcome.exit_code,
            "signal": self.outcome.signal,
            "reason": None if reason is None else clean_text(reason),
            "from_statuses": to_json(sorted(self.from_statuses)),
            "agent_id": self.agent_id,
            "offer": self.offer,
            **as_seen(self.seen),
            "attempts_add": int(self.counts_attempt),
            "now": self.now,
        }

    def steps(self, *, guard: bool) -> list[Step]:
        """The end and what follows from it.  Without `guard` a stale end changes nothing, but undoes nothing either.

        `finished` reads their results.
        """
        job: Params = {"job_id": self.job_id, "now": self.now}
        if self.outcome.status is JobStatus.SUCCESS:
            dependents = Step(Query.RELEASE_DEPENDENTS, job)
        else:
            why = f"needs job {self.job_id}, which ended {self.outcome.status}"
            dependents = Step(Query.SKIP_DEPENDENTS, {**job, "reason": why})
        return [
            Step(Query.LOCK_RUN_OF_JOB, {"job_id": self.job_id}),
            Step(Query.END_JOB, {**self.params(), "grace_ms": self.unroutable_grace_ms}, guard=guard),
            dependents,
            Step(Query.CLOSE_RUN, {**job, "run_id": None}),
        ]


STEPS_OF_END: Final = 4


def as_seen(job: Job | None) -> dict[str, Value]:
    """What tells whether a held job is where it was when it was read; None: it need not be."""
    return {
        "is_seen": None if job is None else 1,
        "seen_owner": None if job is None else job.owner_instance_id,
        "seen_deadline": None if job is None else job.recovery_deadline,
    }


def finished(results: Sequence[Rows]) -> Finished | None:
    """What the steps of an end did; None when it was stale."""
    _, ended, dependents, run = results
    if not ended:
        return None
    moved = [each.id for each in _in_order(dependents)]
    job = job_from(ended[0])
    is_success = job.status is JobStatus.SUCCESS
    return Finished(
        job=job,
        released=tuple(moved) if is_success else (),
        skipped=() if is_success else tuple(moved),
        run_over=_is_over(run),
    )


class JobEnds(Part):
    """`ports.store.JobStore`, as far as jobs leave their agents."""

    async def requeue_job(
        self,
        offer: Offer,
        *,
        reason: str,
        attempts_max: int,
        count_attempt: bool = True,
        now: Instant | None = None,
    ) -> Requeued | None:
        held: Params = {"job_id": offer.job_id, "agent_id": offer.agent_id}
        spawn = Step(Query.END_BOUND_SPAWN, {**held, "reason": "requeued", "now": now})
        requeue: Params = {
            **held,
            "offer": offer.number,
            "reason": clean_text(reason),
            "attempts_add": int(count_attempt),
            "attempts_max": attempts_max,
        }
        results = await self._database.unit([spawn, Step(Query.REQUEUE_JOB, requeue, guard=True)])
        if results is not None:
            return Requeued(job=job_from(results[1][0]))
        give_up = End(
            job_id=offer.job_id,
            outcome=Outcome(
                status=JobStatus.FAILED, reason=f"gave up after {attempts_max} dispatch attempts: {reason}"
            ),
            from_statuses=frozenset({JobStatus.DISPATCHED}),
            agent_id=offer.agent_id,
            offer=offer.number,
            counts_attempt=count_attempt,
            now=now,
        )
        results = await self._database.unit([spawn, *give_up.steps(guard=True)])
        return None if results is None else Requeued(job=job_from(results[2][0]))

    async def finish_job(
        self,
        job_id: JobId,
        outcome: Outcome,
        *,
        agent_id: AgentId | None = None,
        from_statuses: frozenset[JobStatus],
        seen: Job | None = None,
        now: Instant | None = None,
    ) -> Finished | None:
        end = End(job_id=job_id, outcome=outcome, from_statuses=from_statuses, agent_id=agent_id, seen=seen, now=now)
        rows = await self._write(Query.FINISH_LONE_JOB, end.params())
        if rows:
            return Finished(job=job_from(rows[0]), run_over=_is_over(rows[-1:]))
        results = await self._database.unit(end.steps(guard=True))
        return None if results is None else finished(results)

    async def cancel(
        self, run_id: RunId, job_id: JobId | None, *, reason: str, now: Instant | None = None
    ) -> Cancelled:
        why: Params = {"reason": clean_text(reason), "now": now}
        if job_id is not None:
            return await self._cancel_job(run_id, job_id, why, now)
        results = await self._database.unit(
            [
                Step(Query.CANCEL_RUN, {"run_id": run_id, "now": now}, guard=True),
                Step(Query.CANCEL_JOBS, {"run_id": run_id, **why}),
                Step(Query.CLOSE_RUN, {"run_id": run_id, "job_id": None, "now": now}),
            ]
        )
        moved = _in_order(results[1]) if results is not None else []
        return Cancelled(
            ended=tuple(job for job in moved if job.status is JobStatus.CANCELLED),
            told=tuple(job for job in moved if job.status is JobStatus.CANCELLING),
        )

    async def _cancel_job(self, run_id: RunId, job_id: JobId, why: Params, now: Instant | None) -> Cancelled:
        job = await self._one(Query.JOB, {"job_id": job_id})
        if job is None or job["run_id"] != run_id:
            return Cancelled(ended=(), told=())
        outcome = Outcome(status=JobStatus.CANCELLED, reason=str(why["reason"]))
        end = End(job_id=job_id, outcome=outcome, from_statuses=_NOT_STARTED, now=now)
        results = await self._database.unit(end.steps(guard=True))
        if results is not None:
            _, ended, skipped, _ = results
            return Cancelled(ended=(job_from(ended[0]), *_in_order(skipped)), told=())
        told = await self._write(Query.CANCEL_STARTED_JOB, {"job_id": job_id, **why})
        return Cancelled(ended=(), told=tuple(_in_order(told)))


def _in_order(rows: Rows) -> list[Job]:
    return sorted((job_from(row) for row in rows), key=lambda job: job.seq)


def _is_over(runs: Rows) -> bool:
    return any(run["run_over"] for run in runs)
