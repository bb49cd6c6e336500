"""Workflows, events and claim codes over HTTP."""

from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from kici.domain.event import SCALE_UP, EventState
from kici.domain.ids import AgentId
from kici.testing.builders import AGENT, a_spawn
from kici.testing.fake_surface import FakeSurface

Client = TestClient[web.Request, web.Application]
OWNER = {"Authorization": "Bearer owner"}
SUBMITTER = {"Authorization": "Bearer submitter"}
API = "/api/v1"
DOCUMENT = {"ref": "acme/deploy", "on": ["deployed"], "jobs": {"go": {"run": "true"}}}


async def call(
    client: Client, method: str, path: str, body: object = None, *, status: int = 200, headers: Any = OWNER
) -> dict[str, Any]:
    response = await client.request(method, f"{API}/{path}", json=body, headers=headers)
    assert response.status == status, await response.text()
    answer: dict[str, Any] = {} if response.status == 204 else await response.json()
    return answer


async def test_a_workflow_is_applied_listed_shown_and_deleted(client: Client) -> None:
    applied = await call(client, "POST", "workflows", DOCUMENT)
    assert (applied["ref"], applied["kind"], applied["events"]) == ("acme/deploy", "workflow", ["deployed"])
    assert (await call(client, "GET", "workflows"))["items"] == [applied]
    assert await call(client, "GET", "workflows/acme%2Fdeploy") == applied
    await call(client, "DELETE", "workflows/acme%2Fdeploy", status=204)
    await call(client, "DELETE", "workflows/acme%2Fdeploy", status=404)
    await call(client, "GET", "workflows/acme%2Fdeploy", status=404)


async def test_everything_wrong_with_a_workflow_is_told(client: Client) -> None:
    problem = await call(client, "POST", "workflows", {"ref": "?", "on": ["a b"], "jbos": {}}, status=422)
    assert problem["errors"]


async def test_submitters_emit_and_do_not_apply(client: Client) -> None:
    await call(client, "POST", "workflows", DOCUMENT, status=403, headers=SUBMITTER)
    await call(client, "GET", "admin/events", status=403, headers=SUBMITTER)
    emitted = await call(client, "POST", "events", {"name": "deployed"}, status=202, headers=SUBMITTER)
    assert emitted["targets"] == []


@pytest.mark.spec("T5.4")
async def test_reserved_names_are_refused(client: Client) -> None:
    for name in (SCALE_UP, "__x"):
        await call(client, "POST", "events", {"name": name}, status=403)


@pytest.mark.spec("T5.2")
async def test_events_are_listed_and_dead_ones_retried_or_discarded(client: Client, fake: FakeSurface) -> None:
    await call(client, "POST", "workflows", DOCUMENT)
    for number in range(3):
        await call(client, "POST", "events", {"name": "deployed", "payload": {"n": number}}, status=202)
    page = await call(client, "GET", "admin/events?limit=2")
    assert [each["payload"]["n"] for each in page["items"]] == [2, 1]
    rest = await call(client, "GET", f"admin/events?limit=2&cursor={page['nextCursor']}")
    assert [each["payload"]["n"] for each in rest["items"]] == [0]
    assert rest["nextCursor"] is None
    first = rest["items"][0]["id"]
    await call(client, "POST", f"admin/events/{first}/retry", status=409)
    await call(client, "DELETE", f"admin/events/{first}", status=409)
    for place, reason in ((0, "exhausted_retries"), (1, "withdrawn"), (2, "non_retryable")):
        fake.events.rows[place] = replace(fake.events.rows[place], state=EventState.DEAD, dead_reason=reason)
    assert (await call(client, "POST", f"admin/events/{first}/retry"))["state"] == "pending"
    refused = await call(client, "POST", f"admin/events/{fake.events.rows[1].id}/retry", status=409)
    assert "not wanted" in refused["detail"]
    dead = (await call(client, "GET", "admin/events?state=dead"))["items"]
    assert [each["deadReason"] for each in dead] == ["non_retryable", "withdrawn"]
    await call(client, "DELETE", f"admin/events/{dead[0]['id']}", status=204)
    await call(client, "GET", f"admin/events/{dead[0]['id']}", status=404)


async def test_provisions_are_listed(client: Client, fake: FakeSurface) -> None:
    fake.events.spawns.append(a_spawn(backend_type="event", provisioning_targets=("acme/a",)))
    (row,) = (await call(client, "GET", "admin/provisions"))["items"]
    assert (row["agentId"], row["state"], row["targets"], row["adoptedBy"]) == (AGENT, "booting", ["acme/a"], None)


async def test_the_schema_of_scale_events_is_published(client: Client) -> None:
    assert SCALE_UP in (await call(client, "GET", "events/schema"))["events"]


@pytest.mark.spec("scaler 24.7.2")
async def test_a_claim_code_needs_no_token_and_works_once(client: Client, fake: FakeSurface) -> None:
    fake.claims.good["code"] = AgentId("scaler-event-00000001")
    body = {"claimCode": "code"}
    redeemed = await call(client, "POST", "claims/redeem", body, headers={})
    assert redeemed == {
        "agentToken": "kat_1",
        "agentId": "scaler-event-00000001",
        "orchestratorUrl": "ws://x/ws",
        "labels": ["cloud"],
    }
    refused = await call(client, "POST", "claims/redeem", body, headers={}, status=403)
    assert refused["detail"] == "claim code already consumed"
    await call(client, "POST", "claims/redeem", {}, headers={}, status=422)
    fake.claims.is_tired = True
    response = await client.post(f"{API}/claims/redeem", json=body)
    assert (response.status, response.headers["Retry-After"]) == (429, "5")
