"""Probes, sessions of browsers, and the files of the status page."""

import re

import pytest
from aiohttp import hdrs, web
from aiohttp.test_utils import TestClient

from kici.testing.fake_surface import FakeSurface
from kici.web.logins import Logins
from kici.web.pages import STATIC

Client = TestClient[web.Request, web.Application]
OWNER = {"Authorization": "Bearer owner"}
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


@pytest.mark.spec("T9.5")
async def test_health_is_200_while_ready_waits_for_recovery(client: Client, fake: FakeSurface) -> None:
    fake.coordinator.trouble = "recovering"
    assert (await client.get("/health")).status == 200
    response = await client.get("/ready")
    assert response.status == 503
    assert await response.json() == {"ready": False, "reason": "recovering"}
    fake.coordinator.trouble = None
    assert (await client.get("/ready")).status == 200


async def test_metrics_are_prometheus_text(client: Client) -> None:
    response = await client.get("/metrics", headers=OWNER)
    assert response.headers[hdrs.CONTENT_TYPE].startswith("text/plain; version=0.0.4")
    assert "kici_orch_agents_active 0" in await response.text()


async def test_a_code_signs_one_browser_in_once(client: Client, logins: Logins) -> None:
    code, _ = logins.code("owner")
    response = await client.get(f"/login?code={code}&next=/jobs/job-1", allow_redirects=False)
    assert (response.status, response.headers["Location"]) == (303, "/jobs/job-1")
    cookie = response.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert (await (await client.get("/api/v1/whoami")).json())["role"] == "owner"
    client.session.cookie_jar.clear()
    assert (await client.get(f"/login?code={code}", allow_redirects=False)).status == 410
    assert (await client.get("/api/v1/whoami")).status == 401


async def test_looking_at_a_link_does_not_spend_it(client: Client, logins: Logins) -> None:
    code, _ = logins.code("owner")
    assert (await client.head(f"/login?code={code}", allow_redirects=False)).status == 303
    assert (await client.get(f"/login?code={code}", allow_redirects=False)).status == 303


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "jobs"])
async def test_a_login_leads_nowhere_else(client: Client, logins: Logins, target: str) -> None:
    code, _ = logins.code("owner")
    response = await client.get("/login", params={"code": code, "next": target}, allow_redirects=False)
    assert response.headers["Location"] == "/"


async def test_a_token_signs_in_and_logout_ends_it(client: Client) -> None:
    assert (await client.post("/login", json={"token": "nobody"})).status == 401
    assert (await client.post("/login", json={"token": "auditor"})).status == 204
    assert (await (await client.get("/api/v1/whoami")).json())["role"] == "auditor"
    assert (await client.post("/logout")).status == 204
    assert (await client.get("/api/v1/whoami")).status == 401


async def test_a_session_ends_with_its_token(client: Client, fake: FakeSurface) -> None:
    await client.post("/login", json={"token": "admin"})
    await fake.tokens.revoke(fake.tokens.api["admin"].id)
    assert (await client.get("/api/v1/whoami")).status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        (SAME_ORIGIN, 202),
    ],
)
async def test_a_cookie_changes_things_only_from_our_own_pages(
    client: Client, fake: FakeSurface, headers: dict[str, str], status: int
) -> None:
    await client.post("/login", json={"token": "owner"})
    fake.jobs.add()
    assert (await client.post("/api/v1/jobs/job-1/cancel", headers=headers)).status == status


async def test_an_old_browser_may_prove_itself_by_its_origin(client: Client, fake: FakeSurface) -> None:
    await client.post("/login", json={"token": "owner"})
    fake.jobs.add()
    origin = str(client.make_url("/")).rstrip("/")
    assert (await client.post("/api/v1/jobs/job-1/cancel", headers={"Origin": origin})).status == 202


async def test_whoever_is_in_can_mint_a_link(client: Client) -> None:
    for headers in (OWNER, SAME_ORIGIN):
        code = await (await client.post("/api/v1/login-codes", headers=headers)).json()
        assert (await client.get(code["path"], allow_redirects=False)).status == 303


async def test_the_page_and_its_parts_are_served(client: Client) -> None:
    for path in ("/", "/jobs/job-1"):
        response = await client.get(path)
        text = await response.text()
        assert response.content_type == "text/html"
        assert "script-src 'self'" in response.headers["Content-Security-Policy"]
        for part in re.findall(r'(?:src|href)="(/static/[^"]+)"', text):
            assert (await client.get(part)).status == 200, part
    assert (await client.get("/static/nothing.js")).status == 404
    assert (await client.get("/static/..%2fapp.py")).status == 404


def test_pages_hold_nothing_that_the_policy_forbids() -> None:
    html = STATIC["index.html"].decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=|https?://", html)
    assert not re.search(r"\.innerHTML|\beval\(|https?://", STATIC["app.js"].decode())
