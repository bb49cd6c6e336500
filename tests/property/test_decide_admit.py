"""Usage is what the reservations add up to, whatever happens, and caps hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kici.decide.admit import NO_USAGE, Active, Book, Cap, HostCaps, ScalerCaps, Usage, admit
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.resources import Amount, Shape
from kici.domain.spawn import Reservation

SCALERS = tuple(ScalerName(name) for name in ("a", "b"))
AGENTS = tuple(AgentId(f"agent-{number}") for number in range(8))
agents = st.sampled_from(AGENTS)
amounts = st.builds(
    Amount,
    cpus=st.sampled_from((0.0, 0.1, 0.25, 0.3, 1.0, 2.5)),
    memory_bytes=st.integers(0, 3) | st.just(1 << 40),
)
CAPS = {
    SCALERS[0]: ScalerCaps(scaler=SCALERS[0], agents_max=3, resources=Cap(cpus=3.0)),
    SCALERS[1]: ScalerCaps(scaler=SCALERS[1], agents_max=4, resources=Cap(memory_bytes=5)),
}
HOST = HostCaps(agents_max=5, resources=Cap(cpus=5.0))


def reservation(agent: AgentId, scaler: ScalerName, requests: Amount) -> Reservation:
    return Reservation(
        agent_id=agent,
        scaler=scaler,
        shape=Shape(requests=requests),
        machine_pool=None,
        owner_instance_id=InstanceId("i"),
        reserved_at=Instant(0),
    )


def total_of(reservations: list[Reservation]) -> Usage:
    usage = NO_USAGE
    for held in reservations:
        usage = usage.plus(held.shape.requests)
    return usage


class Admissions(RuleBasedStateMachine):
    """Requests and releases in any order, repeated at will, and an instance that restarts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book()

    @rule(agent=agents, scaler=st.sampled_from(SCALERS), requests=amounts, unreserved=st.integers(0, 2))
    def request(self, agent: AgentId, scaler: ScalerName, requests: Amount, unreserved: int) -> None:
        active = Active(here=0, total=unreserved)
        refusal = admit(
            requests,
            scaler=CAPS[scaler],
            host=HOST,
            here=self.book.of(scaler),
            total=self.book.total,
            active=active,
        )
        if refusal is None:
            self.book.reserve(reservation(agent, scaler, requests))
        else:
            assert refusal.used + refusal.requested > refusal.limit

    @rule(agent=agents)
    def release(self, agent: AgentId) -> None:
        self.book.release(agent)

    @rule()
    def restart(self) -> None:
        self.book = Book(self.book.reservations.values())

    @invariant()
    def usage_is_the_sum_of_reservations(self) -> None:
        held = list(self.book.reservations.values())
        assert self.book.total == total_of(held)
        for scaler in SCALERS:
            assert self.book.of(scaler) == total_of([one for one in held if one.scaler == scaler])

    @invariant()
    def caps_hold(self) -> None:
        assert self.book.total.agents <= HOST.agents_max
        assert self.book.total.cpu_micros <= 5_000_000
        assert self.book.of(SCALERS[0]).agents <= 3
        assert self.book.of(SCALERS[0]).cpu_micros <= 3_000_000
        assert self.book.of(SCALERS[1]).memory_bytes <= 5

    def teardown(self) -> None:
        for agent in AGENTS:
            self.book.release(agent)
        assert self.book.total == NO_USAGE
        assert all(self.book.of(scaler) == NO_USAGE for scaler in SCALERS)


TestAdmissions = pytest.mark.spec("scaler 49.1", "scaler 49.2")(Admissions.TestCase)


@given(st.data())
def test_what_is_added_and_taken_in_any_order_leaves_nothing(data: st.DataObject) -> None:
    added = data.draw(st.lists(amounts, max_size=20))
    usage = NO_USAGE
    for amount in added:
        usage = usage.plus(amount)
    for amount in data.draw(st.permutations(added)):
        usage = usage.minus(amount)
        assert usage.agents >= 0
        assert usage.cpu_micros >= 0
    assert usage == NO_USAGE
