"""The scaler: makes an agent for a job that none can take, and takes down what was made.

Thin: which label set serves a job, whether caps allow it and how long a failing scaler is left alone are decided
in `decide`; what is under way is in `spawn_book`.  The order here is the safety: a reservation is taken in memory
and the row is written before anything is made; a compute is known to be gone before its row is deleted.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kici.decide.admit import Active, Book, admit, is_burst_refusal
from kici.decide.entries import Routable
from kici.domain.agent import AgentToken
from kici.domain.errors import Conflict, DeterministicRefusal, KiciError, StoreDown
from kici.domain.ids import AgentId, ClassId, InstanceId, JobId, OrgId, scaler_agent_id
from kici.domain.job import Demand, Job
from kici.domain.resources import Shape
from kici.domain.scale import AtCapacity, Failed, NoBackend, ScaleAnswer, Skipped, Spawning
from kici.domain.spawn import Reservation, ScaleDownReason, Spawn, SpawnState
from kici.domain.verdict import Draining, NoScalerMatches, SpawnBooting, SpawnFailed
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.ports.backend import SpawnEvent, SpawnEventType, SpawnOrder
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.store import SpawnStore
from kici.services.drain_state import DrainState
from kici.services.launch_failures import LaunchFailures
from kici.services.scaler_runtime import Fleet, ScalerRuntime
from kici.services.spawn_book import SpawnBook, TrackedSpawn
from kici.services.teardown import Teardown

MINT_TRIES: Final = 8


Mint = Callable[[AgentId, Sequence[str], frozenset[str]], tuple[AgentToken, str]]
"""Makes a credential for one agent with these labels and this gate, and its plain text; the caller stores it."""


class ScalerManager:
    def __init__(
        self,
        *,
        fleet: Fleet,
        store: SpawnStore,
        mint: Mint | None,
        book: Book,
        spawns: SpawnBook,
        failures: LaunchFailures,
        teardown: Teardown,
        supervisor: Supervisor,
        drain: DrainState,
        clock: Clock,
        entropy: Entropy,
        instance_id: InstanceId,
        spawn_deadline_ms: Callable[[OrgId], int],
        note: Callable[[JobId, str], None],
        on_refusal: Callable[[], None],
    ) -> None:
        self.fleet = fleet
        self._store = store
        self._mint = mint
        self._book = book
        self._spawns = spawns
        self._failures = failures
        self._teardown = teardown
        self._supervisor = supervisor
        self._drain = drain
        self._clock = clock
        self._entropy = entropy
        self._instance_id = instance_id
        self._spawn_deadline_ms = spawn_deadline_ms
        self._note = note
        self._refused: set[ClassId] = set()
        """Classes refused since capacity last changed: the re-drive asks again, oldest job first."""
        self._on_refusal = on_refusal

    # ------------------------------------------------------------------ the request path

    def wanted(self, job: Job) -> None:
        """A job just found no idle agent.  Asks at once, unless older jobs of its class were refused."""
        if job.class_id in self._refused or self.judge(job.demand) is not None:
            self._refused.add(job.class_id)
            return
        self._supervisor.start(f"scale.{job.id}", self.request(job))

    def ask_again(self) -> None:
        """Capacity changed: refused classes may ask again."""
        self._refused.clear()

    def judge(self, demand: Demand) -> ScaleAnswer | None:
        """Why no agent would be made for such a job now; None: one would be.  Changes nothing."""
        answer = self._choose(demand)
        return None if isinstance(answer, _Choice) else answer

    async def request(self, job: Job) -> ScaleAnswer:
        """Make an agent for this job, if none is being made for it already.

        Returns when the spawn row is written; the agent is made in the background.
        """
        serving = self._spawns.serving(job.id)
        if serving is not None:
            return Spawning(agent_id=serving.agent_id, backend_type=serving.spawn.backend_type)
        choice = self._choose(job.demand)
        if not isinstance(choice, _Choice):
            self._refused.add(job.class_id)
            emit(Event.SCALE_REFUSED, level=logging.DEBUG, job_id=job.id, answer=type(choice).__name__)
            return choice
        for _ in range(MINT_TRIES):
            answer = await self._admit(job, choice)
            if answer is not None:
                return answer
        return Failed(error=f"no free agent id for scaler {choice.runtime.name} after {MINT_TRIES} tries")

    def _choose(self, demand: Demand) -> "_Choice | ScaleAnswer":
        """The label set that serves a demand, if it may start one more agent now."""
        if self._drain.closed:
            return Skipped(verdict=Draining())
        routable = self.fleet.router.match(demand)
        if routable is None:
            return NoBackend(
                verdict=NoScalerMatches(
                    labels=tuple(sorted(demand.labels)),
                    exclude=tuple(sorted(demand.exclude)),
                    nearest=self.fleet.router.explain_mismatch(demand),
                )
            )
        deferred = self._failures.refusal(routable.scaler, self._clock.now())
        if deferred is not None:
            return Skipped(verdict=deferred, retry_after_ms=max(0, deferred.until - self._clock.now()))
        try:
            shape = routable.shape(demand.resources)
        except ValueError as error:
            return Failed(error=f"scaler {routable.scaler}: {error}")
        runtime = self.fleet.runtimes[routable.scaler]
        active = Active(here=runtime.backend.active_count(), total=self.fleet.active_total())
        here, total = self._book.of(runtime.name), self._book.total
        refused = admit(
            shape.requests, scaler=runtime.caps, host=self.fleet.caps, here=here, total=total, active=active
        )
        if refused is None:
            return _Choice(runtime, routable, shape)
        self._on_refusal()
        if is_burst_refusal(refused, active, here=here, total=total):
            emit(Event.SCALE_BURST, level=logging.WARNING, scaler=runtime.name, cap=refused.cap, used=refused.used)
        return AtCapacity(verdict=refused)

    async def _admit(self, job: Job, choice: "_Choice") -> ScaleAnswer | None:
        """Reserve, write the row, start.  None: the agent id was taken, try another."""
        agent_id = scaler_agent_id(choice.routable.backend_type, self._entropy.hex(4))
        token, plain = (
            (None, None)
            if self._mint is None
            else self._mint(agent_id, choice.routable.agent_labels, choice.routable.gate)
        )
        tracked = TrackedSpawn(spawn=self._row(job, choice, agent_id, token), runtime=choice.runtime)
        reservation = Reservation(
            agent_id=agent_id,
            scaler=choice.runtime.name,
            shape=choice.shape,
            machine_pool=choice.runtime.machine_pool,
            owner_instance_id=self._instance_id,
            reserved_at=self._clock.now(),
        )
        self._book.reserve(reservation)
        self._spawns.add(tracked)
        try:
            existing = await self._store.insert_spawn(tracked.spawn, reservation, token)
            tracked.is_written = existing is None
        except Conflict:
            return None
        except StoreDown as error:
            tracked.is_written = True
            self._teardown.begin(tracked, ScaleDownReason.SPAWN_TIMEOUT)  # the row may have been written after all
            return Failed(error=f"the spawn row of {agent_id} could not be written: {error}")
        finally:
            if not tracked.is_written:
                self._spawns.remove(tracked)
                self._book.release(agent_id)
        if existing is not None:
            return Spawning(agent_id=existing.agent_id, backend_type=existing.backend_type)
        emit(Event.SPAWN_ADMITTED, agent_id=agent_id, scaler=choice.runtime.name, job_id=job.id)
        if tracked.is_unwanted:
            self._teardown.begin(tracked, ScaleDownReason.JOB_COMPLETE)
        else:
            order = self._order(tracked, plain)
            tracked.task = self._supervisor.spawn(f"spawn.{agent_id}", self._run(tracked, order, job.org))
        return Spawning(agent_id=agent_id, backend_type=choice.routable.backend_type)

    def _row(self, job: Job, choice: "_Choice", agent_id: AgentId, token: AgentToken | None) -> Spawn:
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
            bound_job_id=job.id,
            run_id=job.run_id,
            org=job.org,
            job_image=routable.runs_job_image and job.spec.image is not None,
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
            token=token,
            orchestrator_url=tracked.runtime.orchestrator_url,
            limits=spawn.shape.limits,
            requests=spawn.shape.requests,
            bound_job_id=spawn.bound_job_id,
            run_id=spawn.run_id,
        )

    # ------------------------------------------------------------------ the spawn itself

    async def _run(self, tracked: TrackedSpawn, order: SpawnOrder, org: OrgId) -> None:
        """One spawn, from its turn in the line to a compute or a failure."""
        deadline_ms = self._spawn_deadline_ms(org)
        try:
            async with tracked.runtime.gateway:
                tracked.started_at = self._clock.monotonic()
                async with asyncio.timeout(deadline_ms / 1000):
                    await tracked.runtime.backend.spawn(order, lambda event: self.heard(tracked, event))
        except TimeoutError:
            self._spawn_failed(tracked, f"scaler spawn timed out after {deadline_ms} ms", is_deterministic=False)
        except KiciError as error:
            self._spawn_failed(tracked, str(error), is_deterministic=isinstance(error, DeterministicRefusal))
        except Exception as error:  # noqa: BLE001 - the border of a backend: whatever it raises is a failed spawn
            emit(Event.SPAWN_CRASHED, level=logging.ERROR, agent_id=tracked.agent_id, error=repr(error))
            self._spawn_failed(tracked, f"the backend failed: {error!r}", is_deterministic=False)
        else:
            tracked.is_settled = True
            emit(Event.SPAWN_SETTLED, agent_id=tracked.agent_id, scaler=tracked.runtime.name)

    def heard(self, tracked: TrackedSpawn, event: SpawnEvent) -> None:
        """Progress of a spawn.  A failure after it settled means that its compute is gone."""
        if event.type is not SpawnEventType.FAILED:
            return
        if tracked.spawn.bound_job_id is not None:
            self._note(tracked.spawn.bound_job_id, f"{tracked.agent_id}: {event.detail}")
        self._failures.seen(tracked.spawn, event.detail, self._clock.now())
        if tracked.is_settled and tracked.is_booting:
            self._spawn_failed(tracked, event.detail, is_deterministic=True)

    def _spawn_failed(self, tracked: TrackedSpawn, text: str, *, is_deterministic: bool) -> None:
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
        if is_deterministic:
            self._failures.defer(tracked.runtime.name, tracked.agent_id, text, self._clock.now())
        self._failures.of_job(tracked.spawn, SpawnFailed(text=text, scaler=tracked.runtime.name))
        self._teardown.begin(tracked, ScaleDownReason.SPAWN_TIMEOUT, error=text)

    def never_came(self, tracked: TrackedSpawn, text: str) -> None:
        """Its agent did not register in time."""
        self._failures.seen(tracked.spawn, text, self._clock.now())
        self._spawn_failed(tracked, text, is_deterministic=True)

    # ------------------------------------------------------------------ what agents and jobs tell

    def record_of(self, agent_id: AgentId) -> Spawn | None:
        """The spawn of an agent that this instance made, in whatever state."""
        tracked = self._spawns.get(agent_id)
        if tracked is None:
            return None
        return replace(tracked.spawn, state=SpawnState.ENDING) if tracked.is_ending else tracked.spawn

    def registered(self, spawn: Spawn) -> None:
        """Its agent is registered (again)."""
        tracked = self._spawns.get(spawn.agent_id)
        if tracked is None or tracked.is_ending:
            return
        if tracked.spawn.state is SpawnState.BOOTING:
            self._spawns.registered(tracked, self._clock.now())
            tracked.runtime.backend.mark_registered(spawn.agent_id)
            self._failures.clear(tracked.runtime.name)
            emit(Event.SPAWN_REGISTERED, agent_id=spawn.agent_id, scaler=spawn.scaler)

    def agent_gone(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        """The agent is lost for good: take its compute down."""
        tracked = self._spawns.get(agent_id)
        if tracked is not None:
            self._teardown.begin(tracked, reason)

    async def condemn(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        """As `agent_gone`, and return when its job may be served by another spawn."""
        tracked = self._spawns.get(agent_id)
        if tracked is not None:
            await self._teardown.condemn(tracked, reason)

    def reclaim(self, agent_id: AgentId) -> None:
        """An agent came that nothing explains: destroy whatever this host holds for it."""
        for runtime in self.fleet.runtimes.values():
            if runtime.backend.spawns_on_local_host:
                self._supervisor.start(f"reclaim.{agent_id}", runtime.backend.reap_unowned(agent_id))

    def job_over(self, job_id: JobId) -> None:
        """A compute that is still being made for an ended job has lost its purpose."""
        self._failures.job_over(job_id)
        serving = self._spawns.serving(job_id)
        if serving is not None and serving.is_booting:
            emit(Event.SPAWN_WITHDRAWN, agent_id=serving.agent_id, job_id=job_id)
            self._teardown.begin(serving, ScaleDownReason.JOB_COMPLETE)

    def booting_for(self, job_id: JobId) -> SpawnBooting | None:
        serving = self._spawns.serving(job_id)
        if serving is None:
            return None
        return SpawnBooting(agent_id=serving.agent_id, scaler=serving.spawn.scaler, since=serving.spawn.spawned_at)


class _Choice:
    """A label set that may start one more agent of this shape now."""

    __slots__ = ("routable", "runtime", "shape")

    def __init__(self, runtime: ScalerRuntime, routable: Routable, shape: Shape) -> None:
        self.runtime = runtime
        self.routable = routable
        self.shape = shape
