"""The bridge of microVMs on a real kernel, in a network namespace: made, checked, mended."""

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from tests.microvm.lab import Namespace, namespace

from kici.adapters.host_commands import CommandFailed, HostCommands
from kici.adapters.host_network import IpHostNetwork
from kici.decide.isolate import Needs, Policy
from kici.decide.microvm import Bridge, guest
from kici.domain.errors import Conflict

pytestmark = pytest.mark.engine("firecracker")  # what it needs is what a host of microVMs needs
NEEDS = Needs(coordinator_port=4000)
BRIDGE = Bridge(
    name="kici-br0",
    cidr=IPv4Network("10.200.0.0/24"),
    gateway=IPv4Address("10.200.0.1"),
    netmask=IPv4Address("255.255.255.0"),
    table="kici",
)
ONE = guest("scaler-firecracker-00000001", IPv4Address("10.200.0.2"))
TWO = guest("scaler-firecracker-00000002", IPv4Address("10.200.0.20"))

DOCKERS = """
table ip kici {
    chain forward {
        type filter hook forward priority 0; policy accept;
        ip saddr 172.31.0.0/16 accept
        ip daddr 172.31.0.0/16 accept
    }
}
"""
"""Rules for containers that jobs make, in a table that is almost named like ours."""


class Counting(HostCommands):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, ...]] = []

    async def run(self, *argv: str, stdin: str = "", seconds: float = 30.0) -> str:
        self.ran.append(argv)
        return await super().run(*argv, stdin=stdin, seconds=seconds)


@pytest.fixture
def host() -> Iterator[Namespace]:
    with namespace() as made, made.enter():
        yield made


async def made(bridge: Bridge = BRIDGE) -> IpHostNetwork:
    network = IpHostNetwork(bridge, HostCommands())
    await network.provision()
    return network


async def join(network: IpHostNetwork, *guests: object) -> None:
    for each in (ONE, TWO):
        if each in guests:
            await network.make_tap(each, owner=65_100)
            await network.admit(each, policy=Policy(), needs=NEEDS)
            await network.link_up(each)


async def test_a_bridge_that_was_made_is_healthy_and_one_that_is_not_there_says_what_is_missing(
    host: Namespace,
) -> None:
    network = IpHostNetwork(BRIDGE, HostCommands())
    assert str(await network.health()) == "bridge kici-br0 is missing; table bridge kici_kici_br0 is missing"
    await network.provision()
    assert str(await network.health()) == "healthy"
    await network.probe_isolation()
    assert "kici-isoprobe" not in host.interfaces()


@pytest.mark.spec("scaler 32.6.1")
async def test_looking_at_a_healthy_bridge_changes_nothing(host: Namespace) -> None:
    await made()
    commands = Counting()
    before = host.run("nft", "list", "ruleset")
    assert (await IpHostNetwork(BRIDGE, commands).health()).is_healthy
    assert host.run("nft", "list", "ruleset") == before
    assert not [argv for argv in commands.ran if {"add", "set", "del", "-f"} & set(argv)]


@pytest.mark.spec("scaler 32.6.2")
async def test_a_bridge_is_mended_under_guests_that_keep_their_rules(host: Namespace) -> None:
    network = await made()
    await join(network, ONE, TWO)
    admitted = await network.admitted()
    host.run("nft", "flush", "chain", "inet", BRIDGE.fence.table, "forward")
    assert "rules of chain forward" in str(await network.health())
    await network.provision()
    assert (await network.health()).is_healthy
    assert await network.admitted() == admitted
    assert len(admitted) == 2


@pytest.mark.spec("scaler 31.7.6")
async def test_a_table_that_lacks_a_chain_gets_it(host: Namespace) -> None:
    host.run("nft", "add", "table", "inet", BRIDGE.fence.table)
    network = IpHostNetwork(BRIDGE, HostCommands())
    assert not (await network.health()).is_healthy
    await network.provision()
    assert (await network.health()).is_healthy
    host.run("nft", "delete", "chain", "inet", BRIDGE.fence.table, "postrouting")
    assert "postrouting" in str(await network.health())
    await network.provision()
    assert (await network.health()).is_healthy


@pytest.mark.spec("scaler 32.6.3")
async def test_rules_that_are_not_ours_survive_everything_we_do(host: Namespace) -> None:
    host.run("nft", "-f", "-", stdin=DOCKERS)
    before = host.run("nft", "list", "table", "ip", "kici")
    network = await made()
    await join(network, ONE)
    host.run("nft", "flush", "chain", "inet", BRIDGE.fence.table, "forward")
    await network.provision()
    await network.dismiss(ONE)
    await network.teardown()
    assert host.run("nft", "list", "table", "ip", "kici") == before


@pytest.mark.spec("scaler 32.6.8")
async def test_a_docker_engine_beside_us_lets_our_guests_pass_and_none_is_fine(host: Namespace) -> None:
    network = await made()
    assert (await network.health()).is_healthy, "without its chain"
    host.run("iptables", "-N", "DOCKER-USER")
    for _ in range(2):
        await network.provision()
        rules = host.run("iptables", "-S", "DOCKER-USER").splitlines()[1:]
        assert sorted(rules) == [f"-A DOCKER-USER -{side} {BRIDGE.subnet} -j ACCEPT" for side in "ds"]
    await network.teardown()
    assert host.run("iptables", "-S", "DOCKER-USER").splitlines() == ["-N DOCKER-USER"]


class Failing(HostCommands):
    """Runs nothing, and fails one command with these words."""

    def __init__(self, argv: tuple[str, ...], words: str) -> None:
        super().__init__()
        self._argv = argv
        self._words = words

    async def run(self, *argv: str, stdin: str = "", seconds: float = 30.0) -> str:
        if argv[: len(self._argv)] == self._argv:
            raise CommandFailed(f"{' '.join(argv)} failed", output=self._words)
        return ""


@pytest.mark.spec("scaler 32.6.6")
async def test_a_link_that_exists_is_fine_and_one_that_cannot_be_set_up_is_not(tmp_path: Path) -> None:
    exists = "RTNETLINK answers: File exists"

    def network(*argv: str) -> IpHostNetwork:
        return IpHostNetwork(BRIDGE, Failing(argv, exists), network_manager=tmp_path / "absent")

    await network("ip", "link", "add").provision()
    await network("ip", "addr", "add").provision()
    await network("iptables").provision()
    with pytest.raises(CommandFailed, match="ip link set kici-br0 up failed"):
        await network("ip", "link", "set").provision()


@pytest.mark.spec("scaler 32.6.4")
async def test_a_rule_before_or_behind_ours_is_unhealthy(host: Namespace) -> None:
    network = await made()
    host.run("nft", "add", "rule", "inet", BRIDGE.fence.table, "forward", "accept")
    assert not (await network.health()).is_healthy


@pytest.mark.spec("scaler 32.6.5")
async def test_a_second_bridge_takes_nothing_from_the_first(host: Namespace) -> None:
    network = await made()
    await join(network, ONE)
    other = replace(BRIDGE, name="kici-br1", cidr=IPv4Network("10.201.0.0/24"), gateway=IPv4Address("10.201.0.1"))
    second = await made(other)
    assert (await network.health()).is_healthy
    assert (await second.health()).is_healthy
    await second.teardown()
    assert (await network.health()).is_healthy
    assert list(await network.admitted()) == [str(ONE.address)]
    assert "kici-br1" not in host.interfaces()


@pytest.mark.spec("scaler 32.6.7")
async def test_an_interface_that_is_not_isolated_is_named_and_a_strange_one_is_not(host: Namespace) -> None:
    network = await made()
    await join(network, ONE)
    host.run("ip", "link", "add", "uplink", "type", "veth", "peer", "name", "away")
    host.run("ip", "link", "set", "uplink", "master", BRIDGE.name)
    assert (await network.health()).is_healthy
    host.run("ip", "link", "set", ONE.tap, "type", "bridge_slave", "isolated", "off")
    assert str(await network.health()) == f"interface {ONE.tap} is not isolated from its neighbours"


@pytest.mark.spec("scaler 50.4")
async def test_an_interface_is_made_down_isolated_and_owned(host: Namespace) -> None:
    network = await made()
    await network.make_tap(ONE, owner=65_100)
    shown = host.run("ip", "-d", "link", "show", ONE.tap)
    assert "isolated on" in shown
    assert "user 65100" in shown
    assert ",UP" not in shown.split(">")[0], "no frame may leave before its rules are there"
    with pytest.raises(Conflict, match="already"):
        await network.make_tap(ONE, owner=65_100)
    assert await network.taps() == [ONE.tap]
    assert await network.remove_tap(ONE.tap)
    assert not await network.remove_tap(ONE.tap)


async def test_an_interface_on_another_bridge_stays(host: Namespace) -> None:
    network = await made()
    other = replace(BRIDGE, name="kici-br1", cidr=IPv4Network("10.201.0.0/24"), gateway=IPv4Address("10.201.0.1"))
    second = await made(other)
    await network.make_tap(ONE, owner=65_100)
    assert not await second.remove_tap(ONE.tap)
    assert await network.taps() == [ONE.tap]
    host.run("ip", "link", "set", ONE.tap, "nomaster")
    assert await second.remove_tap(ONE.tap), "one on no bridge was about to be put on ours"


@pytest.mark.spec("scaler 31.7.5")
@pytest.mark.spec("scaler 31.7.7")
async def test_rules_are_put_once_and_taken_without_touching_a_similar_address(host: Namespace) -> None:
    network = await made()
    await join(network, ONE, TWO)
    await network.admit(ONE, policy=Policy(deny_all=True), needs=NEEDS)
    await network.dismiss(ONE)
    await network.dismiss(ONE)
    assert list(await network.admitted()) == [str(TWO.address)]
    listed = host.run("nft", "list", "ruleset")
    assert "00000001" not in listed
    assert listed.count("chain t_scaler_firecracker_00000002") == 1


@pytest.mark.spec("scaler 36.18.12")
async def test_a_reused_address_inherits_nothing(host: Namespace) -> None:
    network = await made()
    before = guest("scaler-firecracker-0000000a", ONE.address)
    allowed = Policy(allowlist=(IPv4Network("10.9.0.0/16"),))
    await network.admit(before, policy=allowed, needs=NEEDS)  # and its maker was killed here
    await network.admit(ONE, policy=Policy(), needs=NEEDS)
    listed = host.run("nft", "list", "ruleset")
    assert "10.9.0.0/16" not in listed
    assert await network.admitted() == {str(ONE.address): "scaler_firecracker_00000001"}


@pytest.mark.spec("scaler 31.7.8")
@pytest.mark.parametrize("gone", ["agents_input", "agents_forward", "taps"])
async def test_what_is_half_gone_is_taken_away_all_the_same(host: Namespace, gone: str) -> None:
    network = await made()
    await join(network, ONE, TWO)
    family = "bridge" if gone == "taps" else "inet"
    element = f'"{ONE.tap}"' if gone == "taps" else str(ONE.address)
    host.run("nft", "delete", "element", family, BRIDGE.fence.table, gone, f"{{ {element} }}")
    await network.dismiss(ONE)
    assert "00000001" not in host.run("nft", "list", "ruleset")
    assert list(await network.admitted()) == [str(TWO.address)]


async def test_a_guest_whose_address_went_to_another_takes_nothing_of_that_one_away(host: Namespace) -> None:
    network = await made()
    await join(network, ONE)
    late = guest("scaler-firecracker-0000000b", ONE.address)
    await network.dismiss(late)
    assert await network.admitted() == {str(ONE.address): "scaler_firecracker_00000001"}


async def test_an_address_of_which_half_is_left_can_be_given_again(host: Namespace) -> None:
    network = await made()
    await network.admit(guest("scaler-firecracker-0000000a", ONE.address), policy=Policy(), needs=NEEDS)
    host.run("nft", "delete", "element", "inet", BRIDGE.fence.table, "agents_forward", f"{{ {ONE.address} }}")
    await join(network, ONE)
    assert "0000000a" not in host.run("nft", "list", "ruleset")
    assert (await network.health()).is_healthy
