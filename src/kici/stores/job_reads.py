"""Runs and jobs as listings, counts and demand classes show them."""

from collections.abc import Mapping, Sequence

from kici.domain.ids import AgentId, ClassId, InstanceId, Instant, JobId, RunId
from kici.domain.job import Job, JobStatus, Run, WaitingClass
from kici.domain.paging import Mark
from kici.ports.store import JobFilter
from kici.stores.database import Params, Part, Value
from kici.stores.query import Query
from kici.stores.rows import job_from, run_from, to_json, waiting_class_from


class JobReads(Part):
    """`ports.store.JobStore`, as far as nothing moves."""

    async def run(self, run_id: RunId) -> Run | None:
        row = await self._one(Query.RUN, {"run_id": run_id})
        return None if row is None else run_from(row)

    async def runs(self, *, before: Mark | None, limit: int) -> list[Run]:
        params: dict[str, Value] = {"before": None, "before_id": None, "limit": limit}
        if before is not None:
            params |= {"before": before.at, "before_id": before.id}
        rows = await self._database.read(Query.RUNS_LISTED, params)
        return [run_from(row) for row in rows]

    async def jobs(self, which: JobFilter) -> list[Job]:
        params: dict[str, Value] = {"org": which.org, "before_seq": which.before_seq, "limit": which.limit}
        if which.run_id is not None:
            return await self._jobs(Query.JOBS_OF_RUN, {**params, "run_id": which.run_id, "status": which.status})
        if which.status is not None:
            return await self._jobs(Query.JOBS_BY_STATUS, {**params, "status": which.status})
        return await self._jobs(Query.JOBS_LISTED, params)

    async def waiting_classes(self, *, limit: int) -> list[WaitingClass]:
        rows = await self._database.read(Query.WAITING_CLASSES, {"limit": limit})
        return [waiting_class_from(row) for row in rows]

    async def queued_of_class(
        self, class_id: ClassId, *, limit: int, unserved: bool = False, now: Instant | None = None
    ) -> list[Job]:
        params = {"class_id": class_id, "limit": limit, "unserved": unserved, "now": now}
        return await self._jobs(Query.QUEUED_OF_CLASS, params)

    async def queued_count(self) -> int:
        (row,) = await self._database.read(Query.QUEUED_COUNT, {})
        return int(row["jobs"])

    async def counts_by_status(self) -> Mapping[JobStatus, int]:
        rows = await self._database.read(Query.COUNTS_BY_STATUS, {})
        return {JobStatus(row["status"]): int(row["jobs"]) for row in rows}

    async def held_jobs(self, agent_id: AgentId) -> list[Job]:
        rows = await self._database.read(Query.HELD_JOBS, {"agent_id": agent_id}, told_apart_by="agent_id")
        return [job_from(row) for row in rows]

    async def jobs_owned_by(self, instance_id: InstanceId, *, limit: int) -> list[Job]:
        return await self._jobs(Query.JOBS_OWNED_BY, {"instance_id": instance_id, "limit": limit})

    async def overdue_acks(self, *, limit: int, now: Instant | None = None) -> list[Job]:
        return await self._jobs(Query.OVERDUE_ACKS, {"limit": limit, "now": now})

    async def overdue_recoveries(self, *, limit: int, now: Instant | None = None) -> list[Job]:
        return await self._jobs(Query.OVERDUE_RECOVERIES, {"limit": limit, "now": now})

    async def ended_jobs(self, job_ids: Sequence[JobId]) -> frozenset[JobId]:
        rows = await self._database.read(Query.ENDED_JOBS, {"job_ids": to_json(list(job_ids))})
        return frozenset(JobId(row["id"]) for row in rows)

    async def _jobs(self, query: Query, params: Params) -> list[Job]:
        return [job_from(row) for row in await self._database.read(query, params)]
