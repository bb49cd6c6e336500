"""Addresses of microVMs: who has which, in the database or in memory."""

from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Protocol

from kici.domain.ids import AgentId, InstanceId, ScalerName


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRow:
    """One row of `ip_allocations`."""

    ip: IPv4Address
    vm_id: AgentId
    scaler: ScalerName
    owner_instance_id: InstanceId
    tap_device: str
    mac_address: str


class AddressStore(Protocol):
    """The part of the store that holds addresses.  No two rows of one address, cluster-wide."""

    async def insert_address(self, row: AddressRow) -> bool:
        """False: somebody has this address, or the machine has one already."""
        ...

    async def delete_address(self, vm_id: AgentId) -> bool: ...

    async def addresses(self, *, limit: int) -> list[AddressRow]:
        """Everybody's."""
        ...


class Addresses(Protocol):
    """The addresses that one scaler gives to its machines."""

    async def allocate(self, vm_id: AgentId) -> IPv4Address:
        """The lowest free one; the same again for a machine that has one.  Raises `NoCapacity` naming the network."""
        ...

    async def release(self, vm_id: AgentId) -> None:
        """Let others have it.  A machine without one: no-op."""
        ...

    async def held(self) -> dict[AgentId, IPv4Address]:
        """What this scaler of this coordinator holds."""
        ...

    def restore(self, vm_id: AgentId, address: IPv4Address) -> None:
        """After a restart: a machine that lives has this address (for what forgets; a database does not)."""
        ...
