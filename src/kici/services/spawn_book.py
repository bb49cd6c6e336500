"""The spawns of this instance: what each one is for, and how far it is.

Memory that can be rebuilt from spawn rows and from what backends find on their hosts.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from kici.domain.ids import AgentId, Instant, JobId, RunId, ScalerName
from kici.domain.spawn import SERVING, Spawn, SpawnState
from kici.services.scaler_runtime import ScalerRuntime

STORY_LINES_MAX: Final = 64
"""Of an agent that has no job yet; the oldest are forgotten first."""


@dataclass(slots=True, kw_only=True, eq=False)
class TrackedSpawn:
    spawn: Spawn
    runtime: ScalerRuntime
    started_at: float | None = None
    """Monotonic seconds at which the semaphore let it start; None: still in line, and not stale however old."""
    is_settled: bool = False
    """The backend's `spawn` returned: there is a compute."""
    is_written: bool = False
    """Its row is in the store."""
    is_unwanted: bool = False
    """Its end was asked for before the row was written: it ends as soon as it is."""
    is_ending: bool = False
    jobs_given: int = 0
    """Jobs that its agent was given, as far as this coordinator knows."""
    given_last: JobId | None = None
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LINES_MAX))
    """What happened to it and was not told yet."""
    story_of: JobId | None = None
    """Whose people are told: the job that it was made for, then the one that it was given last."""
    story_run: RunId | None = None
    is_being_told: bool = False
    task: asyncio.Task[None] | None = None
    """The spawn under way."""
    deadline: asyncio.Timeout | None = None
    """Of the spawn under way; lifted when its agent is there, whatever its backend still waits for."""

    def __post_init__(self) -> None:
        if self.story_of is None:
            self.story_of, self.story_run = self.spawn.bound_job_id, self.spawn.run_id

    @property
    def agent_id(self) -> AgentId:
        return self.spawn.agent_id

    def gives(self, job_id: JobId) -> None:
        """Its agent has this job: counted once, whether it was told of it or is found to hold it."""
        if job_id != self.given_last:
            self.jobs_given += 1
            self.given_last = job_id

    def gets_back(self, job_id: JobId) -> None:
        """The job that it was given last returned to the queue before it began."""
        if job_id == self.given_last:
            self.jobs_given -= 1
            self.given_last = None

    @property
    def is_booting(self) -> bool:
        return self.spawn.state is SpawnState.BOOTING and not self.is_ending


class SpawnBook:
    def __init__(self) -> None:
        self._spawns: dict[AgentId, TrackedSpawn] = {}
        self._serving: dict[JobId, AgentId] = {}
        self._resisting: dict[AgentId, ScalerName] = {}

    def __iter__(self) -> Iterator[TrackedSpawn]:
        return iter(list(self._spawns.values()))

    def __len__(self) -> int:
        return len(self._spawns)

    def get(self, agent_id: AgentId) -> TrackedSpawn | None:
        return self._spawns.get(agent_id)

    def serving(self, job_id: JobId) -> TrackedSpawn | None:
        """The spawn that serves this job.  One whose end has been decided on serves nobody."""
        agent_id = self._serving.get(job_id)
        tracked = None if agent_id is None else self._spawns.get(agent_id)
        return None if tracked is None or tracked.is_ending else tracked

    def add(self, tracked: TrackedSpawn) -> None:
        assert tracked.agent_id not in self._spawns, tracked.agent_id
        self._spawns[tracked.agent_id] = tracked
        job_id = tracked.spawn.bound_job_id
        if job_id is not None and tracked.spawn.state in SERVING:
            self._serving[job_id] = tracked.agent_id

    def registered(self, tracked: TrackedSpawn, at: Instant) -> None:
        tracked.spawn = replace(tracked.spawn, state=SpawnState.REGISTERED, registered_at=at)
        tracked.is_settled = True
        if tracked.deadline is not None and not tracked.deadline.expired():
            tracked.deadline.reschedule(None)

    def ending(self, tracked: TrackedSpawn, reason: str) -> None:
        """It serves its job no longer."""
        tracked.spawn = replace(tracked.spawn, state=SpawnState.ENDING, end_reason=reason)
        self._unserve(tracked)

    def resists(self, tracked: TrackedSpawn) -> None:
        """Its end could not be confirmed: it holds no reservation any more, and still counts as an agent."""
        self._resisting[tracked.agent_id] = tracked.runtime.name

    def yields(self, tracked: TrackedSpawn) -> None:
        """Its compute is known to be gone."""
        self._resisting.pop(tracked.agent_id, None)

    def resisting(self, scaler: ScalerName | None = None) -> int:
        """How many computes, of one scaler or of all, exist without a reservation."""
        return sum(scaler in (None, name) for name in self._resisting.values())

    def remove(self, tracked: TrackedSpawn) -> None:
        if self._spawns.get(tracked.agent_id) is tracked:
            del self._spawns[tracked.agent_id]
        self._unserve(tracked)

    def _unserve(self, tracked: TrackedSpawn) -> None:
        job_id = tracked.spawn.bound_job_id
        if job_id is not None and self._serving.get(job_id) == tracked.agent_id:
            del self._serving[job_id]
