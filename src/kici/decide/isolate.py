"""What agents on a bridge may reach, as rules of the packet filter: data in, scripts out, each one transaction.

Nothing is let through that was not admitted: a bridge has static rules that send each packet to the rules of its
sender's address, and drop what has none.  So an agent is cut off before its rules are there, after they are gone,
and when it invents an address.  Its rules are two chains of its own, which a map finds by address; taking an agent
away takes its elements and chains away by name, and cannot touch a neighbour.  Where frames can be filtered, a third
chain of each agent drops whatever comes with its address from anywhere but its own port of the bridge.

    forward: replies · allowed networks · the coordinator, name service · private and metadata addresses: no · rest: yes
    input:   replies · what may be reached on this host · rest: no
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Final
from urllib.parse import urlsplit

from kici.config.grammar import HostAccess

PRIVATE: Final = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
METADATA: Final = tuple(map(IPv4Network, ("169.254.0.0/16", "100.100.100.200/32")))
"""Link-local, where clouds answer questions about their machines; one cloud uses another address."""
DNS_PORT: Final = 53
FORWARD_MAP: Final = "agents_forward"
INPUT_MAP: Final = "agents_input"
SENDERS_MAP: Final = "agents_senders"
PRIORITY: Final = -10
"""Before the engine's own rules: what we refuse stays refused whatever it allows."""
SENDERS_PRIORITY: Final = -300
"""Before connection tracking, so that what is forged leaves no trace."""
_REFUSE: Final = "reject with icmpx type admin-prohibited"
"""At once and in words, so that a job fails with a reason instead of waiting for a timeout."""
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the agents of a label set may reach."""

    allowlist: tuple[IPv4Network, ...] = ()
    deny_all: bool = False
    host_access: tuple[HostAccess, ...] | None = None
    """None: name service and the coordinator; empty: nothing."""


DEFAULT_POLICY: Final = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """One bridge with agents on this host."""

    network: str
    bridge: str
    gateway: IPv4Address
    subnet: IPv4Network

    @property
    def table(self) -> str:
        """A table of its own for each network, so that nobody else's rules are in it."""
        return _NO_NAME.sub("_", self.network)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What every agent needs to work at all."""

    coordinator_port: int | None
    coordinator: IPv4Address | None = None
    """Where it is given by its address; it may be another machine."""
    resolvers: tuple[IPv4Address, ...] = ()
    """Name servers that this host uses; an engine passes questions on to them."""


def needs_of(url: str, *, resolvers: Iterable[str], names: Mapping[str, str]) -> Needs:
    """What follows from the address that agents connect to.  `names`: names that only agents can resolve."""
    parts = urlsplit(url)
    port = parts.port or {"ws": 80, "wss": 443}.get(parts.scheme)
    host = parts.hostname or ""
    servers = tuple(each for each in map(_address, resolvers) if each is not None and not each.is_loopback)
    return Needs(coordinator_port=port, coordinator=_address(names.get(host, host)), resolvers=servers)


def base_script(fence: Fence) -> str:
    """The static part of a bridge.  May be repeated: agents' rules stay."""
    table, bridge = f"inet {fence.table}", f'"{fence.bridge}"'
    return _script(
        f"add table {table}",
        f"add map {table} {FORWARD_MAP} {{ type ipv4_addr : verdict; }}",
        f"add map {table} {INPUT_MAP} {{ type ipv4_addr : verdict; }}",
        f"add chain {table} forward {{ type filter hook forward priority {PRIORITY}; policy accept; }}",
        f"add chain {table} input {{ type filter hook input priority {PRIORITY}; policy accept; }}",
        f"flush chain {table} forward",
        f"flush chain {table} input",
        f"add rule {table} forward iifname {bridge} ct state established,related accept",
        f"add rule {table} forward iifname {bridge} ip saddr vmap @{FORWARD_MAP}",
        f"add rule {table} forward iifname {bridge} drop",
        f"add rule {table} forward oifname {bridge} ct state established,related accept",
        f"add rule {table} forward oifname {bridge} drop",
        f"add rule {table} input iifname {bridge} ct state established,related accept",
        f"add rule {table} input iifname {bridge} ip saddr vmap @{INPUT_MAP}",
        f"add rule {table} input iifname {bridge} drop",
    )


def bridge_script(fence: Fence) -> str:
    """The same for frames between two agents on one bridge, where those do not pass the rules above."""
    table, subnet = f"bridge {fence.table}", fence.subnet
    return _script(
        f"add table {table}",
        f"add chain {table} forward {{ type filter hook forward priority {PRIORITY}; policy accept; }}",
        f"flush chain {table} forward",
        f"add rule {table} forward ip saddr {subnet} ip daddr {subnet} drop",
    )


def senders_script(fence: Fence) -> str:
    """The static part of who may send from which address, in frames as they come in at a port of the bridge.

    Rules by address alone would let an agent borrow the address of a neighbour who may do more.
    """
    table = f"bridge {fence.table}"
    return _script(
        f"add table {table}",
        f"add map {table} {SENDERS_MAP} {{ type ipv4_addr : verdict; }}",
        f"add chain {table} prerouting {{ type filter hook prerouting priority {SENDERS_PRIORITY}; policy accept; }}",
        f"flush chain {table} prerouting",
        f"add rule {table} prerouting ip saddr vmap @{SENDERS_MAP}",
        f"add rule {table} prerouting arp saddr ip vmap @{SENDERS_MAP}",
    )


def bind_script(fence: Fence, *, agent: str, address: str, port: str | None, replaces: str | None = None) -> str:
    """Let only the agent's own port of the bridge send from its address; None: it is not known which that is."""
    table, chain = f"bridge {fence.table}", _senders_chain(agent)
    before = [] if replaces is None or replaces == agent else _unbinding(fence, agent=replaces, address=address)
    return _script(
        *before,
        f"add chain {table} {chain}",
        f"flush chain {table} {chain}",
        *([] if port is None else [f'add rule {table} {chain} iifname != "{port}" drop']),
        f"add element {table} {SENDERS_MAP} {{ {address} : jump {chain} }}",
    )


def unbind_script(fence: Fence, *, agent: str, address: str) -> str:
    """Take that away, by address and agent as in `dismiss_script`."""
    return _script(*_unbinding(fence, agent=agent, address=address))


def admit_script(
    fence: Fence, *, agent: str, address: str, policy: Policy, needs: Needs, replaces: str | None = None
) -> str:
    """Let an agent at an address reach what it may.  `replaces`: the agent that had the address before."""
    table = f"inet {fence.table}"
    forward, host = _chains(agent)
    before = [] if replaces is None or replaces == agent else _dismissal(fence, agent=replaces, address=address)
    return _script(
        *before,
        f"add chain {table} {forward}",
        f"add chain {table} {host}",
        f"flush chain {table} {forward}",
        f"flush chain {table} {host}",
        *(f"add rule {table} {forward} {rule}" for rule in forward_rules(policy, needs)),
        *(f"add rule {table} {host} {rule}" for rule in input_rules(policy, needs, fence.gateway)),
        f"add element {table} {FORWARD_MAP} {{ {address} : jump {forward} }}",
        f"add element {table} {INPUT_MAP} {{ {address} : jump {host} }}",
    )


def dismiss_script(fence: Fence, *, agent: str, address: str) -> str:
    """Take an agent's rules away.  Fails as a whole when the address belongs to another agent by now."""
    return _script(*_dismissal(fence, agent=agent, address=address))


def forward_rules(policy: Policy, needs: Needs) -> list[str]:
    """In order; the first that matches decides."""
    rules = [f"ip daddr {network} accept" for network in policy.allowlist]
    if needs.coordinator is not None and needs.coordinator_port is not None:
        # Packets to this host never come here: this is for a coordinator on another machine.
        rules.append(f"ip daddr {needs.coordinator} tcp dport {needs.coordinator_port} accept")
    if policy.host_access is None and not policy.deny_all:
        rules += [
            f"ip daddr {server} {protocol} dport {DNS_PORT} accept"
            for server in needs.resolvers
            for protocol in ("udp", "tcp")
        ]
    if policy.deny_all:
        return [*rules, _REFUSE]
    return [*rules, *(f"ip daddr {network} {_REFUSE}" for network in (*PRIVATE, *METADATA)), "accept"]


def input_rules(policy: Policy, needs: Needs, gateway: IPv4Address) -> list[str]:
    """What may be reached on the host itself: everything else is refused, whatever its address."""
    granted = policy.host_access
    if granted is None:
        granted = (HostAccess(network=IPv4Network(gateway), port=DNS_PORT),)
        if needs.coordinator_port is not None:
            granted = (*granted, HostAccess(network=None, port=needs.coordinator_port))
    return [*(rule for entry in granted for rule in _access(entry)), _REFUSE]


def agent_of_chain(chain: str) -> str:
    """Whose chain a verdict map names."""
    return chain.partition("_")[2]


def name_of(agent: str) -> str:
    """An agent in names of chains."""
    return _NO_NAME.sub("_", agent)


def stale(elements: Mapping[str, str], in_use: Iterable[str]) -> list[tuple[str, str]]:
    """Addresses that have rules and no container, each with its agent's name in chains."""
    used = set(in_use)
    return sorted((address, agent_of_chain(chain)) for address, chain in elements.items() if address not in used)


def _access(entry: HostAccess) -> list[str]:
    where = "" if entry.network is None else f"ip daddr {entry.network} "
    if entry.port is None:
        return [f"{where}accept"]
    return [f"{where}{protocol} dport {entry.port} accept" for protocol in ("tcp", "udp")]


def _dismissal(fence: Fence, *, agent: str, address: str) -> list[str]:
    table = f"inet {fence.table}"
    forward, host = _chains(agent)
    return [
        f"delete element {table} {FORWARD_MAP} {{ {address} }}",
        f"delete element {table} {INPUT_MAP} {{ {address} }}",
        f"delete chain {table} {forward}",
        f"delete chain {table} {host}",
    ]


def _unbinding(fence: Fence, *, agent: str, address: str) -> list[str]:
    table = f"bridge {fence.table}"
    return [
        f"delete element {table} {SENDERS_MAP} {{ {address} }}",
        f"delete chain {table} {_senders_chain(agent)}",
    ]


def _senders_chain(agent: str) -> str:
    return f"s_{name_of(agent)}"


def _chains(agent: str) -> tuple[str, str]:
    return f"f_{name_of(agent)}", f"i_{name_of(agent)}"


def _address(text: str) -> IPv4Address | None:
    try:
        return IPv4Address(text)
    except ValueError:
        return None


def _script(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)
