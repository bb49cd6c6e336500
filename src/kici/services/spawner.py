"""One spawn, from an admitted choice to a compute or a failure.

The reservation is taken in memory, then in the machine pool, and the row is written, before anything is made; the
backend works under a deadline, at most so many at once for each scaler; a failure is recorded before its capacity
is freed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, Protocol, assert_never

from kici.decide.admit import Book
from kici.decide.entries import Routable
from kici.decide.ledger import kind_of
from kici.decide.prune import EVENT
from kici.decide.registry_auth import is_ready
from kici.domain.agent import AgentToken
from kici.domain.errors import (
    Conflict,
    DeterministicRefusal,
    JobRefused,
    KiciError,
    LockContended,
    Retryable,
    StoreDown,
)
from kici.domain.ids import DEFAULT_ORG, AgentId, InstanceId, JobId, OrgId, ScalerName, scaler_agent_id
from kici.domain.job import Job
from kici.domain.provision import SlotRefused, SlotRules
from kici.domain.resources import Shape
from kici.domain.scale import AtCapacity, Failed, ScaleAnswer, Skipped, Spawning
from kici.domain.spawn import Reservation, ScaleDownReason, Spawn, SpawnState
from kici.domain.verdict import AtCap, InBackoff, SpawnFailed
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.ports.backend import JobContainer, SpawnEvent, SpawnEventType, SpawnOrder
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.event_store import ProvisionStore
from kici.ports.store import SpawnStore
from kici.ports.workers import WorkerFull
from kici.services.launch_failures import LaunchFailures
from kici.services.machine_pools import MachinePools
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.shared_deferrals import SharedDeferrals
from kici.services.spawn_book import SpawnBook, TrackedSpawn
from kici.services.spawn_story import SpawnStories
from kici.services.teardown import Teardown

MINT_TRIES: Final = 8
RETRY_MS_MIN: Final = 1000


class Images(Protocol):
    """What becomes of a job's own image before an agent can be made of it."""

    async def resolve(self, job: Job, *, in_image: bool) -> JobContainer | None: ...


Refuse = Callable[[JobId, AgentId, ScalerName, str], Awaitable[bool]]
"""Ends a waiting job that can never be started, with the reason."""
Mint = Callable[[AgentId, Sequence[str], frozenset[str]], tuple[AgentToken, str]]
"""Makes a credential for one agent with these labels and this gate, and its plain text; the caller stores it."""


class Blame(Enum):
    """What a failed spawn speaks against."""

    SCALER = auto()
    """The next one would fail as well, until somebody does something: it is asked less and less often."""
    CHANCE = auto()
    """The next one may succeed."""
    JOB = auto()


@dataclass(frozen=True, slots=True)
class Choice:
    """A label set that may start one more agent of this shape now."""

    runtime: ScalerRuntime
    routable: Routable
    shape: Shape


class Rows(SpawnStore, ProvisionStore, Protocol):
    """What a spawn is written to."""


class Spawner:
    def __init__(
        self,
        *,
        store: Rows,
        mint: Mint | None,
        book: Book,
        machine_pools: MachinePools,
        spawns: SpawnBook,
        failures: LaunchFailures,
        teardown: Teardown,
        supervisor: Supervisor,
        clock: Clock,
        entropy: Entropy,
        instance_id: InstanceId,
        deadline_ms: Callable[[OrgId], int],
        stories: SpawnStories,
        images: Images,
        refuse: Refuse,
        deferrals: SharedDeferrals,
        lock_wait_ms: int,
    ) -> None:
        """`deadline_ms(org)`: longest time of one backend call."""
        self._deferrals = deferrals
        self._lock_wait_ms = lock_wait_ms
        self._images = images
        self._refuse = refuse
        self._store = store
        self._mint = mint
        self._book = book
        self._machine_pools = machine_pools
        self._spawns = spawns
        self._failures = failures
        self._teardown = teardown
        self._supervisor = supervisor
        self._clock = clock
        self._entropy = entropy
        self._instance_id = instance_id
        self._deadline_ms = deadline_ms
        self._stories = stories
        self.cap_lock_failed: Callable[[str], None] = lambda reason: None
        """Set by the composition root: counts spawns that could not be counted."""

    async def start(self, choice: Choice, job: Job | None) -> ScaleAnswer:
        """Start an agent for a job, or without one (warm).  The caller has just checked the caps.

        Tracked and reserved before the first await; returns when the row is written.
        """
        for _ in range(MINT_TRIES):
            answer = await self._admit(job, choice)
            if answer is not None:
                return answer
        return Failed(error=f"no free agent id for scaler {choice.runtime.name} after {MINT_TRIES} tries")

    async def _admit(self, job: Job | None, choice: Choice) -> ScaleAnswer | None:
        """Reserve, write the row, start.  None: the agent id was taken, try another."""
        agent_id = scaler_agent_id(choice.routable.backend_type, self._entropy.hex(4))
        if self._spawns.get(agent_id) is not None:
            return None
        token, plain = (
            (None, None)
            if self._mint is None or choice.runtime.caps.is_cluster_counted  # its agent trades a claim code for it
            else self._mint(agent_id, choice.routable.agent_labels, choice.routable.gate)
        )
        tracked = TrackedSpawn(spawn=self._row(job, choice, agent_id, token), runtime=choice.runtime)
        reservation = self._reservation(tracked.spawn)
        self._book.reserve(reservation)
        self._spawns.add(tracked)
        try:
            answer = await self._bill(reservation, choice.routable) or await self._write(tracked, reservation, token)
        except Conflict:
            return None
        finally:
            if not tracked.is_written:
                self._spawns.remove(tracked)
                self._book.release(agent_id)
                await self._machine_pools.release(reservation.machine_pool, agent_id)
        if answer is not None:
            return answer
        emit(Event.SPAWN_ADMITTED, agent_id=agent_id, scaler=choice.runtime.name, job_id=tracked.spawn.bound_job_id)
        if tracked.is_unwanted:
            self._teardown.begin(tracked, ScaleDownReason.JOB_COMPLETE)
        else:
            order = self._order(tracked, plain)
            tracked.task = self._supervisor.spawn(f"spawn.{agent_id}", self._run(tracked, order, job))
        return Spawning(agent_id=agent_id, backend_type=choice.routable.backend_type)

    async def _bill(self, reservation: Reservation, routable: Routable) -> ScaleAnswer | None:
        """Take it from the machine pool; None: taken, or there is none."""
        kind = kind_of(routable.backend_type, runs_job_image=routable.runs_job_image)
        try:
            refused = await self._machine_pools.reserve(reservation, kind)
        except KiciError as error:
            return Failed(error=str(error))
        return None if refused is None else AtCapacity(verdict=refused)

    async def _write(
        self, tracked: TrackedSpawn, reservation: Reservation, token: AgentToken | None
    ) -> ScaleAnswer | None:
        """Write the row; None: it is this spawn's.  Raises `Conflict` for an agent id that is taken."""
        try:
            if tracked.runtime.caps.is_cluster_counted:
                return await self._write_counted(tracked, reservation)
            existing = await self._store.insert_spawn(tracked.spawn, reservation, token)
        except StoreDown as error:
            tracked.is_written = True  # it may have been, after all
            self._teardown.begin(tracked, ScaleDownReason.SPAWN_TIMEOUT)
            return Failed(error=f"the spawn row of {tracked.agent_id} could not be written: {error}")
        except Retryable as error:
            return Failed(error=str(error))
        tracked.is_written = existing is None
        return None if existing is None else Spawning(agent_id=existing.agent_id, backend_type=existing.backend_type)

    async def _write_counted(self, tracked: TrackedSpawn, reservation: Reservation) -> ScaleAnswer | None:
        """Write the row if the whole cluster has room for it.  What cannot be counted is refused."""
        scaler = tracked.runtime.name
        rules = SlotRules(
            agents_max=tracked.runtime.caps.agents_max,
            lock_wait_ms=self._lock_wait_ms,
            may_probe=self._deferrals.may_probe(scaler),
        )
        try:
            answer = await self._store.insert_cluster_spawn(tracked.spawn, reservation, rules)
        except LockContended as error:
            self.cap_lock_failed("contended")
            return Failed(error=f"scaler {scaler}: others are starting agents of it; {error}")
        except StoreDown:
            self.cap_lock_failed("unreachable")
            raise
        match answer:
            case None:
                tracked.is_written = True
                self._deferrals.tried(scaler)
                return None
            case Spawn():
                return Spawning(agent_id=answer.agent_id, backend_type=answer.backend_type)
            case SlotRefused(verdict=verdict):
                return await self._no_slot(scaler, verdict)
            case _:
                assert_never(answer)

    async def _no_slot(self, scaler: ScalerName, verdict: AtCap | InBackoff) -> ScaleAnswer:
        if isinstance(verdict, AtCap):
            return AtCapacity(verdict=verdict)
        self._deferrals.tried(scaler)
        await self._deferrals.tick()  # another coordinator knew before we did
        known = self._deferrals.refusal(scaler) or verdict
        return Skipped(verdict=known, retry_after_ms=max(RETRY_MS_MIN, known.until - self._clock.now()))

    def _reservation(self, spawn: Spawn) -> Reservation:
        return Reservation(
            agent_id=spawn.agent_id,
            scaler=spawn.scaler,
            shape=spawn.shape,
            machine_pool=spawn.machine_pool,
            owner_instance_id=self._instance_id,
            reserved_at=spawn.spawned_at,
        )

    def _row(self, job: Job | None, choice: Choice, agent_id: AgentId, token: AgentToken | None) -> Spawn:
        routable, runtime = choice.routable, choice.runtime
        return Spawn(
            agent_id=agent_id,
            scaler=runtime.name,
            backend_type=routable.backend_type,
            state=SpawnState.BOOTING,
            label_set=routable.label_set,
            labels=routable.agent_labels,
            gate=routable.gate,
            shape=choice.shape,
            machine_pool=runtime.machine_pool,
            provisioning_targets=runtime.provisioning_targets,
            roles=routable.roles,
            token_id=token.id if token else None,
            owner_instance_id=self._instance_id,
            worker_id=None if runtime.elsewhere is None else runtime.elsewhere.worker_id,
            bound_job_id=None if job is None else job.id,
            run_id=None if job is None else job.run_id,
            org=DEFAULT_ORG if job is None else job.org,
            job_image=job is not None and routable.runs_job_image and is_ready(job.spec.image),
            reuse_idle_seconds=runtime.reuse_idle_seconds,
            reuse_max_jobs=runtime.reuse_max_jobs,
            spawned_at=self._clock.now(),
        )

    def _order(self, tracked: TrackedSpawn, token: str | None) -> SpawnOrder:
        spawn = tracked.spawn
        return SpawnOrder(
            agent_id=spawn.agent_id,
            label_set=spawn.label_set,
            labels=spawn.labels,
            gate=spawn.gate,
            token_id=spawn.token_id,
            token=token,
            orchestrator_url=tracked.runtime.orchestrator_url,
            limits=spawn.shape.limits,
            requests=spawn.shape.requests,
            bound_job_id=spawn.bound_job_id,
            run_id=spawn.run_id,
            proof=self._machine_pools.descriptor(spawn.agent_id),
        )

    async def _run(self, tracked: TrackedSpawn, order: SpawnOrder, job: Job | None) -> None:
        """One spawn, from its turn in the line to a compute or a failure."""
        try:
            async with tracked.runtime.gateway:
                tracked.started_at = self._clock.monotonic()
                await self._make(tracked, order, job)
        except JobRefused as error:
            self._supervisor.start(f"refuse.{tracked.agent_id}", self._refuse_job(tracked, str(error)))
        except WorkerFull as error:
            self._no_room(tracked, error)
        except KiciError as error:
            self._spawn_failed(tracked, str(error), _blame(error))
        except Exception as error:  # noqa: BLE001 - the border of a backend: whatever it raises is a failed spawn
            emit(Event.SPAWN_CRASHED, level=logging.ERROR, agent_id=tracked.agent_id, error=repr(error))
            self._spawn_failed(tracked, f"the backend failed: {error!r}", Blame.CHANCE)
        else:
            tracked.is_settled = True
            emit(Event.SPAWN_SETTLED, agent_id=tracked.agent_id, scaler=tracked.runtime.name)

    async def _make(self, tracked: TrackedSpawn, order: SpawnOrder, job: Job | None) -> None:
        """Let the backend make it, within the deadline.  Whatever it raises after that, the deadline is the reason."""
        deadline_ms = self._deadline_ms(tracked.spawn.org)
        limit = asyncio.timeout(deadline_ms / 1000)
        try:
            async with limit:
                tracked.deadline = limit
                if job is not None and job.spec.image is not None:
                    container = await self._images.resolve(job, in_image=tracked.spawn.job_image)
                    order = replace(order, container=container)
                await tracked.runtime.backend.spawn(order, lambda event: self.heard(tracked, event))
        except Exception as error:
            if limit.expired():
                raise Retryable(f"scaler spawn timed out after {deadline_ms} ms") from error
            raise
        finally:
            tracked.deadline = None

    def _no_room(self, tracked: TrackedSpawn, error: WorkerFull) -> None:
        """Other coordinators fill the worker, too: no failure of anybody.  Its job is offered again."""
        emit(Event.SCALE_REFUSED, agent_id=tracked.agent_id, scaler=tracked.runtime.name, reason=str(error))
        if tracked.runtime.elsewhere is not None:
            tracked.runtime.elsewhere.had_no_room(tracked.runtime.name, error.verdict)
        self._teardown.begin(tracked, ScaleDownReason.SHUTDOWN)

    def heard(self, tracked: TrackedSpawn, event: SpawnEvent) -> None:
        """Progress of a spawn.  A failure after it settled means that its compute is gone."""
        has_failed = event.type is SpawnEventType.FAILED
        self._stories.heard(tracked, event.detail, is_urgent=has_failed)
        if not has_failed:
            return
        self._failures.seen(tracked.spawn, event.detail, self._clock.now())
        if tracked.is_settled and tracked.is_booting:
            self._spawn_failed(tracked, event.detail, Blame.SCALER)

    def _spawn_failed(self, tracked: TrackedSpawn, text: str, blame: Blame) -> None:
        """Record, then free: a freed slot is offered again at once, and must find the scaler deferred."""
        if tracked.is_ending:
            return
        emit(
            Event.SPAWN_FAILED,
            level=logging.WARNING,
            agent_id=tracked.agent_id,
            scaler=tracked.runtime.name,
            job_id=tracked.spawn.bound_job_id,
            error=text,
        )
        if tracked.spawn.backend_type == EVENT:
            self._deferrals.expect(tracked.runtime.name, tracked.agent_id, text)
            work = self._deferrals.count(tracked.runtime.name, tracked.agent_id, text)
            self._supervisor.start(f"defer.{tracked.agent_id}", work)
        elif blame is Blame.SCALER:
            self._failures.defer(tracked.runtime.name, tracked.agent_id, text)
        elif blame is Blame.CHANCE and tracked.started_at is not None:
            self._failures.stumbled(tracked.runtime.name, text, started_at=tracked.started_at)
        self._failures.of_job(tracked.spawn, SpawnFailed(text=text, scaler=tracked.runtime.name))
        self._teardown.begin(tracked, ScaleDownReason.SPAWN_TIMEOUT, error=text)

    async def _refuse_job(self, tracked: TrackedSpawn, text: str) -> None:
        """No agent can ever be made for this job: it ends, and its scaler is not to blame."""
        job_id = tracked.spawn.bound_job_id
        assert job_id is not None, "only a job brings an image"
        try:
            await self._refuse(job_id, tracked.agent_id, tracked.runtime.name, text)
        except StoreDown as error:
            text = f"{text} ({error})"
        self._spawn_failed(tracked, text, Blame.JOB)

    def provision_failed(self, tracked: TrackedSpawn, text: str) -> None:
        """The machine of an event spawn will not come."""
        self._failures.seen(tracked.spawn, text, self._clock.now())
        self._spawn_failed(tracked, text, Blame.SCALER)

    def never_came(self, tracked: TrackedSpawn, text: str) -> None:
        """Its agent did not register in time."""
        self._failures.seen(tracked.spawn, text, self._clock.now())
        self._spawn_failed(tracked, text, Blame.SCALER)


def _blame(error: KiciError) -> Blame:
    return Blame.SCALER if isinstance(error, DeterministicRefusal) else Blame.CHANCE
