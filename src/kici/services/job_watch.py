"""Who waits for a job to change: long polls and followers of this process.

Hints only: a change made by another coordinator is not heard here, so every waiter also polls.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kici.domain.ids import JobId


class JobWatch:
    def __init__(self) -> None:
        self._waiting: dict[JobId, set[asyncio.Event]] = {}

    def changed(self, job_id: JobId) -> None:
        for event in self._waiting.get(job_id, ()):
            event.set()

    @asynccontextmanager
    async def watching(self, job_id: JobId) -> AsyncIterator[asyncio.Event]:
        """An event that is set when the job changes; clear it before looking again."""
        event = asyncio.Event()
        self._waiting.setdefault(job_id, set()).add(event)
        try:
            yield event
        finally:
            waiting = self._waiting[job_id]
            waiting.discard(event)
            if not waiting:
                del self._waiting[job_id]
