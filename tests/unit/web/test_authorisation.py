"""Who may ask what: every route against every role."""

import re

import pytest
from aiohttp import hdrs, web
from aiohttp.test_utils import TestClient

from kici.domain.access import GRANTS, Permission, Role
from kici.domain.errors import StoreDown
from kici.testing.fake_surface import FakeSurface
from kici.web.app import ROUTES
from kici.web.routing import Access, Route

Client = TestClient[web.Request, web.Application]
GUARDED = [route for route in ROUTES if route.needs is not Access.PUBLIC]


def name(route: Route) -> str:
    return f"{route.method} {route.path}"


def as_role(role: Role) -> dict[str, str]:
    return {hdrs.AUTHORIZATION: f"Bearer {role.value}"}


async def ask(client: Client, route: Route, headers: dict[str, str]) -> int:
    path = re.sub(r"\{\w+\}", "none", route.path)
    body = b"{" if route.body is not None else None
    response = await client.request(
        route.method, path, data=body, headers={"Content-Type": "application/json"} | headers
    )
    return response.status


@pytest.mark.spec("T6.3", "scaler 45", "D26")
@pytest.mark.parametrize("route", GUARDED, ids=name)
async def test_a_route_is_open_to_exactly_the_roles_with_its_permission(client: Client, route: Route) -> None:
    for role in Role:
        allowed = not isinstance(route.needs, Permission) or route.needs in GRANTS[role]
        status = await ask(client, route, as_role(role))
        assert (status != 403) == allowed, role
        assert status != 401, role


@pytest.mark.spec("T6.3")
@pytest.mark.parametrize("route", GUARDED, ids=name)
async def test_without_a_good_token_nothing_is_answered(client: Client, route: Route) -> None:
    assert await ask(client, route, {}) == 401
    for authorization in ("Bearer nobody", "Bearer ", "Basic b3duZXI6", "owner"):
        assert await ask(client, route, {hdrs.AUTHORIZATION: authorization}) == 401, authorization


def test_only_probes_sessions_pages_and_the_description_are_public() -> None:
    public = {route.path for route in ROUTES if route.needs is Access.PUBLIC}
    pages = {"/", "/jobs/{job_id}", "/static/{name}", "/login", "/logout"}
    assert public == {"/health", "/ready", "/api/v1/claims/redeem", *pages}


async def test_a_missing_permission_is_named(client: Client) -> None:
    response = await client.get("/api/v1/admin/tokens", headers=as_role(Role.ADMIN))
    assert response.status == 403
    assert "token.manage" in (await response.json())["detail"]


async def test_401_says_how_to_authenticate(client: Client) -> None:
    response = await client.get("/api/v1/jobs")
    assert response.headers["WWW-Authenticate"].startswith("Bearer")


async def test_a_token_that_is_not_ascii_is_no_token(client: Client) -> None:
    response = await client.get("/api/v1/jobs", headers={hdrs.AUTHORIZATION: "Bearer \u00fcber"})
    assert response.status == 401


async def test_a_token_store_that_is_down_is_503_not_401(client: Client, fake: FakeSurface) -> None:
    fake.tokens.failure = StoreDown("the store does not answer")
    response = await client.get("/api/v1/jobs", headers=as_role(Role.OWNER))
    assert response.status == 503
    assert response.headers["Retry-After"] == "1"


@pytest.mark.spec("T6.4")
async def test_changes_leave_a_record_with_the_actor(client: Client, fake: FakeSurface) -> None:
    headers = as_role(Role.OWNER)
    await client.put("/api/v1/admin/secrets/deploy/token", json={"value": "s3cret"}, headers=headers)
    await client.post("/api/v1/admin/secrets/deploy/none/reveal", headers=headers)
    await client.post("/api/v1/admin/secrets/deploy/token/reveal", headers=as_role(Role.SUBMITTER))
    records = [(record.actor, record.action, record.target, record.outcome) for record in fake.access_log.records]
    assert records == [
        ("owner", "secret.write", "deploy/token", "ok"),
        ("owner", "secret.reveal", "deploy/none", "refused 404"),
        ("submitter", "secret.reveal", "deploy/token", "denied"),
    ]
    assert "s3cret" not in repr(fake.access_log.records)


async def test_strangers_cannot_fill_the_access_log(client: Client, fake: FakeSurface) -> None:
    await client.post("/api/v1/admin/stop")
    assert fake.access_log.records == []
