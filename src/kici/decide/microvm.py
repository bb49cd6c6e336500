"""What a microVM is called and where it lives: names that follow from its id, addresses, size, the files of a guest.

Pure: everything here is computed from the id of the agent and from the configuration, so that a crash between any
two steps leaves nothing whose name the next start could not compute again.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from kici.decide.isolate import Fence
from kici.domain.resources import Amount

MICROVMS: Final = "firecracker"
"""The type of scalers that make them, whatever program runs them."""
TAP_PREFIX: Final = "kici-"
_TAP: Final = re.compile(r"kici-[0-9a-f]{8}\Z")
_VM: Final = re.compile(r"scaler-firecracker-[0-9a-f]{8}\Z")


class VmmKind(StrEnum):
    """The program that runs a microVM; also the name of the folder that its machines live in."""

    FIRECRACKER = "firecracker"
    QEMU = "qemu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """The network of this host's microVMs."""

    name: str
    cidr: IPv4Network
    gateway: IPv4Address
    netmask: IPv4Address
    table: str
    """What the names of its packet filter tables begin with."""

    @property
    def subnet(self) -> IPv4Network:
        """What the bridge's own address puts on it."""
        return IPv4Network((self.gateway, str(self.netmask)), strict=False)

    @property
    def fence(self) -> Fence:
        """Its tables are its own even when two bridges name the same table."""
        return Fence(network=f"{self.table}_{self.name}", bridge=self.name, gateway=self.gateway, subnet=self.subnet)

    @property
    def gateway_cidr(self) -> str:
        return f"{self.gateway}/{self.subnet.prefixlen}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A microVM on its bridge."""

    vm_id: str
    address: IPv4Address
    tap: str
    mac: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware of a guest."""

    vcpus: int
    mem_mib: int
    overlay_mib: int
    limits: Amount
    """What it may use of the host; 0: as much as its hardware lets it."""


def guest(vm_id: str, address: IPv4Address) -> Guest:
    return Guest(vm_id=vm_id, address=address, tap=tap_of(vm_id), mac=mac_of(address))


def is_vm_id(name: str) -> bool:
    """Whether a name is one that this software gives to microVMs."""
    return _VM.match(name) is not None


def tap_of(vm_id: str) -> str:
    """Name of its network interface on the host; at most 15 characters, as the kernel wants."""
    return f"{TAP_PREFIX}{vm_id[-8:]}"


def is_tap(name: str) -> bool:
    return _TAP.match(name) is not None


def mac_of(address: IPv4Address) -> str:
    return "06:00:AC:{:02X}:{:02X}:{:02X}".format(*address.packed[1:])


def candidates(cidr: IPv4Network, gateway: IPv4Address) -> Iterator[IPv4Address]:
    """Addresses that guests may have, lowest first."""
    ends = {cidr.network_address, cidr.broadcast_address} if cidr.prefixlen < 31 else set()
    return (address for address in cidr if address not in ends and address != gateway)


def first_free(cidr: IPv4Network, gateway: IPv4Address, taken: Collection[IPv4Address]) -> IPv4Address | None:
    """The lowest address that nobody has; None: all are taken."""
    return next((address for address in candidates(cidr, gateway) if address not in taken), None)
