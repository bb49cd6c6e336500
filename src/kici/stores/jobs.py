"""Runs, jobs and the queue: the moves of a job.  Sweeps over many are in `job_sweeps`, listings in `job_reads`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kici.domain.errors import Bug, Retryable
from kici.domain.ids import AgentId, ClassId, InstanceId, Instant, JobId, RunId
from kici.domain.job import JOB_MOVES, Job, JobStatus, NewJob, NewRun, Outcome
from kici.domain.moves import check_move
from kici.ports.store import Cancelled, Claim, Finished, Requeued, Submitted
from kici.stores.database import Params, Part, Rows, Step, Value
from kici.stores.query import Query
from kici.stores.rows import canonical_demand, class_id, class_key, clean_text, job_from, to_json

RUN_JOBS_MAX: Final = 100_000
"""Longest list of jobs that a repeated submission is answered with."""

CLAIM_TRIES_MAX: Final = 3
"""How often a claim looks again when others are moving every job that it could have."""

_NOT_STARTED: Final = frozenset({JobStatus.PENDING, JobStatus.QUEUED, JobStatus.DISPATCHED})


class JobMoves(Part):
    """`ports.store.JobStore`, as far as single jobs move."""

    async def submit(
        self,
        run: NewRun,
        jobs: Sequence[NewJob],
        *,
        claim: Claim | None = None,
        idempotency_key: str | None = None,
        now: Instant | None = None,
    ) -> Submitted:
        check_submission(run, jobs, claim)
        rows = await self._write(
            Query.SUBMIT_RUN,
            {
                "run_id": run.id,
                "name": run.name,
                "org": run.org,
                "submitted_by": run.submitted_by,
                "jobs": to_json([_document(run, job, place) for place, job in enumerate(jobs)]),
                "key": idempotency_key,
                "instance_id": None if claim is None else claim.instance_id,
                "ack_ms": None if claim is None else claim.ack_ms,
                "scaler": None if claim is None else claim.scaler,
                "now": now,
            },
        )
        if not rows:
            return await self._submitted_before(idempotency_key)
        made = sorted((job_from(row) for row in rows if row["move"] == "job"), key=lambda job: job.seq)
        return Submitted(run_id=run.id, jobs=tuple(made), created=True)

    async def job(self, job_id: JobId) -> Job | None:
        row = await self._one(Query.JOB, {"job_id": job_id})
        return None if row is None else job_from(row)

    async def claim_oldest(
        self, class_ids: Sequence[ClassId], claim: Claim, *, now: Instant | None = None
    ) -> Job | None:
        params: Params = {**claim_params(claim, now), "class_ids": to_json(list(class_ids))}
        for _ in range(CLAIM_TRIES_MAX):
            rows = await self._write(Query.CLAIM_OLDEST, params)
            if not rows or rows[0]["id"] is not None:
                return first_job(rows)
        return None

    async def claim_job(self, job_id: JobId, claim: Claim, *, now: Instant | None = None) -> Job | None:
        return first_job(await self._write(Query.CLAIM_JOB, {**claim_params(claim, now), "job_id": job_id}))

    async def start_job(self, job_id: JobId, agent_id: AgentId, *, now: Instant | None = None) -> Job | None:
        return first_job(await self._write(Query.START_JOB, {"job_id": job_id, "agent_id": agent_id, "now": now}))

    async def requeue_job(
        self,
        job_id: JobId,
        agent_id: AgentId,
        *,
        reason: str,
        attempts_max: int,
        count_attempt: bool = True,
        now: Instant | None = None,
    ) -> Requeued | None:
        spawn = Step(Query.END_BOUND_SPAWN, {"job_id": job_id, "agent_id": agent_id, "reason": "requeued", "now": now})
        requeue: Params = {
            "job_id": job_id,
            "agent_id": agent_id,
            "reason": clean_text(reason),
            "attempts_add": int(count_attempt),
            "attempts_max": attempts_max,
        }
        results = await self._database.unit([spawn, Step(Query.REQUEUE_JOB, requeue, guard=True)])
        if results is not None:
            return Requeued(job=job_from(results[1][0]))
        give_up = finish_step(
            job_id,
            Outcome(status=JobStatus.FAILED, reason=f"gave up after {attempts_max} dispatch attempts: {reason}"),
            Held(from_statuses=frozenset({JobStatus.DISPATCHED}), agent_id=agent_id),
            attempts_add=int(count_attempt),
            now=now,
        )
        results = await self._database.unit([spawn, replace(give_up, guard=True)])
        if results is None:
            return None
        finished = finished_from(results[1])
        assert finished is not None, "the guard saw a row"
        return Requeued(job=finished.job)

    async def finish_job(
        self,
        job_id: JobId,
        outcome: Outcome,
        *,
        agent_id: AgentId | None = None,
        from_statuses: frozenset[JobStatus],
        now: Instant | None = None,
    ) -> Finished | None:
        step = finish_step(job_id, outcome, Held(from_statuses=from_statuses, agent_id=agent_id), now=now)
        return finished_from(await self._write(step.query, step.params))

    async def recover_job(
        self, job_id: JobId, agent_id: AgentId, *, deadline: Instant, now: Instant | None = None
    ) -> bool:
        del now  # the deadline is all that this move writes
        params: Params = {"job_id": job_id, "agent_id": agent_id, "deadline": deadline}
        return bool(await self._write(Query.RECOVER_JOB, params))

    async def resume_job(
        self, job_id: JobId, agent_id: AgentId, instance_id: InstanceId, *, now: Instant | None = None
    ) -> Job | None:
        del now  # this move writes no time
        params: Params = {"job_id": job_id, "agent_id": agent_id, "instance_id": instance_id}
        return first_job(await self._write(Query.RESUME_JOB, params))

    async def cancel(
        self, run_id: RunId, job_id: JobId | None, *, reason: str, now: Instant | None = None
    ) -> Cancelled:
        reason = clean_text(reason)
        if job_id is not None:
            return await self._cancel_job(run_id, job_id, reason, now)
        rows = await self._write(Query.CANCEL_RUN, {"run_id": run_id, "reason": reason, "now": now})
        moved = sorted((job_from(row) for row in rows if row["move"] == "job"), key=lambda job: job.seq)
        return Cancelled(
            ended=tuple(job for job in moved if job.status is JobStatus.CANCELLED),
            told=tuple(job for job in moved if job.status is JobStatus.CANCELLING),
        )

    async def set_provisioning_error(self, job_id: JobId, text: str) -> bool:
        return bool(await self._write(Query.SET_PROVISIONING_ERROR, {"job_id": job_id, "text": clean_text(text)}))

    async def _submitted_before(self, key: str | None) -> Submitted:
        row = await self._one(Query.RUN_OF_KEY, {"key": key})
        if row is None:
            raise Retryable(f"the run of idempotency key {key!r} was deleted just now; submit it again")
        rows = await self._database.read(
            Query.JOBS_OF_RUN,
            {"run_id": row["run_id"], "status": None, "org": None, "before_seq": None, "limit": RUN_JOBS_MAX},
        )
        return Submitted(run_id=row["run_id"], jobs=tuple(job_from(job) for job in reversed(rows)), created=False)

    async def _cancel_job(self, run_id: RunId, job_id: JobId, reason: str, now: Instant | None) -> Cancelled:
        job = await self.job(job_id)
        if job is None or job.run_id != run_id:
            return Cancelled(ended=(), told=())
        outcome = Outcome(status=JobStatus.CANCELLED, reason=reason)
        finish = finish_step(job_id, outcome, Held(from_statuses=_NOT_STARTED), now=now)
        rows = await self._write(finish.query, finish.params)
        if rows:
            return Cancelled(ended=tuple(job_from(row) for row in rows if row["move"] in _OVER), told=())
        params: Params = {"job_id": job_id, "reason": reason, "now": now}
        told = await self._write(Query.CANCEL_STARTED_JOB, params)
        return Cancelled(ended=(), told=tuple(job_from(row) for row in told))


_OVER: Final = frozenset({"ended", "skipped"})


def first_job(rows: Rows) -> Job | None:
    return job_from(rows[0]) if rows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The state that the end of a job was decided on."""

    from_statuses: frozenset[JobStatus]
    agent_id: AgentId | None = None
    """Holds the job; None: whoever does."""
    unroutable_grace_ms: int | None = None
    """Was stamped unroutable longer ago than this; None: need not be."""


def finish_step(
    job_id: JobId, outcome: Outcome, held: Held, *, attempts_add: int = 0, now: Instant | None = None
) -> Step:
    """The query that ends a job.  Raises `Bug` when a source status may not move to the outcome."""
    for status in held.from_statuses:
        check_move(JOB_MOVES, status, outcome.status, what=f"job {job_id}")
    return Step(
        Query.FINISH_JOB,
        {
            "job_id": job_id,
            "status": outcome.status,
            "exit_code": outcome.exit_code,
            "signal": outcome.signal,
            "reason": None if outcome.reason is None else clean_text(outcome.reason),
            "skip_reason": f"needs job {job_id}, which ended {outcome.status}",
            "from_statuses": to_json(sorted(held.from_statuses)),
            "agent_id": held.agent_id,
            "attempts_add": attempts_add,
            "grace_ms": held.unroutable_grace_ms,
            "now": now,
        },
    )


def finished_from(rows: Rows) -> Finished | None:
    """What the rows of `finish_job` say; None when the move was stale."""
    if not rows:
        return None
    moved: dict[str, list[Job]] = {}
    for row in rows:
        if row["move"] != "run":
            moved.setdefault(row["move"], []).append(job_from(row))
    (ended,) = moved["ended"]
    return Finished(
        job=ended,
        released=_in_order(moved.get("released", ())),
        skipped=_in_order(moved.get("skipped", ())),
        run_over=any(row["run_over"] for row in rows),
    )


def _in_order(jobs: Iterable[Job]) -> tuple[JobId, ...]:
    return tuple(job.id for job in sorted(jobs, key=lambda job: job.seq))


def check_submission(run: NewRun, jobs: Sequence[NewJob], claim: Claim | None) -> None:
    """Raise `Bug` for a submission that could never end."""
    ids = {job.id for job in jobs}
    if not ids or len(ids) != len(jobs):
        raise Bug(f"run {run.id} has {len(jobs)} jobs with {len(ids)} ids")
    for job in jobs:
        if not ids.issuperset(job.needs) or job.id in job.needs:
            raise Bug(f"job {job.id} needs jobs outside of run {run.id}, or itself: {job.needs}")
        if job.claimed_by is not None and (claim is None or job.needs):
            raise Bug(f"job {job.id} cannot be claimed by {job.claimed_by}: it waits for others, or nobody claims")


def _document(run: NewRun, job: NewJob, place: int) -> Mapping[str, object]:
    demand = canonical_demand(job.demand)
    key = class_key(demand)
    if job.claimed_by is not None:
        status = JobStatus.DISPATCHED
    else:
        status = JobStatus.PENDING if job.needs else JobStatus.QUEUED
    return {
        "place": place,
        "id": job.id,
        "name": job.name,
        "org": run.org,
        "status": status,
        "class_id": class_id(key),
        "class_key": key,
        "demand": demand,
        "needs": tuple(dict.fromkeys(job.needs)),
        "expires_at": job.expires_at,
        "agent_id": job.claimed_by,
        "spec": to_json(job.spec),
    }


def claim_params(claim: Claim, now: Instant | None) -> dict[str, Value]:
    return {
        "agent_id": claim.agent_id,
        "instance_id": claim.instance_id,
        "ack_ms": claim.ack_ms,
        "scaler": claim.scaler,
        "now": now,
    }
