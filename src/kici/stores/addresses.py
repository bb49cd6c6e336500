"""Addresses of microVMs: `ports.addresses.AddressStore`."""

from ipaddress import IPv4Address

from kici.domain.ids import AgentId, InstanceId, Instant, ScalerName
from kici.ports.addresses import AddressRow
from kici.stores.database import Part
from kici.stores.query import Query


class Addresses(Part):
    async def insert_address(self, row: AddressRow, *, now: Instant | None = None) -> bool:
        params = {
            "ip": str(row.ip),
            "vm_id": row.vm_id,
            "scaler_name": row.scaler,
            "owner": row.owner_instance_id,
            "tap_device": row.tap_device,
            "mac_address": row.mac_address,
            "now": now,
        }
        return bool(await self._write(Query.INSERT_ADDRESS, params))

    async def delete_address(self, vm_id: AgentId) -> bool:
        return bool(await self._write(Query.DELETE_ADDRESS, {"vm_id": vm_id}))

    async def addresses(self, *, limit: int) -> list[AddressRow]:
        return [
            AddressRow(
                ip=IPv4Address(row["ip"]),
                vm_id=AgentId(row["vm_id"]),
                scaler=ScalerName(row["scaler_name"]),
                owner_instance_id=InstanceId(row["owner_instance_id"]),
                tap_device=row["tap_device"],
                mac_address=row["mac_address"],
            )
            for row in await self._database.read(Query.ADDRESSES, {"limit": limit})
        ]
