"""Runs and jobs for those who submit them: insert, look, wait, cancel."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from kici.domain.access import Actor
from kici.domain.document import JobRequest, SubmitRun
from kici.domain.errors import Conflict, NoCapacity, NotFound, StoreDown
from kici.domain.ids import Instant, JobId, OrgId, RunId
from kici.domain.job import TERMINAL, Job, JobStatus, NewJob, NewRun, Run, RunStatus
from kici.domain.paging import Mark
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.store import Cancelled, JobFilter, JobStore, Submitted
from kici.services.dispatcher import Dispatcher
from kici.services.job_lifecycle import JobLifecycle
from kici.services.job_watch import JobWatch
from kici.services.registry import ConnectedAgent

DEPTH_CACHE_SECONDS: Final = 1.0
POLL_SECONDS: Final = 1.0
OFFERED_AT_ONCE: Final = 64
"""Jobs of one submission that are offered directly; the re-drive finds the others."""


class RemoteHolders(Protocol):
    async def cancelled(
        self, run_id: RunId, job_id: JobId | None, moved: Cancelled, *, force: bool, reason: str
    ) -> None: ...


class JobService:
    def __init__(
        self,
        *,
        store: JobStore,
        dispatcher: Dispatcher,
        lifecycle: JobLifecycle,
        watch: JobWatch,
        supervisor: Supervisor,
        clock: Clock,
        entropy: Entropy,
        queue_depth_max: Callable[[], int],
        queue_timeout_ms: Callable[[OrgId], int],
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._lifecycle = lifecycle
        self._watch = watch
        self._supervisor = supervisor
        self._clock = clock
        self._entropy = entropy
        self._queue_depth_max = queue_depth_max
        self._queue_timeout_ms = queue_timeout_ms
        self._depth = 0
        self._depth_read_at = -DEPTH_CACHE_SECONDS
        self.remote: RemoteHolders | None = None
        """Set by the composition root: who reaches agents that are connected to other coordinators."""
        self._inserted = 0
        self._arriving = 0
        """Jobs that are being inserted: of submissions at one moment, no two take the same place."""

    async def submit(self, request: SubmitRun, actor: Actor, idempotency_key: str | None) -> Submitted:
        """Insert a run and its jobs, in the order of the request, and look for agents.

        `NoCapacity` when the queue is full; `Denied` for secrets of contexts that the actor may not use.
        """
        actor.check_secrets(request.secret_refs())
        await self._check_depth(len(request.jobs))
        self._arriving += len(request.jobs)
        try:
            key = None if idempotency_key is None else f"{actor.token_id or actor.name}|{idempotency_key}"
            return await self._submit(request, by=actor.name, key=key)
        finally:
            self._arriving -= len(request.jobs)

    async def start_run(self, request: SubmitRun, *, by: str, run_id: RunId | None, key: str | None) -> Submitted:
        """A run that nobody submitted: of a workflow whose event came.  As `submit`, for jobs that were judged before.

        `run_id`: the id it gets; `key`: what was started under it before is not started again.
        """
        await self._check_depth(len(request.jobs))
        return await self._submit(request, by=by, key=None if key is None else f"event|{key}", run_id=run_id)

    async def _submit(self, request: SubmitRun, *, by: str, key: str | None, run_id: RunId | None = None) -> Submitted:
        jobs = self._new_jobs(request)
        agent = self._seat(jobs) if key is None else None
        try:
            submitted = await self._store.submit(
                NewRun(
                    id=run_id or RunId(f"run-{self._entropy.hex(8)}"),
                    name=request.name,
                    org=request.org,
                    submitted_by=by,
                ),
                jobs if agent is None else [replace(jobs[0], claimed_by=agent.agent_id)],
                claim=None if agent is None else self._dispatcher.claim_by(agent, request.org),
                idempotency_key=key,
            )
        except StoreDown:
            if agent is not None:
                self._dispatcher.in_doubt(agent, jobs[0].id)  # it may be inserted, as that agent's
            raise
        except BaseException:
            if agent is not None:
                self._dispatcher.unseat(agent, jobs[0].id)
            raise
        if submitted.created:
            emit(Event.JOB_SUBMITTED, run_id=submitted.run_id, jobs=len(jobs), by=by)
            queued = sum(job.status is JobStatus.QUEUED for job in submitted.jobs)
            self._inserted += queued
            self._depth += queued
            await self._find_agents(submitted, agent)
        return submitted

    async def job(self, job_id: JobId) -> Job | None:
        return await self._store.job(job_id)

    async def run(self, run_id: RunId) -> Run | None:
        return await self._store.run(run_id)

    async def jobs(self, which: JobFilter) -> list[Job]:
        return await self._store.jobs(which)

    async def runs(self, *, before: Mark | None, limit: int) -> list[Run]:
        return await self._store.runs(before=before, limit=limit)

    async def cancel_job(self, job_id: JobId, *, force: bool, reason: str) -> Job:
        """The job as it is now.  `NotFound`; `Conflict` when it is over already."""
        job = await self._existing(job_id)
        if job.status in TERMINAL:
            raise Conflict(f"job {job_id} is over already: {job.status}")
        await self._cancel(job.run_id, job_id, force=force, reason=reason)
        return await self._existing(job_id)

    async def cancel_run(self, run_id: RunId, *, force: bool, reason: str) -> Run:
        """The run as it is now.  `NotFound`; `Conflict` when it is over already."""
        run = await self._existing_run(run_id)
        if run.status not in (RunStatus.RUNNING, RunStatus.CANCELLING):
            raise Conflict(f"run {run_id} is over already: {run.status}")
        await self._cancel(run_id, None, force=force, reason=reason)
        return await self._existing_run(run_id)

    async def wait(self, job_id: JobId, seconds: float, *, unlike: JobStatus) -> Job | None:
        """The job once its status differs from `unlike`, or as it is after `seconds`; None when there is none."""
        ends_at = self._clock.monotonic() + seconds
        async with self._watch.watching(job_id) as changed:
            while True:
                changed.clear()
                job = await self._store.job(job_id)
                left = ends_at - self._clock.monotonic()
                if job is None or _shown(job.status) is not _shown(unlike) or left <= 0:
                    return job
                try:
                    async with asyncio.timeout(min(left, POLL_SECONDS)):
                        await changed.wait()
                except TimeoutError:
                    continue

    async def queue(self, limit: int) -> list[Job]:
        """Waiting jobs, first in line first."""
        waiting: list[Job] = []
        for known in await self._store.waiting_classes(limit=limit):
            waiting += await self._store.queued_of_class(known.class_id, limit=limit)
        return sorted(waiting, key=lambda job: job.seq)[:limit]

    async def clear_queue(self, *, reason: str) -> int:
        """Cancel everything that waits.  How many."""
        cleared = 0
        while batch := await self.queue(OFFERED_AT_ONCE):
            for job in batch:
                moved = await self._cancel(job.run_id, job.id, force=False, reason=reason)
                cleared += len(moved.ended)
        return cleared

    async def _cancel(self, run_id: RunId, job_id: JobId | None, *, force: bool, reason: str) -> Cancelled:
        moved = await self._store.cancel(run_id, job_id, reason=reason)
        await self._lifecycle.cancelled(moved, reason=reason)
        self._lifecycle.stop(run_id, job_id, reason=reason, force=force)
        if self.remote is not None:
            await self.remote.cancelled(run_id, job_id, moved, force=force, reason=reason)
        return moved

    async def _check_depth(self, adding: int) -> None:
        now = self._clock.monotonic()
        if now - self._depth_read_at >= DEPTH_CACHE_SECONDS:
            self._depth_read_at = now
            before = self._inserted
            counted = await self._store.queued_count()
            self._depth = counted + self._inserted - before  # those inserted meanwhile may not be counted
        limit = self._queue_depth_max()
        if self._depth + self._arriving + adding > limit:
            raise NoCapacity(
                f"the queue is full: {self._depth} jobs wait and {limit} may, which leaves no room for {adding} more. "
                "Try again later, or raise the setting queue_max_depth"
            )

    def _new_jobs(self, request: SubmitRun) -> list[NewJob]:
        ids = {job.key: JobId(f"job-{self._entropy.hex(8)}") for job in request.jobs}
        return [
            NewJob(
                id=ids[job.key],
                name=job.name,
                demand=job.demand,
                spec=job.spec,
                needs=tuple(ids[need] for need in job.needs),
                expires_at=self._expiry(job),
            )
            for job in request.jobs
        ]

    def _expiry(self, job: JobRequest) -> Instant | None:
        timeout_ms = job.queue_timeout_ms
        if timeout_ms is None:
            timeout_ms = self._queue_timeout_ms(job.demand.org)
        return Instant(self._clock.now() + timeout_ms) if timeout_ms else None

    def _seat(self, jobs: Sequence[NewJob]) -> ConnectedAgent | None:
        """A single job that an idle agent fits is inserted as that agent's: one write instead of two."""
        if len(jobs) != 1:
            return None
        return self._dispatcher.seat(jobs[0].demand, jobs[0].id)

    async def _find_agents(self, submitted: Submitted, agent: ConnectedAgent | None) -> None:
        if agent is not None:
            await self._dispatcher.deliver(agent, submitted.jobs[0])
            return
        queued = [job for job in submitted.jobs if job.status is JobStatus.QUEUED]
        for job in queued[:OFFERED_AT_ONCE]:
            self._supervisor.start(f"offer.{job.id}", self._offer(job))
        for job in queued[OFFERED_AT_ONCE:]:
            self._dispatcher.waits(job)

    async def _offer(self, job: Job) -> None:
        try:
            await self._dispatcher.offer(job)
        except StoreDown as error:  # it is in the queue: the next pass finds it
            emit(Event.STORE_DOWN, job_id=job.id, error=str(error))

    async def _existing(self, job_id: JobId) -> Job:
        job = await self._store.job(job_id)
        if job is None:
            raise NotFound(f"no job {job_id}")
        return job

    async def _existing_run(self, run_id: RunId) -> Run:
        run = await self._store.run(run_id)
        if run is None:
            raise NotFound(f"no run {run_id}")
        return run


def _shown(status: JobStatus) -> JobStatus:
    """People see a dispatched job as queued, so that move wakes nobody."""
    return JobStatus.QUEUED if status is JobStatus.DISPATCHED else status
