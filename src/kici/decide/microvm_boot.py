"""What a guest is told when it boots, and what its console says when it does not.

The boot data (`kici-…` keys below `latest/meta-data`) holds the agent's credential, so it goes to the guest by a
way that is closed once the agent has it, never by the kernel's command line, which every process of the guest reads.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address, ip_address
from typing import Final
from urllib.parse import urlsplit

from kici.config.grammar import HOST_GATEWAY, ExtraHost
from kici.decide.agent_env import forwarded
from kici.decide.microvm import Bridge, Guest

METADATA_ADDRESS: Final = "169.254.169.254"
LINK_LOCAL_MASK: Final = "255.255.0.0"
EMPTY: Final[dict[str, object]] = {"latest": {"meta-data": {}}}
"""What the metadata service answers once the agent has what it needs."""
ENV_BYTES_MAX: Final = 32_768
_ENTRY_BYTES: Final = 2
_POSIX: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_NAME_PART: Final = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST: Final = re.compile(rf"(?=.{{1,253}}\Z){_NAME_PART}(\.{_NAME_PART})*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class BootOrder:
    """What an agent in a guest needs to know."""

    agent_id: str
    labels: tuple[str, ...]
    url: str
    token: str | None = field(repr=False)
    backpressure: str | None = None
    extra_hosts: tuple[ExtraHost, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


def metadata(order: BootOrder, bridge: Bridge) -> dict[str, object]:
    """The document that the metadata service serves."""
    told: dict[str, object] = {
        "kici-orchestrator-url": order.url,
        "kici-agent-id": order.agent_id,
        "kici-labels": ",".join(order.labels),
        "kici-scaler-managed": "1",
    }
    hosts = [f"{each.name}:{_host_address(each, bridge.gateway)}" for each in order.extra_hosts if is_plain_host(each)]
    optional: dict[str, object | None] = {
        "kici-agent-token": order.token,
        "kici-backpressure-mode": order.backpressure,
        "kici-extra-hosts": ",".join(hosts) or None,
        "kici-env": dict(order.env) or None,
    }
    told |= {key: value for key, value in optional.items() if value is not None}
    return {"latest": {"meta-data": told}}


def guest_env(host: Mapping[str, str], label_set: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables for the agent in a guest, and the names that were left out.

    What the operator forwards comes first, so that a label set's value wins; a value that does not fit leaves room
    for later, smaller ones.
    """
    wanted = {**forwarded(host), **label_set}
    taken: dict[str, str] = {}
    left_out: list[str] = []
    room = ENV_BYTES_MAX
    for name, value in wanted.items():
        cost = len(name.encode()) + len(value.encode()) + _ENTRY_BYTES
        if _POSIX.match(name) is None or cost > room:
            left_out.append(name)
            continue
        taken[name] = value
        room -= cost
    return taken, tuple(left_out)


def is_plain_host(extra: ExtraHost) -> bool:
    return _HOST.match(extra.name) is not None and (extra.address == HOST_GATEWAY or _is_address(extra.address))


def boot_args(guest: Guest, bridge: Bridge | None, *, more: Iterable[str] = ()) -> str:
    """The kernel's command line, without anything that is a secret.

    Without a bridge the guest, which warms up to be copied, has an address on a link that leads nowhere.
    """
    if bridge is None:
        network = f"ip={guest.address}:::{LINK_LOCAL_MASK}::eth0:off"
    else:
        network = f"ip={guest.address}::{bridge.gateway}:{bridge.netmask}::eth0:off"
    return " ".join(("console=ttyS0", "reboot=k", "panic=1", "random.trust_cpu=on", *more, "init=/init", network))


def url_problem(url: str) -> str | None:
    """Why a guest cannot reach this address, as far as it shows; None: it may."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or (_is_address(host) and ip_address(host).is_loopback):
        return (
            f"microVMs cannot reach {url}: that is the guest itself; let the coordinator listen on the bridge "
            "(--host) and give its address there as orchestratorUrl"
        )
    return None


class BootFailure(StrEnum):
    """Why a guest ended before its agent registered, as its console tells."""

    KERNEL_PANIC = "kernel-panic"
    INIT_FAILURE = "init-failure"
    ROOTFS_MOUNT_FAILURE = "rootfs-mount-failure"
    UNKNOWN = "unknown"


_SIGNS: Final = (
    (BootFailure.ROOTFS_MOUNT_FAILURE, ("unable to mount root fs", "cannot mount root", "cannot open root device")),
    (
        BootFailure.INIT_FAILURE,
        (
            "attempted to kill init",
            "no working init found",
            "failed to execute /init",
            "failed to execute /sbin",
            "cannot execute init",
            "requested init",
            "kici-init:",
        ),
    ),
    (BootFailure.KERNEL_PANIC, ("kernel panic",)),
)
_ALARMS: Final = (
    "kernel panic",
    "not syncing",
    "cannot execute init",
    "failed to start",
    "cannot mount root",
    "unable to mount root fs",
    "attempted to kill init",
    "kici-init: cannot",
    "out of memory",
)


def failure_of(lines: Iterable[str]) -> BootFailure:
    """What the last lines of a console say of a guest that ended."""
    text = "\n".join(lines).lower()
    for failure, signs in _SIGNS:
        if any(sign in text for sign in signs):
            return failure
    return BootFailure.UNKNOWN


def is_alarming(line: str) -> bool:
    """Whether a console line is worth an operator's attention."""
    text = line.lower()
    return any(alarm in text for alarm in _ALARMS)


def _host_address(extra: ExtraHost, gateway: IPv4Address) -> str:
    return str(gateway) if extra.address == HOST_GATEWAY else extra.address


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
