"""Agents that are gone but may come back: a blink is not a death.

What follows from a loss is decided by `decide.dispatch.triage`; here it is carried out.  An agent that is lost
with jobs gets a grace to return to them.  When that ends, or the agent is proven dead, its jobs end
with the reason and its compute goes.  While the store does not answer nothing is settled and the grace stands
still: the agent could not be let in either.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, assert_never

from kici.decide.dispatch import (
    Await,
    End,
    HeldJob,
    LossCause,
    LossPlan,
    LostAgent,
    Recover,
    Requeue,
    triage,
)
from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, Instant
from kici.domain.job import Job, Outcome
from kici.domain.spawn import ScaleDownReason
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.store import JobStore
from kici.services.dispatcher import Dispatcher
from kici.services.job_lifecycle import JobLifecycle

AGAIN_SECONDS: Final = 10.0
"""Twice the longest pause between two tries of an agent that has a job."""
PAUSED_SECONDS: Final = 5.0
"""Without a look for so long, though there is one every second, this program stood still: nobody could come back."""
SETTLE_TRIES: Final = 3
"""Jobs may move between look and write (a cancel); so often it is looked again."""


@dataclass(slots=True, kw_only=True, eq=False)
class Absence:
    """One lost agent that held jobs."""

    agent_id: AgentId
    scaler_managed: bool
    cause: LossCause
    how: str
    grace_ms: int
    began_at: float
    deadline: float
    """Monotonic seconds at which the grace ends; moved by as long as the store was away."""
    is_settled: bool = False
    """What the loss itself asked for is done; only the grace is left."""
    settling: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its jobs are settled: the agent is not let in before that ends, or both would move its jobs."""


class Store(JobStore, Protocol):
    """What settling reads and writes."""

    async def database_now(self) -> Instant: ...


class Absences:
    def __init__(
        self,
        *,
        store: Store,
        dispatcher: Dispatcher,
        lifecycle: JobLifecycle,
        clock: Clock,
        compute_gone: Callable[[AgentId, ScaleDownReason], None],
        condemn: Callable[[AgentId, ScaleDownReason], Awaitable[None]],
    ) -> None:
        """`compute_gone(agent id, reason)` takes down the compute of a scaler-made agent that will not return;
        `condemn` also returns when another spawn may serve its job."""
        self._store = store
        self._dispatcher = dispatcher
        self._lifecycle = lifecycle
        self._clock = clock
        self._compute_gone = compute_gone
        self._condemn = condemn
        self._absent: dict[AgentId, Absence] = {}
        self._seen_at = 0.0
        """Monotonic seconds at which the store was last asked whether it is there."""
        self._is_blind = False
        """It was not."""
        self.is_elsewhere: Callable[[AgentId], Awaitable[bool]] = _nowhere
        """Whether an agent is connected to another coordinator: then it is not lost, and its jobs are there."""

    def __len__(self) -> int:
        return len(self._absent)

    def __contains__(self, agent_id: AgentId) -> bool:
        return agent_id in self._absent

    async def begin(
        self, agent_id: AgentId, *, scaler_managed: bool, cause: LossCause, how: str, grace_ms: int
    ) -> None:
        """An agent with jobs was lost.  Settles what can be settled now."""
        self.expect(agent_id, scaler_managed=scaler_managed, cause=cause, how=how, grace_ms=grace_ms)
        await self._advance(self._absent[agent_id])

    def expect(self, agent_id: AgentId, *, scaler_managed: bool, cause: LossCause, how: str, grace_ms: int) -> None:
        """An agent is away; what follows is settled once the store answers."""
        self._absent[agent_id] = Absence(
            agent_id=agent_id,
            scaler_managed=scaler_managed,
            cause=cause,
            how=how,
            grace_ms=grace_ms,
            began_at=self._clock.monotonic(),
            deadline=self._clock.monotonic() + grace_ms / 1000,
        )

    async def has_moved(self, agent_id: AgentId) -> bool:
        """Whether an agent that is lost here goes on at another coordinator.  Raises `StoreDown`."""
        has_moved = await self.is_elsewhere(agent_id)
        if has_moved:
            emit(Event.AGENT_MOVED, agent_id=agent_id)
        return has_moved

    async def returned(self, agent_id: AgentId) -> bool:
        """The agent is back: what it holds is for its registration to reconcile, from when this returns.

        Whether it was absent: then its jobs may have moved until now.
        """
        absence = self._absent.pop(agent_id, None)
        if absence is None:
            return False
        async with absence.settling:
            return True

    async def died(self, agent_id: AgentId, how: str) -> bool:
        """Proof of death ends the grace at once.  Whether the agent was absent."""
        absence = self._absent.get(agent_id)
        if absence is None:
            return False
        absence.cause, absence.how, absence.is_settled = LossCause.COMPUTE_ENDED, how, False
        await self._advance(absence)
        return True

    async def tick(self) -> None:
        """End what is due; try again what the store could not take."""
        if not self._absent or not await self._sees():
            return
        for absence in list(self._absent.values()):
            if absence.is_settled and self._clock.monotonic() >= absence.deadline:
                await self._give_up(absence)
            elif not absence.is_settled:
                await self._advance(absence)

    async def _sees(self) -> bool:
        """Whether the store answers.  Graces stand still for as long as it does not, or this program was stopped."""
        was_blind = self._is_blind
        try:
            await self._store.held_jobs(next(iter(self._absent)))
            self._is_blind = False
        except StoreDown as error:
            emit(Event.STORE_DOWN, level=logging.WARNING, during="absences", error=str(error))
            self._is_blind = True
        now = self._clock.monotonic()
        for absence in self._absent.values():
            unseen = now - max(self._seen_at, absence.began_at)
            if was_blind or self._is_blind or unseen > PAUSED_SECONDS:
                absence.deadline += unseen
        self._seen_at = now
        return not self._is_blind

    async def _give_up(self, absence: Absence) -> None:
        """The grace is over; if that cannot be written, it goes on for a moment in which the agent may return."""
        cause, how = absence.cause, absence.how
        absence.cause = LossCause.GRACE_OVER
        absence.how = f"{how}, and it did not come back within {absence.grace_ms / 1000:g} s"
        absence.is_settled = False
        await self._advance(absence)
        if self._is_current(absence) and not absence.is_settled and absence.cause is LossCause.GRACE_OVER:
            absence.cause, absence.how, absence.is_settled = cause, how, True
            absence.deadline = self._clock.monotonic() + AGAIN_SECONDS

    async def _advance(self, absence: Absence) -> None:
        async with absence.settling:
            if self._is_current(absence):
                await self._advance_alone(absence)

    def _is_current(self, absence: Absence) -> bool:
        """False: the agent came back meanwhile."""
        return self._absent.get(absence.agent_id) is absence

    async def _advance_alone(self, absence: Absence) -> None:
        cause = absence.cause
        try:
            plan = await self._settle(absence)
        except StoreDown as error:
            emit(Event.STORE_DOWN, level=logging.WARNING, agent_id=absence.agent_id, error=str(error))
            absence.deadline = max(absence.deadline, self._clock.monotonic() + absence.grace_ms / 1000)
            return
        if plan is None:
            self._absent.pop(absence.agent_id, None)
            return
        if not self._is_current(absence):
            return
        absence.is_settled = absence.cause is cause  # else more is known since, and waits for its turn
        if plan.may_return:
            return
        del self._absent[absence.agent_id]
        if plan.compute is not None:
            reason = ScaleDownReason.SHUTDOWN if isinstance(plan.compute, Await) else plan.compute.reason
            self._compute_gone(absence.agent_id, reason)

    async def _settle(self, absence: Absence) -> LossPlan | None:
        """Carry out the plan; look again while jobs moved under it.  None: they are another coordinator's now."""
        plan = LossPlan()
        for _ in range(SETTLE_TRIES):
            now = await self._store.database_now()  # if we die meanwhile, another coordinator judges by that clock
            held = await self._store.held_jobs(absence.agent_id)
            # Only now: who goes elsewhere later takes its jobs along, so that they are not as we saw them.
            # A compute that is gone is gone, whoever its agent was connected to.
            if absence.cause is not LossCause.COMPUTE_ENDED and await self.has_moved(absence.agent_id):
                return None
            agent = LostAgent(
                agent_id=absence.agent_id,
                jobs=tuple(HeldJob(job_id=job.id, status=job.status) for job in held),
                scaler_managed=absence.scaler_managed,
                grace_ms=absence.grace_ms,
            )
            plan = triage(agent, cause=absence.cause, how=absence.how, now=now)
            if not self._is_current(absence):
                break
            done = [await self._apply(command, absence, held) for command in plan.jobs]
            if all(done):
                break
        return plan

    async def _apply(self, command: Requeue | Recover | End, absence: Absence, held: list[Job]) -> bool:
        """False: the job was not where the plan saw it."""
        job = next(job for job in held if job.id == command.job_id)
        match command:
            case Requeue(reason=reason):
                if absence.scaler_managed:
                    await self._condemn(absence.agent_id, ScaleDownReason.SHUTDOWN)
                return await self._dispatcher.requeue(job, reason=reason) is not None
            case Recover(deadline=deadline):
                emit(Event.JOB_RECOVERING, job_id=job.id, agent_id=absence.agent_id, grace_ms=absence.grace_ms)
                return await self._store.recover_job(job.id, absence.agent_id, deadline=deadline, seen=job)
            case End(status=status, reason=reason):
                return await self._lifecycle.end_lost(job, Outcome(status=status, reason=reason))
            case _:
                assert_never(command)


async def _nowhere(agent_id: AgentId) -> bool:
    return False
