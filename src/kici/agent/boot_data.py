"""What a guest learns when it boots, as the agent's environment: rules without I/O.

The document is the one of the metadata service; the kernel's command line carries the network only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_VARIABLES: Final = {
    "kici-orchestrator-url": "KICI_ORCHESTRATOR_URL",
    "kici-agent-id": "KICI_AGENT_ID",
    "kici-labels": "KICI_LABELS",
    "kici-scaler-managed": "KICI_SCALER_MANAGED",
    "kici-agent-token": "KICI_AGENT_TOKEN",
    "kici-backpressure-mode": "KICI_BACKPRESSURE_MODE",
}
_BASE: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "KICI_EXECUTION_MODE": "firecracker",
}


class BadBootData(Exception):
    """What came is no boot data; the message says why, without what was in it."""


@dataclass(frozen=True, slots=True)
class Network:
    """One interface, as `ip=` on the kernel's command line says it."""

    address: str
    gateway: str
    netmask: str
    device: str


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a guest gets that goes on from a snapshot, and no other guest has."""

    network: Network
    mac: str
    entropy: bytes
    now_ms: int


def parse_network(command_line: str) -> Network | None:
    """From `ip=<address>::<gateway>:<netmask>:<host>:<device>:<how>`; None: there is none."""
    for word in command_line.split():
        if word.startswith("ip="):
            parts = word[3:].split(":")
            if len(parts) >= 4 and parts[0] and parts[3]:
                device = parts[5] if len(parts) > 5 and parts[5] else "eth0"
                return Network(parts[0], parts[2], parts[3], device)
    return None


def parse_document(data: bytes) -> dict[str, object]:
    """The `meta-data` of a document, whole or the part below `latest/meta-data`.  Raises `BadBootData`."""
    try:
        told = json.loads(data)
    except ValueError:
        raise BadBootData(f"{len(data)} bytes that are not JSON") from None
    if isinstance(told, dict) and isinstance(told.get("latest"), dict):
        told = told["latest"].get("meta-data")
    if not isinstance(told, dict) or not told:
        raise BadBootData("the document is empty: it was read before, or never written")
    return told


def warms_up(document: Mapping[str, object]) -> bool:
    """The guest is to be copied, and is told nothing else."""
    return "kici-warm" in document


def renewal(document: Mapping[str, object], device: str) -> Renewal:
    """Raises `BadBootData`."""
    try:
        given = {
            key: str(document[f"kici-{key}"]) for key in ("address", "gateway", "netmask", "mac", "entropy", "now-ms")
        }
        return Renewal(
            network=Network(given["address"], given["gateway"], given["netmask"], device),
            mac=given["mac"],
            entropy=bytes.fromhex(given["entropy"]),
            now_ms=int(given["now-ms"]),
        )
    except (KeyError, ValueError) as error:
        raise BadBootData(f"nothing to renew this guest with: {error!r}") from None


def environment(document: Mapping[str, object]) -> dict[str, str]:
    """The whole environment of the agent.  What the operator and the label set gave wins over our defaults."""
    given = document.get("kici-env")
    more = {str(name): str(value) for name, value in given.items()} if isinstance(given, dict) else {}
    told = {name: str(document[key]) for key, name in _VARIABLES.items() if key in document}
    return {**_BASE, **told, **more}


def host_lines(document: Mapping[str, object]) -> list[str]:
    """Lines for the guest's hosts file."""
    text = document.get("kici-extra-hosts")
    lines = []
    for entry in str(text).split(",") if text else ():
        name, _, address = entry.partition(":")
        if name and address:
            lines.append(f"{address} {name}")
    return lines
