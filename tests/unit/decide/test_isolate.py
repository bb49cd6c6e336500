"""Rules of agents: what they say, and that they are whole scripts."""

from ipaddress import IPv4Address, IPv4Network

import pytest

from kici.config.grammar import HostAccess
from kici.decide import isolate
from kici.decide.isolate import Fence, Needs, Policy, forward_rules, input_rules, needs_of

FENCE = Fence(
    network="kici-agent-net",
    bridge="kici-agents",
    gateway=IPv4Address("172.30.0.1"),
    subnet=IPv4Network("172.30.0.0/16"),
)
NEEDS = Needs(coordinator_port=4000)
REFUSE = "reject with icmpx type admin-prohibited"


@pytest.mark.spec("scaler 31.7.1")
def test_an_allowed_network_comes_before_the_private_ones() -> None:
    rules = forward_rules(Policy(allowlist=(IPv4Network("10.9.0.0/16"),)), NEEDS)
    assert rules.index("ip daddr 10.9.0.0/16 accept") < rules.index(f"ip daddr 10.0.0.0/8 {REFUSE}")
    assert rules[-1] == "accept"


@pytest.mark.spec("scaler 31.7.2")
def test_deny_all_ends_with_an_unconditional_refusal() -> None:
    assert forward_rules(Policy(deny_all=True), Needs(coordinator_port=1, resolvers=(IPv4Address("10.0.0.2"),))) == [
        REFUSE
    ]


@pytest.mark.spec("scaler 31.7.3")
def test_a_port_is_granted_for_tcp_and_udp() -> None:
    granted = Policy(host_access=(HostAccess(network=None, port=53),))
    assert input_rules(granted, NEEDS, FENCE.gateway) == ["tcp dport 53 accept", "udp dport 53 accept", REFUSE]


def test_the_default_grants_name_service_and_the_coordinator_and_an_empty_list_nothing() -> None:
    rules = input_rules(Policy(), NEEDS, FENCE.gateway)
    assert "ip daddr 172.30.0.1/32 udp dport 53 accept" in rules
    assert "tcp dport 4000 accept" in rules
    assert input_rules(Policy(host_access=()), NEEDS, FENCE.gateway) == [REFUSE]


def test_a_coordinator_on_another_machine_can_be_reached_although_its_network_is_private() -> None:
    needs = needs_of("ws://10.1.2.3:4000/ws", resolvers=(), names={})
    rules = forward_rules(Policy(deny_all=True, host_access=()), needs)
    assert rules == ["ip daddr 10.1.2.3 tcp dport 4000 accept", REFUSE]


def test_needs_know_names_that_only_agents_resolve_and_leave_out_local_resolvers() -> None:
    needs = needs_of("wss://ci.local/ws", resolvers=("127.0.0.53", "::1", "10.0.0.2"), names={"ci.local": "10.5.5.5"})
    assert needs == Needs(
        coordinator_port=443, coordinator=IPv4Address("10.5.5.5"), resolvers=(IPv4Address("10.0.0.2"),)
    )


@pytest.mark.spec("scaler 31.7.7")
def test_admission_replaces_whoever_had_the_address() -> None:
    script = isolate.admit_script(
        FENCE,
        agent="scaler-container-2",
        address="172.30.0.2",
        policy=Policy(),
        needs=NEEDS,
        replaces="scaler_container_1",
    )
    lines = script.splitlines()
    assert lines[0] == "delete element inet kici_agent_net agents_forward { 172.30.0.2 }"
    assert "delete chain inet kici_agent_net f_scaler_container_1" in lines
    assert lines[-2:] == [
        "add element inet kici_agent_net agents_forward { 172.30.0.2 : jump f_scaler_container_2 }",
        "add element inet kici_agent_net agents_input { 172.30.0.2 : jump i_scaler_container_2 }",
    ]


@pytest.mark.spec("scaler 31.7.5")
def test_only_addresses_without_a_container_are_stale() -> None:
    elements = {"10.0.0.2": "f_a", "10.0.0.20": "f_b"}
    assert isolate.stale(elements, {"10.0.0.20"}) == [("10.0.0.2", "a")]
    assert isolate.stale(elements, elements) == []


def test_the_static_part_drops_what_nobody_admitted() -> None:
    lines = isolate.base_script(FENCE).splitlines()
    vmap = lines.index('add rule inet kici_agent_net forward iifname "kici-agents" ip saddr vmap @agents_forward')
    assert lines[vmap + 1] == 'add rule inet kici_agent_net forward iifname "kici-agents" drop'


def test_an_address_belongs_to_one_port_of_the_bridge() -> None:
    script = isolate.bind_script(FENCE, agent="a-1", address="172.30.0.2", port="veth1", replaces="a-0")
    table = "bridge kici_agent_net"
    assert script.splitlines() == [
        f"delete element {table} agents_senders {{ 172.30.0.2 }}",
        f"delete chain {table} s_a_0",
        f"add chain {table} s_a_1",
        f"flush chain {table} s_a_1",
        f'add rule {table} s_a_1 iifname != "veth1" drop',
        f"add element {table} agents_senders {{ 172.30.0.2 : jump s_a_1 }}",
    ]
    assert "drop" not in isolate.bind_script(FENCE, agent="a-1", address="172.30.0.2", port=None)
    assert isolate.unbind_script(FENCE, agent="a-1", address="172.30.0.2").splitlines() == [
        f"delete element {table} agents_senders {{ 172.30.0.2 }}",
        f"delete chain {table} s_a_1",
    ]


def test_forged_addresses_are_looked_at_in_packets_and_in_questions_for_addresses() -> None:
    script = isolate.senders_script(FENCE)
    assert "prerouting ip saddr vmap @agents_senders" in script
    assert "prerouting arp saddr ip vmap @agents_senders" in script
