"""The agents connected here: who is idle, who could ever serve a demand.

Memory only; what the cluster knows is in `agent_sessions`.  Looking for an idle agent costs as much as there are
different kinds of idle agents, not as many as there are agents: agents of one shape are interchangeable.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kici.decide.fit import AgentShape, class_fits
from kici.domain.agent import AgentFacts
from kici.domain.ids import AgentId, ConnectionId, Instant, JobId, ScalerName, TokenId
from kici.domain.job import Demand, Job
from kici.domain.spawn import Spawn, SpawnState
from kici.wire.messages import AgentMetrics, Message

DEMANDS_REMEMBERED_MAX: Final = 2000
CLAIMING: Final = JobId("(claiming)")
"""Holds a slot while the store is asked for the oldest job: which one is not known yet."""
_HOST: Final = "kici:host:"
STATEFUL: Final = "stateful"


class Seat(Protocol):
    """The connection of an agent, as those see it who give it work."""

    @property
    def connection_id(self) -> ConnectionId: ...

    @property
    def opened_at(self) -> float:
        """Monotonic seconds: of two connections of one agent, the one that was opened later counts."""
        ...

    def send(self, message: Message) -> None: ...

    def close(self, code: int, reason: str) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class ConnectedAgent:
    """One registered agent.  `jobs` holds what it was given and has not finished, claims under way included."""

    agent_id: AgentId
    seat: Seat
    shape: AgentShape
    """What it can take, without its host's name: agents of one shape are interchangeable."""
    labels: frozenset[str]
    registered_at: Instant
    token_id: TokenId | None = None
    spawn: Spawn | None = None
    """Of a scaler-made agent."""
    facts: AgentFacts = field(default_factory=AgentFacts)
    slots: int = 1
    jobs_left: int | None = None
    """How many more jobs it may take in its life; None: any number."""
    draining: bool = False
    may_start: bool = False
    """Nothing in its compute tells a job what the agent was told at its boot."""
    reported: AgentMetrics | None = None
    """What it last said of itself."""
    is_settling: bool = False
    """What it holds is still compared with what the store says: it is given nothing new meanwhile."""
    is_resting: bool = False
    """It declined a job as busy, though it has a free slot as far as we know: not asked again for the moment."""
    jobs: dict[JobId, Job | None] = field(default_factory=dict)
    """Each with its row, once the claim is known."""

    @property
    def scaler(self) -> ScalerName | None:
        return None if self.spawn is None else self.spawn.scaler

    @property
    def backend_type(self) -> str:
        """`stateful` for an agent that no scaler made."""
        return STATEFUL if self.spawn is None else self.spawn.backend_type

    @property
    def is_new(self) -> bool:
        """A scaler made it, and it has never been here before, nor at another coordinator."""
        return self.spawn is not None and self.spawn.state is SpawnState.BOOTING

    @property
    def job_ids(self) -> tuple[JobId, ...]:
        """What it was given, without the slot of a claim that has not found its job yet."""
        return tuple(job_id for job_id in self.jobs if job_id != CLAIMING)

    @property
    def is_free(self) -> bool:
        rests = self.draining or self.is_settling or self.is_resting
        return not rests and len(self.jobs) < self.slots and self.jobs_left != 0

    @property
    def may_serve(self) -> bool:
        """Whether it will take jobs, now or after the one it has."""
        return not self.draining and self.jobs_left != 0


def shape_without_host(shape: AgentShape) -> AgentShape:
    """The shape with self-reported host names left out, which make every agent look different."""
    return replace(shape, labels=frozenset(label for label in shape.labels if not label.startswith(_HOST)))


class Kind:
    """The connected agents of one shape, and those of them that are idle."""

    __slots__ = ("agents", "idle", "shape")

    def __init__(self, shape: AgentShape) -> None:
        self.shape = shape
        self.agents: dict[AgentId, ConnectedAgent] = {}
        self.idle: dict[AgentId, ConnectedAgent] = {}


class AgentRegistry:
    """Index of connected agents by shape.  All methods are synchronous."""

    def __init__(self) -> None:
        self._agents: dict[AgentId, ConnectedAgent] = {}
        self._kinds: dict[AgentShape, Kind] = {}
        self._idle: dict[Kind, None] = {}
        """Kinds with an idle agent, in the order in which they got one."""
        self._fits: dict[Demand, dict[Kind, bool]] = {}
        """Remembered answers of `class_fits`: a demand is looked up once, then kinds by identity."""

    def __len__(self) -> int:
        return len(self._agents)

    def __iter__(self) -> Iterator[ConnectedAgent]:
        return iter(list(self._agents.values()))

    def get(self, agent_id: AgentId) -> ConnectedAgent | None:
        return self._agents.get(agent_id)

    def add(self, agent: ConnectedAgent) -> None:
        """Enter an agent; one of the same id is replaced."""
        self._forget(self._agents.get(agent.agent_id))
        self._agents[agent.agent_id] = agent
        kind = self._kinds.get(agent.shape)
        if kind is None:
            kind = self._kinds[agent.shape] = Kind(agent.shape)
        kind.agents[agent.agent_id] = agent
        self.refresh(agent)

    def remove(self, agent_id: AgentId, connection_id: ConnectionId) -> ConnectedAgent | None:
        """Take an agent out, if it is still of this connection."""
        agent = self._agents.get(agent_id)
        if agent is None or agent.seat.connection_id != connection_id:
            return None
        self._forget(agent)
        return agent

    def refresh(self, agent: ConnectedAgent) -> None:
        """Call after a change of its jobs, slots or draining.  One that was replaced or removed changes nothing."""
        if self._agents.get(agent.agent_id) is not agent:
            return
        kind = self._kinds[agent.shape]
        if agent.is_free:
            kind.idle[agent.agent_id] = agent
            self._idle[kind] = None
        else:
            self._is_not_idle(kind, agent.agent_id)

    def close(self, agent_id: AgentId) -> None:
        """Give an agent no further job."""
        agent = self._agents.get(agent_id)
        if agent is not None:
            agent.draining = True
            self.refresh(agent)

    def take_idle(self, demand: Demand, job_id: JobId) -> ConnectedAgent | None:
        """Give `job_id` a slot of an idle agent that fits `demand`: the one that has been idle longest."""
        agent = next(self._idle_for(demand), None)
        if agent is not None:
            self.give(agent, job_id)
        return agent

    def has_idle(self, demand: Demand) -> bool:
        return next(self._idle_for(demand), None) is not None

    def ready(self, demand: Demand) -> int:
        """How many idle agents could take such a job now."""
        if _names_host(demand):
            return sum(1 for _ in self._idle_for(demand))
        return sum(len(kind.idle) for kind in self._fitting(self._idle, demand))

    def give(self, agent: ConnectedAgent, job_id: JobId) -> None:
        """Take a slot for a job.  Its row is entered when the claim is known."""
        agent.jobs[job_id] = None
        if agent.jobs_left is not None:
            agent.jobs_left -= 1
        self.refresh(agent)

    def take_back(self, agent: ConnectedAgent, job_id: JobId) -> None:
        """The job did not reach the agent after all."""
        if job_id in agent.jobs:
            del agent.jobs[job_id]
            if agent.jobs_left is not None:
                agent.jobs_left += 1
        self.refresh(agent)

    def done(self, agent: ConnectedAgent, job_id: JobId) -> None:
        """The agent has finished with the job."""
        agent.jobs.pop(job_id, None)
        self.refresh(agent)

    def serving(self, demand: Demand) -> int:
        """How many connected agents could take such a job, sooner or later."""
        return sum(1 for _ in self._serving(demand))

    def could_serve(self, demand: Demand) -> bool:
        return next(self._serving(demand), None) is not None

    def accepts(self, agent: ConnectedAgent, demand: Demand) -> bool:
        """Whether this agent, busy or not, can take a job of this demand that it was not made for."""
        return self.fits(agent.shape, demand) and _host_fits(agent, demand)

    def fits(self, shape: AgentShape, demand: Demand) -> bool:
        """`class_fits`, remembered.  Demands that name a host are judged for the rest of their labels."""
        kind = self._kinds.get(shape)
        if kind is None:
            return class_fits(shape, _without_host(demand)) is None
        return bool(self._fitting((kind,), demand))

    def _idle_for(self, demand: Demand) -> Iterator[ConnectedAgent]:
        for kind in self._fitting(self._idle, demand):
            for agent in kind.idle.values():
                if _host_fits(agent, demand):
                    yield agent

    def _serving(self, demand: Demand) -> Iterator[ConnectedAgent]:
        for kind in self._fitting(self._kinds.values(), demand):
            for agent in kind.agents.values():
                if agent.may_serve and _host_fits(agent, demand):
                    yield agent

    def _fitting(self, kinds: Iterable[Kind], demand: Demand) -> list[Kind]:
        known = self._fits.get(demand)
        if known is None:
            if len(self._fits) >= DEMANDS_REMEMBERED_MAX:
                self._fits.clear()
            known = self._fits[demand] = {}
        found = []
        for kind in kinds:
            fits = known.get(kind)
            if fits is None:
                fits = known[kind] = class_fits(kind.shape, _without_host(demand)) is None
            if fits:
                found.append(kind)
        return found

    def _is_not_idle(self, kind: Kind, agent_id: AgentId) -> None:
        kind.idle.pop(agent_id, None)
        if not kind.idle:
            self._idle.pop(kind, None)

    def _forget(self, agent: ConnectedAgent | None) -> None:
        if agent is None:
            return
        del self._agents[agent.agent_id]
        kind = self._kinds[agent.shape]
        kind.agents.pop(agent.agent_id, None)
        self._is_not_idle(kind, agent.agent_id)
        if not kind.agents:
            del self._kinds[agent.shape]
            for known in self._fits.values():
                known.pop(kind, None)


def _names_host(demand: Demand) -> bool:
    return any(label.startswith(_HOST) for label in demand.labels | demand.exclude)


def _without_host(demand: Demand) -> Demand:
    if not _names_host(demand):
        return demand
    return replace(
        demand,
        labels=frozenset(label for label in demand.labels if not label.startswith(_HOST)),
        exclude=frozenset(label for label in demand.exclude if not label.startswith(_HOST)),
    )


def _host_fits(agent: ConnectedAgent, demand: Demand) -> bool:
    wanted = [label for label in demand.labels if label.startswith(_HOST)]
    return all(label in agent.labels for label in wanted) and not (
        demand.exclude and any(label.startswith(_HOST) and label in agent.labels for label in demand.exclude)
    )
