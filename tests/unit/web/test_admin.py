from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from kici.decide.forget import ForgetOutcome
from kici.domain.ids import AgentId, JobId
from kici.domain.job import JobStatus
from kici.testing.fake_surface import ME, FakeSurface
from kici.web.surface import AgentRow, Check, CheckStatus

Client = TestClient[web.Request, web.Application]
OWNER = {"Authorization": "Bearer owner"}
ADMIN = "/api/v1/admin"


async def get(client: Client, path: str, status: int = 200) -> dict[str, Any]:
    response = await client.get(f"{ADMIN}/{path}", headers=OWNER)
    assert response.status == status
    answer: dict[str, Any] = await response.json()
    return answer


async def test_agents_are_listed_shown_and_drained(client: Client, fake: FakeSurface) -> None:
    row = AgentRow(agent_id=AgentId("agent-1"), state="idle", instance_id=ME, labels=frozenset({"b", "a"}))
    fake.agents.rows[row.agent_id] = row
    assert (await get(client, "agents"))["items"] == [await get(client, "agents/agent-1")]
    assert (await get(client, "agents/agent-1"))["labels"] == ["a", "b"]
    response = await client.post(f"{ADMIN}/agents/agent-1/drain", headers=OWNER)
    assert (response.status, (await response.json())["state"]) == (202, "draining")
    assert (await client.post(f"{ADMIN}/agents/agent-2/drain", headers=OWNER)).status == 404
    await get(client, "agents/agent-2", 404)


async def test_scalers_show_their_label_sets(client: Client) -> None:
    (row,) = (await get(client, "scalers"))["items"]
    assert (row["name"], row["labelSets"], row["maxAgents"]) == ("local", [["linux", "x64"]], 4)


@pytest.mark.parametrize(("outcome", "status"), [("applied", 200), ("unchanged", 200), ("rejected", 422)])
async def test_a_rejected_reload_is_422_with_its_results(
    client: Client, fake: FakeSurface, outcome: str, status: int
) -> None:
    fake.scalers.outcome = outcome
    response = await client.post(f"{ADMIN}/scalers/reload", headers=OWNER)
    assert response.status == status
    assert (await response.json())["items"][0]["outcome"] == outcome


@pytest.mark.spec("T9.6")
async def test_a_diagnosis_is_as_bad_as_its_worst_check(client: Client, fake: FakeSurface) -> None:
    assert (await get(client, "diagnose"))["overall"] == "pass"
    for status in (CheckStatus.WARN, CheckStatus.FAIL, CheckStatus.PASS):
        fake.scalers.checks.append(Check(name=status.value, status=status, message="image not found"))
    found = await get(client, "diagnose?scaler=local")
    assert found["overall"] == "fail"
    assert len(found["checks"]) == 3
    await get(client, "diagnose?scaler=none", 404)


async def test_the_queue_is_shown_in_order_and_cleared(client: Client, fake: FakeSurface) -> None:
    for status in (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.QUEUED):
        fake.jobs.add(status=status)
    queue = await get(client, "queue?limit=1")
    assert (queue["depth"], [job["id"] for job in queue["items"]]) == (2, ["job-1"])
    assert (await get(client, "queue/job-3"))["status"] == "queued"
    await get(client, "queue/job-2", 404)
    response = await client.post(f"{ADMIN}/queue/clear", headers=OWNER)
    assert await response.json() == {"cancelled": 2}
    assert fake.jobs.rows[JobId("job-1")].reason == "queue cleared by owner"


@pytest.mark.spec("T7.1")
async def test_draining_is_switched_on_and_off(client: Client, fake: FakeSurface) -> None:
    fake.coordinator.running = 2
    response = await client.post(f"{ADMIN}/drain", json={"action": "drain"}, headers=OWNER)
    assert await response.json() == {"draining": True, "jobsRunning": 2} == await get(client, "drain")
    response = await client.post(f"{ADMIN}/drain", json={"action": "resume"}, headers=OWNER)
    assert (await response.json())["draining"] is False
    assert (await client.post(f"{ADMIN}/drain", json={"action": "stop"}, headers=OWNER)).status == 422


async def test_stop_may_keep_agents(client: Client, fake: FakeSurface) -> None:
    await client.post(f"{ADMIN}/stop", headers=OWNER)
    await client.post(f"{ADMIN}/stop", json={"keepAgents": True}, headers=OWNER)
    assert fake.coordinator.stopped == [False, True]


async def test_instances_mark_the_one_that_answers(client: Client) -> None:
    (row,) = (await get(client, "instances"))["items"]
    assert (row["id"], row["isSelf"], row["leads"]) == ("instance-1", True, True)


@pytest.mark.spec("scaler 44")
async def test_a_peer_is_forgotten_or_the_outcome_says_why_not(client: Client, fake: FakeSurface) -> None:
    async def forget(query: str = "", token: dict[str, str] = OWNER) -> tuple[int, object]:
        answer = await client.delete(f"{ADMIN}/peers/gone{query}", headers=token)
        return answer.status, (await answer.json()).get("outcome")

    assert await forget() == (200, "forgotten")
    fake.coordinator.forget_outcome = ForgetOutcome.ACKNOWLEDGEMENT_REQUIRED
    assert await forget("?acknowledge=true") == (409, "acknowledgement-required")
    fake.coordinator.forget_outcome = ForgetOutcome.NOT_FOUND
    assert await forget() == (404, "not-found")
    assert fake.coordinator.forgotten == [("gone", False), ("gone", True), ("gone", False)]
    assert [record.action for record in fake.access_log.records] == ["peer.forget"] * 3


@pytest.mark.spec("T6.7")
@pytest.mark.parametrize("query", ["", "?org=acme"])
async def test_a_token_for_some_contexts_only_changes_no_settings(
    client: Client, fake: FakeSurface, query: str
) -> None:
    fake.tokens.api["limited"] = replace(fake.tokens.api["owner"], secret_contexts=frozenset({"deploy"}))
    before = await get(client, f"settings{query}")
    response = await client.patch(
        f"{ADMIN}/settings{query}",
        json={"scaler_spawn_timeout_ms": 60_000},
        headers={"Authorization": "Bearer limited"},
    )
    assert (response.status, "limited to some secret contexts" in (await response.json())["detail"]) == (403, True)
    assert await get(client, f"settings{query}") == before
    assert [(each.action, each.outcome) for each in fake.access_log.records] == [("settings.patch", "denied")]


@pytest.mark.parametrize("path", ["tokens", "agent-tokens"])
async def test_a_token_for_some_contexts_only_makes_no_token_that_may_do_more(
    client: Client, fake: FakeSurface, path: str
) -> None:
    fake.tokens.api["limited"] = replace(fake.tokens.api["owner"], secret_contexts=frozenset({"deploy"}))
    body = {"name": "more", **({"role": "owner"} if path == "tokens" else {})}
    as_limited = {"Authorization": "Bearer limited"}
    assert (await client.post(f"{ADMIN}/{path}", json=body, headers=as_limited)).status == 403
    assert (await client.post(f"{ADMIN}/{path}", json=body, headers=OWNER)).status == 201


async def test_settings_are_patched_whole_or_not_at_all(client: Client) -> None:
    async def patch(body: object, query: str = "") -> int:
        return (await client.patch(f"{ADMIN}/settings{query}", json=body, headers=OWNER)).status

    assert await patch({"queue_max_depth": 7}) == 200
    (row,) = (await get(client, "settings"))["items"]
    assert (row["value"], row["effective"], row["default"]) == (7, 7, 100)
    assert await patch({"queue_max_depth": 9}, "?org=acme") == 200
    assert await patch({"queue_max_depth": None}) == 200
    (row,) = (await get(client, "settings"))["items"]
    assert (row["value"], row["effective"]) == (None, 100)
    for wrong in ({"nonsense": 1}, {"queue_max_depth": "7"}, {"queue_max_depth": 7.5}, [1]):
        assert await patch(wrong) == 422, wrong


async def test_tokens_are_shown_once(client: Client) -> None:
    body = {"name": "ci", "role": "submitter", "secretContexts": ["deploy"], "expiresInSeconds": 60}
    response = await client.post(f"{ADMIN}/tokens", json=body, headers=OWNER)
    assert response.status == 201
    made = await response.json()
    assert made["details"]["expiresAt"] == "2025-06-15T15:07:40Z"
    assert (await client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {made['token']}"})).status == 200
    assert made["token"] not in str(await get(client, "tokens"))
    path = f"{ADMIN}/tokens/{made['details']['id']}"
    assert (await client.delete(path, headers=OWNER)).status == 204
    assert (await client.delete(path, headers=OWNER)).status == 404
    assert (await client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {made['token']}"})).status == 401


async def test_the_same_idempotency_key_makes_one_token(client: Client) -> None:
    async def create(body: object, *, token: str = "owner") -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "once"}
        response = await client.post(f"{ADMIN}/tokens", json=body, headers=headers)
        return response.status, await response.json()

    body = {"name": "ci", "role": "owner"}
    status, made = await create(body)
    assert (status, made) == (201, made) == await create(body)
    assert len((await get(client, "tokens"))["items"]) == 5
    assert (await create({**body, "name": "other"}))[0] == 422
    _, others = await create(body, token=made["token"])
    assert others["token"] != made["token"]
    assert (await create({"name": "ci"}, token=others["token"]))[0] == 422
    assert (await create(body, token=others["token"]))[0] == 201


async def test_agent_tokens_take_canonical_labels(client: Client, fake: FakeSurface) -> None:
    body = {"labels": ["Linux", "gpu"], "mandatoryLabels": ["GPU"]}
    response = await client.post(f"{ADMIN}/agent-tokens", json=body, headers=OWNER)
    made = await response.json()
    assert (response.status, made["details"]["labels"], made["details"]["mandatoryLabels"]) == (
        201,
        ["gpu", "linux"],
        ["gpu"],
    )
    assert made["token"] not in str(await get(client, "agent-tokens"))
    assert (await client.delete(f"{ADMIN}/agent-tokens/{made['details']['id']}", headers=OWNER)).status == 204


@pytest.mark.spec("T6.6")
async def test_listing_secrets_never_returns_values(client: Client) -> None:
    path = f"{ADMIN}/secrets/deploy/token"
    assert (await client.put(path, json={"value": "hunter2"}, headers=OWNER)).status == 204
    listed = await get(client, "secrets")
    assert [(row["context"], row["key"]) for row in listed["items"]] == [("deploy", "token")]
    assert "hunter2" not in str(listed)
    auditor = {"Authorization": "Bearer auditor"}
    assert (await client.get(f"{ADMIN}/secrets", headers=auditor)).status == 200
    assert (await client.post(f"{path}/reveal", headers=auditor)).status == 403
    assert (await (await client.post(f"{path}/reveal", headers=OWNER)).json())["value"] == "hunter2"
    assert (await get(client, "secrets?org=acme"))["items"] == []
    assert (await client.delete(path, headers=OWNER)).status == 204
    assert (await client.delete(path, headers=OWNER)).status == 404


async def test_a_token_for_some_contexts_only_sees_and_changes_no_others(client: Client, fake: FakeSurface) -> None:
    limited = replace(fake.tokens.api["owner"], name="limited", secret_contexts=frozenset({"deploy"}))
    fake.tokens.api["limited"] = limited
    as_limited = {"Authorization": "Bearer limited"}
    for context in ("deploy", "registry"):
        made = await client.put(f"{ADMIN}/secrets/{context}/token", json={"value": "hunter2"}, headers=OWNER)
        assert made.status == 204
    listed = await (await client.get(f"{ADMIN}/secrets", headers=as_limited)).json()
    assert [row["context"] for row in listed["items"]] == ["deploy"]
    for context, status in (("deploy", 200), ("registry", 403)):
        path = f"{ADMIN}/secrets/{context}/token"
        assert (await client.post(f"{path}/reveal", headers=as_limited)).status == status
    path = f"{ADMIN}/secrets/registry/token"
    denied = await client.put(path, json={"value": "other"}, headers=as_limited)
    assert (denied.status, (await denied.json())["detail"]) == (
        403,
        "limited may not use secrets of context 'registry'",
    )
    assert (await client.delete(path, headers=as_limited)).status == 403
    assert (await client.post(f"{ADMIN}/rotate-key", headers=as_limited)).status == 403
    assert (await (await client.post(f"{path}/reveal", headers=OWNER)).json())["value"] == "hunter2"


@pytest.mark.parametrize("path", ["a b/key", "deploy/k%2fey", "déploy/key"])
async def test_a_secret_has_a_plain_name(client: Client, path: str) -> None:
    response = await client.put(f"{ADMIN}/secrets/{path}", json={"value": "x"}, headers=OWNER)
    assert response.status in (404, 422)


async def test_the_access_log_is_read_newest_first(client: Client) -> None:
    for _ in range(3):
        await client.post(f"{ADMIN}/queue/clear", headers=OWNER)
    page = await get(client, "access-log?limit=2")
    assert [row["action"] for row in page["items"]] == ["queue.clear"] * 2
    assert page["nextCursor"] is not None


async def test_only_an_owner_changes_the_key_and_it_is_recorded(client: Client, fake: FakeSurface) -> None:
    await client.put(f"{ADMIN}/secrets/deploy/token", json={"value": "hunter2"}, headers=OWNER)
    fake.secrets.unreadable = ("acme/deploy:token",)
    assert (await client.post(f"{ADMIN}/rotate-key", headers={"Authorization": "Bearer admin"})).status == 403
    done = await (await client.post(f"{ADMIN}/rotate-key", headers=OWNER)).json()
    assert done == {"resealed": 1, "kept": 0, "unreadable": ["acme/deploy:token"]}
    recorded = [(record.actor, record.action, record.outcome) for record in fake.access_log.records]
    assert recorded[1:] == [("admin", "key.rotate", "denied"), ("owner", "key.rotate", "ok")]
