"""Why a job is where it is, as all coordinators see it: each is asked what it makes of the job.

One that does not answer in time is left out: an explanation that comes late explains nothing.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from kici.domain.errors import StoreDown
from kici.domain.ids import InstanceId, JobId
from kici.domain.job import Job, JobStatus
from kici.domain.peer import RequestKind
from kici.domain.verdict import NoScalerMatches, Unroutable, Verdict, decode, encode, nearness
from kici.ports.store import JobStore
from kici.services.explain import Explain
from kici.services.peers import PeerView, Requests

ANSWER_SECONDS: Final = 2.0
Found = tuple[InstanceId, Verdict]


class ExplainAll:
    def __init__(
        self, *, explain: Explain, store: JobStore, peers: PeerView, requests: Requests, instance_id: InstanceId
    ) -> None:
        self._explain = explain
        self._store = store
        self._peers = peers
        self._requests = requests
        self._instance_id = instance_id

    async def findings(self, job: Job) -> list[Found]:
        """All that holds anywhere, nearest to running first, one's own before others' equal ones."""
        found = [(self._instance_id, verdict) for verdict in await self._explain.verdicts(job)]
        if job.status is JobStatus.QUEUED:
            async with asyncio.TaskGroup() as group:
                asked = [
                    group.create_task(self._ask(other, job.id), name=f"explain by {other}")
                    for other in sorted(self._peers.others)
                ]
            found += [each for task in asked for each in task.result()]
        return sorted(found, key=lambda each: nearness(each[1]))

    async def nearest(self, job: Job) -> Verdict | None:
        """What this coordinator makes of a job, in a list of many; nothing where only another could serve it."""
        booting = self._explain.booting(job)
        if booting is not None:
            return booting
        verdicts = await self._explain.verdicts(job)
        if not verdicts:
            return None
        is_hopeless = isinstance(verdicts[0], NoScalerMatches | Unroutable)
        return None if is_hopeless and self._peers.could_serve(job.demand) else verdicts[0]

    async def answer(self, payload: Mapping[str, object]) -> object:
        """What another coordinator asked."""
        job = await self._store.job(JobId(str(payload["jobId"])))
        verdicts = [] if job is None else await self._explain.verdicts(job)
        return {"verdicts": [encode(verdict).decode() for verdict in verdicts]}

    async def _ask(self, other: InstanceId, job_id: JobId) -> list[Found]:
        try:
            answer = await self._requests.ask(other, RequestKind.EXPLAIN, {"jobId": job_id}, seconds=ANSWER_SECONDS)
            texts = msgspec.convert(answer, dict[str, list[str]])["verdicts"] if answer else []
        except (StoreDown, msgspec.ValidationError, KeyError):
            return []
        return [(other, verdict) for text in texts if (verdict := decode(text)) is not None]
