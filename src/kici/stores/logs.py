"""Job output: `ports.store.LogStorage`."""

from collections.abc import Mapping, Sequence
from typing import Final

from kici.domain.ids import Instant, JobId
from kici.domain.logs import LogChunk, NewChunk, Stream
from kici.stores.database import Params, Part, Rows, Step
from kici.stores.query import Query
from kici.stores.rows import chunk_from, to_json

CHUNKS_READ_MAX: Final = 1000


class Logs(Part):
    async def append_log(
        self, chunks: Sequence[NewChunk], *, now: Instant | None = None
    ) -> Mapping[JobId, Mapping[Stream, int]]:
        if not chunks:
            return {}
        jobs: Params = {"job_ids": to_json(sorted({chunk.job_id for chunk in chunks}))}
        appends = [Step(Query.APPEND_LOG, _append(chunk, now)) for chunk in chunks]
        results = await self._database.unit([Step(Query.LOCK_LOGS, jobs), *appends, Step(Query.LOG_ENDS, jobs)])
        assert results is not None, "nothing here is a guard"
        return _ends(results[-1])

    async def log_ends(self, job_id: JobId) -> Mapping[Stream, int]:
        rows = await self._database.read(Query.LOG_ENDS, {"job_ids": to_json([job_id])})
        return _ends(rows).get(job_id, {})

    async def read_log(self, job_id: JobId, *, after: int, bytes_max: int) -> list[LogChunk]:
        params: Params = {"job_id": job_id, "after": after, "bytes_max": bytes_max, "chunks_max": CHUNKS_READ_MAX}
        return [chunk_from(row) for row in await self._database.read(Query.READ_LOG, params)]


def _append(chunk: NewChunk, now: Instant | None) -> Params:
    return {
        "job_id": chunk.job_id,
        "stream": int(chunk.stream),
        "byte_offset": chunk.offset,
        "data": chunk.data,
        "now": now,
    }


def _ends(rows: Rows) -> dict[JobId, dict[Stream, int]]:
    ends: dict[JobId, dict[Stream, int]] = {}
    for row in rows:
        ends.setdefault(JobId(row["job_id"]), {})[Stream(row["stream"])] = int(row["ends"])
    return ends
