"""Job output: bytes of a stream at an offset."""

from dataclasses import dataclass
from enum import IntEnum

from kici.domain.ids import Instant, JobId


class Stream(IntEnum):
    STDOUT = 1
    STDERR = 2
    SYSTEM = 3
    """Lines of the orchestrator about the job: spawn progress, loss, requeue.

    Written by any coordinator, one chunk for each line; their offsets only tell them apart.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    """Bytes of one stream of a job, starting at `offset` of that stream."""

    job_id: JobId
    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChunk:
    """A stored chunk.  `position` orders all chunks of a job as they arrived; followers resume after one."""

    position: int
    stream: Stream
    offset: int
    data: bytes
    received_at: Instant
