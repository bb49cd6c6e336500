"""The re-drive: which waiting jobs are offered to the scalers again, and in what order.

Works by demand class: the oldest few jobs of each, the oldest of all first.  A class that is refused is out for
the rest of the pass, so a thousand jobs that nobody can serve cost one question, and never keep others waiting.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kici.domain.ids import ClassId, JobId

PER_CLASS_MAX: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One waiting job."""

    seq: int
    job_id: JobId
    class_id: ClassId


class Redrive:
    """One pass.  Iterate over it, and `refuse` the class of a job before taking the next one."""

    def __init__(self, queues: Iterable[Sequence[Waiting]], *, per_class_max: int = PER_CLASS_MAX) -> None:
        """`queues`: the waiting jobs of each class, oldest first."""
        self._queues = [list(queue[:per_class_max]) for queue in queues]
        self._refused: set[ClassId] = set()

    def refuse(self, class_id: ClassId) -> None:
        """This class got no agent: its other jobs would not either."""
        self._refused.add(class_id)

    def __iter__(self) -> Iterator[Waiting]:
        for waiting in heapq.merge(*self._queues, key=lambda waiting: waiting.seq):
            if waiting.class_id not in self._refused:
                yield waiting
