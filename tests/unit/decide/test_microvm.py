"""Names, addresses, boot data, command lines and rules of microVMs: what follows from configuration and id alone."""

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.config.grammar import ExtraHost
from kici.config.model import BackendType, LabelSet, ScalerEntry
from kici.decide.isolate import Needs, Policy
from kici.decide.launch import CgroupSupport, LimitsBy
from kici.decide.microvm import Bridge, Machine, candidates, first_free, guest, is_tap, is_vm_id, mac_of, tap_of
from kici.decide.microvm_boot import (
    BootFailure,
    BootOrder,
    boot_args,
    failure_of,
    guest_env,
    is_alarming,
    metadata,
    url_problem,
)
from kici.decide.microvm_firecracker import Jail, cgroup_options, jailer_argv
from kici.decide.microvm_qemu import QemuHost, accelerator, names_vm
from kici.decide.microvm_rules import admit_guest, base_chains, bridge_base, dismiss_guest, missing_rules
from kici.domain.ids import ScalerName
from kici.domain.resources import NOTHING, Amount

VM = "scaler-firecracker-1a2b3c4d"
BRIDGE = Bridge(
    name="kici-br0",
    cidr=IPv4Network("10.0.0.0/24"),
    gateway=IPv4Address("10.0.0.1"),
    netmask=IPv4Address("255.255.255.0"),
    table="kici",
)


@pytest.mark.spec("scaler 33.2.4")
@pytest.mark.spec("scaler 33.2.5")
def test_names_follow_from_id_and_address() -> None:
    assert mac_of(IPv4Address("10.0.0.10")) == "06:00:AC:00:00:0A"
    assert mac_of(IPv4Address("10.0.1.42")) == "06:00:AC:00:01:2A"
    assert tap_of(VM) == "kici-1a2b3c4d"
    assert len(tap_of(VM)) <= 15
    assert is_tap(tap_of(VM))
    assert not is_tap("kici-br0")
    assert is_vm_id(VM)
    assert not is_vm_id("scaler-bare-metal-1a2b3c4d")


@pytest.mark.spec("scaler 33.2.1")
def test_a_small_network_has_one_address() -> None:
    assert list(candidates(IPv4Network("10.0.0.0/30"), IPv4Address("10.0.0.1"))) == [IPv4Address("10.0.0.2")]


@given(st.sets(st.integers(min_value=0, max_value=255)), st.integers(min_value=1, max_value=254))
def test_the_lowest_free_address_is_given(taken: set[int], gateway: int) -> None:
    network = IPv4Network("10.0.0.0/24")
    address = first_free(network, network[gateway], {network[number] for number in taken})
    free = [number for number in range(1, 255) if number not in taken | {gateway}]
    assert address == (network[free[0]] if free else None)


def test_two_bridges_that_name_one_table_have_tables_of_their_own() -> None:
    other = Bridge(
        name="kici-br1", cidr=BRIDGE.cidr, gateway=BRIDGE.gateway, netmask=BRIDGE.netmask, table=BRIDGE.table
    )
    assert BRIDGE.fence.table != other.fence.table


@pytest.mark.spec("scaler 32.6.9")
def test_the_subnet_follows_from_gateway_and_mask() -> None:
    assert BRIDGE.subnet == IPv4Network("10.0.0.0/24")
    assert BRIDGE.gateway_cidr == "10.0.0.1/24"


def test_boot_data_holds_what_the_agent_needs_and_leaves_out_what_is_not_known() -> None:
    order = BootOrder(agent_id=VM, labels=("linux", "kici:scaler:vms"), url="ws://10.0.0.1:4000/ws", token=None)
    assert metadata(order, BRIDGE) == {
        "latest": {
            "meta-data": {
                "kici-orchestrator-url": "ws://10.0.0.1:4000/ws",
                "kici-agent-id": VM,
                "kici-labels": "linux,kici:scaler:vms",
                "kici-scaler-managed": "1",
            }
        }
    }


@pytest.mark.spec("scaler 36.18.16")
def test_host_gateway_is_the_bridge() -> None:
    hosts = (
        ExtraHost(name="cache", address="host-gateway"),
        ExtraHost(name="db", address="10.9.9.9"),
        ExtraHost(name="bad name", address="10.9.9.9"),
    )
    order = BootOrder(agent_id=VM, labels=(), url="", token="kat_1", extra_hosts=hosts, env={"A": "b"})
    told = metadata(order, BRIDGE)["latest"]
    assert isinstance(told, dict)
    assert told["meta-data"]["kici-extra-hosts"] == "cache:10.0.0.1,db:10.9.9.9"
    assert told["meta-data"]["kici-agent-token"] == "kat_1"
    assert told["meta-data"]["kici-env"] == {"A": "b"}


@pytest.mark.spec("scaler 36.18.10")
def test_a_variable_that_does_not_fit_leaves_room_for_smaller_ones() -> None:
    taken, left_out = guest_env({"KICI_AGENT_ENV_BIG": "x" * 40_960, "HOME": "/root"}, {"SMALL": "y", "no-name": "z"})
    assert taken == {"SMALL": "y"}
    assert left_out == ("BIG", "no-name")


@given(st.dictionaries(st.from_regex(r"[A-Z]{1,8}\Z"), st.text(max_size=9000), max_size=8))
def test_forwarded_variables_never_exceed_their_budget(env: dict[str, str]) -> None:
    taken, left_out = guest_env({}, env)
    assert sum(len(name.encode()) + len(value.encode()) + 2 for name, value in taken.items()) <= 32_768
    assert set(taken) | set(left_out) == set(env)
    assert not set(taken) & set(left_out)


def test_the_command_line_of_the_kernel_holds_the_network_and_no_secret() -> None:
    text = boot_args(guest(VM, IPv4Address("10.0.0.7")), BRIDGE)
    assert "ip=10.0.0.7::10.0.0.1:255.255.255.0::eth0:off" in text.split()
    assert {"reboot=k", "panic=1", "random.trust_cpu=on", "init=/init"} <= set(text.split())


@pytest.mark.parametrize("url", ["ws://127.0.0.1:4000/ws", "ws://localhost:4000/ws", "ws://[::1]:4000/ws"])
def test_an_address_that_is_the_guest_itself_is_a_problem(url: str) -> None:
    assert "cannot reach" in (url_problem(url) or "")


def test_an_address_on_the_bridge_is_no_problem() -> None:
    assert url_problem("ws://10.0.0.1:4000/ws") is None
    assert url_problem("wss://ci.example/ws") is None


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("[ 1.2] Kernel panic - not syncing: Fatal exception", BootFailure.KERNEL_PANIC),
        ("Kernel panic - not syncing: VFS: Unable to mount root fs on vda", BootFailure.ROOTFS_MOUNT_FAILURE),
        ("Kernel panic - not syncing: Attempted to kill init!", BootFailure.INIT_FAILURE),
        ("kici-init: cannot go on: BadBootData: nothing came", BootFailure.INIT_FAILURE),
        ("all is well", BootFailure.UNKNOWN),
    ],
)
def test_the_console_says_why_a_guest_ended(line: str, failure: BootFailure) -> None:
    assert failure_of(["[ 0.1] booting", line, "Rebooting in 1 seconds.."]) is failure
    assert is_alarming(line) is (failure is not BootFailure.UNKNOWN)


@pytest.mark.spec("scaler 36.18.9")
def test_fractions_of_processors_are_rounded_up_and_of_memory_down() -> None:
    chosen = LabelSet(labels=("vm",), rootfs_path="/r")
    entry = ScalerEntry(name=ScalerName("vms"), type=BackendType.FIRECRACKER, max_agents=1, label_sets=(chosen,))
    assert entry.vm_size(chosen, Amount(cpus=1.2, memory_bytes=1_572_864)) == (2, 1)
    assert entry.vm_size(chosen, NOTHING) == (entry.vcpu_count, entry.mem_size_mib)


def test_the_jailer_is_told_whom_to_become_and_where() -> None:
    jail = Jail(jailer="/j", firecracker="/f/firecracker", base="/srv/jailer", uid=10_000, gid=10_001)
    words = jailer_argv(jail, VM, ())
    text = " ".join(words)
    assert f"--id {VM} --exec-file /f/firecracker --uid 10000 --gid 10001 --chroot-base-dir /srv/jailer" in text
    assert "--new-pid-ns" in words[: words.index("--")]
    assert "--daemonize" not in words, "its console is our file"


@pytest.mark.parametrize(
    ("by", "wanted"),
    [
        (LimitsBy.NONE, ()),
        (LimitsBy.V1, ("memory.limit_in_bytes=201326592", "cpu.cfs_quota_us=150000")),
        (LimitsBy.V2, ("memory.max=201326592", "cpu.max=150000 100000")),
    ],
)
def test_the_vmm_is_limited_where_this_host_can(by: LimitsBy, wanted: tuple[str, ...]) -> None:
    machine = Machine(vcpus=2, mem_mib=64, overlay_mib=8, limits=Amount(cpus=1.5, memory_bytes=64 * 2**20))
    words = cgroup_options(CgroupSupport(limits=by), machine)
    assert set(wanted) <= set(words)
    assert bool(words) is bool(wanted)


def test_qemu_uses_the_kernel_where_it_works_and_emulates_elsewhere() -> None:
    with_kvm, without = QemuHost(arch="x64", has_kvm=True), QemuHost(arch="x64", has_kvm=False)
    assert (accelerator("auto", with_kvm), accelerator("auto", without)) == ("kvm", "tcg")
    assert accelerator("tcg", with_kvm) == "tcg"
    with pytest.raises(ValueError, match="cannot be used here"):
        accelerator("kvm", without)


def test_a_qemu_is_known_by_the_machine_that_it_names() -> None:
    ours = ["qemu-system-x86_64", "-name", VM, "-S", "-kernel", "/srv/kernel"]
    assert names_vm(ours, VM, kernel="/srv/kernel")
    assert not names_vm(ours, VM, kernel="/other/kernel")
    assert not names_vm(["qemu-system-x86_64", "-name", f"{VM}0", "-kernel", "/srv/kernel"], VM, kernel="/srv/kernel")
    assert not names_vm(["bash", VM], VM, kernel="/srv/kernel")


def test_a_guest_is_admitted_and_dismissed_by_name() -> None:
    one = guest(VM, IPv4Address("10.0.0.7"))
    admitted = admit_guest(BRIDGE, one, policy=Policy(), needs=Needs(coordinator_port=4000))
    assert f'add element bridge kici_kici_br0 taps {{ "{one.tap}" : jump t_scaler_firecracker_1a2b3c4d }}' in admitted
    assert "ether saddr != 06:00:ac:00:00:07 drop" in admitted
    frames = [line for line in admitted.splitlines() if " bridge kici_kici_br0 t_" in line and "add rule" in line]
    assert frames[-1].endswith(" drop"), "what was not admitted is dropped"
    assert all(line.startswith("delete ") for line in dismiss_guest(BRIDGE, one).splitlines())


def test_health_is_the_exact_rules_in_their_order() -> None:
    wanted = base_chains(bridge_base(BRIDGE))
    assert missing_rules(wanted, wanted) == []
    forward = ("inet", "kici_kici_br0", "forward")
    turned = {**wanted, forward: list(reversed(wanted[forward]))}
    assert missing_rules(wanted, turned) == [
        "the rules of chain forward of table inet kici_kici_br0 are not those that we wrote"
    ]
    gone = {key: rules for key, rules in wanted.items() if key != forward}
    assert missing_rules(wanted, gone) == ["chain forward of table inet kici_kici_br0 is missing"]
