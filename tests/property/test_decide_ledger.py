"""Several coordinators of one host use a pool in any order, are killed and come back: the caps hold all the time."""

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kici.decide.admit import Cap
from kici.decide.ledger import EMPTY, Kind, Ledger, Life, Row, declare, is_alive, living, reserve, restore, without
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.resources import Amount

INSTANCES = [InstanceId("a"), InstanceId("b"), InstanceId("c")]
SCALER = ScalerName("local")
instances = st.sampled_from(INSTANCES)
caps = st.builds(Cap, cpus=st.sampled_from([2.0, 3.5, 6.0]), memory_bytes=st.sampled_from([None, 5, 9]))
amounts = st.builds(Amount, cpus=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]), memory_bytes=st.integers(0, 4))


class Host(RuleBasedStateMachine):
    """The ledger as it stands in the file, beside what really runs on the host."""

    agents = Bundle("agents")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = EMPTY
        self.running: set[InstanceId] = set()
        self.runs: dict[AgentId, Row] = {}
        """What really runs, and what it was made with."""
        self.number = 0

    def change(self, instance: InstanceId, step: Callable[[Ledger], Ledger]) -> None:
        self.running.add(instance)
        self.ledger = step(living(self.ledger, self.life()))

    def life(self) -> Life:
        return Life(boot="boot-1", instances=frozenset(self.running), agents=frozenset(self.runs))

    @rule(target=agents, instance=instances, cap=caps, requests=amounts, kind=st.sampled_from(Kind))
    def an_agent_is_wanted(self, instance: InstanceId, cap: Cap, requests: Amount, kind: Kind) -> AgentId:
        self.number += 1
        row = Row(
            instance_id=instance,
            agent_id=AgentId(f"agent-{self.number}"),
            requests=requests,
            reserved_at=Instant(0),
            boot="boot-1",
            kind=kind,
        )
        self.running.add(instance)
        self.runs[row.agent_id] = row  # its coordinator proves it before it asks
        outcome = reserve(living(self.ledger, self.life()), row, cap=cap, pool="ci", scaler=SCALER)
        self.ledger = outcome.ledger
        if outcome.refused is not None:
            del self.runs[row.agent_id]
            assert outcome.refused.used + outcome.refused.requested > outcome.refused.limit
        else:
            in_force = self.ledger.cap
            used = self.ledger.usage
            assert in_force.cpus is not None
            assert used.cpu_micros <= in_force.cpus * 1_000_000
            assert in_force.memory_bytes is None or used.memory_bytes <= in_force.memory_bytes
            assert all(in_force.cpus <= (declared.cpus or 0) for declared in self.ledger.caps.values())
        return row.agent_id

    @rule(agent=agents)
    def an_agent_ends_and_is_given_back(self, agent: AgentId) -> None:
        row = self.runs.get(agent)
        if row is not None and row.instance_id in self.running:
            del self.runs[agent]
            self.change(row.instance_id, lambda now: without(now, row.instance_id, {agent}))

    @rule(agent=agents)
    def a_process_of_a_killed_coordinator_ends(self, agent: AgentId) -> None:
        row = self.runs.get(agent)
        if row is not None and row.instance_id not in self.running and row.kind is Kind.PROCESS:
            del self.runs[agent]

    @rule(instance=instances)
    def a_coordinator_is_killed(self, instance: InstanceId) -> None:
        self.running.discard(instance)

    @rule(instance=instances, cap=caps)
    def a_coordinator_declares(self, instance: InstanceId, cap: Cap) -> None:
        self.change(instance, lambda now: declare(now, instance, cap))

    @rule(instance=instances)
    def a_coordinator_is_restarted(self, instance: InstanceId) -> None:
        mine = [row for row in self.runs.values() if row.instance_id == instance]
        self.change(instance, lambda now: restore(now, instance, mine))

    @invariant()
    def everything_that_runs_is_in_the_ledger_and_lives(self) -> None:
        alive = {row.agent_id: row for row in self.ledger.rows if is_alive(row, self.life())}
        assert self.runs.items() <= alive.items()

    @invariant()
    def nothing_is_in_the_ledger_twice(self) -> None:
        names = [row.agent_id for row in self.ledger.rows]
        assert len(names) == len(set(names))

    @invariant()
    def usage_is_what_runs(self) -> None:
        alive = living(self.ledger, self.life())
        assert {row.agent_id for row in alive.rows} == set(self.runs)
        assert alive.usage.cpu_micros == sum(round(row.requests.cpus * 1_000_000) for row in self.runs.values())
        assert alive.usage.memory_bytes == sum(row.requests.memory_bytes for row in self.runs.values())

    def teardown(self) -> None:
        for agent, row in list(self.runs.items()):
            del self.runs[agent]
            self.change(row.instance_id, lambda now, row=row: without(now, row.instance_id, {row.agent_id}))  # type: ignore[misc]  # a default that keeps the value of the loop
        assert living(self.ledger, self.life()).rows == ()


TestHost = pytest.mark.spec("scaler 49.2")(Host.TestCase)
