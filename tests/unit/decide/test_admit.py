from dataclasses import replace

import pytest

from kici.decide.admit import (
    NO_USAGE,
    Active,
    Book,
    Cap,
    HostCaps,
    ScalerCaps,
    Usage,
    admit,
    fits_alone,
    is_burst_refusal,
)
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.resources import NOTHING, Amount, Shape
from kici.domain.spawn import Reservation
from kici.domain.verdict import AtCap, CapName, Dimension

A, B = ScalerName("a"), ScalerName("b")
GIB = 1 << 30
IDLE = Active(here=0, total=0)
SCALER = ScalerCaps(scaler=A, agents_max=10)
HOST = HostCaps(agents_max=100)


def reservation(agent: str, scaler: ScalerName = A, *, cpus: float = 0.0, memory_bytes: int = 0) -> Reservation:
    return Reservation(
        agent_id=AgentId(agent),
        scaler=scaler,
        shape=Shape(requests=Amount(cpus=cpus, memory_bytes=memory_bytes), limits=Amount(cpus=99.0)),
        machine_pool=None,
        owner_instance_id=InstanceId("i"),
        reserved_at=Instant(0),
    )


@pytest.mark.spec("scaler 10.7.1")
def test_one_of_ten_requests_is_admitted_where_one_agent_may_run() -> None:
    book, caps, refused = Book(), replace(SCALER, agents_max=1), []
    for number in range(10):
        refusal = admit(NOTHING, scaler=caps, host=HOST, here=book.of(A), total=book.total, active=IDLE)
        if refusal is None:
            book.reserve(reservation(f"agent-{number}"))
        else:
            refused.append(refusal)
    assert len(book.reservations) == 1
    assert (
        refused
        == [AtCap(cap=CapName.MAX_AGENTS, dimension=Dimension.AGENTS, used=1, requested=1, limit=1, scaler=A)] * 9
    )


@pytest.mark.spec("scaler 10.7.2")
def test_the_host_cap_counts_all_scalers() -> None:
    book = Book([reservation("x", A), reservation("y", B)])
    refusal = admit(NOTHING, scaler=SCALER, host=HostCaps(agents_max=2), here=book.of(A), total=book.total, active=IDLE)
    assert refusal is not None
    assert (refusal.cap, refusal.used, refusal.limit) == (CapName.GLOBAL_MAX_AGENTS, 2, 2)


@pytest.mark.spec("scaler 10.7.3")
def test_a_resource_cap_may_be_reached_exactly() -> None:
    caps = replace(SCALER, resources=Cap(cpus=4))
    two = Amount(cpus=2)
    once, twice = NO_USAGE.plus(two), NO_USAGE.plus(two).plus(two)
    assert admit(two, scaler=caps, host=HOST, here=once, total=once, active=IDLE) is None
    refusal = admit(two, scaler=caps, host=HOST, here=twice, total=twice, active=IDLE)
    assert refusal == AtCap(cap=CapName.RESOURCE_CAP, dimension=Dimension.CPUS, used=4, requested=2, limit=4, scaler=A)


@pytest.mark.spec("scaler 10.7.7")
def test_agents_that_only_the_backends_know_count_for_the_host() -> None:
    """A retiring scaler has active agents, and no reservation is asked for any more."""
    active = Active(here=0, total=2)
    refusal = admit(NOTHING, scaler=SCALER, host=HostCaps(agents_max=2), here=NO_USAGE, total=NO_USAGE, active=active)
    assert refusal is not None
    assert refusal.cap is CapName.GLOBAL_MAX_AGENTS


@pytest.mark.spec("scaler 10.3")
def test_an_agent_with_reservation_and_active_record_counts_once() -> None:
    usage = Usage(agents=5)
    caps, host = replace(SCALER, agents_max=6), HostCaps(agents_max=6)
    for active in (Active(here=5, total=5), Active(here=2, total=2)):
        assert admit(NOTHING, scaler=caps, host=host, here=usage, total=usage, active=active) is None


def test_active_agents_without_reservation_count_for_their_scaler() -> None:
    caps, active = replace(SCALER, agents_max=2), Active(here=2, total=2)
    refusal = admit(NOTHING, scaler=caps, host=HOST, here=NO_USAGE, total=NO_USAGE, active=active)
    assert refusal is not None
    assert (refusal.cap, refusal.used) == (CapName.MAX_AGENTS, 2)


@pytest.mark.spec("scaler 10.7.8")
@pytest.mark.parametrize(
    ("scaler_cap", "host_cap", "expected"),
    [
        (Cap(), Cap(), None),
        (Cap(cpus=1), Cap(), (CapName.RESOURCE_CAP, Dimension.CPUS)),
        (Cap(memory_bytes=GIB), Cap(), (CapName.RESOURCE_CAP, Dimension.MEMORY)),
        (Cap(), Cap(cpus=1), (CapName.GLOBAL_RESOURCE_CAP, Dimension.CPUS)),
        (Cap(), Cap(memory_bytes=GIB), (CapName.GLOBAL_RESOURCE_CAP, Dimension.MEMORY)),
        (Cap(cpus=1, memory_bytes=GIB), Cap(cpus=1), (CapName.RESOURCE_CAP, Dimension.CPUS)),
        (Cap(memory_bytes=GIB), Cap(cpus=1), (CapName.RESOURCE_CAP, Dimension.MEMORY)),
    ],
)
def test_the_first_exceeded_cap_refuses_and_an_undeclared_dimension_never_does(
    scaler_cap: Cap, host_cap: Cap, expected: tuple[CapName, Dimension] | None
) -> None:
    refusal = admit(
        Amount(cpus=2, memory_bytes=2 * GIB),
        scaler=replace(SCALER, resources=scaler_cap),
        host=replace(HOST, resources=host_cap),
        here=NO_USAGE,
        total=NO_USAGE,
        active=IDLE,
    )
    assert (None if refusal is None else (refusal.cap, refusal.dimension)) == expected


@pytest.mark.spec("scaler 10.2")
def test_a_scaler_that_the_store_counts_is_not_refused_by_its_own_count_here() -> None:
    caps = ScalerCaps(scaler=A, agents_max=1, is_cluster_counted=True)
    usage = Usage(agents=5)
    assert admit(NOTHING, scaler=caps, host=HOST, here=usage, total=usage, active=IDLE) is None
    refusal = admit(NOTHING, scaler=caps, host=HostCaps(agents_max=5), here=usage, total=usage, active=IDLE)
    assert refusal is not None
    assert refusal.cap is CapName.GLOBAL_MAX_AGENTS


@pytest.mark.spec("scaler 10.4")
def test_only_a_refusal_that_active_agents_do_not_explain_is_a_burst() -> None:
    caps = replace(SCALER, agents_max=3)
    usage = Usage(agents=3)
    refusal = admit(NOTHING, scaler=caps, host=HOST, here=usage, total=usage, active=Active(here=1, total=1))
    assert refusal is not None
    assert is_burst_refusal(refusal, Active(here=1, total=1), here=usage, total=usage)
    assert not is_burst_refusal(refusal, Active(here=3, total=3), here=usage, total=usage)


def test_reserving_twice_and_releasing_twice_counts_once() -> None:
    book = Book()
    assert book.reserve(reservation("x", cpus=2, memory_bytes=GIB))
    assert not book.reserve(reservation("x", cpus=2, memory_bytes=GIB))
    assert book.total == book.of(A) == Usage(agents=1, cpu_micros=2_000_000, memory_bytes=GIB)
    assert book.release(AgentId("x")) is not None
    assert book.release(AgentId("x")) is None
    assert book.total == book.of(A) == NO_USAGE


def test_usage_never_goes_below_zero() -> None:
    assert NO_USAGE.minus(Amount(cpus=1, memory_bytes=1)) == NO_USAGE


def test_tenths_of_a_cpu_add_up_exactly() -> None:
    assert NO_USAGE.plus(Amount(cpus=0.57)).cpu_micros == 570_000
    usage = NO_USAGE
    for _ in range(10):
        usage = usage.plus(Amount(cpus=0.1))
    caps = replace(SCALER, agents_max=99, resources=Cap(cpus=1.1))
    assert admit(Amount(cpus=0.1), scaler=caps, host=HOST, here=usage, total=usage, active=IDLE) is None
    for _ in range(10):
        usage = usage.minus(Amount(cpus=0.1))
    assert usage == NO_USAGE


@pytest.mark.parametrize(
    ("cpus", "scaler", "host", "fits"),
    [
        (4.0, SCALER, HOST, True),
        (4.0, replace(SCALER, agents_max=0), HOST, False),
        (4.0, replace(SCALER, resources=Cap(cpus=3.0)), HOST, False),
        (4.0, SCALER, replace(HOST, resources=Cap(cpus=4.0)), True),
        (4.5, SCALER, replace(HOST, resources=Cap(cpus=4.0)), False),
        (4.5, SCALER, replace(HOST, machine_pools={"rack": Cap(cpus=4.0)}), False),
        (4.5, SCALER, replace(HOST, machine_pools={"other": Cap(cpus=4.0)}), True),
    ],
)
def test_making_room_helps_only_an_agent_that_would_fit_alone(
    cpus: float, scaler: ScalerCaps, host: HostCaps, fits: bool
) -> None:
    assert fits_alone(Amount(cpus=cpus), scaler=scaler, host=host, machine_pool="rack") is fits
