"""Moves of many waiting jobs at once: expiry, the unroutable mark, retention."""

from collections.abc import Sequence
from typing import Final

from kici.domain.ids import ClassId, Instant, JobId
from kici.domain.job import JobStatus, Outcome
from kici.ports.store import Finished
from kici.stores.database import Part, Row, Step
from kici.stores.jobs import Held, finish_step, finished_from
from kici.stores.query import Query
from kici.stores.rows import clean_text

MARKED_MAX: Final = 5000
"""Rows stamped by one statement; the next probe stamps the next ones."""


class JobSweeps(Part):
    """`ports.store.JobStore`, as far as many jobs move together."""

    async def expire_queued(self, *, limit: int, now: Instant | None = None) -> list[Finished]:
        rows = await self._database.read(Query.EXPIRED_JOBS, {"limit": limit, "now": now})
        waiting = Held(from_statuses=frozenset({JobStatus.PENDING, JobStatus.QUEUED}))
        return await self._finish_all(
            [
                finish_step(
                    JobId(row["id"]),
                    Outcome(status=JobStatus.TIMED_OUT, reason=_expiry_reason(row)),
                    waiting,
                    now=now,
                )
                for row in sorted(rows, key=_run_of)
            ]
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
        stamped = Held(from_statuses=frozenset({JobStatus.QUEUED}), unroutable_grace_ms=grace_ms)
        return await self._finish_all(
            [
                finish_step(
                    JobId(row["id"]),
                    Outcome(status=JobStatus.UNROUTABLE, reason=clean_text(reason)),
                    stamped,
                    now=now,
                )
                for row in sorted(rows, key=_run_of)
            ]
        )

    async def prune_jobs(self, *, older_than: Instant, limit: int) -> int:
        return len(await self._write(Query.PRUNE_JOBS, {"older_than": older_than, "limit": limit}))

    async def _finish_all(self, steps: Sequence[Step]) -> list[Finished]:
        """One unit; jobs that moved since they were read are left out.

        Steps come in the order of their runs, which they lock: two sweeps never wait for each other in a circle.
        """
        if not steps:
            return []
        results = await self._database.unit(steps)
        assert results is not None, "none of these steps is a guard"
        return [finished for rows in results if (finished := finished_from(rows)) is not None]


def _expiry_reason(row: Row) -> str:
    error = row["last_provisioning_error"]
    waited = "waited longer than allowed"
    return waited if error is None else f"{waited}; the last attempt to make an agent failed: {error}"


def _run_of(row: Row) -> str:
    return str(row["run_id"])
