"""A job looks for an agent, an agent looks for a job.

The store's claim decides; this service chooses whom to try and tells the agent.  A slot is taken in memory before
the claim is asked for and given back if it fails, so no agent is tried twice at once.  When the store does not say
what became of a claim, the slot stays taken until it does: the agent may hold a job that nobody told it of.
Nothing starts before the agent acknowledged and `running` is committed (see `job_lifecycle`).
"""

from collections.abc import Callable
from typing import Final, Protocol

from kici.decide.dispatch import ATTEMPTS_MAX
from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, InstanceId, JobId, OrgId, ScalerName
from kici.domain.job import Demand, Job, JobStatus
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.store import Claim, JobStore, Offer
from kici.services.demand_index import DemandIndex
from kici.services.drain_state import DrainState
from kici.services.registry import CLAIMING, AgentRegistry, ConnectedAgent
from kici.services.store_outages import sits_out_outages
from kici.wire.messages import JobDispatch

CLASSES_PER_CLAIM: Final = 200
STORE_RETRY_SECONDS: Final = 1.0
REST_SECONDS: Final = 10.0
"""After which an agent is asked again that declined a job as busy, unless it says before that it has room."""


class ScaleRequests(Protocol):
    """Whom the dispatcher tells of a job that no idle agent here can take."""

    def wanted(self, job: Job) -> None:
        """Ask a scaler for it soon.  Never raises, never waits."""
        ...

    def gave_back(self, agent_id: AgentId, job_id: JobId) -> None:
        """A job returned to the queue from this agent; the spawn that it was made by serves the job no longer."""
        ...


class NoScaling:
    """For coordinators that scale nothing."""

    def wanted(self, job: Job) -> None:
        pass

    def gave_back(self, agent_id: AgentId, job_id: JobId) -> None:
        pass


class Dispatcher:
    def __init__(
        self,
        *,
        store: JobStore,
        registry: AgentRegistry,
        demands: DemandIndex,
        drain: DrainState,
        supervisor: Supervisor,
        clock: Clock,
        instance_id: InstanceId,
        ack_ms: Callable[[OrgId], int],
    ) -> None:
        """`ack_ms(org)`: how long an agent may take to acknowledge a job."""
        self._store = store
        self._registry = registry
        self._demands = demands
        self._drain = drain
        self._supervisor = supervisor
        self._clock = clock
        self._instance_id = instance_id
        self._ack_ms = ack_ms
        self.scale: ScaleRequests = NoScaling()
        """Set by the composition root: scaler and dispatcher know each other."""
        self.queued: Callable[[], None] = lambda: None
        """Told of every job that waits: other coordinators may have an agent for it."""
        self.handed_off: Callable[[ConnectedAgent, Job], None] = lambda agent, job: None
        """Told of every job that an agent was told of."""
        self.gave_back: Callable[[], None] = lambda: None
        """Told of every job that returned to the queue."""
        self.gave_up: Callable[[Job], None] = lambda job: None
        """Told of every job that ended because nobody took it."""

    def claim_by(self, agent: ConnectedAgent, *orgs: OrgId) -> Claim:
        """What a claim for this agent writes, of a job of one of these orgs."""
        return self.claim_of(agent.agent_id, agent.scaler, *orgs)

    def claim_of(self, agent_id: AgentId, scaler: ScalerName | None, *orgs: OrgId) -> Claim:
        """Of several orgs the most patient one counts: whose job it will be is not known yet."""
        ack_ms = max(self._ack_ms(org) for org in orgs)
        return Claim(agent_id=agent_id, instance_id=self._instance_id, ack_ms=ack_ms, scaler=scaler)

    def seat(self, demand: Demand, job_id: JobId) -> ConnectedAgent | None:
        """A slot for a job, taken at once; None while draining or when no idle agent fits."""
        return None if self._drain.closed else self._registry.take_idle(demand, job_id)

    def unseat(self, agent: ConnectedAgent, job_id: JobId) -> None:
        self._registry.take_back(agent, job_id)

    def in_doubt(self, agent: ConnectedAgent, slot: JobId) -> None:
        """The store did not say what became of a claim for this slot: ask until it does."""
        self._supervisor.start(f"doubt.{agent.agent_id}", self._resolve(agent, slot))

    async def offer(self, job: Job) -> bool:
        """Find an agent for a queued job: an idle one now, else one to be made.  Whether it was dispatched."""
        agent = self.seat(job.demand, job.id)
        if agent is None:
            self.waits(job)
            return False
        try:
            claimed = await self._store.claim_job(job.id, self.claim_by(agent, job.org))
        except StoreDown:
            self.in_doubt(agent, job.id)
            return False
        except BaseException:
            self._registry.take_back(agent, job.id)
            raise
        if claimed is None:
            self._registry.take_back(agent, job.id)
            await self.drain(agent)
            return False
        await self.deliver(agent, claimed)
        return True

    def waits(self, job: Job) -> None:
        """A queued job that no idle agent takes: remember its class and ask the scalers."""
        self._demands.note(job)
        self.queued()
        if not self._drain.closed:
            self.scale.wanted(job)

    def note(self, job: Job) -> None:
        """A job is queued: whoever drains next may take it."""
        self._demands.note(job)

    async def drain(self, agent: ConnectedAgent) -> Job | None:
        """Give a free agent the oldest waiting job that it fits, if any.  One job at most: the one it was given."""
        while not self._drain.closed and agent.is_free and self._registry.get(agent.agent_id) is agent:
            class_ids = self._demands.fitting(
                lambda demand: self._registry.accepts(agent, demand), limit=CLASSES_PER_CLAIM
            )
            if not class_ids:
                return None
            since = self._demands.mark()
            self._registry.give(agent, CLAIMING)
            try:
                claim = self.claim_by(agent, *self._demands.orgs(class_ids))
                claimed = await self._store.claim_oldest(class_ids, claim)
            except StoreDown:
                self.in_doubt(agent, CLAIMING)
                return None
            except BaseException:
                self._registry.take_back(agent, CLAIMING)
                raise
            self._registry.take_back(agent, CLAIMING)
            if claimed is not None:
                self._registry.give(agent, claimed.id)
                await self.deliver(agent, claimed)
                return claimed
            self._demands.gone(class_ids, since)
        return None

    async def deliver(self, agent: ConnectedAgent, job: Job) -> None:
        """Tell the agent of a job that was claimed for it, unless it was lost meanwhile: then back with the job.

        A job that ended while the claim was under way has lost its seat, and nobody is told.
        """
        if self._registry.get(agent.agent_id) is not agent:
            await self._return_claim(job)
            return
        if job.id not in agent.jobs:
            return
        agent.jobs[job.id] = job
        emit(Event.JOB_DISPATCHED, job_id=job.id, agent_id=agent.agent_id, attempt=job.attempts + 1)
        self.handed_off(agent, job)
        agent.seat.send(JobDispatch(job_id=job.id, run_id=job.run_id, name=job.name))

    async def offer_again(self, agent: ConnectedAgent, job: Job) -> None:
        """Tell an agent that came back of the job that it holds and does not know."""
        told = await self._store.offer_again(Offer(job.id, agent.agent_id, job.offers), ack_ms=self._ack_ms(job.org))
        if self._registry.get(agent.agent_id) is not agent:
            return  # it is gone again: its funnel sees to the job
        if told is None:
            await self._free_if_moved(agent, job.id)
            return
        agent.jobs[job.id] = told
        emit(Event.JOB_DISPATCHED, job_id=job.id, agent_id=agent.agent_id, attempt=job.attempts + 1)
        agent.seat.send(JobDispatch(job_id=job.id, run_id=job.run_id, name=job.name))

    async def _free_if_moved(self, agent: ConnectedAgent, job_id: JobId) -> None:
        """A job that the agent held a moment ago is no offer of its any more."""
        held = await self._store.held_jobs(agent.agent_id)
        if job_id not in {job.id for job in held}:
            self._registry.take_back(agent, job_id)
            await self.drain(agent)

    def rest(self, agent: ConnectedAgent) -> None:
        """Ask an agent for no job until it ends one or says how it is, or a while has passed."""
        agent.is_resting = True
        self._registry.refresh(agent)
        self._supervisor.start(f"rest.{agent.agent_id}", self._wake(agent))

    async def _wake(self, agent: ConnectedAgent) -> None:
        await self._clock.sleep(REST_SECONDS)
        if agent.is_resting:
            self.has_room(agent)
            await self.drain(agent)

    def has_room(self, agent: ConnectedAgent) -> None:
        """An agent that rested may be asked again."""
        agent.is_resting = False
        self._registry.refresh(agent)

    async def _return_claim(self, job: Job) -> None:
        """Its agent is gone.  If the agent came back and holds the job by a newer claim, that one stands."""
        with sits_out_outages("returning a claim"):  # the deadline of its acknowledgement returns it as well
            now = await self._store.job(job.id)
            if now is not None and now.offers == job.offers:
                await self.requeue(job, reason=f"agent {job.agent_id} was lost before it could be told")

    async def _resolve(self, agent: ConnectedAgent, slot: JobId) -> None:
        """Deliver what a claim gave the agent after all, or free the slot.  A lost agent's jobs are its funnel's."""
        while self._registry.get(agent.agent_id) is agent:
            try:
                held = await self._store.held_jobs(agent.agent_id)
            except StoreDown:
                await self._clock.sleep(STORE_RETRY_SECONDS)
                continue
            if self._registry.get(agent.agent_id) is not agent:
                return
            known = agent.jobs.keys() - {slot}
            self._registry.take_back(agent, slot)
            for job in held:
                if job.status is JobStatus.DISPATCHED and job.id not in known:
                    self._registry.give(agent, job.id)
                    await self.deliver(agent, job)
            await self.drain(agent)
            return

    async def requeue(self, job: Job, *, reason: str, count_attempt: bool = True) -> Job | None:
        """Back to the queue, at its old place, and offer it again.  None: it was no longer dispatched."""
        assert job.agent_id is not None, job
        requeued = await self._store.requeue_job(
            Offer(job.id, job.agent_id, job.offers),
            reason=reason,
            attempts_max=ATTEMPTS_MAX,
            count_attempt=count_attempt,
        )
        if requeued is None:
            return await self._requeued_before(job)
        emit(
            Event.JOB_REQUEUED,
            job_id=job.id,
            agent_id=job.agent_id,
            reason=reason,
            status=requeued.job.status,
            attempts=requeued.job.attempts,
        )
        self.scale.gave_back(job.agent_id, job.id)
        if requeued.job.status is JobStatus.QUEUED:
            self.gave_back()
            await self.offer(requeued.job)
        else:
            self.gave_up(requeued.job)
        return requeued.job

    async def _requeued_before(self, job: Job) -> Job | None:
        """The job is not its agent's any more: perhaps an earlier try returned it, and its answer was lost."""
        assert job.agent_id is not None, job
        now = await self._store.job(job.id)
        if now is None or now.status is not JobStatus.QUEUED:
            return None
        self.scale.gave_back(job.agent_id, job.id)
        await self.offer(now)
        return now
