"""The scaler: whom to ask for an agent, whether it may, and what becomes of agents that were made.

Thin: which label set serves a job, whether caps allow it and how long a failing scaler is left alone are decided
in `decide`; a spawn under way is `spawner`'s, one that ends is `teardown`'s.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kici.decide.admit import Book, admit, fits_alone, is_burst_refusal
from kici.decide.entries import Routable
from kici.decide.fallback import SCALERS_MAX, is_refusal, spokesman, verdict_of
from kici.decide.microvm import MICROVMS
from kici.decide.prune import EVENT
from kici.decide.route import Router
from kici.domain.errors import Permanent
from kici.domain.ids import AgentId, ClassId, JobId, ScalerName
from kici.domain.job import Demand, Job
from kici.domain.resources import UNDECLARED, Amount, ResourceRequest
from kici.domain.scale import AtCapacity, Failed, NoBackend, ScaleAnswer, Skipped, Spawning
from kici.domain.spawn import ScaleDownReason, Spawn, SpawnState
from kici.domain.verdict import Draining, NoScalerMatches, SpawnBooting, Verdict
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.live_vms import BootDataBackend
from kici.services.drain_state import DrainState
from kici.services.launch_failures import LaunchFailures
from kici.services.machine_pools import MachinePools
from kici.services.scaler_runtime import ActiveTotal, Fleet, ScalerRuntime
from kici.services.spawn_book import SpawnBook, TrackedSpawn
from kici.services.spawn_story import SpawnStories
from kici.services.spawner import Choice, Spawner
from kici.services.teardown import Teardown
from kici.services.workers_caps import Load, load_of, spread

FULL_SECONDS: Final = 15.0
"""How long it is told that a scaler had no room: longer than the pause between two sweeps that ask again."""


class ScalerManager:
    def __init__(
        self,
        *,
        fleet: Fleet,
        spawner: Spawner,
        stories: SpawnStories,
        book: Book,
        machine_pools: MachinePools,
        spawns: SpawnBook,
        failures: LaunchFailures,
        teardown: Teardown,
        supervisor: Supervisor,
        drain: DrainState,
        clock: Clock,
        on_refusal: Callable[[], None],
    ) -> None:
        self.fleet = fleet
        """This host's scalers and those of linked workers, as one value; made anew when either changes."""
        self._local = fleet
        self._remote: dict[ScalerName, ScalerRuntime] = {}
        self._remote_entries: tuple[Routable, ...] = ()
        self._spawner = spawner
        self._stories = stories
        self._book = book
        self._machine_pools = machine_pools
        self._spawns = spawns
        self._failures = failures
        self._teardown = teardown
        self._supervisor = supervisor
        self._drain = drain
        self._clock = clock
        self._refused: set[ClassId] = set()
        """Classes refused since capacity last changed: the re-drive asks again, oldest job first."""
        self._full: dict[ScalerName, tuple[Verdict, float]] = {}
        """Scalers that had no room, as counted where spawns are written, and when that was."""
        self._active_total = ActiveTotal(clock)
        self._on_refusal = on_refusal
        self.foreign_gone: Callable[[AgentId, ScaleDownReason], None] = lambda agent_id, reason: None
        """Told of an agent that is gone and that this instance did not make."""
        self.clear_foreign: Callable[[Spawn], Awaitable[None]] = _cannot_clear
        """Set by the composition root: clears the boot data of a compute that another coordinator made."""
        self.provision_overdue: Callable[[TrackedSpawn, str], None] = self._spawner.never_came
        """Set by the composition root: an event spawn whose agent did not come in time."""
        self.adopted: Callable[[Spawn], None] = lambda spawn: None
        """Set by the composition root: an agent of an event scaler registered here, whoever asked for it."""
        self.retry_later: Callable[[int], None] = lambda after_ms: None
        """Set by the composition root: told when a refused request may be made again."""

    # ------------------------------------------------------------------ which scalers there are

    @property
    def local(self) -> Fleet:
        """This host's scalers.  Replaced as a whole by a reload."""
        return self._local

    @local.setter
    def local(self, fleet: Fleet) -> None:
        self._local = fleet
        self._merge()

    def elsewhere(self, runtimes: Mapping[ScalerName, ScalerRuntime], entries: Iterable[Routable]) -> None:
        """Scalers on the hosts of workers, all of them; `entries` of those that take work."""
        self._remote, self._remote_entries = dict(runtimes), tuple(entries)
        self._merge()

    def _merge(self) -> None:
        local = self._local
        if not self._remote:
            self.fleet = local
            return
        entries = tuple(entry for entry in self._remote_entries if entry.scaler not in local.runtimes)
        self.fleet = Fleet(
            runtimes={**self._remote, **local.runtimes},
            router=Router((*local.router.entries, *entries)) if entries else local.router,
            caps=local.caps,
            remote=frozenset(self._remote.keys() - local.runtimes.keys()),
        )

    # ------------------------------------------------------------------ the request path

    def wanted(self, job: Job) -> None:
        """A job just found no idle agent.  Asks at once, unless older jobs of its class were refused."""
        if job.class_id in self._refused:
            return
        refused = self.judge(job.demand)
        if refused is not None:
            self._refused.add(job.class_id)
            self._count(refused, job.id)
            return
        self._supervisor.start(f"scale.{job.id}", self.request(job))

    def ask_again(self) -> None:
        """Capacity changed: refused classes may ask again."""
        self._refused.clear()

    def judge(self, demand: Demand) -> ScaleAnswer | None:
        """Why no agent would be made for such a job now; None: one would be.  Changes nothing."""
        answer = self._choose(demand)
        return None if isinstance(answer, Choice) else answer

    async def request(self, job: Job) -> ScaleAnswer:
        """Make an agent for this job, if none is being made for it already.

        Returns when the spawn row is written; the agent is made in the background.
        """
        serving = self._spawns.serving(job.id)
        if serving is not None:
            return Spawning(agent_id=serving.agent_id, backend_type=serving.spawn.backend_type)
        answer = await self._ask(job)
        if not isinstance(answer, Spawning | Failed):
            self._refused.add(job.class_id)
            self._count(answer, job.id)
        return answer

    async def _ask(self, job: Job) -> ScaleAnswer:
        """Ask one matching scaler after the other, the best first, until one does not refuse."""
        refusals: list[ScaleAnswer] = []
        for choice in self._choices(job.demand):
            answer = await self._spawner.start(choice, job) if isinstance(choice, Choice) else choice
            if not is_refusal(answer):
                return answer
            if isinstance(choice, Choice) and isinstance(answer, AtCapacity):
                self._full[choice.runtime.name] = (answer.verdict, self._clock.monotonic())
            refusals.append(answer)
            serving = self._spawns.serving(job.id)
            if serving is not None:  # somebody else was faster
                return Spawning(agent_id=serving.agent_id, backend_type=serving.spawn.backend_type)
        return spokesman(refusals)

    async def warm(self, routable: Routable) -> ScaleAnswer:
        """Make an agent without a job, of the shape that its label set declares."""
        choice = self._admit(routable, UNDECLARED)
        if not isinstance(choice, Choice):
            self._count(choice, f"warm pool of {routable.scaler}")
            return choice
        answer = await self._spawner.start(choice, None)
        if isinstance(answer, AtCapacity):
            self._count(answer, f"warm pool of {routable.scaler}")
        return answer

    def could_make_room(self, demand: Demand, scaler: ScalerName) -> bool:
        """Whether the end of other agents of its host could let this scaler make one for such a job."""
        runtime = self.fleet.runtimes.get(scaler)
        routable = next((each for each in self.fleet.router.candidates(demand) if each.scaler == scaler), None)
        if runtime is None or routable is None:
            return False
        host = self.fleet.caps if runtime.elsewhere is None else runtime.elsewhere.caps
        try:
            requests = routable.shape(demand.resources).requests
        except ValueError:
            return False
        return fits_alone(requests, scaler=runtime.caps, host=host, machine_pool=runtime.machine_pool)

    def _choose(self, demand: Demand) -> Choice | ScaleAnswer:
        """The best label set that serves a demand and may start one more agent now, or why there is none."""
        refusals: list[ScaleAnswer] = []
        for choice in self._choices(demand):
            if isinstance(choice, Choice):
                return choice
            refusals.append(choice)
        return spokesman(refusals)

    def _choices(self, demand: Demand) -> Iterator[Choice | ScaleAnswer]:
        """What each matching scaler says, the best first; at least one answer."""
        if self._drain.closed:
            yield Skipped(verdict=Draining())
            return
        best = self.fleet.router.match(demand)
        if best is None:
            yield NoBackend(
                verdict=NoScalerMatches(
                    labels=tuple(sorted(demand.labels)),
                    exclude=tuple(sorted(demand.exclude)),
                    nearest=self.fleet.router.explain_mismatch(demand),
                )
            )
            return
        asked = set()
        if best.scaler not in self.fleet.remote:
            asked.add(best.scaler)
            yield self._admit(best, demand.resources)
        for routable in self._in_turn(demand):
            if routable.scaler not in asked:
                asked.add(routable.scaler)
                yield self._admit(routable, demand.resources)
                if len(asked) == SCALERS_MAX:
                    return

    def _in_turn(self, demand: Demand) -> Iterator[Routable]:
        """Every label set that serves a demand, the best first."""
        candidates, remote = self.fleet.router.candidates(demand), self.fleet.remote
        return spread(candidates, remote, self._free) if remote else candidates

    def _free(self, name: ScalerName) -> int:
        """How many more agents a scaler may start, by their number alone."""
        runtime = self.fleet.runtimes[name]
        load = self._load(runtime)
        here = runtime.caps.agents_max - max(load.active.here, load.here.agents)
        return min(here, load.caps.agents_max - max(load.active.total, load.total.agents))

    def lately_full(self, demand: Demand) -> list[Verdict]:
        """Of the scaler that would be asked first: that the store said a moment ago that it has no room."""
        routable = self.fleet.router.match(demand)
        verdict, at = self._full.get(routable.scaler, (None, 0.0)) if routable is not None else (None, 0.0)
        is_fresh = self._clock.monotonic() - at < FULL_SECONDS
        return [verdict] if verdict is not None and is_fresh else []

    def refusals(self, demand: Demand, *, before: ScalerName | None = None) -> list[Verdict]:
        """Why matching scalers make no agent for such a job now; `before`: only those that are asked before it."""
        found: list[Verdict] = []
        for choice in self._choices(demand):
            if isinstance(choice, Choice):
                break
            verdict = verdict_of(choice)
            if verdict is None or (before is not None and getattr(verdict, "scaler", None) == before):
                break
            found.append(verdict)
        return found

    def _admit(self, routable: Routable, resources: ResourceRequest) -> Choice | ScaleAnswer:
        """Whether this label set may start one more agent now."""
        if self._drain.closed:
            return Skipped(verdict=Draining())
        deferred = self._failures.refusal(routable.scaler)
        if deferred is not None:
            return Skipped(verdict=deferred, retry_after_ms=max(0, deferred.until - self._clock.now()))
        try:
            shape = routable.shape(resources)
        except ValueError as error:
            return Failed(error=f"scaler {routable.scaler}: {error}")
        runtime = self.fleet.runtimes[routable.scaler]
        refused = self._over_caps(runtime, shape.requests)
        if refused is not None:
            self._active_total.forget()
            refused = self._over_caps(runtime, shape.requests)
        foreseen = refused or self._machine_pools.foresee(runtime.machine_pool, shape.requests, runtime.name)
        return foreseen or Choice(runtime, routable, shape)

    def _over_caps(self, runtime: ScalerRuntime, requests: Amount) -> AtCapacity | None:
        load = self._load(runtime)
        refused = admit(
            requests, scaler=runtime.caps, host=load.caps, here=load.here, total=load.total, active=load.active
        )
        if refused is None:
            told = None if runtime.elsewhere is None else runtime.elsewhere.has_no_room(runtime.name)
            return None if told is None else AtCapacity(verdict=told)
        is_burst = is_burst_refusal(refused, load.active, here=load.here, total=load.total)
        return AtCapacity(verdict=refused, is_burst=is_burst)

    def _load(self, runtime: ScalerRuntime) -> Load:
        return load_of(runtime, self.fleet, self._book, self._spawns, self._active_total.read)

    def _count(self, answer: ScaleAnswer, what: str) -> None:
        """A refused request is counted; it is worth a warning when only a burst explains it."""
        if isinstance(answer, Skipped) and answer.retry_after_ms is not None:
            self.retry_later(answer.retry_after_ms)
        emit(Event.SCALE_REFUSED, level=logging.DEBUG, wanted_for=what, answer=type(answer).__name__)
        if isinstance(answer, AtCapacity):
            self._on_refusal()
            if answer.is_burst:
                emit(Event.SCALE_BURST, level=logging.WARNING, wanted_for=what)

    # ------------------------------------------------------------------ what agents and jobs tell

    def never_came(self, tracked: TrackedSpawn, text: str) -> None:
        """Its agent did not register in time."""
        if tracked.spawn.backend_type == EVENT:
            self.provision_overdue(tracked, text)
        else:
            self._spawner.never_came(tracked, text)

    def provision_failed(self, tracked: TrackedSpawn, text: str) -> None:
        """The machine of an event spawn will not come."""
        self._spawner.provision_failed(tracked, text)

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

    async def clear_boot_data(self, spawn: Spawn) -> None:
        """Nobody but its agent can read what its compute was told at its boot when this returns.

        Raises a `KiciError` when that may not be so.
        """
        tracked = self._spawns.get(spawn.agent_id)
        if tracked is None:
            if spawn.backend_type == MICROVMS:
                await self.clear_foreign(spawn)
        elif isinstance(tracked.runtime.backend, BootDataBackend):
            await tracked.runtime.backend.boot_data_read(spawn.agent_id)

    def agent_gone(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        """The agent is lost for good: take its compute down."""
        tracked = self._spawns.get(agent_id)
        if tracked is not None:
            self._teardown.begin(tracked, reason)
        else:
            self.foreign_gone(agent_id, reason)

    async def condemn(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        """As `agent_gone`, and return when its job may be served by another spawn."""
        tracked = self._spawns.get(agent_id)
        if tracked is not None:
            await self._teardown.condemn(tracked, reason)
        else:
            self.foreign_gone(agent_id, reason)

    def handed_off(self, agent_id: AgentId, job: Job) -> None:
        """An agent was told of a job."""
        tracked = self._spawns.get(agent_id)
        if tracked is not None:
            tracked.gives(job.id)
            self._stories.belongs(tracked, job)

    def jobs_given(self, agent_id: AgentId, held: Sequence[Job]) -> int:
        """How many jobs it was given, those that it holds included: of a claim it may not have been told yet."""
        tracked = self._spawns.get(agent_id)
        if tracked is None:
            return len(held)
        for job in held:
            tracked.gives(job.id)
        return tracked.jobs_given

    def gave_back(self, agent_id: AgentId, job_id: JobId) -> None:
        """An agent's job returned to the queue.  If it was the one that the agent was made for, it has no purpose."""
        tracked = self._spawns.get(agent_id)
        if tracked is None:
            return
        tracked.gets_back(job_id)
        if tracked.spawn.bound_job_id == job_id:
            self._teardown.let_go(tracked, ScaleDownReason.SHUTDOWN)

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


async def _cannot_clear(spawn: Spawn) -> None:
    raise Permanent(f"agent {spawn.agent_id} was made by another coordinator")
