"""Why a job is where it is: every reason that can be found here, nearest to running first.

Computed when asked, from the same functions that decide, so that it cannot disagree with them.
"""

from collections.abc import Callable
from typing import assert_never

import msgspec

from kici.domain.ids import Instant
from kici.domain.job import TERMINAL, Job, JobStatus
from kici.domain.scale import AtCapacity, Failed, NoBackend, Skipped, Spawning
from kici.domain.verdict import (
    AgentsBusy,
    Dispatched,
    Running,
    SpawnBooting,
    Unroutable,
    Verdict,
    WaitingForNeeds,
    nearest_first,
)
from kici.ports.store import JobStore
from kici.services.launch_failures import LaunchFailures
from kici.services.registry import AgentRegistry
from kici.services.scaler_manager import ScalerManager


class Explain:
    def __init__(
        self,
        *,
        store: JobStore,
        registry: AgentRegistry,
        manager: ScalerManager,
        failures: LaunchFailures,
        unroutable_grace_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._registry = registry
        self._manager = manager
        self._failures = failures
        self._unroutable_grace_ms = unroutable_grace_ms

    async def verdicts(self, job: Job) -> list[Verdict]:
        """All that holds, nearest to running first; empty for a job that is over."""
        if job.status is JobStatus.PENDING:
            ended = await self._store.ended_jobs(job.needs)
            return [WaitingForNeeds(needs=tuple(need for need in job.needs if need not in ended))]
        return nearest_first(self.now(job))

    def now(self, job: Job) -> list[Verdict]:
        """What memory says; nothing for a pending job or one that is over."""
        match job.status:
            case JobStatus.RUNNING | JobStatus.RECOVERING | JobStatus.CANCELLING if job.agent_id is not None:
                return [Running(agent_id=job.agent_id)]
            case JobStatus.DISPATCHED if job.agent_id is not None:
                return [Dispatched(agent_id=job.agent_id)]
            case JobStatus.QUEUED:
                return self._waiting(job)
            case _:
                assert job.status in TERMINAL or job.status is JobStatus.PENDING, job
                return []

    def booting(self, job: Job) -> SpawnBooting | None:
        """The agent that is being made for a queued job.  Nothing else that holds for such a job is nearer."""
        found = self._manager.booting_for(job.id) if job.status is JobStatus.QUEUED else None
        return None if found is None else msgspec.structs.replace(found, trouble=job.last_provisioning_error)

    def _waiting(self, job: Job) -> list[Verdict]:
        booting = self.booting(job)
        if booting is not None:
            return [booting, *self._manager.refusals(job.demand, before=booting.scaler)]
        found: list[Verdict] = []
        serving = self._registry.serving(job.demand)
        if serving:
            found.append(AgentsBusy(count=serving, labels=tuple(sorted(job.demand.labels))))
        answer = self._manager.judge(job.demand)
        match answer:
            case None | Spawning():
                found += self._manager.lately_full(job.demand)
            case NoBackend(verdict=verdict):
                found.append(verdict)
            case AtCapacity() | Skipped() | Failed():
                found += self._manager.refusals(job.demand)
            case _:
                assert_never(answer)
        failed = self._failures.last_of_job(job.id)
        if failed is not None:
            found.append(failed)
        if isinstance(answer, NoBackend) and not serving and job.unroutable_since is not None:
            found.append(self._unroutable(job, job.unroutable_since))
        return found

    def _unroutable(self, job: Job, since: Instant) -> Unroutable:
        grace_ms = self._unroutable_grace_ms()
        return Unroutable(
            labels=tuple(sorted(job.demand.labels)),
            since=since,
            ends_at=Instant(since + grace_ms) if grace_ms else None,
        )
