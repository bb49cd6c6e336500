"""What every route does with requests that it cannot serve."""

import io
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from yarl import URL

from kici.domain.errors import Conflict, Misconfigured, NoCapacity, NotFound, Permanent, Retryable, StoreDown
from kici.testing.fake_surface import FakeSurface

Client = TestClient[web.Request, web.Application]
OWNER = {"Authorization": "Bearer owner"}
JOB = {"command": ["true"]}


async def test_errors_are_problem_documents(client: Client) -> None:
    response = await client.get("/api/v1/jobs/none", headers=OWNER)
    assert response.status == 404
    assert response.content_type == "application/problem+json"
    problem = await response.json()
    assert problem["status"] == 404
    assert problem["title"] == "Not Found"
    assert problem["instance"] == "/api/v1/jobs/none"
    assert "none" in problem["detail"]


async def test_an_unknown_path_is_a_problem_too(client: Client) -> None:
    response = await client.get("/api/v1/nothing")
    assert (response.status, response.content_type) == (404, "application/problem+json")


async def test_a_wrong_method_names_the_right_ones(client: Client) -> None:
    response = await client.delete("/api/v1/jobs", headers=OWNER)
    assert response.status == 405
    assert {"GET", "POST"} <= set(response.headers["Allow"].split(","))


@pytest.mark.parametrize("path", ["/api/v1/jobs/%00", "/api/v1/jobs/" + "x" * 201, "/api/v1/jobs/%0a"])
async def test_a_path_that_can_name_nothing_is_404(client: Client, path: str) -> None:
    response = await client.get(URL(path, encoded=True), headers=OWNER)
    assert response.status == 404


@pytest.mark.parametrize("body", [b"", b"{", b"[1,]", b"\xff", b'{"a":NaN}', b"[" * 100_000, b'"\\ud800"'])
async def test_a_body_that_is_not_json_is_400(client: Client, body: bytes) -> None:
    headers = {**OWNER, "Content-Type": "application/json"}
    response = await client.post("/api/v1/jobs", data=body, headers=headers)
    assert response.status == 400
    assert "JSON" in (await response.json())["detail"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml"])
async def test_a_body_of_another_type_is_415(client: Client, kind: str) -> None:
    response = await client.post("/api/v1/jobs", data=json.dumps(JOB), headers={**OWNER, "Content-Type": kind})
    assert response.status == 415


async def test_a_body_over_the_limit_is_413_whatever_it_claims_to_be_long(client: Client) -> None:
    async def long() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * 65536

    headers = {**OWNER, "Content-Type": "application/json"}
    response = await client.post("/api/v1/jobs", data=long(), headers=headers)
    assert response.status == 413
    response = await client.post("/api/v1/jobs", data=io.BytesIO(b" " * (1024 * 1024 + 1)), headers=headers)
    assert response.status == 413


async def test_a_faulty_document_is_422_with_every_fault(client: Client) -> None:
    body = {"command": [], "runson": ["linux"], "env": {"A": 1}}
    response = await client.post("/api/v1/jobs", json=body, headers=OWNER)
    assert response.status == 422
    faults = {each["path"]: each["detail"] for each in (await response.json())["errors"]}
    assert set(faults) == {"$.command", "$.runson", "$.env.A"}
    assert "runsOn" in faults["$.runson"]


async def test_a_key_that_is_given_twice_is_refused(client: Client) -> None:
    body = b'{"command": ["true"], "command": ["false"]}'
    response = await client.post("/api/v1/jobs", data=body, headers={**OWNER, "Content-Type": "application/json"})
    assert response.status == 422
    assert "twice" in (await response.json())["detail"]


@pytest.mark.parametrize(
    ("query", "path"),
    [("stauts=queued", "?stauts"), ("status=busy", "?status"), ("limit=0", "?limit"), ("limit=1&limit=2", "?limit")],
)
async def test_a_query_that_is_not_understood_is_400(client: Client, query: str, path: str) -> None:
    response = await client.get(f"/api/v1/jobs?{query}", headers=OWNER)
    assert response.status == 400
    assert [each["path"] for each in (await response.json())["errors"]] == [path]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound("x"), 404),
        (Conflict("x"), 409),
        (NoCapacity("the queue is full"), 429),
        (Misconfigured("x"), 422),
        (Permanent("x"), 422),
        (StoreDown("x"), 503),
        (Retryable("x", after_seconds=7), 503),
    ],
)
async def test_each_error_has_its_status(client: Client, fake: FakeSurface, error: Exception, status: int) -> None:
    fake.jobs.refusal = error
    response = await client.post("/api/v1/jobs", json=JOB, headers=OWNER)
    assert response.status == status
    assert (await response.json())["detail"] == str(error)
    assert ("Retry-After" in response.headers) == (status in (429, 503))


async def test_what_nobody_foresaw_is_500_without_details(
    client: Client, fake: FakeSurface, caplog: pytest.LogCaptureFixture
) -> None:
    fake.jobs.refusal = RuntimeError("password is hunter2")
    response = await client.post("/api/v1/jobs", json=JOB, headers=OWNER)
    assert response.status == 500
    assert "hunter2" not in await response.text()
    assert "hunter2" in caplog.text


async def test_answers_carry_security_headers(client: Client) -> None:
    for path in ("/health", "/", "/api/v1/jobs", "/nothing"):
        response = await client.get(path, headers=OWNER)
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
