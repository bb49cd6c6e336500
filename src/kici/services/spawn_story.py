"""What happens while an agent is made, told to the people of the job that it is for.

An agent that was made without a job (warm) has no people yet: what is known of it waits for its first job, so that
their log says where the agent came from.  Lines are written in order, and those of one moment together, of however
many jobs: one transaction takes them all.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kici.domain.ids import JobId
from kici.domain.job import Job
from kici.kit.supervise import Supervisor
from kici.ports.clock import Clock
from kici.services.spawn_book import TrackedSpawn

GATHER_SECONDS: Final = 0.5
"""From the first line of a moment to its end."""


class SpawnStories:
    def __init__(
        self,
        *,
        write: Callable[[JobId, Sequence[str]], Awaitable[object]],
        supervisor: Supervisor,
        clock: Clock,
    ) -> None:
        """`write(job, lines)` adds lines of the orchestrator to a job's output; it never raises."""
        self._write = write
        self._supervisor = supervisor
        self._clock = clock
        self._gathered: list[TrackedSpawn] = []

    def heard(self, tracked: TrackedSpawn, text: str, *, is_urgent: bool = False) -> None:
        """Something happened to it.  `is_urgent`: nothing else will follow that it should wait for."""
        tracked.story.append(f"{tracked.agent_id}: {text}")
        self._tell(tracked, is_urgent=is_urgent)

    def belongs(self, tracked: TrackedSpawn, job: Job) -> None:
        """Its agent was given this job: what is and will be known of it is for the people of that."""
        tracked.story_of, tracked.story_run = job.id, job.run_id
        self._tell(tracked, is_urgent=False)

    def _tell(self, tracked: TrackedSpawn, *, is_urgent: bool) -> None:
        if tracked.story_of is not None and tracked.story and not tracked.is_being_told:
            tracked.is_being_told = True
            self._gathered.append(tracked)
            if is_urgent:
                self._begin()
            elif len(self._gathered) == 1:
                self._supervisor.start("stories", self._gathering())

    async def _gathering(self) -> None:
        await self._clock.sleep(GATHER_SECONDS)
        self._begin()

    def _begin(self) -> None:
        """Tell all at once, so that their lines go out together."""
        gathered, self._gathered = self._gathered, []
        for tracked in gathered:
            self._supervisor.start(f"story.{tracked.agent_id}", self._telling(tracked))

    async def _telling(self, tracked: TrackedSpawn) -> None:
        try:
            while tracked.story and tracked.story_of is not None:
                lines = list(tracked.story)
                tracked.story.clear()
                await self._write(tracked.story_of, lines)
        finally:
            tracked.is_being_told = False
