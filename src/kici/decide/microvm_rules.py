"""Packet filter rules of a bridge with microVMs, on top of those of any bridge with agents (`decide.isolate`).

A guest sends frames, not only packets, so more is needed than for containers: what leaves a TAP must carry the
guest's own MAC and address, or it is dropped before anything sees it, whatever protocol it is; guests on one bridge
do not reach each other; and what may leave for the internet is translated to the host's address.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from kici.decide.isolate import Needs, Policy, admit_script, base_script, bridge_script, dismiss_script, name_of
from kici.decide.microvm import Bridge, Guest

TAPS_MAP: Final = "taps"
MSS: Final = 1460
_SPOOF_PRIORITY: Final = -300
"""Before connection tracking, so that a forged packet leaves no trace."""


def bridge_base(bridge: Bridge, *, egress: str | None = None) -> str:
    """The static part of a bridge: one transaction that may be repeated, guests' rules stay.

    `egress`: the only interface to the world; None: any but the bridge itself.
    """
    fence = bridge.fence
    table, frames = f"inet {fence.table}", f"bridge {fence.table}"
    out = f'oifname != "{bridge.name}"' if egress is None else f'oifname "{egress}"'
    return (
        base_script(fence)
        + bridge_script(fence)
        + _script(
            f"add chain {table} postrouting {{ type nat hook postrouting priority srcnat; policy accept; }}",
            f"flush chain {table} postrouting",
            f"add rule {table} postrouting ip saddr {bridge.subnet} {out} masquerade",
            f"add chain {table} clamp {{ type filter hook forward priority mangle; policy accept; }}",
            f"flush chain {table} clamp",
            f'add rule {table} clamp iifname "{bridge.name}" tcp flags syn / syn,rst tcp option maxseg size set {MSS}',
            f"add map {frames} {TAPS_MAP} {{ type ifname : verdict; }}",
            f"add chain {frames} prerouting "
            f"{{ type filter hook prerouting priority {_SPOOF_PRIORITY}; policy accept; }}",
            f"flush chain {frames} prerouting",
            f"add rule {frames} prerouting iifname vmap @{TAPS_MAP}",
        )
    )


def remove_bridge(bridge: Bridge) -> str:
    """Take all tables of a bridge away, guests' rules included."""
    table = bridge.fence.table
    return _script(
        f"add table inet {table}",
        f"delete table inet {table}",
        f"add table bridge {table}",
        f"delete table bridge {table}",
    )


def admit_guest(bridge: Bridge, guest: Guest, *, policy: Policy, needs: Needs) -> str:
    """Let a guest reach what it may, and be only itself: one transaction."""
    frames, chain = f"bridge {bridge.fence.table}", tap_chain(guest.vm_id)
    return admit_script(
        bridge.fence, agent=guest.vm_id, address=str(guest.address), policy=policy, needs=needs
    ) + _script(
        f"add chain {frames} {chain}",
        f"flush chain {frames} {chain}",
        f"add rule {frames} {chain} ether saddr != {guest.mac.lower()} drop",
        f"add rule {frames} {chain} ip saddr {guest.address} accept",
        f"add rule {frames} {chain} arp saddr ether {guest.mac.lower()} arp saddr ip {guest.address} accept",
        f"add rule {frames} {chain} drop",
        f'add element {frames} {TAPS_MAP} {{ "{guest.tap}" : jump {chain} }}',
    )


def dismiss_guest(bridge: Bridge, guest: Guest) -> str:
    """Take everything of a guest away: one transaction, which fails as a whole when a part is not there."""
    frames = f"bridge {bridge.fence.table}"
    return dismiss_script(bridge.fence, agent=guest.vm_id, address=str(guest.address)) + _script(
        f'delete element {frames} {TAPS_MAP} {{ "{guest.tap}" }}', f"delete chain {frames} {tap_chain(guest.vm_id)}"
    )


def tap_chain(vm_id: str) -> str:
    return f"t_{name_of(vm_id)}"


Chains = Mapping[tuple[str, str, str], Sequence[str]]
"""Rules by family, table and chain."""


def base_chains(script: str) -> dict[tuple[str, str, str], list[str]]:
    """The chains that a static script fills, and their rules: what a healthy host lists."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for line in script.splitlines():
        words = line.split(" ", 5)
        if words[:2] == ["add", "rule"]:
            family, table, chain, rule = words[2], words[3], words[4], words[5]
            found.setdefault((family, table, chain), []).append(rule)
    return found


def missing_rules(wanted: Chains, listed: Chains) -> list[str]:
    """A sentence for each chain that is not exactly as it should be."""
    faults = []
    for key, rules in wanted.items():
        family, table, chain = key
        if key not in listed:
            faults.append(f"chain {chain} of table {family} {table} is missing")
        elif list(listed[key]) != list(rules):
            faults.append(f"the rules of chain {chain} of table {family} {table} are not those that we wrote")
    return faults


def _script(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)
