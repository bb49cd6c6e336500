"""Settings, secrets, the access log and small facts: rows that are kept and read, and seldom move."""

from collections.abc import Mapping

from kici.domain.access import AccessRecord
from kici.domain.ids import Instant, OrgId
from kici.domain.paging import Mark
from kici.domain.secret import SealedSecret, SecretRef
from kici.stores.database import Params, Part, Step, Value
from kici.stores.query import Query
from kici.stores.rows import access_from, clean_text, secret_from, to_json


class Settings(Part):
    """`ports.store.SettingsStore`."""

    async def settings(self, org: OrgId | None) -> Mapping[str, int]:
        if org is None:
            rows = await self._database.read(Query.CLUSTER_SETTINGS, {})
        else:
            rows = await self._database.read(Query.ORG_SETTINGS, {"org": org})
        return {row["name"]: row["value"] for row in rows}

    async def settings_version(self) -> int:
        (row,) = await self._database.read(Query.META, {"name": "settings_version"})
        return int(row["value"])

    async def patch_settings(
        self, org: OrgId | None, changes: Mapping[str, int | None], *, now: Instant | None = None
    ) -> int:
        del now  # settings keep no time
        document = to_json([{"name": name, "value": value} for name, value in sorted(changes.items())])
        params: Params = {"org": org, "changes": document}
        of_cluster = org is None
        results = await self._database.unit(
            [
                Step(Query.LOCK_SETTINGS, {}),
                Step(Query.BUMP_SETTINGS, params, guard=True),
                Step(Query.PATCH_CLUSTER_SETTINGS if of_cluster else Query.PATCH_ORG_SETTINGS, params),
                Step(Query.CLEAR_CLUSTER_SETTINGS if of_cluster else Query.CLEAR_ORG_SETTINGS, params),
            ]
        )
        return await self.settings_version() if results is None else int(results[1][0]["value"])


class Secrets(Part):
    """`ports.store.SecretStore`."""

    async def put_secret(self, secret: SealedSecret) -> None:
        await self._write(
            Query.PUT_SECRET,
            {
                **_key(secret.org, secret.ref),
                "sealed": secret.sealed,
                "key_version": secret.key_version,
                "updated_at": secret.updated_at,
            },
        )

    async def secret(self, org: OrgId, ref: SecretRef) -> SealedSecret | None:
        row = await self._one(Query.SECRET, _key(org, ref))
        return None if row is None else secret_from(row)

    async def secrets(self, org: OrgId, *, limit: int) -> list[SealedSecret]:
        return [secret_from(row) for row in await self._database.read(Query.SECRETS, {"org": org, "limit": limit})]

    async def secrets_of_all(self, *, after: SealedSecret | None, limit: int) -> list[SealedSecret]:
        first = OrgId(""), SecretRef("", "")
        key = _key(*(first if after is None else (after.org, after.ref)))
        return [secret_from(row) for row in await self._database.read(Query.SECRETS_OF_ALL, {**key, "limit": limit})]

    async def reseal_secret(self, before: SealedSecret, sealed: bytes, *, key_version: int) -> bool:
        params: Params = {"sealed": sealed, "key_version": key_version, "before": before.sealed}
        return bool(await self._write(Query.RESEAL_SECRET, {**_key(before.org, before.ref), **params}))

    async def delete_secret(self, org: OrgId, ref: SecretRef) -> bool:
        return bool(await self._write(Query.DELETE_SECRET, _key(org, ref)))


class AccessLog(Part):
    """`ports.store.AccessLogStore`."""

    async def record_access(self, record: AccessRecord) -> None:
        await self._write(
            Query.RECORD_ACCESS,
            {
                "at": record.at,
                "actor": clean_text(record.actor),
                "action": record.action,
                "target": clean_text(record.target),
                "outcome": record.outcome,
                "detail": clean_text(record.detail),
            },
        )

    async def access_log(self, *, before: Mark | None, limit: int) -> list[AccessRecord]:
        params: dict[str, Value] = {"before": None, "before_id": None, "limit": limit}
        if before is not None:
            params |= {"before": before.at, "before_id": int(before.id)}
        rows = await self._database.read(Query.ACCESS_LOG, params)
        return [access_from(row) for row in rows]

    async def prune_access_log(self, *, older_than: Instant, limit: int) -> int:
        return len(await self._write(Query.PRUNE_ACCESS_LOG, {"older_than": older_than, "limit": limit}))


class Facts(Part):
    """`ports.store.MetaStore`."""

    async def meta(self, name: str) -> str | None:
        row = await self._one(Query.META, {"name": name})
        return None if row is None else str(row["value"])

    async def set_meta(self, name: str, value: str) -> None:
        await self._write(Query.SET_META, {"name": name, "value": value})


def _key(org: OrgId, ref: SecretRef) -> dict[str, str]:
    return {"org": org, "context": ref.context, "key": ref.key}
