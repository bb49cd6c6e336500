"""Agents on the host of a worker: orders go over its link, what becomes of them comes back the same way.

The truth is on the worker.  What is tracked here is what was ordered from here (or taken over); a lost link changes
none of it.  When the worker is back it says what it holds, and the two are compared.  An order that was not answered
leaves a doubt: its agent may exist, so its end is asked for until the worker confirms it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kici.backends.ending import end_all
from kici.backends.remote.faults import raise_fault
from kici.decide.microvm import MICROVMS
from kici.domain.errors import DeterministicRefusal, KiciError, NoCapacity, Permanent, Retryable
from kici.domain.ids import AgentId, Instant, ScalerName
from kici.domain.labels import set_key
from kici.domain.resources import Amount
from kici.domain.spawn import ScaleDownReason, Spawn, SpawnState
from kici.domain.worker import remote_name
from kici.kit.finish import finish
from kici.kit.supervise import Supervisor
from kici.ports.backend import (
    Compute,
    ComputeState,
    JobContainer,
    OnEvent,
    OnExit,
    SpawnEvent,
    SpawnEventType,
    SpawnOrder,
)
from kici.ports.clock import Clock
from kici.ports.workers import Unanswered, WorkerChannel
from kici.wire.worker_messages import (
    CLEARS_BOOT_DATA,
    AbortSpawn,
    Amounts,
    Answer,
    ClearBootData,
    DestroyAgent,
    Held,
    Image,
    MarkRegistered,
    ReapAgent,
    RecoverAgents,
    Request,
    SpawnAgent,
    SpawnProgress,
    SweepOrphans,
    TailAgent,
)

DESTROY_SECONDS: Final = 100.0
"""Longer than any backend takes over an end."""
ABORT_SECONDS: Final = 100.0
CLEAR_SECONDS: Final = 8.0
"""Less than an agent has to acknowledge its job, whose start waits for it."""
LOOK_SECONDS: Final = 60.0
TAIL_SECONDS: Final = 10.0
TAIL_LINES: Final = 50
TAILS_MAX: Final = 200
Order = Callable[[str], Request]


@dataclass(slots=True, eq=False)
class _Tracked:
    agent_id: AgentId
    label_set: tuple[str, ...]
    spawned_at: Instant
    on_event: OnEvent | None
    """None: its spawn was ordered by a program before this one."""
    ref: str = ""
    state: ComputeState = ComputeState.SPAWNING
    registered: bool = False
    has_failed: bool = False
    """Its failure was told."""
    is_unwanted: bool = False
    """Its end was asked for while it was being started."""
    ended_how: str | None = None
    """It ended before its spawn could say that it had begun."""


@dataclass(slots=True)
class _Offer:
    sets: frozenset[str] = frozenset()
    max_agents: int = 0


class RemoteBackend:
    """Rules of every backend: `ports.backend.Backend`; beside them, what `ports.workers.RemoteScaler` says."""

    def __init__(
        self,
        *,
        scaler: ScalerName,
        backend_type: str,
        channel: WorkerChannel,
        on_exit: OnExit,
        supervisor: Supervisor,
        clock: Clock,
    ) -> None:
        """`scaler`: as the worker calls it."""
        self._scaler = scaler
        self._type = backend_type
        self._channel = channel
        self._on_exit = on_exit
        self._supervisor = supervisor
        self._clock = clock
        self._offer = _Offer()
        self._agents: dict[AgentId, _Tracked] = {}
        self._doubtful: set[AgentId] = set()
        """Not tracked any more, and perhaps there."""
        self._asked_for: frozenset[AgentId] = frozenset()
        """Being taken over: the worker may hold them for us already, and the answer be on its way."""
        self._tails: dict[AgentId, list[str]] = {}
        self._tailing: set[AgentId] = set()

    @property
    def type(self) -> str:
        return self._type

    @property
    def spawns_on_local_host(self) -> bool:
        return False

    def active_count(self) -> int:
        return len(self._agents)

    def computes(self) -> tuple[Compute, ...]:
        return tuple(_compute(agent) for agent in self._agents.values())

    # ------------------------------------------------------------------ orders

    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        agent = self._admit(order, on_event)
        try:
            answer = await self._channel.ask(
                lambda request_id: self._spawn_order(request_id, order),
                what=f"start agent {agent.agent_id}",
                seconds=None,
                on_answer=lambda answer: _settle(agent, answer.agents),
            )
            raise_fault(answer, self._title)
            if agent.ended_how is not None:
                raise DeterministicRefusal(agent.ended_how)
        except KiciError as error:
            if isinstance(error, Unanswered) and agent.registered and not agent.is_unwanted:
                agent.state = ComputeState.RUNNING  # its agent came: the answer was lost, not the order
                return _compute(agent)
            self._failed(agent, error)
            raise
        except BaseException as error:
            await finish(self._abort(agent), seconds=ABORT_SECONDS + 5, what=f"calling off agent {agent.agent_id}")
            self._tell_failure(agent, str(error) or "the start was called off")
            raise
        return _compute(agent)

    async def destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        if agent_id not in self._agents and agent_id not in self._doubtful:
            return
        what = f"ending agent {agent_id}"
        try:
            await finish(self._destroy(agent_id, reason), seconds=DESTROY_SECONDS + 5, what=what)
        except TimeoutError as error:
            raise Retryable(str(error)) from error

    def mark_registered(self, agent_id: AgentId) -> None:
        agent = self._agents.get(agent_id)
        if agent is not None:
            agent.registered = True
            self._channel.tell(MarkRegistered(agent_id=agent_id))

    async def boot_data_read(self, agent_id: AgentId) -> None:
        """Asked of a worker that is away for a moment as well: once it is back."""
        if self._type != MICROVMS:
            return  # others hand nothing over that a job could find
        if self._channel.is_linked and self._channel.protocol < CLEARS_BOOT_DATA:
            raise Permanent(f"worker {self._channel.name} is too old to say that it has cleared it; update it")
        answer = await self._channel.ask(
            lambda request_id: ClearBootData(request_id=request_id, agent_id=agent_id),
            what=f"clear the boot data of agent {agent_id}",
            seconds=CLEAR_SECONDS,
        )
        raise_fault(answer, self._title)

    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        unknown = sorted(known - self._agents.keys())
        self._asked_for |= frozenset(unknown)
        try:
            answer = await self._look(
                lambda request_id: RecoverAgents(request_id=request_id, scaler=self._scaler, known=tuple(unknown)),
                f"look for {len(unknown)} agents",
            )
        finally:
            self._asked_for -= frozenset(unknown)
        found = [self._track(held) for held in answer.agents]
        return tuple(_compute(agent) for agent in found)

    async def reap_unowned(self, agent_id: AgentId) -> bool:
        answer = await self._look(
            lambda request_id: ReapAgent(request_id=request_id, agent_id=agent_id), f"reclaim agent {agent_id}"
        )
        self._drop(agent_id)
        return answer.count > 0

    async def cleanup_orphans(self, owned: frozenset[AgentId]) -> int:
        """A worker that is away is compared when it comes back."""
        if not self._channel.is_linked:
            return 0
        kept = tuple(sorted(owned | self._agents.keys() | self._doubtful | self._asked_for))
        answer = await self._look(
            lambda request_id: SweepOrphans(request_id=request_id, scaler=self._scaler, owned=kept), "look for orphans"
        )
        return answer.count

    async def shutdown_all(self) -> None:
        await end_all(self._agents, self.destroy)

    async def release_all(self) -> None:
        """Nothing is sent: the worker keeps what it has."""
        self._agents.clear()
        self._doubtful.clear()

    def tail(self, agent_id: AgentId, lines: int) -> list[str]:
        """What is known; newer lines are fetched meanwhile, for whoever asks again."""
        if agent_id in self._agents and agent_id not in self._tailing and self._channel.is_linked:
            self._tailing.add(agent_id)
            self._supervisor.start(f"tail.{agent_id}", self._fetch_tail(agent_id))
        return self._tails.get(agent_id, [])[-lines:] if lines > 0 else []

    # ------------------------------------------------------------------ what the worker tells

    def offered(self, sets: Sequence[tuple[str, ...]], max_agents: int) -> None:
        self._offer = _Offer(frozenset(map(set_key, sets)), max_agents)

    def expect(self, rows: Sequence[Spawn]) -> None:
        for row in rows:
            if row.agent_id not in self._agents:
                self._agents[row.agent_id] = _Tracked(
                    row.agent_id,
                    row.label_set,
                    row.spawned_at,
                    None,
                    ref=f"agent on {self._channel.name}",
                    state=ComputeState.RUNNING,
                    registered=row.state is SpawnState.REGISTERED,
                )

    def compared(self, held: Mapping[AgentId, Held], gone: Mapping[AgentId, str]) -> None:
        for agent in list(self._agents.values()):
            found = held.get(agent.agent_id)
            if found is not None:
                agent.ref = found.ref
                if agent.registered:
                    self._channel.tell(MarkRegistered(agent_id=agent.agent_id))
            elif agent.state is ComputeState.RUNNING:  # other states have an order under way, which is sent again
                how = gone.get(agent.agent_id, f"worker {self._channel.name} holds it no longer")
                _ = self.ended(agent.agent_id, how)

    def progressed(self, progress: SpawnProgress) -> bool:
        agent = self._agents.get(AgentId(progress.agent_id))
        if agent is None:
            return False
        if progress.kind != SpawnEventType.FAILED:
            self._report(agent, progress)
        elif agent.state is ComputeState.RUNNING:
            _ = self.ended(agent.agent_id, progress.detail)
        else:
            agent.has_failed = True
            self._report(agent, progress)
        return True

    def ended(self, agent_id: AgentId, how: str) -> bool:
        agent = self._agents.get(agent_id)
        if agent is None:
            return False
        if agent.state is not ComputeState.RUNNING:
            return True  # the order that is under way tells
        del self._agents[agent_id]
        agent.ended_how = how
        if agent.registered or agent.on_event is None:
            self._on_exit(agent_id, how)
        else:
            self._tell_failure(agent, how)
        return True

    def forget(self, agent_id: AgentId) -> None:
        self._agents.pop(agent_id, None)
        self._doubtful.discard(agent_id)

    # ------------------------------------------------------------------ how

    def _admit(self, order: SpawnOrder, on_event: OnEvent) -> _Tracked:
        """Check and track, before the first await.  Want of room is no failure: nothing was begun."""
        agent = _Tracked(order.agent_id, order.label_set, self._clock.now(), on_event)
        if set_key(order.label_set) not in self._offer.sets:
            error = Permanent(f"scaler {self._title} has no label set [{', '.join(order.label_set)}] any more")
            self._tell_failure(agent, str(error))
            raise error
        if len(self._agents) >= self._offer.max_agents:
            raise NoCapacity(f"scaler {self._title} already has its maximum of {self._offer.max_agents} agents")
        assert order.agent_id not in self._agents, f"agent id {order.agent_id} is minted once"
        self._agents[order.agent_id] = agent
        return agent

    @property
    def _title(self) -> ScalerName:
        return remote_name(self._channel.name, self._scaler)

    def _spawn_order(self, request_id: str, order: SpawnOrder) -> SpawnAgent:
        return SpawnAgent(
            request_id=request_id,
            scaler=self._scaler,
            agent_id=order.agent_id,
            label_set=order.label_set,
            labels=order.labels,
            gate=tuple(sorted(order.gate)),
            token=order.token,
            token_id=order.token_id,
            limits=_amounts(order.limits),
            requests=_amounts(order.requests),
            bound_job_id=order.bound_job_id,
            run_id=order.run_id,
            image=None if order.container is None else _image(order.container),
        )

    def _failed(self, agent: _Tracked, error: KiciError) -> None:
        self._agents.pop(agent.agent_id, None)
        if isinstance(error, Unanswered):
            self._doubtful.add(agent.agent_id)
        if not isinstance(error, NoCapacity):
            self._tell_failure(agent, str(error))

    async def _abort(self, agent: _Tracked) -> None:
        """Nothing of it is tracked when this returns, and nothing is there unless the worker cannot be asked."""
        self._agents.pop(agent.agent_id, None)
        self._doubtful.add(agent.agent_id)
        if not self._channel.is_linked:
            return
        try:
            answer = await self._channel.ask(
                lambda request_id: AbortSpawn(request_id=request_id, agent_id=agent.agent_id),
                what=f"call off agent {agent.agent_id}",
                seconds=ABORT_SECONDS,
            )
        except KiciError:
            return  # its end is asked for again by whoever tears it down
        if answer.fault is None:
            self._doubtful.discard(agent.agent_id)

    async def _destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        if self._channel.is_given_up:
            self._drop(agent_id)
            return
        agent = self._agents.get(agent_id)
        if agent is not None:
            agent.is_unwanted = True
            if agent.state is ComputeState.RUNNING:
                agent.state = ComputeState.DESTROYING
        answer = await self._look(
            lambda request_id: DestroyAgent(request_id=request_id, agent_id=agent_id, reason=reason),
            f"end agent {agent_id}",
            seconds=DESTROY_SECONDS,
        )
        self._remember_tail(agent_id, answer.lines)
        self._drop(agent_id)

    async def _look(self, order: Order, what: str, *, seconds: float = LOOK_SECONDS) -> Answer:
        """Ask a worker that is there now; raise its fault."""
        if not self._channel.is_linked:
            raise Retryable(f"worker {self._channel.name} is not linked; it could not be told to {what}")
        answer = await self._channel.ask(order, what=what, seconds=seconds)
        raise_fault(answer, self._title)
        return answer

    async def _fetch_tail(self, agent_id: AgentId) -> None:
        try:
            answer = await self._look(
                lambda request_id: TailAgent(request_id=request_id, agent_id=agent_id, lines=TAIL_LINES),
                f"show the output of agent {agent_id}",
                seconds=TAIL_SECONDS,
            )
            self._remember_tail(agent_id, answer.lines)
        except KiciError:
            return  # what was known stays
        finally:
            self._tailing.discard(agent_id)

    def _remember_tail(self, agent_id: AgentId, lines: Sequence[str]) -> None:
        if lines:
            self._tails.pop(agent_id, None)
            self._tails[agent_id] = list(lines)
            while len(self._tails) > TAILS_MAX:
                del self._tails[next(iter(self._tails))]

    def _track(self, held: Held) -> _Tracked:
        agent = _Tracked(AgentId(held.agent_id), held.label_set, Instant(held.spawned_at), None)
        agent.registered = held.registered
        _settle(agent, (held,))
        self._agents[agent.agent_id] = agent
        return agent

    def _drop(self, agent_id: AgentId) -> None:
        self._agents.pop(agent_id, None)
        self._doubtful.discard(agent_id)

    def _report(self, agent: _Tracked, progress: SpawnProgress) -> None:
        if agent.on_event is not None:
            kind = SpawnEventType(progress.kind)
            agent.on_event(
                SpawnEvent(agent_id=agent.agent_id, type=kind, detail=progress.detail, at=Instant(progress.at))
            )

    def _tell_failure(self, agent: _Tracked, detail: str) -> None:
        """Once for each spawn, whoever noticed it first."""
        if agent.has_failed or agent.on_event is None:
            return
        agent.has_failed = True
        agent.on_event(
            SpawnEvent(agent_id=agent.agent_id, type=SpawnEventType.FAILED, detail=detail, at=self._clock.now())
        )


def _settle(agent: _Tracked, answered: Sequence[Held]) -> None:
    """The worker has it."""
    for held in answered:
        agent.ref = held.ref
        agent.spawned_at = Instant(held.spawned_at)
        if agent.state is ComputeState.SPAWNING:
            agent.state = ComputeState.DESTROYING if agent.is_unwanted else ComputeState.RUNNING


def _compute(agent: _Tracked) -> Compute:
    return Compute(
        agent_id=agent.agent_id,
        label_set=agent.label_set,
        ref=agent.ref,
        spawned_at=agent.spawned_at,
        state=agent.state,
        registered=agent.registered,
    )


def _amounts(amount: Amount) -> Amounts:
    return Amounts(cpus=amount.cpus, memory_bytes=amount.memory_bytes)


def _image(container: JobContainer) -> Image:
    return Image(
        image=container.image,
        username=container.username,
        password=container.password,
        registry=container.registry,
        env=container.env,
    )
