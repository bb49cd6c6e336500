"""What the clock does to waiting and offered jobs.

Acknowledgements that did not come, queue times that ran out, jobs that nothing could ever run.  Every pass is
safe to repeat and safe on several coordinators: each move is a guarded write.
"""

from collections.abc import Callable
from typing import Final, Never

from kici.decide.dispatch import LossCause
from kici.domain.ids import JobId
from kici.domain.job import Demand, Job, JobStatus, Outcome, WaitingClass
from kici.domain.say import say
from kici.domain.scale import NoBackend
from kici.domain.verdict import Verdict
from kici.ports.clock import Clock
from kici.ports.store import JobFilter, JobStore
from kici.services.agent_sessions import AgentSessions
from kici.services.demand_index import DemandIndex
from kici.services.dispatcher import Dispatcher
from kici.services.job_lifecycle import JobLifecycle
from kici.services.registry import AgentRegistry
from kici.services.scaler_manager import ScalerManager
from kici.services.store_outages import sits_out_outages
from kici.wire.messages import CloseCode

INTERVAL_SECONDS: Final = 1.0
BATCH: Final = 200
IDLE_MATCH_SECONDS: Final = 10.0
STUCK_CANCEL_SECONDS: Final = 240.0
"""Long enough for every grace of an agent and one lost connection."""
PROBE_SECONDS_MIN: Final = 5.0
PROBE_SECONDS_MAX: Final = 30.0


class QueueSweeper:
    def __init__(
        self,
        *,
        store: JobStore,
        registry: AgentRegistry,
        demands: DemandIndex,
        dispatcher: Dispatcher,
        lifecycle: JobLifecycle,
        sessions: AgentSessions,
        manager: ScalerManager,
        clock: Clock,
        unroutable_grace_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._registry = registry
        self._demands = demands
        self._dispatcher = dispatcher
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._manager = manager
        self._clock = clock
        self._unroutable_grace_ms = unroutable_grace_ms
        self._matched_at = 0.0
        self._probed_at = 0.0
        self._cancelling: dict[JobId, float] = {}
        """Since when (monotonic: a jump of the wall clock must not end a job) agents here hold cancelled jobs."""
        self.leads: Callable[[], bool] = lambda: True
        """Whether this coordinator does what one must do for all."""
        self.watches: Callable[[Job], bool] = lambda job: True
        """Whether an offer is ours to watch: we made it, or whoever did is gone and we lead."""
        self.is_served_elsewhere: Callable[[Demand], bool] = lambda demand: False
        """Whether another coordinator could serve such a job."""

    async def run(self) -> Never:
        """Sweep for ever.  Leave by cancellation."""
        while True:
            await self._clock.sleep(INTERVAL_SECONDS)
            with sits_out_outages("queue sweep"):
                await self.tick()

    async def tick(self) -> None:
        """One pass over everything that is due."""
        for job in await self._store.overdue_acks(limit=BATCH):
            if self.watches(job):
                await self._ack_overdue(job)
        for finished in await self._store.expire_queued(limit=BATCH):
            await self._lifecycle.over(finished)
        now = self._clock.monotonic()
        if now - self._matched_at >= IDLE_MATCH_SECONDS:
            self._matched_at = now
            await self._match_idle()
            await self._settle_cancels()
        grace_ms = self._unroutable_grace_ms()
        pause = min(max(grace_ms / 4000, PROBE_SECONDS_MIN), PROBE_SECONDS_MAX)
        if grace_ms and self.leads() and now - self._probed_at >= pause:
            self._probed_at = now
            await self._probe(grace_ms)

    async def _ack_overdue(self, job: Job) -> None:
        """The agent leaves the registry before its job is offered again.  Of one that is away, the grace decides."""
        assert job.agent_id is not None, job
        if self._sessions.waits_for(job.agent_id):
            return
        why = "it did not acknowledge its job in time"
        dismissed = await self._sessions.dismiss(
            job.agent_id, cause=LossCause.ACK_TIMEOUT, code=CloseCode.ACK_TIMEOUT, why=why
        )
        if not dismissed:
            await self._dispatcher.requeue(job, reason=f"agent {job.agent_id} was lost: {why}")

    async def _settle_cancels(self) -> None:
        """End jobs whose agents are connected here and do not end them although they were told to."""
        now, before = self._clock.monotonic(), self._cancelling
        self._cancelling = {}
        for job in await self._store.jobs(JobFilter(status=JobStatus.CANCELLING, limit=BATCH)):
            agent = None if job.agent_id is None else self._registry.get(job.agent_id)
            if agent is None or job.id not in agent.jobs:
                continue
            since = self._cancelling[job.id] = before.get(job.id, now)
            if now - since < STUCK_CANCEL_SECONDS:
                continue
            why = f"agent {agent.agent_id} did not end its cancelled job within {STUCK_CANCEL_SECONDS:g} s"
            outcome = Outcome(status=JobStatus.CANCELLED, reason=why)
            await self._lifecycle.end(
                job.id, outcome, agent_id=agent.agent_id, from_statuses=frozenset({JobStatus.CANCELLING})
            )
            # When it comes back, it is told to drop the job.
            await self._sessions.dismiss(
                agent.agent_id, cause=LossCause.CONNECTION_CLOSED, code=CloseCode.INTERNAL, why=why
            )

    async def _match_idle(self) -> None:
        """A net under lost hints: waiting classes against agents that are idle here."""
        await self._demands.refresh()
        if any(self._registry.has_idle(waiting.demand) for waiting in self._demands):
            for agent in self._registry:
                if agent.is_free:
                    await self._dispatcher.drain(agent)

    async def _probe(self, grace_ms: int) -> None:
        """Jobs that no agent and no scaler could run, now or when others end: end them after the grace."""
        for waiting in await self._store.waiting_classes(limit=BATCH):
            obstacle = self._obstacle(waiting)
            if obstacle is None:
                await self._store.clear_unroutable(waiting.class_id)
                continue
            await self._store.mark_unroutable(waiting.class_id)
            why = say(obstacle, now=self._clock.now())
            ended = await self._store.expire_unroutable(
                waiting.class_id,
                grace_ms=grace_ms,
                reason=f"no agent and no scaler could run it within {grace_ms / 1000:g} s: {why}",
                limit=BATCH,
            )
            for finished in ended:
                await self._lifecycle.over(finished)

    def _obstacle(self, waiting: WaitingClass) -> Verdict | None:
        """Why nothing could ever run such a job; None: something could, now or when others end."""
        if self._registry.could_serve(waiting.demand) or self.is_served_elsewhere(waiting.demand):
            return None
        answer = self._manager.judge(waiting.demand)
        return answer.verdict if isinstance(answer, NoBackend) else None
