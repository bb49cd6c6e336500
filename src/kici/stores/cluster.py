"""Instances, leases and the database's clock: `ports.store.InstanceStore`."""

from kici.domain.ids import InstanceId, Instant
from kici.domain.instance import Instance, Lease
from kici.stores.database import Params, Part
from kici.stores.query import Query
from kici.stores.rows import instance_from, lease_from


class Cluster(Part):
    async def beat(self, instance: Instance, *, now: Instant | None = None) -> None:
        await self._write(
            Query.BEAT,
            {
                "instance_id": instance.id,
                "role": instance.role,
                "version": instance.version,
                "address": instance.address,
                "started_at": instance.started_at,
                "draining": instance.draining,
                "now": now,
            },
        )

    async def remove_instance(self, instance_id: InstanceId) -> None:
        await self._write(Query.REMOVE_INSTANCE, {"instance_id": instance_id})

    async def instances(self, *, limit: int) -> list[Instance]:
        return [instance_from(row) for row in await self._database.read(Query.INSTANCES, {"limit": limit})]

    async def database_now(self) -> Instant:
        (row,) = await self._database.read(Query.DATABASE_NOW, {})
        return Instant(row["now"])

    async def acquire_lease(
        self, name: str, holder: InstanceId, *, ttl_ms: int, now: Instant | None = None
    ) -> Lease | None:
        params: Params = {"name": name, "holder": holder, "ttl_ms": ttl_ms, "now": now}
        rows = await self._write(Query.ACQUIRE_LEASE, params)
        return lease_from(rows[0]) if rows else None

    async def lease(self, name: str) -> Lease | None:
        row = await self._one(Query.LEASE, {"name": name})
        return None if row is None else lease_from(row)

    async def release_lease(self, lease: Lease) -> bool:
        params: Params = {"name": lease.name, "holder": lease.holder, "token": lease.token}
        return bool(await self._write(Query.RELEASE_LEASE, params))
