from dataclasses import replace

import pytest

from kici.decide.admit import NO_CAP, Cap, Usage
from kici.decide.ledger import (
    BOOT_TIME,
    EMPTY,
    Kind,
    Ledger,
    Life,
    Row,
    add,
    declare,
    is_same_boot,
    kind_of,
    living,
    only,
    refusal,
    reserve,
    restore,
    smallest,
    without,
)
from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.domain.resources import Amount
from kici.domain.verdict import CapName, Dimension

ME, OTHER = InstanceId("me"), InstanceId("other")
SCALER = ScalerName("local")
GIB = 1 << 30


def row(agent: str, instance: InstanceId = ME, *, cpus: float = 1.0, kind: Kind = Kind.PROCESS) -> Row:
    return Row(
        instance_id=instance,
        agent_id=AgentId(agent),
        requests=Amount(cpus=cpus, memory_bytes=GIB),
        reserved_at=Instant(0),
        boot="boot-1",
        kind=kind,
    )


def ledger(*rows: Row, **caps: Cap) -> Ledger:
    return Ledger(caps={InstanceId(instance): cap for instance, cap in caps.items()}, rows=rows)


def life(*agents: str, boot: str = "boot-1", instances: tuple[InstanceId, ...] = ()) -> Life:
    return Life(boot=boot, instances=frozenset(instances), agents=frozenset(map(AgentId, agents)))


@pytest.mark.parametrize(
    ("backend_type", "runs_job_image", "kind"),
    [
        ("bare-metal", False, Kind.PROCESS),
        ("bare-metal", True, Kind.CONTAINER),
        ("container", True, Kind.CONTAINER),
        ("firecracker", False, Kind.VM),
        ("event", False, Kind.VM),
    ],
)
def test_only_processes_of_this_host_prove_their_life(backend_type: str, runs_job_image: bool, kind: Kind) -> None:
    assert kind_of(backend_type, runs_job_image=runs_job_image) is kind


@pytest.mark.spec("scaler 38.7.3")
def test_a_process_lives_by_its_proof_whoever_made_it() -> None:
    rows = (row("a"), row("b"), row("c", OTHER), row("d", OTHER))
    assert living(ledger(*rows), life("a", "c")).rows == (rows[0], rows[2])


@pytest.mark.spec("scaler 38.7.2")
@pytest.mark.parametrize("kind", [Kind.CONTAINER, Kind.VM])
def test_what_proves_nothing_lives_as_long_as_the_boot(kind: Kind) -> None:
    rows = (row("a", kind=kind), replace(row("b", kind=kind), boot="boot-0"))
    assert living(ledger(*rows), life()).rows == (rows[0],)


def test_an_instance_that_does_not_run_has_no_say() -> None:
    both = ledger(me=Cap(cpus=4.0), other=Cap(cpus=8.0))
    assert living(both, life(instances=(OTHER,))).caps == {OTHER: Cap(cpus=8.0)}


@pytest.mark.spec("scaler 50.16")
def test_a_clock_that_is_set_is_no_reboot() -> None:
    assert is_same_boot("boot-1", "boot-1")
    assert not is_same_boot("boot-1", "boot-2")
    assert is_same_boot(f"{BOOT_TIME}1000", f"{BOOT_TIME}1002")
    assert not is_same_boot(f"{BOOT_TIME}1000", f"{BOOT_TIME}1100")
    assert not is_same_boot(f"{BOOT_TIME}1000", "boot-1")


@pytest.mark.parametrize(
    ("caps", "least"),
    [
        ([], NO_CAP),
        ([Cap(cpus=4.0), Cap(cpus=8.0)], Cap(cpus=4.0)),
        ([Cap(cpus=4.0), Cap(memory_bytes=GIB)], Cap(cpus=4.0, memory_bytes=GIB)),
        ([Cap(cpus=4.0, memory_bytes=2 * GIB), Cap(cpus=8.0, memory_bytes=GIB)], Cap(cpus=4.0, memory_bytes=GIB)),
        ([NO_CAP, NO_CAP], NO_CAP),
    ],
)
def test_the_smallest_is_taken_in_each_dimension(caps: list[Cap], least: Cap) -> None:
    assert smallest(caps) == least


@pytest.mark.spec("scaler 38.7.7")
def test_caps_that_differ_are_told() -> None:
    assert ledger(me=Cap(cpus=4.0), other=Cap(cpus=8.0)).is_disputed
    assert not ledger(me=Cap(cpus=4.0), other=Cap(cpus=4.0)).is_disputed
    assert not EMPTY.is_disputed


def test_a_refusal_says_all_its_numbers() -> None:
    full = ledger(row("a", OTHER, cpus=3.0))
    outcome = reserve(full, row("b", cpus=2.0), cap=Cap(cpus=4.0), pool="ci", scaler=SCALER)
    assert outcome.ledger == declare(full, ME, Cap(cpus=4.0)), "the cap is declared all the same"
    refused = outcome.refused
    assert refused is not None
    assert (refused.cap, refused.pool, refused.dimension) == (CapName.MACHINE_POOL, "ci", Dimension.CPUS)
    assert (refused.used, refused.requested, refused.limit) == (3.0, 2.0, 4.0)


def test_the_cap_of_another_instance_binds_us() -> None:
    outcome = reserve(ledger(other=Cap(cpus=1.0)), row("a", cpus=2.0), cap=Cap(cpus=8.0), pool="ci", scaler=SCALER)
    assert outcome.refused is not None
    assert outcome.refused.limit == 1.0


def test_reserving_again_replaces_the_row() -> None:
    once = reserve(EMPTY, row("a", cpus=3.0), cap=Cap(cpus=4.0), pool="ci", scaler=SCALER).ledger
    twice = reserve(once, row("a", cpus=4.0), cap=Cap(cpus=4.0), pool="ci", scaler=SCALER)
    assert twice.refused is None
    assert twice.ledger.usage == Usage(agents=1, cpu_micros=4_000_000, memory_bytes=GIB)


def test_what_is_under_way_counts_before_it_is_written() -> None:
    now = ledger(row("a"), me=Cap(cpus=2.0))
    one = Usage(agents=1, cpu_micros=1_000_000)
    assert refusal(now, Amount(cpus=1.0), pool="ci", scaler=SCALER) is None
    assert refusal(now, Amount(cpus=1.0), pool="ci", scaler=SCALER, under_way=one) is not None


def test_only_own_rows_are_given_back() -> None:
    rows = (row("a"), row("b"), row("a", OTHER))
    assert without(ledger(*rows), ME, {AgentId("a")}).rows == rows[1:]


def test_of_own_rows_only_those_that_are_known_stay_and_those_that_prove_themselves() -> None:
    rows = (row("a"), row("b", kind=Kind.VM), row("c", kind=Kind.VM), row("d", OTHER, kind=Kind.VM))
    assert only(ledger(*rows), ME, {AgentId("c")}).rows == (rows[0], rows[2], rows[3])


def test_a_restart_adds_what_is_missing_and_keeps_what_is_there() -> None:
    there, missing, stale = row("a"), row("b", cpus=9.0), row("c", kind=Kind.CONTAINER)
    older = replace(there, reserved_at=Instant(5))
    after = restore(ledger(older, stale, me=Cap(cpus=1.0)), ME, [there, missing])
    assert after.rows == (older, missing)
    assert restore(after, ME, [there, missing]) == after


def test_withdrawing_a_cap_leaves_the_rows() -> None:
    now = add(declare(declare(EMPTY, ME, Cap(cpus=1.0)), OTHER, Cap(cpus=2.0)), row("a"))
    assert declare(now, ME, None) == ledger(row("a"), other=Cap(cpus=2.0))
