"""An agent registers: admitted or refused, its jobs reconciled, its promised job handed over.

Who may register is decided by `decide.registration`, what becomes of jobs that it lists or should list by
`decide.dispatch.reconcile`.  The record of a scaler-made agent is moved in the same unit that claims its bound
job, so the job waits for exactly this agent however old other waiting jobs are.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, assert_never

from kici.decide.dispatch import (
    Drop,
    End,
    HeldJob,
    ListedJob,
    LossCause,
    OfferAgain,
    Phase,
    Requeue,
    Resume,
    Start,
    reconcile,
)
from kici.decide.hand_over import for_agent
from kici.decide.prune import EVENT
from kici.decide.registration import (
    Accept,
    AgentRecord,
    Claimant,
    Known,
    LiveConnection,
    Refuse,
    admit_agent,
    may_be_elsewhere,
)
from kici.domain.agent import AgentFacts, AgentSession
from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, InstanceId, Instant, JobId, is_scaler_agent
from kici.domain.job import STARTED, Job, JobStatus, Outcome
from kici.domain.logs import Stream
from kici.domain.spawn import SERVING, ScaleDownReason, Spawn, SpawnState
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.store import AgentStore as AgentRows
from kici.ports.store import Claim, JobStore, LogStorage, Registered, SpawnStore
from kici.services.absences import Absences
from kici.services.agent_connection import AgentConnection
from kici.services.arrivals import connected_agent
from kici.services.dispatcher import Dispatcher
from kici.services.drain_state import DrainState
from kici.services.job_lifecycle import JobLifecycle
from kici.services.registry import AgentRegistry, ConnectedAgent
from kici.wire.messages import (
    AgentExit,
    AgentRegister,
    CloseCode,
    JobCancel,
    JobVerdict,
    RegisterAck,
    Reuse,
)

OVERTAKEN = Refuse(close_code=CloseCode.SUPERSEDED, reason="superseded by a newer connection")
HELD_ELSEWHERE = Refuse(close_code=CloseCode.INTERNAL, reason="another coordinator still holds this agent; come back")
TORN_DOWN = Refuse(close_code=CloseCode.DISMISSED, reason="this agent is being torn down")


class Store(AgentRows, JobStore, LogStorage, SpawnStore, Protocol):
    """What registration reads and writes."""

    async def database_now(self) -> Instant: ...


class Computes(Protocol):
    """What the scaler knows of an agent that comes, and wants to hear."""

    def record_of(self, agent_id: AgentId) -> Spawn | None:
        """The spawn of an agent that this instance made, in whatever state."""
        ...

    def adopted(self, spawn: Spawn, /) -> None:
        """Its agent is registered here, whoever asked for it."""
        ...

    def registered(self, spawn: Spawn) -> None: ...

    async def clear_boot_data(self, spawn: Spawn) -> None:
        """Nobody but its agent can read what its compute was told at its boot when this returns.

        Raises a `KiciError` when that may not be so.
        """
        ...

    def agent_gone(self, agent_id: AgentId, reason: ScaleDownReason) -> None: ...

    def reclaim(self, agent_id: AgentId) -> None: ...

    def jobs_given(self, agent_id: AgentId, held: Sequence[Job]) -> int:
        """How many jobs the agent was given, as far as is known here, those that it holds included."""
        ...


class NoComputes:
    """For coordinators that scale nothing."""

    def record_of(self, agent_id: AgentId) -> Spawn | None:
        return None

    def adopted(self, spawn: Spawn, /) -> None:
        pass

    def registered(self, spawn: Spawn) -> None:
        pass

    async def clear_boot_data(self, spawn: Spawn) -> None:
        pass

    def agent_gone(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        pass

    def reclaim(self, agent_id: AgentId) -> None:
        pass

    def jobs_given(self, agent_id: AgentId, held: Sequence[Job]) -> int:
        return len(held)


@dataclass(slots=True)
class _Plan:
    """What to tell a returning agent, and what to do once it was told."""

    verdicts: list[JobVerdict] = field(default_factory=list)
    after: list[Callable[[], Awaitable[object]]] = field(default_factory=list)


class Registration:
    def __init__(
        self,
        *,
        store: Store,
        registry: AgentRegistry,
        dispatcher: Dispatcher,
        lifecycle: JobLifecycle,
        absences: Absences,
        computes: Computes,
        drain: DrainState,
        clock: Clock,
        instance_id: InstanceId,
        requires_token: bool,
        coordinators: Callable[[], list[str]],
    ) -> None:
        """`coordinators()`: addresses that agents may go to when this one is lost."""
        self._store = store
        self._registry = registry
        self._dispatcher = dispatcher
        self._lifecycle = lifecycle
        self._absences = absences
        self._computes = computes
        self._drain = drain
        self._clock = clock
        self._instance_id = instance_id
        self._requires_token = requires_token
        self._coordinators = coordinators
        self.refused: Callable[[int], None] = lambda code: None
        """Told of every registration that was refused, by its close code."""
        self.lookup_failed: Callable[[], None] = lambda: None
        """Told of every agent of a scaler whose record could not be read or moved."""
        self._in_doubt: set[AgentId] = set()
        """Agents of which nobody knows whether their registration is written."""

    async def register(self, connection: AgentConnection, message: AgentRegister) -> None:
        """Answer one registration, the first of its connection or a repeated one."""
        agent_id = AgentId(message.agent_id)
        spawn = self._computes.record_of(agent_id)
        asked_at = self._clock.monotonic()
        try:
            if is_scaler_agent(agent_id) and may_be_elsewhere(spawn, message.connection_number, message.in_flight_jobs):
                spawn = await self._recorded(agent_id, spawn)
            held = await self._held(agent_id, spawn)
            judged = self._judge(connection, message, spawn, held)
            if isinstance(judged, Refuse):
                await self._refuse(connection, agent_id, judged)
                return
            claim = self._claim(agent_id, spawn)
            session = self._session(connection, message, judged, spawn)
            registered = await self._register(connection, session, needs_spawn=spawn is not None, claim=claim)
            if registered is None:
                await self._refuse(connection, agent_id, await self._why_not(session))
                return
            registered, held = _claimed_before(registered, held, spawn)
            if registered.spawn is not None and registered.spawn.backend_type == EVENT:
                self._computes.adopted(registered.spawn)
            await self._welcome(connection, message, session, spawn, registered, held, asked_at)
        except StoreDown as error:
            if is_scaler_agent(agent_id):
                self.lookup_failed()
            await self._refuse(
                connection, agent_id, Refuse(close_code=CloseCode.INTERNAL, reason=f"the store is down: {error}"[:100])
            )

    async def _recorded(self, agent_id: AgentId, known: Spawn | None) -> Spawn | None:
        """The record of an agent that another coordinator made, or whose token was made when it came."""
        row = await self._store.spawn(agent_id)
        is_ending = known is not None and known.state is SpawnState.ENDING
        return replace(row, state=SpawnState.ENDING) if row is not None and is_ending else row

    async def _why_not(self, session: AgentSession) -> Refuse:
        """Why a registration was not written: it came late, its compute ends, or another still has its machine."""
        newest = await self._store.session(session.agent_id)
        if session.scaler is None or (newest is not None and newest.overtakes(session)):
            return OVERTAKEN
        row = await self._store.spawn(session.agent_id)
        is_held = row is not None and row.state in SERVING and row.adopted_by not in (None, self._instance_id)
        return HELD_ELSEWHERE if is_held else TORN_DOWN

    async def _register(
        self, connection: AgentConnection, session: AgentSession, *, needs_spawn: bool, claim: Claim | None
    ) -> Registered | None:
        """Write the registration.  When the store does not answer it may be written, and the bound job claimed."""
        connection.is_in_doubt = True
        self._in_doubt.add(session.agent_id)
        registered = await self._store.register_agent(session, needs_spawn=needs_spawn, bound=claim)
        connection.is_in_doubt = False
        self._in_doubt.discard(session.agent_id)
        return registered

    async def _welcome(
        self,
        connection: AgentConnection,
        message: AgentRegister,
        session: AgentSession,
        spawn: Spawn | None,
        registered: Registered,
        held: list[Job],
        asked_at: float,
    ) -> None:
        given = self._computes.jobs_given(session.agent_id, held)
        agent = connected_agent(connection, message, session, spawn, given=given)
        older = self._registry.get(agent.agent_id)
        if older is not None and older.seat.opened_at > connection.opened_at:
            await self._refuse(connection, agent.agent_id, OVERTAKEN)
            return
        connection.agent = agent
        agent.jobs = dict.fromkeys([*(() if older is None else older.jobs), *(job.id for job in held)])
        if registered.job is not None:
            self._registry.give(agent, registered.job.id)
        agent.draining = agent.draining or self._is_ending(spawn)
        self._registry.add(agent)
        if older is not None and older.seat.connection_id != connection.connection_id:
            emit(Event.AGENT_RETURNED, agent_id=agent.agent_id, superseded=older.seat.connection_id)
            older.seat.close(CloseCode.SUPERSEDED, "superseded by a newer connection")
        if spawn is not None:
            self._computes.registered(spawn)
        emit(Event.AGENT_REGISTERED, agent_id=agent.agent_id, scaler=agent.scaler, remote=connection.remote)
        was_absent = await self._absences.returned(agent.agent_id)
        if connection.is_over:
            return  # the caller passes it to the funnel
        if self._is_ending(spawn):  # its end was decided on while it registered
            await self._refuse(connection, agent.agent_id, TORN_DOWN)
            return
        if was_absent or older is not None:  # its jobs may have moved since we looked
            now_held = await self._store.held_jobs(agent.agent_id)
            agent.jobs = dict.fromkeys(job.id for job in now_held)
            held = [job for job in now_held if registered.job is None or job.id != registered.job.id]
        if await self._is_outdated(message, session, held, asked_at):
            await self._refuse(connection, agent.agent_id, OVERTAKEN)
            return
        plan = await self._reconcile(agent, message, held)
        await connection.apply(connection.half.registered(self._ack(agent, registered, plan.verdicts)))
        await self._begin(agent, plan)
        if not connection.is_over:
            await self._give_work(agent, registered)

    async def _is_outdated(
        self, message: AgentRegister, session: AgentSession, held: list[Job], asked_at: float
    ) -> bool:
        """Whether it lacks a started job because the agent was given that in a newer connection, here or elsewhere."""
        listed = {ref.job_id for ref in message.in_flight_jobs}
        lacking = [job for job in held if job.status in STARTED and job.id not in listed]
        if not lacking:
            return False
        newest = await self._store.session(session.agent_id)
        if newest is None or newest.connection_id != session.connection_id:
            return True
        now = await self._store.database_now()
        asked = now - (self._clock.monotonic() - asked_at) * 1000
        return any((job.dispatched_at or 0) >= asked for job in lacking)

    async def _begin(self, agent: ConnectedAgent, plan: _Plan) -> None:
        for act in plan.after:
            await act()
        agent.is_settling = False
        self._registry.refresh(agent)

    async def _give_work(self, agent: ConnectedAgent, registered: Registered) -> None:
        if registered.job is not None:
            await self._dispatcher.deliver(agent, registered.job)
        elif agent.jobs_left == 0 and not agent.jobs:  # of its last job it may never have heard: it would wait on
            agent.seat.send(AgentExit(reason="it had its jobs"))
        else:
            await self._dispatcher.drain(agent)

    def _is_ending(self, spawn: Spawn | None) -> bool:
        """Whether the compute of an agent that just registered is being torn down, or is no more, as far as we made it.

        One that another coordinator made is unknown here: what became of it stood in the row that was registered.
        """
        if spawn is None:
            return False
        now = self._computes.record_of(spawn.agent_id)
        if now is None:
            return spawn.owner_instance_id == self._instance_id
        return now.state is SpawnState.ENDING

    def _judge(
        self, connection: AgentConnection, message: AgentRegister, spawn: Spawn | None, held: list[Job]
    ) -> Accept | Refuse:
        agent_id = AgentId(message.agent_id)
        live = self._registry.get(agent_id)
        return admit_agent(
            Claimant(agent_id=agent_id, labels=frozenset(message.labels), uid=message.running_as_uid),
            connection.token,
            now=self._clock.now(),
            known=Known(
                record=None if spawn is None else _record(spawn),
                live=None if live is None else LiveConnection(token_id=live.token_id),
                holds_job=bool(held),
            ),
            requires_token=self._requires_token,
        )

    async def _held(self, agent_id: AgentId, spawn: Spawn | None) -> list[Job]:
        """Jobs that an agent may have from before.  One that is here for the first time has none."""
        if spawn is not None and spawn.state is SpawnState.BOOTING and agent_id not in self._in_doubt:
            return []
        return await self._store.held_jobs(agent_id)

    def _claim(self, agent_id: AgentId, spawn: Spawn | None) -> Claim | None:
        """The claim of the job that the agent was made for."""
        if spawn is None or spawn.bound_job_id is None or spawn.state is not SpawnState.BOOTING or self._drain.closed:
            return None
        return self._dispatcher.claim_of(agent_id, spawn.scaler, spawn.org)

    def _session(
        self, connection: AgentConnection, message: AgentRegister, accepted: Accept, spawn: Spawn | None
    ) -> AgentSession:
        return AgentSession(
            agent_id=AgentId(message.agent_id),
            instance_id=self._instance_id,
            connection_id=connection.connection_id,
            labels=accepted.labels,
            gate=accepted.gate,
            token_id=None if connection.token is None else connection.token.id,
            scaler=None if spawn is None else spawn.scaler,
            backend_type=None if spawn is None else spawn.backend_type,
            facts=AgentFacts(
                platform=message.platform,
                arch=message.arch,
                version=message.version,
                hostname=message.hostname,
                cpu_count=message.cpu_count,
                memory_mb=message.total_memory_mb,
                user=message.running_as_user,
                uid=message.running_as_uid,
            ),
            registered_at=self._clock.now(),
            warm=spawn is not None and spawn.bound_job_id is None,
            incarnation=message.incarnation,
            connection_number=message.connection_number,
        )

    async def _refuse(self, connection: AgentConnection, agent_id: AgentId, refusal: Refuse) -> None:
        emit(Event.AGENT_REFUSED, agent_id=agent_id, code=refusal.close_code, reason=refusal.reason)
        self.refused(refusal.close_code)
        if refusal.is_permanent:
            connection.cause = LossCause.DISMISSED
        if refusal.reclaims:
            self._computes.reclaim(agent_id)
        await connection.apply(connection.half.refused(refusal.close_code, refusal.reason))

    async def _reconcile(self, agent: ConnectedAgent, message: AgentRegister, held: list[Job]) -> _Plan:
        """Compare what the agent lists with what the store says it holds."""
        plan = _Plan()
        jobs = {job.id: job for job in held}
        commands = reconcile(
            agent.agent_id,
            scaler_managed=agent.spawn is not None,
            listed=[ListedJob(job_id=JobId(ref.job_id), phase=Phase(ref.phase)) for ref in message.in_flight_jobs],
            held=[HeldJob(job_id=job.id, status=job.status) for job in held],
        )
        for command in commands:
            match command:
                case Start(job_id=job_id):
                    await self._start(agent, jobs[job_id], plan)
                case Resume(job_id=job_id, cancels=cancels):
                    await self._resume(agent, job_id, plan, cancels=cancels)
                case Drop(job_id=job_id):
                    plan.verdicts.append(JobVerdict(job_id=job_id, action="drop"))
                case OfferAgain(job_id=job_id):
                    plan.after.append(partial(self._dispatcher.offer_again, agent, jobs[job_id]))
                case Requeue(job_id=job_id, reason=reason):
                    self._registry.take_back(agent, job_id)  # it never had it
                    if await self._dispatcher.requeue(jobs[job_id], reason=reason) is None:
                        await self._end_started(agent, job_id, reason)
                case End(job_id=job_id, status=status, reason=reason):
                    agent.jobs.pop(job_id, None)
                    await self._lifecycle.end_lost(jobs[job_id], Outcome(status=status, reason=reason))
                case _:
                    assert_never(command)
        self._registry.refresh(agent)
        return plan

    async def _end_started(self, agent: ConnectedAgent, job_id: JobId, reason: str) -> None:
        """What it does not hold was started meanwhile, for an earlier connection of it: nobody else will end it."""
        now = await self._store.job(job_id)
        if now is not None and now.agent_id == agent.agent_id and now.status in STARTED:
            await self._lifecycle.end_lost(now, Outcome(status=JobStatus.FAILED, reason=reason))

    async def _start(self, agent: ConnectedAgent, job: Job, plan: _Plan) -> None:
        """The agent waits for its start.  `running` may be committed already, and its message lost."""
        if job.status is JobStatus.DISPATCHED:
            agent.jobs[job.id] = job
            plan.verdicts.append(JobVerdict(job_id=job.id, action="start"))
            plan.after.append(lambda: self._lifecycle.acknowledged(agent, job.id))
            return
        resumed = await self._store.resume_job(job.id, agent.agent_id, self._instance_id)
        if resumed is not None and resumed.status is JobStatus.RUNNING:
            agent.jobs[job.id] = resumed
            plan.verdicts.append(JobVerdict(job_id=job.id, action="start"))
            plan.after.append(lambda: self._lifecycle.start_again(agent, resumed))
            return
        agent.jobs.pop(job.id, None)
        plan.verdicts.append(JobVerdict(job_id=job.id, action="drop"))
        if resumed is not None:
            outcome = Outcome(status=JobStatus.CANCELLED, reason="cancelled before it began")
            await self._lifecycle.end_lost(resumed, outcome)

    async def _resume(self, agent: ConnectedAgent, job_id: JobId, plan: _Plan, *, cancels: bool) -> None:
        job = await self._store.resume_job(job_id, agent.agent_id, self._instance_id)
        if job is None:
            agent.jobs.pop(job_id, None)
            plan.verdicts.append(JobVerdict(job_id=job_id, action="drop"))
            return
        agent.jobs[job_id] = job
        ends = await self._store.log_ends(job_id)
        plan.verdicts.append(
            JobVerdict(
                job_id=job_id,
                action="resume",
                stdout_offset=ends.get(Stream.STDOUT, 0),
                stderr_offset=ends.get(Stream.STDERR, 0),
            )
        )
        if cancels:
            plan.after.append(lambda: self._cancel(agent, job_id))

    async def _cancel(self, agent: ConnectedAgent, job_id: JobId) -> None:
        """Not before the agent is registered: it listens to nothing until then."""
        agent.seat.send(JobCancel(job_id=job_id, reason="cancelled while the connection was lost"))

    def _ack(self, agent: ConnectedAgent, registered: Registered, verdicts: list[JobVerdict]) -> RegisterAck:
        spawn = agent.spawn
        reuse = None
        if spawn is not None and spawn.reuse_idle_seconds is not None:
            reuse = Reuse(idle_seconds=spawn.reuse_idle_seconds, max_jobs=spawn.reuse_max_jobs)
        return RegisterAck(
            agent_id=agent.agent_id,
            labels=sorted(agent.labels),
            scaler_managed=spawn is not None,
            pending_dispatch=registered.job is not None,
            warm_pool=spawn is not None and spawn.bound_job_id is None,
            reuse=reuse,
            jobs=verdicts,
            coordinators=for_agent(self._coordinators(), on_worker=spawn is not None and spawn.worker_id is not None),
        )


def _claimed_before(registered: Registered, held: list[Job], spawn: Spawn | None) -> tuple[Registered, list[Job]]:
    """An earlier try, whose answer was lost, may have claimed the bound job: it is this registration's to hand over."""
    if spawn is None or spawn.state is not SpawnState.BOOTING or registered.job is not None:
        return registered, held
    bound = [job for job in held if job.id == spawn.bound_job_id and job.status is JobStatus.DISPATCHED]
    if not bound:
        return registered, held
    return replace(registered, job=bound[0]), [job for job in held if job is not bound[0]]


def _record(spawn: Spawn) -> AgentRecord:
    return AgentRecord(
        gate=spawn.gate,
        labels=spawn.labels,
        token_id=spawn.token_id,
        is_ending=spawn.state is SpawnState.ENDING,
    )
