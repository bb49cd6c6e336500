"""Job output: `ports.store.LogStorage`."""

from collections.abc import Mapping, Sequence
from typing import Final

from kici.domain.ids import Instant, JobId
from kici.domain.logs import LogChunk, NewChunk, Stream
from kici.stores.database import Params, Part, Rows, Step
from kici.stores.query import Query
from kici.stores.rows import chunk_from

CHUNKS_READ_MAX: Final = 1000


class Logs(Part):
    async def append_log(
        self, chunks: Sequence[NewChunk], *, now: Instant | None = None
    ) -> Mapping[JobId, Mapping[Stream, int]]:
        if not chunks:
            return {}
        # Appends to one job wait for each other, so that its followers see positions in order of commit;
        # taking the jobs in one order keeps two batches from waiting for each other in a circle.
        ordered = sorted(chunks, key=lambda chunk: chunk.job_id)
        job_ids = list(dict.fromkeys(chunk.job_id for chunk in ordered))
        results = await self._database.unit(
            [
                Step(
                    Query.APPEND_LOG,
                    {
                        "job_id": chunk.job_id,
                        "stream": int(chunk.stream),
                        "byte_offset": chunk.offset,
                        "data": chunk.data,
                        "now": now,
                    },
                )
                for chunk in ordered
            ]
            + [Step(Query.LOG_ENDS, {"job_id": job_id}) for job_id in job_ids]
        )
        assert results is not None, "nothing here is a guard"
        return {job_id: _ends(rows) for job_id, rows in zip(job_ids, results[len(ordered) :], strict=True)}

    async def log_ends(self, job_id: JobId) -> Mapping[Stream, int]:
        return _ends(await self._database.read(Query.LOG_ENDS, {"job_id": job_id}))

    async def read_log(self, job_id: JobId, *, after: int, bytes_max: int) -> list[LogChunk]:
        params: Params = {"job_id": job_id, "after": after, "bytes_max": bytes_max, "chunks_max": CHUNKS_READ_MAX}
        return [chunk_from(row) for row in await self._database.read(Query.READ_LOG, params)]


def _ends(rows: Rows) -> Mapping[Stream, int]:
    return {Stream(row["stream"]): int(row["ends"]) for row in rows}
