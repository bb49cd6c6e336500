"""Workers over HTTP: join tokens, the list, revocation."""

from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from tests.unit.web.test_authorisation import as_role

from kici.adapters.clock import RealClock
from kici.domain.access import Role
from kici.domain.ids import InstanceId, Instant
from kici.domain.worker import Worker
from kici.testing.fake_surface import FakeSurface

Client = TestClient[web.Request, web.Application]
ADMIN = as_role(Role.ADMIN)
HERE = InstanceId("instance-1")


def a_worker(id: str = "w1", *, seen_ms_ago: int = 0, **fields: object) -> Worker:
    worker = Worker(
        id=id,
        name=f"build-{id}",
        version="1",
        joined_at=Instant(1_750_000_000_000),
        linked_to=(HERE,),
        last_seen_at=Instant(RealClock().now() - seen_ms_ago),
    )
    return replace(worker, **fields)  # type: ignore[arg-type]  # fields of a worker


@pytest.mark.spec("surroundings 4.2")
async def test_a_join_token_is_shown_once_and_lives_an_hour(client: Client, fake: FakeSurface) -> None:
    response = await client.post("/api/v1/admin/join-tokens", headers=ADMIN)
    assert response.status == 201
    made = await response.json()
    assert made["token"].startswith("kici_join_v1.")
    (token,) = fake.workers.tokens
    assert token.expires_at - token.created_at == 3_600_000
    assert token.created_by == "admin"


@pytest.mark.parametrize("seconds", [59, 86_401, 0, -1])
async def test_a_join_token_lives_a_minute_to_a_day(client: Client, fake: FakeSurface, seconds: int) -> None:
    body = {"expiresInSeconds": seconds}
    response = await client.post("/api/v1/admin/join-tokens", json=body, headers=ADMIN)
    assert response.status == 422
    assert not fake.workers.tokens


async def test_workers_are_linked_away_or_revoked(client: Client, fake: FakeSurface) -> None:
    fake.workers.add(a_worker("w1"))
    fake.workers.add(a_worker("w2", seen_ms_ago=61_000))
    fake.workers.add(a_worker("w3", linked_to=(), last_seen_at=None))
    fake.workers.add(a_worker("w4", revoked_at=Instant(1_750_000_000_000)))
    items = (await (await client.get("/api/v1/admin/workers", headers=ADMIN)).json())["items"]
    assert [(each["id"], each["state"], each["linkedTo"]) for each in items] == [
        ("w1", "linked", ["instance-1"]),
        ("w2", "away", []),
        ("w3", "away", []),
        ("w4", "revoked", []),
    ]
    assert not any("credential" in key.lower() for each in items for key in each)


async def test_a_worker_is_revoked_once(client: Client, fake: FakeSurface) -> None:
    fake.workers.add(a_worker())
    path = "/api/v1/admin/workers/w1"
    assert (await client.delete(path, headers=ADMIN)).status == 204
    response = await client.delete(path, headers=ADMIN)
    assert response.status == 404
    assert "kici-admin peers" in (await response.json())["detail"]
