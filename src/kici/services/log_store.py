"""Job output on its way from agents to the store, and from the store to whoever follows it.

Agents send bytes at offsets.  For each stream there is a mark: everything before it was accepted.  A chunk that
starts at the mark is taken, what lies before the mark is a repetition and trimmed, what lies beyond it leaves a
gap and is refused.  `append` returns after the commit, so a caller that waits for it reads its agent no faster
than the store writes: that is the flow control.

Chunks of all jobs that arrive during one write share the next one.  The first of a batch writes it, protected
from its own cancellation, so there is no task to supervise.  When a write fails nobody knows what is stored: all
that was queued fails with `StoreDown` and the marks are read afresh; a caller may simply send the same again.

Followers wake at once for output that passes through this process, and poll for all other.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kici.domain.errors import Conflict, Denied, NoCapacity, StoreDown
from kici.domain.ids import JobId
from kici.domain.job import TERMINAL, Job
from kici.domain.logs import LogChunk, NewChunk, Stream
from kici.kit.finish import finish
from kici.kit.ticker import Ticker
from kici.observe.metrics import Metrics
from kici.ports.entropy import Entropy
from kici.ports.store import LogStorage

BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
BATCH_CHUNKS_MAX: Final = 2000
JOBS_MAX: Final = 20_000
"""Jobs whose marks are remembered; those of others are read again when needed."""
WRITE_SECONDS: Final = 30.0
POLL_SECONDS: Final = 1.0
READ_BYTES_MAX: Final = 256 * 1024
FOLLOWERS_MAX: Final = 10_000
NOTE_BYTES_MAX: Final = 4096
AGENT_STREAMS: Final = (Stream.STDOUT, Stream.STDERR)
_NOTE_OFFSET_BYTES: Final = 6
_TRIES_MAX: Final = 3


class LogsAndJobs(LogStorage, Protocol):
    """What this service needs of the store."""

    async def job(self, job_id: JobId) -> Job | None: ...


class LogGap(Conflict):
    """A chunk starts beyond `expected`, the end of what is stored: what lies between must be sent first."""

    def __init__(self, job_id: JobId, stream: Stream, offset: int, expected: int) -> None:
        super().__init__(
            f"output of job {job_id}, stream {stream.name.lower()}: the chunk at {offset} leaves a gap, "
            f"send from {expected}"
        )
        self.expected = expected


@dataclass(eq=False, slots=True)
class _Batch:
    """Chunks that are written together."""

    chunks: list[NewChunk] = field(default_factory=list)
    byte_count: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None
    ends: Mapping[JobId, Mapping[Stream, int]] = field(default_factory=dict)
    """Where the streams end after it, by the store's word."""

    @property
    def is_full(self) -> bool:
        return self.byte_count >= BATCH_BYTES_MAX or len(self.chunks) >= BATCH_CHUNKS_MAX


@dataclass(slots=True)
class _Mark:
    accepted: int
    batch: _Batch | None = None
    """The latest batch with a chunk of this stream."""


_Marks = dict[Stream, _Mark]


class LogStore:
    def __init__(self, *, store: LogsAndJobs, entropy: Entropy, metrics: Metrics | None = None) -> None:
        self._store = store
        self._entropy = entropy
        self._metrics = metrics
        self._jobs: OrderedDict[JobId, _Marks] = OrderedDict()
        self._pending: dict[JobId, _Batch] = {}
        self._loading: dict[JobId, object] = {}
        self._open = _Batch()
        self._writing = asyncio.Lock()
        self._followers: dict[JobId, list[Ticker]] = {}
        self._follower_count = 0

    # --- in

    async def append(self, chunk: NewChunk) -> int:
        """Take an agent's chunk; returns after the commit: everything before the returned offset is stored.

        For the chunks of one stream, call it one after the other.
        Raises `LogGap`, `Denied` for a stream that is not an agent's, or `StoreDown`: then call again with the same.
        """
        if chunk.stream not in AGENT_STREAMS:
            raise Denied(f"agents do not write the {chunk.stream.name.lower()} stream of a job")
        end = chunk.offset + len(chunk.data)
        stored = -1
        for _ in range(_TRIES_MAX):
            stored = await self._append(chunk)
            if stored >= end:
                return stored
            self.forget(chunk.job_id)  # another coordinator stores this stream, too: look where it is now
        raise LogGap(chunk.job_id, chunk.stream, chunk.offset, stored)

    async def _append(self, chunk: NewChunk) -> int:
        """Where the stream ends after the chunk was stored as far as it could be."""
        job_id, stream, offset = chunk.job_id, chunk.stream, chunk.offset
        mark = (await self._marks(job_id))[stream]
        if offset > mark.accepted:
            return mark.accepted
        start, fresh = mark.accepted, chunk.data[mark.accepted - offset :]
        if not fresh:
            if mark.batch is not None:
                await _written(mark.batch)
            return start
        batch = self._open
        mark.accepted, mark.batch = start + len(fresh), batch
        await self._write(NewChunk(job_id=job_id, stream=stream, offset=start, data=fresh))
        return batch.ends.get(job_id, {}).get(stream, 0)

    async def note(self, job_id: JobId, text: str) -> bool:
        """Add a line of the orchestrator to the job's output.  False: the store did not take it."""
        return await self.notes(job_id, [text])

    async def notes(self, job_id: JobId, texts: Sequence[str]) -> bool:
        """Add lines, which stay together and in order."""
        data = b"".join(map(_line, texts))
        offset = int.from_bytes(self._entropy.bytes(_NOTE_OFFSET_BYTES))  # coordinators must not hit the same one
        try:
            await self._write(NewChunk(job_id=job_id, stream=Stream.SYSTEM, offset=offset, data=data))
        except StoreDown:
            return False
        return True

    async def resume(self, job_id: JobId) -> Mapping[Stream, int]:
        """For an agent that comes back with its job: where each of its streams goes on, as the store has it."""
        self.forget(job_id)
        return {stream: mark.accepted for stream, mark in (await self._marks(job_id)).items()}

    def forget(self, job_id: JobId) -> None:
        """Drop what is remembered of a job, because it is over or its agent went elsewhere; wake its followers."""
        self._jobs.pop(job_id, None)
        self._loading.pop(job_id, None)
        self.wake(job_id)

    # --- out

    async def read(self, job_id: JobId, *, after: int = 0, bytes_max: int = READ_BYTES_MAX) -> list[LogChunk]:
        """Stored chunks after a position, in order."""
        return await self._store.read_log(job_id, after=after, bytes_max=bytes_max)

    async def follow(self, job_id: JobId, *, after: int = 0) -> AsyncGenerator[LogChunk, None]:
        """Chunks after a position as they come; ends when the job is over and all of them were given.

        Close it when done early (`contextlib.aclosing`).  Raises `NoCapacity` when too many follow, `StoreDown`.
        """
        ticker = self._enter(job_id)
        try:
            is_over = False
            while True:
                chunks = await self.read(job_id, after=after)
                for chunk in chunks:
                    yield chunk
                    after = chunk.position
                if chunks:
                    continue
                if is_over:
                    return
                is_over = await self._is_over(job_id)  # then read once more: the last of it may have come since
                if not is_over:
                    await ticker.next()
        finally:
            self._leave(job_id, ticker)

    def wake(self, job_id: JobId) -> None:
        """Have the job's followers look now: it has new output, or is over."""
        for ticker in self._followers.get(job_id, ()):
            ticker.nudge()

    # --- how

    async def _marks(self, job_id: JobId) -> _Marks:
        """The job's marks, when there is room to take a chunk."""
        while True:
            while self._open.is_full:
                await self._open.done.wait()
            if (marks := self._jobs.get(job_id)) is not None:
                self._jobs.move_to_end(job_id)
                return marks
            if (batch := self._pending.get(job_id)) is not None:
                await batch.done.wait()  # the store's word counts when what is under way has arrived
                continue
            await self._load(job_id)

    async def _load(self, job_id: JobId) -> None:
        """Read the marks; what was forgotten, written or read anew meanwhile makes the answer worthless."""
        me = self._loading[job_id] = object()
        try:
            ends = await self._store.log_ends(job_id)
            if self._loading.get(job_id) is me and job_id not in self._pending:
                self._jobs[job_id] = {stream: _Mark(accepted=ends.get(stream, 0)) for stream in AGENT_STREAMS}
                if len(self._jobs) > JOBS_MAX:
                    self._jobs.popitem(last=False)
        finally:
            if self._loading.get(job_id) is me:
                del self._loading[job_id]

    async def _write(self, chunk: NewChunk) -> None:
        """Queue a chunk (before anything else runs) and return when it is committed."""
        batch = self._open
        is_first = not batch.chunks
        batch.chunks.append(chunk)
        self._pending[chunk.job_id] = batch
        batch.byte_count += len(chunk.data)
        if is_first:
            try:
                await finish(self._write_batch(batch), seconds=WRITE_SECONDS, what="storing job output")
            except TimeoutError as error:
                raise StoreDown(str(error)) from error
        await _written(batch)

    async def _write_batch(self, batch: _Batch) -> None:
        """Never raises what the store raised: `batch.failure` tells all who wait."""
        try:
            async with self._writing:
                if batch.done.is_set():
                    return  # failed together with the one before
                self._open = _Batch()
                batch.ends = await self._store.append_log(batch.chunks)
        except BaseException as error:
            self._fail(batch, error)
            if not isinstance(error, StoreDown):
                raise
        else:
            self._close(batch)

    def _close(self, batch: _Batch) -> None:
        batch.done.set()
        for job_id in dict.fromkeys(chunk.job_id for chunk in batch.chunks):
            if self._pending.get(job_id) is batch:
                del self._pending[job_id]
            self.wake(job_id)
        if self._metrics is not None and batch.failure is None:
            self._metrics.log_bytes.inc(batch.byte_count)

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        """What is queued behind a failed write would leave a gap: it fails as well."""
        queued, self._open = self._open, _Batch()
        for failed in (batch, queued):
            for chunk in failed.chunks:
                self.forget(chunk.job_id)
            failed.failure = error
            self._close(failed)

    async def _is_over(self, job_id: JobId) -> bool:
        job = await self._store.job(job_id)
        return job is None or job.status in TERMINAL

    def _enter(self, job_id: JobId) -> Ticker:
        if self._follower_count >= FOLLOWERS_MAX:
            raise NoCapacity(f"{FOLLOWERS_MAX} readers follow job output here already; try again later")
        ticker = Ticker(POLL_SECONDS)
        self._followers.setdefault(job_id, []).append(ticker)
        self._follower_count += 1
        return ticker

    def _leave(self, job_id: JobId, ticker: Ticker) -> None:
        tickers = self._followers[job_id]
        tickers.remove(ticker)
        self._follower_count -= 1
        if not tickers:
            del self._followers[job_id]


async def _written(batch: _Batch) -> None:
    await batch.done.wait()
    if batch.failure is not None:
        raise StoreDown("job output could not be stored; send it again") from batch.failure


def _line(text: str) -> bytes:
    return text.replace("\n", " ").encode()[:NOTE_BYTES_MAX].decode(errors="ignore").encode() + b"\n"
