import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing

import pytest

from kici.domain.errors import Denied, NoCapacity, StoreDown
from kici.domain.ids import Instant, JobId
from kici.domain.job import Job, JobStatus
from kici.domain.logs import LogChunk, NewChunk, Stream
from kici.observe.metrics import Metrics
from kici.services import log_store
from kici.services.log_store import LogGap, LogStore
from kici.testing.builders import a_job
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.virtual_time import virtual

JOB, OTHER = JobId("job-1"), JobId("job-2")
OUT, ERR = Stream.STDOUT, Stream.STDERR


class SlowStorage:
    """Keeps chunks as the contract says; each write takes `write_seconds`, and fails as told."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[JobId, Stream, int], LogChunk] = {}
        self.positions: list[tuple[JobId, LogChunk]] = []
        self.batches: list[list[NewChunk]] = []
        self.write_seconds = 0.1
        self.is_down = False
        self.loses_answers = False
        self.status = JobStatus.RUNNING
        self.loads = 0

    async def append_log(
        self, chunks: Sequence[NewChunk], *, now: Instant | None = None
    ) -> Mapping[JobId, Mapping[Stream, int]]:
        chunks = list(chunks)
        await asyncio.sleep(self.write_seconds)
        if self.is_down:
            raise StoreDown("no answer")
        self.batches.append(chunks)
        for chunk in chunks:
            key = (chunk.job_id, chunk.stream, chunk.offset)
            if chunk.stream is Stream.SYSTEM or chunk.offset == self.ends(chunk.job_id).get(chunk.stream, 0):
                stored = LogChunk(
                    position=len(self.positions) + 1,
                    stream=chunk.stream,
                    offset=chunk.offset,
                    data=chunk.data,
                    received_at=now or Instant(0),
                )
                self.chunks[key] = stored
                self.positions.append((chunk.job_id, stored))
        if self.loses_answers:
            raise StoreDown("no answer")
        return {chunk.job_id: self.ends(chunk.job_id) for chunk in chunks}

    async def log_ends(self, job_id: JobId) -> Mapping[Stream, int]:
        self.loads += 1
        await asyncio.sleep(0.01)
        return self.ends(job_id)

    def ends(self, job_id: JobId) -> dict[Stream, int]:
        ends: dict[Stream, int] = {}
        for (job, stream, offset), chunk in self.chunks.items():
            if job == job_id:
                ends[stream] = max(ends.get(stream, 0), offset + len(chunk.data))
        return ends

    async def read_log(self, job_id: JobId, *, after: int, bytes_max: int) -> list[LogChunk]:
        await asyncio.sleep(0.001)
        found = [chunk for job, chunk in self.positions if job == job_id and chunk.position > after]
        taken: list[LogChunk] = []
        for chunk in found:
            if taken and sum(len(other.data) for other in taken) + len(chunk.data) > bytes_max:
                break
            taken.append(chunk)
        return taken

    async def job(self, job_id: JobId) -> Job | None:
        return a_job(id=job_id, status=self.status)

    def text(self, stream: Stream, job_id: JobId = JOB) -> bytes:
        chunks = sorted(
            (chunk for job, chunk in self.positions if job == job_id and chunk.stream is stream),
            key=lambda chunk: chunk.position if stream is Stream.SYSTEM else chunk.offset,
        )
        end = 0
        for chunk in chunks:
            if stream is not Stream.SYSTEM:
                assert chunk.offset == end, "output has a gap or an overlap"
            end = chunk.offset + len(chunk.data)
        return b"".join(chunk.data for chunk in chunks)


def chunk(job_id: JobId, stream: Stream, offset: int, data: bytes) -> NewChunk:
    return NewChunk(job_id=job_id, stream=stream, offset=offset, data=data)


def logs_on(storage: SlowStorage, metrics: Metrics | None = None) -> LogStore:
    return LogStore(store=storage, entropy=SeededEntropy(1), metrics=metrics)


@virtual
async def test_the_answer_comes_after_the_commit_and_tells_the_end_of_what_is_stored() -> None:
    storage, metrics = SlowStorage(), Metrics()
    logs = logs_on(storage, metrics)
    assert await logs.append(chunk(JOB, OUT, 0, b"hello ")) == 6
    assert await logs.append(chunk(JOB, OUT, 6, b"world")) == 11
    assert await logs.append(chunk(JOB, ERR, 0, b"!")) == 1
    assert storage.text(OUT) == b"hello world"
    assert storage.text(ERR) == b"!"
    assert b"kici_orch_log_bytes_total 12.0" in metrics.render()


@virtual
async def test_what_is_sent_again_is_stored_once() -> None:
    logs = logs_on(storage := SlowStorage())
    await logs.append(chunk(JOB, OUT, 0, b"hello"))
    assert await logs.append(chunk(JOB, OUT, 0, b"hello")) == 5
    assert await logs.append(chunk(JOB, OUT, 2, b"llo world")) == 11
    assert storage.text(OUT) == b"hello world"
    assert len(storage.batches) == 2


@virtual
async def test_a_repetition_is_answered_only_when_the_first_copy_is_committed() -> None:
    logs = logs_on(storage := SlowStorage())
    async with asyncio.TaskGroup() as group:
        group.create_task(logs.append(chunk(JOB, OUT, 0, b"hello")))
        await asyncio.sleep(0.02)
        assert await logs.append(chunk(JOB, OUT, 0, b"hello")) == 5
        assert storage.text(OUT) == b"hello"


@virtual
async def test_a_gap_is_refused_and_names_where_to_go_on() -> None:
    logs = logs_on(storage := SlowStorage())
    await logs.append(chunk(JOB, OUT, 0, b"hello"))
    with pytest.raises(LogGap, match=r"job-1, stream stdout: .* send from 5") as refused:
        await logs.append(chunk(JOB, OUT, 6, b"x"))
    assert refused.value.expected == 5
    assert storage.text(OUT) == b"hello"


@virtual
async def test_agents_cannot_write_the_orchestrators_own_lines() -> None:
    with pytest.raises(Denied, match="system"):
        await logs_on(SlowStorage()).append(chunk(JOB, Stream.SYSTEM, 0, b"forged"))


@virtual
async def test_marks_are_read_from_the_store_when_they_are_not_known() -> None:
    storage = SlowStorage()
    await logs_on(storage).append(chunk(JOB, OUT, 0, b"hello"))
    restarted = logs_on(storage)
    assert await restarted.append(chunk(JOB, OUT, 3, b"lo world")) == 11
    assert storage.text(OUT) == b"hello world"


@virtual
async def test_what_another_coordinator_stored_meanwhile_is_no_gap() -> None:
    storage = SlowStorage()
    here, there = logs_on(storage), logs_on(storage)
    await here.append(chunk(JOB, OUT, 0, b"one "))
    await there.append(chunk(JOB, OUT, 4, b"two "))
    assert await here.append(chunk(JOB, OUT, 8, b"three")) == 13
    assert storage.text(OUT) == b"one two three"


@virtual
async def test_a_write_that_another_coordinator_overtook_is_repeated_from_where_that_one_ended() -> None:
    storage = SlowStorage()
    here, there = logs_on(storage), logs_on(storage)
    await here.append(chunk(JOB, OUT, 0, b"one "))
    assert await there.resume(JOB) == {OUT: 4, ERR: 0}
    late = asyncio.create_task(here.append(chunk(JOB, OUT, 4, b"two")))  # of a connection that is superseded
    await asyncio.sleep(0.02)
    assert await there.append(chunk(JOB, OUT, 4, b"two three")) == 13
    assert await late >= 7
    assert storage.text(OUT) == b"one two three"


@virtual
async def test_a_returning_agent_resumes_where_the_store_ends() -> None:
    storage = SlowStorage()
    here, there = logs_on(storage), logs_on(storage)
    async with asyncio.TaskGroup() as group:
        group.create_task(here.append(chunk(JOB, OUT, 0, b"one ")))
        await asyncio.sleep(0.02)
        assert await here.resume(JOB) == {OUT: 4, ERR: 0}  # after what was under way
    await there.append(chunk(JOB, OUT, 4, b"two "))
    assert await here.resume(JOB) == {OUT: 8, ERR: 0}


@virtual
async def test_chunks_that_come_during_a_write_share_the_next_one() -> None:
    logs = logs_on(storage := SlowStorage())
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(logs.append(chunk(JobId(f"other-{number}"), OUT, 0, b"x")))
    assert sum(len(batch) for batch in storage.batches) == len(storage.positions)
    assert len(storage.batches) <= 3


@virtual
async def test_a_full_batch_makes_callers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_store, "BATCH_BYTES_MAX", 100)
    logs = logs_on(storage := SlowStorage())
    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(logs.append(chunk(JobId(f"job-{number}"), OUT, 0, b"x" * 20)))
    assert len(storage.positions) == 50
    assert max(sum(len(chunk.data) for chunk in batch) for batch in storage.batches) <= 100


@virtual
async def test_after_a_failed_write_everything_queued_fails_and_may_be_sent_again() -> None:
    logs = logs_on(storage := SlowStorage())
    await logs.append(chunk(JOB, OUT, 0, b"a"))
    storage.is_down = True
    outcomes: list[str] = []

    async def send(job_id: JobId, offset: int, data: bytes) -> None:
        try:
            await logs.append(chunk(job_id, OUT, offset, data))
        except StoreDown:
            outcomes.append("down")

    async with asyncio.TaskGroup() as group:
        group.create_task(send(JOB, 1, b"b"))
        await asyncio.sleep(0.02)
        group.create_task(send(JOB, 2, b"c"))
        group.create_task(send(OTHER, 0, b"z"))
    assert outcomes == ["down"] * 3
    storage.is_down = False
    assert await logs.append(chunk(JOB, OUT, 1, b"b")) == 2
    assert await logs.append(chunk(JOB, OUT, 2, b"c")) == 3
    assert storage.text(OUT) == b"abc"
    assert storage.text(OUT, OTHER) == b""


@virtual
async def test_a_write_whose_answer_was_lost_is_not_doubled_by_a_longer_repetition() -> None:
    logs = logs_on(storage := SlowStorage())
    storage.loses_answers = True
    with pytest.raises(StoreDown):
        await logs.append(chunk(JOB, OUT, 0, b"hello"))
    storage.loses_answers = False
    assert await logs.append(chunk(JOB, OUT, 0, b"hello world")) == 11
    assert storage.text(OUT) == b"hello world"


@virtual
async def test_a_store_that_never_answers_is_given_up_and_not_waited_for_again() -> None:
    logs = logs_on(storage := SlowStorage())
    storage.write_seconds = 1e6
    with pytest.raises(StoreDown, match="did not finish within 30 s"):
        await logs.append(chunk(JOB, OUT, 0, b"hello"))
    storage.write_seconds = 0.1
    assert await logs.append(chunk(JOB, OUT, 0, b"hello")) == 5


@virtual
async def test_a_cancelled_writer_does_not_take_the_others_with_it() -> None:
    logs = logs_on(storage := SlowStorage())
    async with asyncio.TaskGroup() as group:
        first = group.create_task(logs.append(chunk(JOB, OUT, 0, b"first")))
        second = group.create_task(logs.append(chunk(OTHER, OUT, 0, b"second")))
        await asyncio.sleep(0.05)
        first.cancel()
    assert first.cancelled()
    assert second.result() == 6
    assert storage.text(OUT) == b"first"


@virtual
async def test_notes_of_two_coordinators_are_all_kept_and_break_no_output() -> None:
    storage = SlowStorage()
    here = logs_on(storage)
    there = LogStore(store=storage, entropy=SeededEntropy(2))
    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(here.note(JOB, f"here {number}"))
            group.create_task(there.note(JOB, f"there {number}\nand more"))
    assert sorted(storage.text(Stream.SYSTEM).decode().splitlines()) == [
        *(f"here {number}" for number in range(5)),
        *(f"there {number} and more" for number in range(5)),
    ]
    storage.is_down = True
    assert await here.note(JOB, "lost") is False


@virtual
async def test_memory_is_bounded_and_forgotten_marks_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_store, "JOBS_MAX", 2)
    logs = logs_on(storage := SlowStorage())
    for job_id in (JOB, OTHER, JobId("job-3")):
        await logs.append(chunk(job_id, OUT, 0, b"x"))
    assert storage.loads == 3
    assert await logs.append(chunk(JOB, OUT, 1, b"y")) == 2
    assert storage.loads == 4
    logs.forget(JOB)
    assert await logs.append(chunk(JOB, OUT, 2, b"z")) == 3
    assert storage.text(OUT) == b"xyz"


async def first_of(chunks: AsyncIterator[LogChunk]) -> LogChunk:
    return await anext(chunks)


async def everything(logs: LogStore, after: int = 0) -> bytes:
    return b"".join([chunk.data async for chunk in logs.follow(JOB, after=after)])


@virtual
async def test_a_follower_sees_output_at_once_and_leaves_when_the_job_is_over() -> None:
    storage = SlowStorage()
    storage.write_seconds = 0
    logs = logs_on(storage)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        following = group.create_task(everything(logs))
        await logs.append(chunk(JOB, OUT, 0, b"one "))
        await asyncio.sleep(30)
        async with aclosing(logs.follow(JOB)) as chunks:
            await anext(chunks)
            before = loop.time()
            group.create_task(logs.append(chunk(JOB, OUT, 4, b"two")))
            assert (await anext(chunks)).data == b"two"
            assert loop.time() - before < 0.1
        storage.status = JobStatus.SUCCESS
        logs.wake(JOB)
        before = loop.time()
        assert await following == b"one two"
        assert loop.time() - before < 0.1


@virtual
async def test_a_follower_finds_what_another_coordinator_stored_within_a_second() -> None:
    storage = SlowStorage()
    here, there = logs_on(storage), logs_on(storage)
    async with aclosing(here.follow(JOB)) as chunks:
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(first_of(chunks))
            await asyncio.sleep(10)
            await there.append(chunk(JOB, OUT, 0, b"remote"))
            before = asyncio.get_running_loop().time()
        assert waiting.result().data == b"remote"
        assert asyncio.get_running_loop().time() - before <= 1.1


@virtual
async def test_following_a_finished_job_gives_all_of_it_and_ends() -> None:
    logs = logs_on(storage := SlowStorage())
    for offset in range(10):
        await logs.append(chunk(JOB, OUT, offset, b"%d" % offset))
    storage.status = JobStatus.FAILED
    assert await everything(logs) == b"0123456789"
    assert await everything(logs, after=5) == b"56789"


@virtual
async def test_followers_are_limited_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_store, "FOLLOWERS_MAX", 1)
    storage = SlowStorage()
    logs = logs_on(storage)
    await logs.append(chunk(JOB, OUT, 0, b"x"))
    async with aclosing(logs.follow(JOB)) as first:
        await anext(first)
        with pytest.raises(NoCapacity):
            await everything(logs)
    async with aclosing(logs.follow(JOB)) as again:
        assert (await anext(again)).data == b"x"
