"""Which demand classes have jobs waiting, so that a free agent asks the store only for what it can take.

A hint, kept by what this coordinator hears and by a poll; the store's claim is the truth.  Its size is the
number of classes with waiting jobs, however many jobs wait in each.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from typing import Final

from kici.domain.ids import ClassId, OrgId
from kici.domain.job import Demand, Job, WaitingClass
from kici.ports.store import JobStore

CLASSES_MAX: Final = 2000


class DemandIndex:
    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._classes: dict[ClassId, WaitingClass] = {}
        self._heard: dict[ClassId, int] = {}
        self._count = 0

    def __iter__(self) -> Iterator[WaitingClass]:
        return iter(list(self._classes.values()))

    def __len__(self) -> int:
        return len(self._classes)

    def note(self, job: Job) -> None:
        """A job of this class is queued."""
        self._count += 1
        self._heard[job.class_id] = self._count
        known = self._classes.get(job.class_id)
        if known is None or job.seq < known.oldest_seq:
            self._classes[job.class_id] = WaitingClass(
                class_id=job.class_id, demand=job.demand, oldest_seq=job.seq, oldest_job=job.id
            )

    def fitting(self, fits: Callable[[Demand], bool], *, limit: int) -> list[ClassId]:
        """Classes with waiting jobs that `fits` accepts: those with the oldest jobs."""
        found = [known for known in self._classes.values() if fits(known.demand)]
        if len(found) > limit:
            found = nsmallest(limit, found, key=lambda known: known.oldest_seq)
        return [known.class_id for known in found]

    def orgs(self, class_ids: Iterable[ClassId]) -> set[OrgId]:
        """Whose jobs these classes are."""
        return {self._classes[class_id].demand.org for class_id in class_ids}

    def mark(self) -> int:
        """A point in what was heard: pass it to `gone`."""
        return self._count

    def gone(self, class_ids: list[ClassId], since: int) -> None:
        """The store had nothing to claim in these classes, asked after `since`."""
        for class_id in class_ids:
            if self._heard.get(class_id, 0) <= since:
                self._classes.pop(class_id, None)
                self._heard.pop(class_id, None)

    async def refresh(self) -> None:
        """Take over what the store says."""
        since = self._count
        waiting = await self._store.waiting_classes(limit=CLASSES_MAX)
        fresh = {known.class_id: known for known in waiting}
        for class_id, known in self._classes.items():
            if class_id not in fresh and self._heard.get(class_id, 0) > since:
                fresh[class_id] = known
        self._classes = fresh
        self._heard = {class_id: count for class_id, count in self._heard.items() if class_id in fresh}
