"""When microVMs may start from a snapshot, and what makes each its own."""

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.agent import boot_data
from kici.decide.microvm import Bridge, Machine, guest, is_vm_id
from kici.decide.microvm_boot import boot_args
from kici.decide.microvm_firecracker import can_rename, load_call, resume_calls
from kici.decide.microvm_snapshot import (
    ABANDONED_MS,
    ADDRESS,
    RENEWALS,
    WARM_DOCUMENT,
    Make,
    Renewal,
    abandoned,
    hardware_problem,
    make_key,
    owner_key,
    renewal_problem,
    renewed,
    space_problem,
    template_id,
    told_warm,
)
from kici.domain.ids import Instant, ScalerName
from kici.domain.resources import NOTHING

BRIDGE = Bridge(
    name="kici-br0",
    cidr=IPv4Network("10.0.0.0/24"),
    gateway=IPv4Address("10.0.0.1"),
    netmask=IPv4Address("255.255.255.0"),
    table="kici",
)
MACHINE = Machine(vcpus=2, mem_mib=512, overlay_mib=1024, limits=NOTHING)
MAKE = Make(labels=("linux",), images=("/k:1:2", "/r:3:4"), vmm="firecracker 1", machine=MACHINE, version="0.1.0")
GUEST = guest("scaler-firecracker-0000000a", IPv4Address("10.0.0.10"))


@pytest.mark.parametrize(
    "other",
    [
        replace(MAKE, labels=("linux", "x64")),
        replace(MAKE, images=("/k:1:2", "/r:3:5")),
        replace(MAKE, vmm="firecracker 2"),
        replace(MAKE, machine=replace(MACHINE, vcpus=1)),
        replace(MAKE, machine=replace(MACHINE, mem_mib=1024)),
        replace(MAKE, machine=replace(MACHINE, overlay_mib=2048)),
        replace(MAKE, version="0.1.1"),
    ],
)
def test_a_snapshot_is_for_one_make_only(other: Make) -> None:
    assert make_key(MAKE) == make_key(replace(MAKE))
    assert make_key(other) != make_key(MAKE)


def test_part_of_a_processor_is_no_other_hardware() -> None:
    assert make_key(replace(MAKE, machine=replace(MACHINE, limits=replace(NOTHING, cpus=0.5)))) == make_key(MAKE)


def test_a_template_has_the_name_of_a_machine_and_another_in_every_installation() -> None:
    ours, theirs = (owner_key(ScalerName("vms"), folder) for folder in ("/var/a", "/var/b"))
    assert ours != theirs
    assert is_vm_id(template_id(ours, make_key(MAKE)))
    assert template_id(ours, make_key(MAKE)) != template_id(theirs, make_key(MAKE))


def test_a_guest_says_that_it_waits_and_what_it_can_renew() -> None:
    assert told_warm(["booting", "kici-init: cannot find x"]) is None
    assert told_warm(["booting", "kici-init: warm address mac"]) == frozenset({"address", "mac"})
    assert renewal_problem(RENEWALS) is None
    assert renewal_problem({"address", "mac", "something new"}) == "its guest cannot renew: clock, entropy"


@given(st.sets(st.sampled_from(sorted(RENEWALS))))
def test_nothing_less_than_everything_will_do(can: set[str]) -> None:
    assert (renewal_problem(can) is None) == (can == RENEWALS)


def test_what_is_to_be_copied_is_told_nothing_and_has_no_way_out() -> None:
    (told,) = [boot_data.parse_document(b'{"latest":{"meta-data":{"kici-warm":"1"}}}')]
    assert boot_data.warms_up(told)
    assert {"latest": {"meta-data": told}} == WARM_DOCUMENT
    network = boot_data.parse_network(boot_args(guest("x", ADDRESS), None))
    assert network == boot_data.Network("169.254.1.2", "", "255.255.0.0", "eth0")


@given(st.binary(min_size=1, max_size=64), st.integers(min_value=0, max_value=2**45))
def test_a_restored_guest_reads_what_it_was_given(entropy: bytes, now: int) -> None:
    document = {"latest": {"meta-data": {"kici-agent-id": "a"}}}
    told = renewed(document, Renewal(entropy=entropy, now=Instant(now)), GUEST, BRIDGE)
    assert document == {"latest": {"meta-data": {"kici-agent-id": "a"}}}, "the caller's is left as it was"
    (data,) = [each["meta-data"] for each in told.values() if isinstance(each, dict)]
    assert data["kici-agent-id"] == "a"
    assert not boot_data.warms_up(data)
    assert boot_data.renewal(data, "eth0") == boot_data.Renewal(
        network=boot_data.Network("10.0.0.10", "10.0.0.1", "255.255.255.0", "eth0"),
        mac="06:00:AC:00:00:0A",
        entropy=entropy,
        now_ms=now,
    )


@pytest.mark.parametrize("missing", ["kici-address", "kici-mac", "kici-entropy", "kici-now-ms"])
def test_a_guest_that_is_given_too_little_does_not_go_on(missing: str) -> None:
    told = renewed({"latest": {"meta-data": {}}}, Renewal(entropy=b"x", now=Instant(1)), GUEST, BRIDGE)
    (data,) = [dict(each["meta-data"]) for each in told.values() if isinstance(each, dict)]
    del data[missing]
    with pytest.raises(boot_data.BadBootData, match=missing):
        boot_data.renewal(data, "eth0")


def test_hardware_and_room_decide_and_the_reason_has_the_figures() -> None:
    assert hardware_problem(MACHINE, replace(MACHINE, limits=replace(NOTHING, cpus=0.5))) is None
    problem = hardware_problem(replace(MACHINE, mem_mib=2048), MACHINE)
    assert problem == "the job asks for 2 processors and 2048 MiB, and the snapshot has 2 and 512"
    assert space_problem(MACHINE, 2 * 2**30) is None
    assert space_problem(MACHINE, 2**30) == "1.5 GiB are needed on the disk, 1.0 GiB are free"


@given(st.dictionaries(st.sampled_from(["mine", "a", "b"]), st.integers(min_value=0, max_value=2 * ABANDONED_MS)))
def test_only_what_nobody_touched_for_a_day_is_abandoned(ages: dict[str, int]) -> None:
    now = Instant(3 * ABANDONED_MS)
    folders = {name: Instant(now - age) for name, age in ages.items()}
    assert set(abandoned(folders, "mine", now)) == {
        name for name, age in ages.items() if name != "mine" and age > ABANDONED_MS
    }


def test_firecracker_loads_before_it_is_told_anything_and_resumes_last() -> None:
    load = load_call(GUEST)
    assert (load.method, load.path) == ("PUT", "/snapshot/load")
    assert isinstance(load.body, dict)
    assert load.body["network_overrides"] == [{"iface_id": "eth0", "host_dev_name": "kici-0000000a"}]
    assert load.body["resume_vm"] is False
    told = [(call.method, call.path) for call in resume_calls({})]
    assert told == [("PUT", "/mmds"), ("PATCH", "/vm")]


@pytest.mark.parametrize(
    ("version", "can"),
    [("1.12.1", True), ("1.12.0-dev", True), ("2.0.0", True), ("1.11.9", False), ("0.99", False), ("x", False)],
)
def test_versions_that_can_name_an_interface_anew(version: str, can: bool) -> None:  # a table
    assert can_rename(version) is can
