"""Runs, jobs and the queue: submission, claims, and what happens to a job while an agent has it.

How jobs end is in `job_ends`, sweeps over many are in `job_sweeps`, listings in `job_reads`.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from kici.domain.errors import Bug, Retryable
from kici.domain.ids import AgentId, ClassId, InstanceId, Instant, JobId
from kici.domain.job import Job, JobStatus, NewJob, NewRun
from kici.ports.store import Claim, Offer, Submitted
from kici.stores.database import Params, Part, Rows, Value
from kici.stores.job_ends import as_seen
from kici.stores.query import Query
from kici.stores.rows import canonical_demand, class_id, class_key, clean_text, job_from, to_json

RUN_JOBS_MAX: Final = 100_000
"""Longest list of jobs that a repeated submission is answered with."""

CLAIM_TRIES_MAX: Final = 3
"""How often a claim looks again when others are moving every job that it could have."""


class JobMoves(Part):
    """`ports.store.JobStore`, as far as jobs begin and go on."""

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
                "jobs": to_json(_documents(run, jobs)),
                "key": idempotency_key,
                "instance_id": None if claim is None else claim.instance_id,
                "ack_ms": None if claim is None else claim.ack_ms,
                "scaler": None if claim is None else claim.scaler,
                "now": now,
            },
        )
        if not rows:
            return await self._submitted_before(idempotency_key)
        demands = {job.id: job.demand for job in jobs}
        made = [job_from(row, demand=demands[row["id"]]) for row in rows if row["move"] == "job"]
        return Submitted(run_id=run.id, jobs=tuple(sorted(made, key=lambda job: job.seq)), created=True)

    async def job(self, job_id: JobId) -> Job | None:
        row = await self._one(Query.JOB, {"job_id": job_id})
        return None if row is None else job_from(row)

    async def claim_oldest(
        self, class_ids: Sequence[ClassId], claim: Claim, *, now: Instant | None = None
    ) -> Job | None:
        params: Params = {**claim_params(claim, now), "class_ids": to_json(list(class_ids))}
        for _ in range(CLAIM_TRIES_MAX):
            rows = await self._write(Query.CLAIM_OLDEST, params, told_apart_by="agent_id", alike_in="class_ids")
            if not rows or rows[0]["id"] is not None:
                return first_job(rows)
        return None

    async def claim_job(self, job_id: JobId, claim: Claim, *, now: Instant | None = None) -> Job | None:
        return first_job(await self._write(Query.CLAIM_JOB, {**claim_params(claim, now), "job_id": job_id}))

    async def start_job(
        self,
        job_id: JobId,
        agent_id: AgentId,
        *,
        offer: int | None = None,
        instance_id: InstanceId | None = None,
        now: Instant | None = None,
    ) -> Job | None:
        params: Params = {
            "job_id": job_id,
            "agent_id": agent_id,
            "offer": offer,
            "instance_id": instance_id,
            "now": now,
        }
        return first_job(await self._write(Query.START_JOB, params))

    async def offer_again(self, offer: Offer, *, ack_ms: int, now: Instant | None = None) -> Job | None:
        params: Params = {
            "job_id": offer.job_id,
            "agent_id": offer.agent_id,
            "offer": offer.number,
            "ack_ms": ack_ms,
            "now": now,
        }
        return first_job(await self._write(Query.OFFER_AGAIN, params))

    async def recover_job(
        self, job_id: JobId, agent_id: AgentId, *, deadline: Instant, seen: Job | None = None
    ) -> bool:
        params: Params = {"job_id": job_id, "agent_id": agent_id, "deadline": deadline, **as_seen(seen)}
        return bool(await self._write(Query.RECOVER_JOB, params))

    async def resume_job(
        self, job_id: JobId, agent_id: AgentId, instance_id: InstanceId, *, now: Instant | None = None
    ) -> Job | None:
        del now  # this move writes no time
        params: Params = {"job_id": job_id, "agent_id": agent_id, "instance_id": instance_id}
        return first_job(await self._write(Query.RESUME_JOB, params))

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


def first_job(rows: Rows) -> Job | None:
    return job_from(rows[0]) if rows else None


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


def _documents(run: NewRun, jobs: Sequence[NewJob]) -> list[Mapping[str, object]]:
    needed = {need for job in jobs for need in job.needs}
    return [{"place": place, "is_needed": job.id in needed, **_document(run, job)} for place, job in enumerate(jobs)]


def _document(run: NewRun, job: NewJob) -> dict[str, object]:
    demand = canonical_demand(job.demand)
    key = class_key(demand)
    if job.claimed_by is not None:
        status = JobStatus.DISPATCHED
    else:
        status = JobStatus.PENDING if job.needs else JobStatus.QUEUED
    return {
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
