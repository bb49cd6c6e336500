"""The index of connected agents: whom it finds, and that it never disagrees with the agents themselves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kici.decide.fit import AgentShape, class_fits
from kici.domain.ids import AgentId, ConnectionId, JobId
from kici.domain.job import Demand
from kici.services.registry import AgentRegistry, ConnectedAgent, shape_without_host
from kici.testing.builders import a_demand, a_shape
from kici.testing.sim_clock import SIM_START
from kici.wire.messages import Message

JOB = JobId("job-1")


@dataclass(slots=True)
class FakeSeat:
    connection_id: ConnectionId
    opened_at: float = 0.0
    sent: list[Message] = field(default_factory=list)

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self, code: int, reason: str) -> None:
        pass


def an_agent(
    name: str = "a", *labels: str, connection: str = "1", gate: tuple[str, ...] = (), slots: int = 1, **fields: object
) -> ConnectedAgent:
    carried = frozenset(labels or ("linux", "x64"))
    shape = AgentShape(labels=carried, gate=frozenset(gate), **fields)  # type: ignore[arg-type]  # as given
    return ConnectedAgent(
        agent_id=AgentId(name),
        seat=FakeSeat(ConnectionId(f"{name}/{connection}")),
        shape=shape_without_host(shape),
        labels=carried,
        registered_at=SIM_START,
        slots=slots,
    )


def a_registry(*agents: ConnectedAgent) -> AgentRegistry:
    registry = AgentRegistry()
    for agent in agents:
        registry.add(agent)
    return registry


def test_an_idle_agent_with_all_labels_is_found_and_then_is_busy() -> None:
    registry = a_registry(an_agent("a", "linux", "gpu"))
    assert registry.take_idle(a_demand("linux", "fpga"), JOB) is None
    assert registry.take_idle(a_demand("gpu"), JOB) is registry.get(AgentId("a"))
    assert registry.take_idle(a_demand("gpu"), JobId("job-2")) is None


@pytest.mark.spec("T1.3")
def test_a_gated_agent_is_idle_only_for_jobs_that_name_its_gate() -> None:
    registry = a_registry(an_agent("a", "linux", "gpu", gate=("gpu",)))
    assert not registry.has_idle(a_demand("linux"))
    assert not registry.could_serve(a_demand("linux"))
    assert registry.has_idle(a_demand("linux", "gpu"))


def test_an_excluded_label_rules_an_agent_out() -> None:
    registry = a_registry(an_agent("a", "linux", "gpu"))
    assert not registry.has_idle(a_demand("linux", exclude=frozenset({"gpu"})))


@pytest.mark.spec("T2.11")
def test_a_draining_agent_is_offered_nothing_and_serves_nothing() -> None:
    agent = an_agent()
    registry = a_registry(agent)
    agent.draining = True
    registry.refresh(agent)
    assert not registry.has_idle(a_demand())
    assert not registry.could_serve(a_demand())


def test_an_agent_at_full_capacity_could_serve_but_is_not_idle() -> None:
    registry = a_registry(an_agent(slots=2))
    for job in ("job-1", "job-2"):
        assert registry.take_idle(a_demand(), JobId(job)) is not None
    assert registry.take_idle(a_demand(), JobId("job-3")) is None
    assert registry.could_serve(a_demand())
    assert registry.serving(a_demand()) == 1


@pytest.mark.spec("D10")
def test_an_agent_for_one_job_takes_one_job_in_its_life() -> None:
    agent = an_agent()
    agent.jobs_left = 1
    registry = a_registry(agent)
    assert registry.take_idle(a_demand(), JOB) is agent
    registry.done(agent, JOB)
    assert not registry.has_idle(a_demand())
    assert not registry.could_serve(a_demand())


def test_a_slot_that_is_given_back_also_gives_the_job_back_to_the_agents_life() -> None:
    agent = an_agent()
    agent.jobs_left = 1
    registry = a_registry(agent)
    registry.give(agent, JOB)
    registry.take_back(agent, JOB)
    assert registry.take_idle(a_demand(), JOB) is agent


def test_the_agent_that_is_idle_longest_comes_first() -> None:
    agents = [an_agent(name) for name in "abc"]
    registry = a_registry(*agents)
    taken = registry.take_idle(a_demand(), JOB)
    assert taken is agents[0]
    registry.done(agents[0], JOB)
    assert registry.take_idle(a_demand(), JOB) is agents[1]


def test_agents_are_told_apart_by_their_host_names_only_when_a_job_names_one() -> None:
    here, there = an_agent("a", "linux", "kici:host:here"), an_agent("b", "linux", "kici:host:there")
    registry = a_registry(here, there)
    assert registry.take_idle(a_demand("linux", "kici:host:there"), JOB) is there
    assert not registry.has_idle(a_demand("linux", "kici:host:there"))
    assert registry.has_idle(a_demand("linux", exclude=frozenset({"kici:host:there"})))
    assert not registry.has_idle(a_demand("linux", exclude=frozenset({"kici:host:here"})))


def test_only_the_connection_that_an_agent_has_now_can_take_it_out() -> None:
    registry = a_registry(an_agent(connection="1"), an_agent(connection="2"))
    assert registry.remove(AgentId("a"), ConnectionId("a/1")) is None
    assert len(registry) == 1
    assert registry.remove(AgentId("a"), ConnectionId("a/2")) is not None
    assert len(registry) == 0


def test_the_end_of_a_claim_for_an_older_connection_leaves_the_newer_one_idle() -> None:
    older, newer = an_agent(connection="1"), an_agent(connection="2")
    registry = a_registry(older)
    registry.give(older, JOB)
    registry.add(newer)
    registry.take_back(older, JOB)
    assert registry.has_idle(a_demand())
    registry.done(older, JOB)
    assert registry.take_idle(a_demand(), JOB) is newer


def test_a_warm_agent_with_other_resources_than_declared_does_not_fit() -> None:
    registry = a_registry(an_agent(prespawned=True, resources=a_shape(cpus=4)))
    assert registry.has_idle(a_demand())
    assert not registry.has_idle(a_demand(cpus=2))


# --- the index against a naive look at every agent

label_sets = st.sampled_from([frozenset({"linux"}), frozenset({"linux", "gpu", "kici:host:here"})])
DEMANDS = [
    a_demand(*labels, exclude=frozenset(exclude))
    for labels, exclude in (
        ((), ()),
        (("linux",), ("gpu",)),
        (("linux", "gpu"), ()),
        (("kici:host:here",), ()),
        (("gpu", "kici:host:here"), ("kici:host:there",)),
        (("linux",), ("kici:host:here",)),
    )
]
names = st.sampled_from("ab")


class Twin:
    """A registry, and every agent object that was ever put into it: old ones are still used by slow callers."""

    def __init__(self) -> None:
        self.registry = AgentRegistry()
        self.ever: list[ConnectedAgent] = []
        self.current: dict[AgentId, ConnectedAgent] = {}
        self.jobs = 0

    def add(self, name: str, labels: frozenset[str], gate: tuple[str, ...], slots: int, left: int | None) -> None:
        agent = an_agent(name, *(labels or {"linux"}), connection=str(len(self.ever)), gate=gate, slots=slots)
        agent.jobs_left = left
        self.ever.append(agent)
        self.registry.add(agent)
        self.current[agent.agent_id] = agent

    def remove(self, number: int) -> None:
        agent = self.ever[number]
        removed = self.registry.remove(agent.agent_id, agent.seat.connection_id)
        assert (removed is agent) == (self.current.get(agent.agent_id) is agent)
        if removed is agent:
            del self.current[agent.agent_id]

    def idle(self, demand: Demand) -> list[ConnectedAgent]:
        return [agent for agent in self.serving(demand) if agent.is_free]

    def serving(self, demand: Demand) -> list[ConnectedAgent]:
        return [
            agent
            for agent in self.current.values()
            if agent.may_serve and class_fits(AgentShape(labels=agent.labels, gate=agent.shape.gate), demand) is None
        ]

    def take(self, demand: Demand) -> None:
        self.jobs += 1
        idle = self.idle(demand)
        taken = self.registry.take_idle(demand, JobId(f"job-{self.jobs}"))
        assert (taken in idle) if idle else (taken is None)

    def check(self, demand: Demand) -> None:
        assert len(self.registry) == len(self.current)
        assert {agent.agent_id for agent in self.registry} == set(self.current)
        assert self.registry.has_idle(demand) == bool(self.idle(demand))
        assert self.registry.ready(demand) == len(self.idle(demand))
        assert self.registry.serving(demand) == len(self.serving(demand))
        assert self.registry.could_serve(demand) == bool(self.serving(demand))


def end_a_job(twin: Twin, number: int, how: Callable[[AgentRegistry, ConnectedAgent, JobId], None]) -> None:
    agent = twin.ever[number]
    for job_id in list(agent.jobs)[:1]:
        how(twin.registry, agent, job_id)


steps = st.one_of(
    st.tuples(
        st.just("add"),
        names,
        label_sets,
        st.sampled_from([(), ("gpu",)]),
        st.integers(1, 2),
        st.sampled_from([None, 1]),
    ),
    st.tuples(st.just("take"), st.sampled_from(DEMANDS)),
    st.tuples(st.sampled_from(["remove", "done", "take back", "drain"]), st.integers(0, 3)),
)


@settings(max_examples=300)
@given(steps=st.lists(steps, max_size=20))
def test_the_index_always_agrees_with_a_look_at_every_agent(steps: list[Any]) -> None:
    twin = Twin()
    for kind, *rest in steps:
        number = rest[0] if kind not in ("add", "take") else 0
        match kind:
            case "add":
                twin.add(*rest)
            case "take":
                twin.take(*rest)
            case _ if number >= len(twin.ever):
                continue
            case "remove":
                twin.remove(number)
            case "done":
                end_a_job(twin, number, AgentRegistry.done)
            case "take back":
                end_a_job(twin, number, AgentRegistry.take_back)
            case _:
                agent = twin.ever[number]
                agent.draining = not agent.draining
                twin.registry.refresh(agent)
        for demand in DEMANDS:
            twin.check(demand)
