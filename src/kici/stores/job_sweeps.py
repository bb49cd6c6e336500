"""Moves of many waiting jobs at once: expiry, the unroutable mark, retention."""

from collections.abc import Iterable
from typing import Final

from kici.domain.ids import ClassId, Instant, JobId
from kici.domain.job import JobStatus, Outcome
from kici.ports.store import Finished
from kici.stores.database import Params, Part, Row, Rows
from kici.stores.job_ends import STEPS_OF_END, End, finished
from kici.stores.query import Query
from kici.stores.rows import to_json

MARKED_MAX: Final = 5000
"""Rows stamped by one statement; the next probe stamps the next ones."""
OLD_JOBS_MAX: Final = 10_000
"""Jobs older than the retention time that are still there, because their runs go on."""
CLASS_MARGIN_MS: Final = 2 * 86_400_000
"""The date of a class may be a day behind its last job; the other day is for clocks that differ."""


class JobSweeps(Part):
    """`ports.store.JobStore`, as far as many jobs move together."""

    async def expire_queued(self, *, limit: int, now: Instant | None = None) -> list[Finished]:
        rows = await self._database.read(Query.EXPIRED_JOBS, {"limit": limit, "now": now})
        waiting = frozenset({JobStatus.PENDING, JobStatus.QUEUED})
        return await self._end_all(
            End(
                job_id=JobId(row["id"]),
                outcome=Outcome(status=JobStatus.TIMED_OUT, reason=_expiry_reason(row)),
                from_statuses=waiting,
                now=now,
            )
            for row in _by_run(rows)
        )

    async def mark_unroutable(self, class_id: ClassId, *, now: Instant | None = None) -> int:
        params = {"class_id": class_id, "limit": MARKED_MAX, "now": now}
        return len(await self._write(Query.MARK_UNROUTABLE, params))

    async def clear_unroutable(self, class_id: ClassId) -> int:
        return len(await self._write(Query.CLEAR_UNROUTABLE, {"class_id": class_id, "limit": MARKED_MAX}))

    async def expire_unroutable(
        self, class_id: ClassId, *, grace_ms: int, reason: str, limit: int, now: Instant | None = None
    ) -> list[Finished]:
        params = {"class_id": class_id, "grace_ms": grace_ms, "limit": limit, "now": now}
        rows = await self._database.read(Query.UNROUTABLE_JOBS, params)
        return await self._end_all(
            End(
                job_id=JobId(row["id"]),
                outcome=Outcome(status=JobStatus.UNROUTABLE, reason=reason),
                from_statuses=frozenset({JobStatus.QUEUED}),
                unroutable_grace_ms=grace_ms,
                now=now,
            )
            for row in _by_run(rows)
        )

    async def prune_jobs(self, *, older_than: Instant, limit: int) -> int:
        return len(await self._write(Query.PRUNE_JOBS, {"older_than": older_than, "limit": limit}))

    async def prune_classes(self, *, older_than: Instant, limit: int) -> int:
        rows = await self._database.read(Query.OLDEST_JOBS, {"limit": OLD_JOBS_MAX})
        held = {row["class_id"] for row in rows if row["created_at"] < older_than}
        if len(rows) == OLD_JOBS_MAX and rows[-1]["created_at"] < older_than:
            return 0  # there are more of them than were looked at
        used_before = older_than - CLASS_MARGIN_MS
        params: Params = {"used_before": used_before, "held": to_json(sorted(held)), "limit": limit}
        return len(await self._write(Query.PRUNE_CLASSES, params))

    async def _end_all(self, ends: Iterable[End]) -> list[Finished]:
        """One unit; jobs that moved since they were read are left out."""
        steps = [step for end in ends for step in end.steps(guard=False)]
        if not steps:
            return []
        results = await self._database.unit(steps)
        assert results is not None, "none of these steps is a guard"
        each = (results[at : at + STEPS_OF_END] for at in range(0, len(results), STEPS_OF_END))
        return [done for done in map(finished, each) if done is not None]


def _by_run(rows: Rows) -> list[Row]:
    """In the order of the runs, which are locked one after the other: two sweeps never wait in a circle."""
    return sorted(rows, key=lambda row: str(row["run_id"]))


def _expiry_reason(row: Row) -> str:
    error = row["last_provisioning_error"]
    waited = "waited longer than allowed"
    return waited if error is None else f"{waited}; the last attempt to make an agent failed: {error}"
