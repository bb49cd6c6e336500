"""What happens to a job between its claim and its end.

Each move is one guarded write of the store; what follows from it (telling agents, offering dependents, giving
computes back) happens here, in one place, whichever way the job ended.
"""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from kici.domain.errors import KiciError, StoreDown
from kici.domain.ids import AgentId, InstanceId, JobId, RunId
from kici.domain.job import HELD_BY_AGENT, STARTED, TERMINAL, Job, JobStatus, Outcome
from kici.observe.events import Event, emit
from kici.ports.store import Cancelled, Finished, JobStore
from kici.services.dispatcher import Dispatcher
from kici.services.job_start import JobStarts
from kici.services.job_watch import JobWatch
from kici.services.registry import AgentRegistry, ConnectedAgent
from kici.wire.messages import JobCancel, JobStart, JobStatusAck, JobStatusReport

DRAINING: Final = "draining"
"""The reason with which an agent declines a job for good."""
_ENDS_FROM: Final = {
    JobStatus.FAILED: frozenset({JobStatus.RUNNING, JobStatus.RECOVERING}),
    JobStatus.CANCELLED: frozenset({JobStatus.CANCELLING}),
}


class ComputeOwner(Protocol):
    """What the scaler wants to hear about jobs."""

    def job_over(self, job: Job) -> None:
        """The job ended: a compute that is still being made for it has lost its purpose."""
        ...

    def capacity_freed(self) -> None: ...


class NoComputes:
    """For coordinators that scale nothing."""

    def job_over(self, job: Job) -> None:
        pass

    def capacity_freed(self) -> None:
        pass


class JobLifecycle:
    def __init__(
        self,
        *,
        store: JobStore,
        registry: AgentRegistry,
        dispatcher: Dispatcher,
        starts: JobStarts,
        watch: JobWatch,
        instance_id: InstanceId,
    ) -> None:
        self._store = store
        self._registry = registry
        self._dispatcher = dispatcher
        self._starts = starts
        self._watch = watch
        self._instance_id = instance_id
        self.computes: ComputeOwner = NoComputes()
        """Set by the composition root."""
        self.may_start: Callable[[ConnectedAgent], Awaitable[bool]] = _always
        """Set by the sessions of agents: whether a job may start on one.  Else it is sent away.  Raises `StoreDown`."""
        dispatcher.gave_up = self._ended

    async def acknowledged(self, agent: ConnectedAgent, job_id: JobId) -> None:
        """The agent has the job: commit `running`, then let it start.  Otherwise it must forget the job."""
        if not await self.may_start(agent):
            return
        job = agent.jobs.get(job_id)
        if job is None:
            self.drop(agent, job_id, "this job is not yours")
            return
        message = await self._start_message(agent, job)
        if message is None:
            return
        # For this claim only: the agent may have lost the job meanwhile, and been offered it anew.
        started = await self._store.start_job(job_id, agent.agent_id, offer=job.offers, instance_id=self._instance_id)
        if started is None:
            self.drop(agent, job_id, "the job was taken back before you acknowledged it")
            return
        agent.jobs[job_id] = started
        self._watch.changed(job_id)
        emit(Event.JOB_STARTED, job_id=job_id, run_id=job.run_id, agent_id=agent.agent_id)
        agent.seat.send(message)

    async def start_again(self, agent: ConnectedAgent, job: Job) -> None:
        """The start message was lost with a connection: the agent waits, `running` is committed already."""
        if not await self.may_start(agent):
            return
        message = await self._start_message(agent, job)
        if message is not None:
            agent.seat.send(message)

    async def _start_message(self, agent: ConnectedAgent, job: Job) -> JobStart | None:
        """None when the job cannot start on this agent: then it is over, and says why."""
        try:
            return await self._starts.message(job, agent.shape)
        except StoreDown:
            raise
        except KiciError as error:
            await self._refuse_start(agent, job, str(error))
            return None

    def drop(self, agent: ConnectedAgent, job_id: JobId, why: str) -> None:
        """Tell an agent to kill and forget a job.  It keeps its slot until it reports that it did."""
        agent.seat.send(JobCancel(job_id=job_id, reason=why, grace_ms=0, force=True))

    async def rejected(self, agent: ConnectedAgent, job_id: JobId, reason: str) -> None:
        """The agent does not want the job: it goes back to its place.  This agent is not asked again for now."""
        job = agent.jobs.get(job_id)
        if job is None:
            return
        if reason == DRAINING:
            agent.draining = True
        else:
            self._dispatcher.rest(agent)
        await self._dispatcher.requeue(job, reason=f"agent {agent.agent_id} declined it: {reason}")
        self._registry.done(agent, job_id)

    async def said(self, agent: ConnectedAgent, *, draining: bool) -> None:
        """The agent tells how it is: it takes no more jobs, or may be asked again."""
        agent.draining = draining
        self._dispatcher.has_room(agent)
        await self._dispatcher.drain(agent)

    async def reported(self, agent: ConnectedAgent, report: JobStatusReport) -> bool:
        """A final status.  Acknowledged after commit, or when this agent has no such job.  Whether it was the end."""
        outcome = Outcome(
            status=JobStatus(report.state), exit_code=report.exit_code, signal=report.signal, reason=report.reason
        )
        finished = await self._store.finish_job(
            JobId(report.job_id), outcome, agent_id=agent.agent_id, from_statuses=STARTED
        )
        agent.seat.send(JobStatusAck(job_id=report.job_id))
        self._registry.done(agent, JobId(report.job_id))
        self._dispatcher.has_room(agent)
        if finished is None:
            await self._freed(agent)
        else:
            await self.over(finished, freed=agent)
        return finished is not None

    async def end(
        self,
        job_id: JobId,
        outcome: Outcome,
        *,
        agent_id: AgentId,
        from_statuses: frozenset[JobStatus],
        seen: Job | None = None,
    ) -> bool:
        """End a job on its agent's behalf: the agent is gone or cannot run it.  `seen`: see the store."""
        finished = await self._store.finish_job(
            job_id, outcome, agent_id=agent_id, from_statuses=from_statuses, seen=seen
        )
        if finished is not None:
            await self.over(finished)
        return finished is not None

    async def end_lost(self, seen: Job, outcome: Outcome) -> bool:
        """End a job that its agent lost, unless it moved since it was `seen`; as cancelled, if that is wished now."""
        if await self._end_seen(seen, outcome):
            return True
        if outcome.status is JobStatus.CANCELLED:
            return False
        return await self._end_seen(seen, Outcome(status=JobStatus.CANCELLED, reason=outcome.reason))

    async def _end_seen(self, seen: Job, outcome: Outcome) -> bool:
        assert seen.agent_id is not None, seen
        sources = _ENDS_FROM[outcome.status]
        return await self.end(seen.id, outcome, agent_id=seen.agent_id, from_statuses=sources, seen=seen)

    async def cancelled(self, moved: Cancelled, *, reason: str) -> None:
        """Follow up a cancel request: what ended loses its agents.  Those of started jobs are told by `stop`."""
        for job in moved.ended:
            self._ended(job)
            agent = self._holder(job)
            if agent is None:
                continue
            if agent.jobs[job.id] is not None:
                self.drop(agent, job.id, reason)
            else:  # its claim is under way, and nobody has told the agent yet
                self._registry.take_back(agent, job.id)
                await self._freed(agent)
        for job in moved.told:
            self._watch.changed(job.id)

    def stop(self, run_id: RunId, job_id: JobId | None, *, reason: str, force: bool) -> None:
        """Tell the agents here that have jobs of a run, or one of them, to stop; again, if they were told before."""
        for agent in self._registry:
            for job in agent.jobs.values():
                if job is not None and job.run_id == run_id and job_id in (None, job.id):
                    agent.seat.send(JobCancel(job_id=job.id, reason=reason, force=force))

    async def over(self, finished: Finished, *, freed: ConnectedAgent | None = None) -> None:
        """Everything that follows from the end of a job, whichever way it ended.

        `freed` has room for another job since: the oldest one, be it released just now or not.
        """
        self._ended(finished.job)
        for job_id in finished.skipped:
            self._watch.changed(job_id)
        released = [job for job_id in finished.released if (job := await self._released(job_id)) is not None]
        for job in released:
            self._watch.changed(job.id)
            self._dispatcher.note(job)
        taken = None if freed is None else await self._freed(freed)
        for job in released:
            if taken is None or taken.id != job.id:
                await self._dispatcher.offer(job)

    async def _released(self, job_id: JobId) -> Job | None:
        """A job that waits no longer for others.  The re-drive finds those that the store does not show now."""
        try:
            job = await self._store.job(job_id)
        except StoreDown as error:
            emit(Event.STORE_DOWN, job_id=job_id, error=str(error))
            return None
        return job if job is not None and job.status is JobStatus.QUEUED else None

    def _ended(self, job: Job) -> None:
        assert job.status in TERMINAL, job
        emit(
            Event.JOB_FINISHED,
            job_id=job.id,
            run_id=job.run_id,
            agent_id=job.agent_id,
            status=job.status,
            exit_code=job.exit_code,
            reason=job.reason,
        )
        self._watch.changed(job.id)
        self.computes.job_over(job)

    def _holder(self, job: Job) -> ConnectedAgent | None:
        agent = None if job.agent_id is None else self._registry.get(job.agent_id)
        return agent if agent is not None and job.id in agent.jobs else None

    async def _refuse_start(self, agent: ConnectedAgent, job: Job, why: str) -> None:
        """End it first: once the agent has dropped it, it can no longer be started either."""
        await self.end(
            job.id,
            Outcome(status=JobStatus.FAILED, reason=why),
            agent_id=agent.agent_id,
            from_statuses=HELD_BY_AGENT,
        )
        self.drop(agent, job.id, "it cannot start")

    async def _freed(self, agent: ConnectedAgent) -> Job | None:
        """An agent may have room: give it the oldest job that fits.  Which one."""
        if not agent.is_free:
            return None
        self.computes.capacity_freed()
        return await self._dispatcher.drain(agent)


async def _always(agent: ConnectedAgent) -> bool:
    return True
