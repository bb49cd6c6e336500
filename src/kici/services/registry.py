"""The agents connected here: who is idle, who could ever serve a demand.

Memory only; what the cluster knows is in `agent_sessions`.  Looking for an idle agent costs as much as there are
different kinds of idle agents, not as many as there are agents: agents of one shape are interchangeable.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from kici.decide.fit import AgentShape, class_fits
from kici.domain.agent import AgentFacts
from kici.domain.ids import AgentId, ConnectionId, Instant, JobId, ScalerName, TokenId
from kici.domain.job import Demand, Job
from kici.domain.spawn import Spawn
from kici.wire.messages import Message

FIT_MEMO_MAX: Final = 100_000
CLAIMING: Final = JobId("(claiming)")
"""Holds a slot while the store is asked for the oldest job: which one is not known yet."""
_HOST: Final = "kici:host:"


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
    is_resting: bool = False
    """It declined a job as busy, though it has a free slot as far as we know: not asked again for the moment."""
    jobs: dict[JobId, Job | None] = field(default_factory=dict)
    """Each with its row, once the claim is known."""

    @property
    def scaler(self) -> ScalerName | None:
        return None if self.spawn is None else self.spawn.scaler

    @property
    def job_ids(self) -> tuple[JobId, ...]:
        """What it was given, without the slot of a claim that has not found its job yet."""
        return tuple(job_id for job_id in self.jobs if job_id != CLAIMING)

    @property
    def is_free(self) -> bool:
        return not self.draining and not self.is_resting and len(self.jobs) < self.slots and self.jobs_left != 0

    @property
    def may_serve(self) -> bool:
        """Whether it will take jobs, now or after the one it has."""
        return not self.draining and self.jobs_left != 0


def shape_without_host(shape: AgentShape) -> AgentShape:
    """The shape with self-reported host names left out, which make every agent look different."""
    return replace(shape, labels=frozenset(label for label in shape.labels if not label.startswith(_HOST)))


class AgentRegistry:
    """Index of connected agents by shape.  All methods are synchronous."""

    def __init__(self) -> None:
        self._agents: dict[AgentId, ConnectedAgent] = {}
        self._idle: dict[AgentShape, dict[AgentId, ConnectedAgent]] = {}
        self._kinds: dict[AgentShape, dict[AgentId, ConnectedAgent]] = {}
        self._fits: dict[tuple[AgentShape, Demand], bool] = {}

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
        self._kinds.setdefault(agent.shape, {})[agent.agent_id] = agent
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
        kind = self._idle.setdefault(agent.shape, {})
        if agent.is_free:
            kind[agent.agent_id] = agent
        else:
            kind.pop(agent.agent_id, None)
        if not kind:
            del self._idle[agent.shape]

    def close(self, agent_id: AgentId) -> None:
        """Give an agent no further job."""
        agent = self._agents.get(agent_id)
        if agent is not None:
            agent.draining = True
            self.refresh(agent)

    def take_idle(self, demand: Demand, job_id: JobId) -> ConnectedAgent | None:
        """Give `job_id` a slot of an idle agent that fits `demand`: the one that has been idle longest."""
        for shape, agents in self._idle.items():
            if not self.fits(shape, demand):
                continue
            for agent in agents.values():
                if _host_fits(agent, demand):
                    self.give(agent, job_id)
                    return agent
        return None

    def has_idle(self, demand: Demand) -> bool:
        return any(
            self.fits(shape, demand) and any(_host_fits(agent, demand) for agent in agents.values())
            for shape, agents in self._idle.items()
        )

    def ready(self, demand: Demand) -> int:
        """How many idle agents could take such a job now."""
        return sum(
            sum(1 for agent in agents.values() if _host_fits(agent, demand))
            for shape, agents in self._idle.items()
            if self.fits(shape, demand)
        )

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
        return sum(
            sum(1 for agent in agents.values() if agent.may_serve and _host_fits(agent, demand))
            for shape, agents in self._kinds.items()
            if self.fits(shape, demand)
        )

    def could_serve(self, demand: Demand) -> bool:
        return any(
            any(agent.may_serve and _host_fits(agent, demand) for agent in agents.values())
            for shape, agents in self._kinds.items()
            if self.fits(shape, demand)
        )

    def accepts(self, agent: ConnectedAgent, demand: Demand) -> bool:
        """Whether this agent, busy or not, can take a job of this demand that it was not made for."""
        return self.fits(agent.shape, demand) and _host_fits(agent, demand)

    def fits(self, shape: AgentShape, demand: Demand) -> bool:
        """`class_fits`, remembered.  Demands that name a host are judged for the rest of their labels."""
        key = (shape, demand)
        known = self._fits.get(key)
        if known is None:
            if len(self._fits) >= FIT_MEMO_MAX:
                self._fits.clear()
            known = self._fits[key] = class_fits(shape, _without_host(demand)) is None
        return known

    def _forget(self, agent: ConnectedAgent | None) -> None:
        if agent is None:
            return
        del self._agents[agent.agent_id]
        for index in (self._idle, self._kinds):
            kind = index.get(agent.shape)
            if kind is not None:
                kind.pop(agent.agent_id, None)
                if not kind:
                    del index[agent.shape]


def _without_host(demand: Demand) -> Demand:
    if not any(label.startswith(_HOST) for label in demand.labels | demand.exclude):
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
