"""Which process is a machine's, what may be swept, and what an operator may stop."""

from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.decide.classify import LiveVmSeen, Tracker, VmStatus, classify, is_name, once, with_absent
from kici.decide.isolate import name_of
from kici.decide.microvm import tap_of
from kici.decide.microvm_probe import Liveness, Sight, judge, parse_pid
from kici.decide.microvm_sweep import FOREIGN_DEAD_MS, HostSight, plan_sweep
from kici.domain.ids import AgentId, Instant, ScalerName

NOW = Instant(10_000_000_000)


def vm(number: int) -> AgentId:
    return AgentId(f"scaler-firecracker-{number:08x}")


def a_sight(*, started: int = 1000, name: str = "firecracker", faults: tuple[str, ...] = ()) -> Sight:
    return Sight(pid=7, pid_file_at=NOW, started=started, boot_at=Instant(NOW - 20_000), name=name, faults=faults)


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "12 34", "1.5"])
def test_what_is_no_pid_names_no_process(text: str) -> None:
    assert parse_pid(text) is None


def test_a_pid_may_end_with_a_line_break() -> None:
    assert parse_pid("4711\n") == 4711


def test_our_vmm_in_its_own_directory_is_confirmed() -> None:
    probe = judge(a_sight(), name="firecracker")
    assert (probe.liveness, probe.is_confirmed, probe.detail) == (Liveness.RUNNING, True, "")
    assert probe.started_at == NOW - 10_000


@pytest.mark.spec("scaler 36.18.7")
def test_a_process_younger_than_the_pid_file_has_its_number_only() -> None:
    assert judge(a_sight(started=2000 + 6001), name="firecracker").liveness is Liveness.RECYCLED
    assert judge(a_sight(started=2000 + 5999), name="firecracker").liveness is Liveness.RUNNING


@pytest.mark.spec("scaler 36.18.8")
@pytest.mark.spec("scaler 37.6.5")
def test_a_process_of_another_name_or_root_runs_but_is_not_confirmed() -> None:
    for sight in (a_sight(name="bash"), a_sight(faults=("process 7 has another root directory",))):
        probe = judge(sight, name="firecracker")
        assert probe.is_running
        assert not probe.is_confirmed
        assert probe.detail


ids = st.frozensets(st.integers(min_value=0, max_value=12).map(vm))


@given(recorded=ids, others=ids, folders=ids, rows=ids, tracked=ids, live=ids, aged=st.booleans())
def test_a_sweep_never_touches_what_is_tracked_lives_or_is_anothers(
    recorded: frozenset[AgentId],
    others: frozenset[AgentId],
    folders: frozenset[AgentId],
    rows: frozenset[AgentId],
    tracked: frozenset[AgentId],
    live: frozenset[AgentId],
    aged: bool,
) -> None:
    made_at = Instant(NOW - FOREIGN_DEAD_MS - 1) if aged else NOW
    everybody = recorded | others | folders | rows | tracked | live
    sight = HostSight(
        recorded=recorded - others,
        others=others,
        folders=dict.fromkeys(folders, made_at),
        rows={vm_id: IPv4Address("10.0.0.2") for vm_id in rows - others},
        taps=[tap_of(vm_id) for vm_id in everybody] + ["kici-ffffffff", "kici-br0", "eth0"],
        admitted={"10.0.0.2": name_of(vm(1)), "10.0.0.9": name_of("scaler-firecracker-ffffffff")},
        tracked=tracked,
        live=live,
    )
    plan = plan_sweep(sight, NOW)
    assert not set(plan.machines) & (tracked | live | others)
    assert set(plan.machines) >= (recorded - others) - tracked - live
    foreign = folders - recorded
    assert bool(set(plan.machines) & (foreign - rows)) <= aged, "another coordinator may be in the midst of making it"
    assert plan.taps == ("kici-ffffffff",)
    assert ("10.0.0.9", name_of("scaler-firecracker-ffffffff")) in plan.rules
    assert (("10.0.0.2", name_of(vm(1))) in plan.rules) is (vm(1) not in everybody)


def test_a_folder_that_is_none_of_our_names_is_left_alone() -> None:
    sight = HostSight(recorded=frozenset(), folders={AgentId("somebodys-vm"): Instant(0)})
    assert plan_sweep(sight, NOW).machines == ()


def seen(number: int = 1, *, is_confirmed: bool = True, detail: str = "", folder: str | None = None) -> LiveVmSeen:
    return LiveVmSeen(
        vm_id=vm(number),
        scaler=ScalerName("vms"),
        pid=7,
        started_at=NOW,
        folder=folder or f"/srv/{number}",
        is_confirmed=is_confirmed,
        detail=detail,
    )


def test_whatever_tracks_a_machine_makes_it_tracked() -> None:
    for tracker in Tracker:
        found = classify(seen(is_confirmed=False), [tracker])
        assert (found.status, found.trackers) == (VmStatus.TRACKED, (tracker,))


def test_a_proven_machine_of_nobody_is_an_orphan_and_an_unproven_one_is_not() -> None:
    assert classify(seen(), []).status is VmStatus.ORPHANED
    unproven = classify(seen(is_confirmed=False, detail="it is called bash"), [])
    assert (unproven.status, unproven.why) == (VmStatus.UNVERIFIED, "it is called bash")


@pytest.mark.spec("scaler 42.7.6")
def test_nobody_is_an_orphan_while_a_coordinator_is_away() -> None:
    assert with_absent(classify(seen(), []), ["b", "a"]).status is VmStatus.UNVERIFIED
    assert "a, b" in with_absent(classify(seen(), []), ["b", "a"]).why
    assert with_absent(classify(seen(), []), []).status is VmStatus.ORPHANED
    assert with_absent(classify(seen(), [Tracker.BACKEND]), ["a"]).status is VmStatus.TRACKED


@pytest.mark.spec("scaler 37.6.3")
def test_scalers_that_share_a_base_list_a_machine_once() -> None:
    assert len(once([seen(1), seen(1), seen(2)])) == 2


@pytest.mark.spec("scaler 37.6.2")
@pytest.mark.parametrize("name", ["", ".", "..", "x/../y", "a\0b"])
def test_what_could_name_another_directory_is_no_id(name: str) -> None:
    assert not is_name(name)
