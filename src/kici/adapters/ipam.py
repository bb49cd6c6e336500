"""Addresses of microVMs.  Contract: `ports.addresses.Addresses`.

Coordinators keep them in the database, where two that want the same one find out; a worker, which has none, keeps
them in memory and learns them again from the machines that it finds alive.
"""

from ipaddress import IPv4Address
from typing import Final

from kici.decide.microvm import Bridge, first_free, mac_of, tap_of
from kici.domain.errors import NoCapacity, Retryable
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.ports.addresses import AddressRow, AddressStore

TRIES_MAX: Final = 16
ROWS_MAX: Final = 70_000
"""More than a /16 has."""


class StoredAddresses:
    """Rows of `ip_allocations`."""

    def __init__(self, store: AddressStore, *, bridge: Bridge, scaler: ScalerName, instance_id: InstanceId) -> None:
        self._store = store
        self._bridge = bridge
        self._scaler = scaler
        self._instance_id = instance_id

    async def allocate(self, vm_id: AgentId) -> IPv4Address:
        for _ in range(TRIES_MAX):
            rows = await self._store.addresses(limit=ROWS_MAX)
            mine = next((row.ip for row in rows if row.vm_id == vm_id), None)
            if mine is not None:
                return mine
            address = first_free(self._bridge.cidr, self._bridge.gateway, {row.ip for row in rows})
            if address is None:
                raise _exhausted(self._bridge, self._scaler)
            if await self._store.insert_address(self._row(vm_id, address)):
                return address
        raise Retryable(f"addresses of {self._bridge.cidr} were taken by others {TRIES_MAX} times in a row; ask again")

    async def release(self, vm_id: AgentId) -> None:
        await self._store.delete_address(vm_id)

    async def held(self) -> dict[AgentId, IPv4Address]:
        rows = await self._store.addresses(limit=ROWS_MAX)
        mine = (self._scaler, self._instance_id)
        return {row.vm_id: row.ip for row in rows if (row.scaler, row.owner_instance_id) == mine}

    def restore(self, vm_id: AgentId, address: IPv4Address) -> None:
        """The database has not forgotten."""

    def _row(self, vm_id: AgentId, address: IPv4Address) -> AddressRow:
        return AddressRow(
            ip=address,
            vm_id=vm_id,
            scaler=self._scaler,
            owner_instance_id=self._instance_id,
            tap_device=tap_of(vm_id),
            mac_address=mac_of(address),
        )


class AddressPool:
    """What all scalers of one bridge share where there is no database."""

    def __init__(self) -> None:
        self.taken: dict[IPv4Address, AgentId] = {}


class MemoryAddresses:
    def __init__(self, pool: AddressPool, *, bridge: Bridge, scaler: ScalerName) -> None:
        self._pool = pool
        self._bridge = bridge
        self._scaler = scaler
        self._mine: dict[AgentId, IPv4Address] = {}

    async def allocate(self, vm_id: AgentId) -> IPv4Address:
        if vm_id in self._mine:
            return self._mine[vm_id]
        address = first_free(self._bridge.cidr, self._bridge.gateway, self._pool.taken)
        if address is None:
            raise _exhausted(self._bridge, self._scaler)
        self.restore(vm_id, address)
        return address

    async def release(self, vm_id: AgentId) -> None:
        address = self._mine.pop(vm_id, None)
        if address is not None and self._pool.taken.get(address) == vm_id:
            del self._pool.taken[address]

    async def held(self) -> dict[AgentId, IPv4Address]:
        return dict(self._mine)

    def restore(self, vm_id: AgentId, address: IPv4Address) -> None:
        self._mine[vm_id] = address
        self._pool.taken[address] = vm_id


def _exhausted(bridge: Bridge, scaler: ScalerName) -> NoCapacity:
    return NoCapacity(
        f"no available IPs: every address of {bridge.cidr} has a microVM, so scaler {scaler} cannot make another; "
        "widen firecracker.cidr, or look for what is left behind with `kici-admin scaler orphans`"
    )
