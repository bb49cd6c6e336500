import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from kici.domain.ids import JobId
from kici.domain.job import JobStatus
from kici.testing.fake_surface import START, FakeSurface

Client = TestClient[web.Request, web.Application]
OWNER = {"Authorization": "Bearer owner"}
JOB = {"name": "hello", "command": ["echo", "hi"], "runsOn": ["Linux"]}


async def test_a_submitted_job_is_answered_whole(client: Client) -> None:
    response = await client.post("/api/v1/jobs", json=JOB, headers=OWNER)
    assert response.status == 201
    job = await response.json()
    assert response.headers["Location"] == job["links"]["self"] == "/api/v1/jobs/job-1"
    assert {key: job[key] for key in ("id", "runId", "name", "status", "runsOn")} == {
        "id": "job-1",
        "runId": "run-1",
        "name": "hello",
        "status": "queued",
        "runsOn": ["linux"],
    }
    for key in ("exitCode", "startedAt", "finishedAt", "agentId", "scaler", "reason"):
        assert job[key] is None
    assert "No scaler" in job["verdict"]
    assert job["createdAt"] == "2025-06-15T15:06:40Z"
    assert (await client.get(job["links"]["self"], headers=OWNER)).status == 200


async def test_the_same_idempotency_key_makes_one_job(client: Client, fake: FakeSurface) -> None:
    headers = {**OWNER, "Idempotency-Key": "once"}
    first = await client.post("/api/v1/jobs", json=JOB, headers=headers)
    second = await client.post("/api/v1/jobs", json=JOB, headers=headers)
    assert (first.status, second.status) == (201, 200)
    assert (await first.json())["id"] == (await second.json())["id"]
    assert len(fake.jobs.requests) == 1


@pytest.mark.parametrize("key", ["", "x" * 201])
async def test_an_idempotency_key_has_a_length(client: Client, key: str) -> None:
    response = await client.post("/api/v1/jobs", json=JOB, headers={**OWNER, "Idempotency-Key": key})
    assert response.status == 400


async def test_secrets_of_foreign_contexts_are_denied(client: Client) -> None:
    body = {**JOB, "secrets": {"TOKEN": "deploy:token"}}
    response = await client.post("/api/v1/jobs", json=body, headers={"Authorization": "Bearer submitter"})
    assert response.status == 403
    assert (await client.post("/api/v1/jobs", json=body, headers=OWNER)).status == 201


async def test_a_dispatched_job_shows_as_queued(client: Client, fake: FakeSurface) -> None:
    fake.jobs.add(status=JobStatus.DISPATCHED, agent_id="agent-1")
    job = await (await client.get("/api/v1/jobs/job-1", headers=OWNER)).json()
    assert job["status"] == "queued"
    assert "agent-1" in job["verdict"]


async def test_the_listing_of_queued_jobs_has_the_dispatched_ones_too(client: Client, fake: FakeSurface) -> None:
    for status in (JobStatus.QUEUED, JobStatus.DISPATCHED, JobStatus.RUNNING, JobStatus.QUEUED):
        fake.jobs.add(status=status, agent_id="agent-1")
    page = await (await client.get("/api/v1/jobs?status=queued&limit=2", headers=OWNER)).json()
    assert [job["id"] for job in page["items"]] == ["job-4", "job-2"]
    rest = await (await client.get(f"/api/v1/jobs?status=queued&cursor={page['nextCursor']}", headers=OWNER)).json()
    assert [job["id"] for job in rest["items"]] == ["job-1"]
    assert rest["nextCursor"] is None


async def test_pages_cover_everything_once(client: Client, fake: FakeSurface) -> None:
    for _ in range(7):
        fake.jobs.add()
    seen: list[str] = []
    cursor = ""
    while cursor is not None:
        query = f"?limit=3{f'&cursor={cursor}' if cursor else ''}"
        page = await (await client.get(f"/api/v1/jobs{query}", headers=OWNER)).json()
        seen += [job["id"] for job in page["items"]]
        cursor = page["nextCursor"]
    assert seen == [f"job-{number}" for number in range(7, 0, -1)]


async def test_a_long_poll_answers_at_the_end(client: Client, fake: FakeSurface) -> None:
    fake.jobs.add()
    async with asyncio.TaskGroup() as group:
        poll = group.create_task(client.get("/api/v1/jobs/job-1?waitSeconds=30", headers=OWNER))
        await client.get("/health")
        fake.jobs.change(JobId("job-1"), status=JobStatus.RUNNING, started_at=START)
        await client.get("/health")
        fake.jobs.change(JobId("job-1"), status=JobStatus.SUCCESS, started_at=START, finished_at=START, exit_code=0)
    job = await poll.result().json()
    assert (job["status"], job["exitCode"]) == ("success", 0)


async def test_a_long_poll_ends_in_time_when_nothing_happens(client: Client, fake: FakeSurface) -> None:
    fake.jobs.add()
    job = await (await client.get("/api/v1/jobs/job-1?waitSeconds=0.05", headers=OWNER)).json()
    assert job["status"] == "queued"


async def test_cancel_needs_no_body_and_takes_force_and_reason(client: Client, fake: FakeSurface) -> None:
    fake.jobs.add()
    fake.jobs.add()
    first = await client.post("/api/v1/jobs/job-1/cancel", headers=OWNER)
    body = {"force": True, "reason": "wrong branch"}
    second = await client.post("/api/v1/jobs/job-2/cancel", json=body, headers=OWNER)
    assert (first.status, second.status) == (202, 202)
    assert fake.jobs.forced == [False, True]
    assert (await first.json())["reason"] == "cancelled by owner"
    assert (await second.json())["reason"] == "wrong branch"


async def test_a_job_that_is_over_cannot_be_cancelled(client: Client, fake: FakeSurface) -> None:
    fake.jobs.add(status=JobStatus.SUCCESS)
    response = await client.post("/api/v1/jobs/job-1/cancel", headers=OWNER)
    assert response.status == 409


async def test_explain_gives_sentences_with_their_instance(client: Client, fake: FakeSurface) -> None:
    fake.jobs.add()
    found = await (await client.get("/api/v1/jobs/job-1/explain", headers=OWNER)).json()
    assert found["status"] == "queued"
    assert found["why"][0]["kind"] == "no-scaler-matches"
    assert found["why"][0]["instance"] == "instance-1"
    assert found["verdict"] == found["why"][0]["sentence"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"status": JobStatus.FAILED, "exit_code": 3}, "exit code 3"),
        ({"status": JobStatus.FAILED, "signal": 9}, "signal 9"),
        ({"status": JobStatus.TIMED_OUT, "reason": "ran longer than 5 s"}, "ran longer than 5 s"),
        ({"status": JobStatus.RUNNING, "agent_id": "agent-7"}, "agent-7"),
        ({"status": JobStatus.RECOVERING, "agent_id": "agent-7"}, "lost"),
        ({"status": JobStatus.PENDING, "needs": (JobId("job-9"),)}, "job-9"),
    ],
)
async def test_every_status_has_its_sentence(
    client: Client, fake: FakeSurface, fields: dict[str, object], words: str
) -> None:
    fake.jobs.add(**fields)
    job = await (await client.get("/api/v1/jobs/job-1", headers=OWNER)).json()
    assert words in job["verdict"]


async def test_a_run_file_becomes_a_run(client: Client, fake: FakeSurface) -> None:
    body = {"name": "build", "jobs": {"compile": {"run": "make"}, "test": {"run": "make test", "needs": ["compile"]}}}
    response = await client.post("/api/v1/runs", json=body, headers=OWNER)
    assert response.status == 201
    run = await response.json()
    assert [(job["name"], job["status"]) for job in run["jobs"]] == [("compile", "queued"), ("test", "pending")]
    shown = await (await client.get(run["links"]["self"], headers=OWNER)).json()
    assert [job["name"] for job in shown["jobs"]] == ["compile", "test"]
    listed = await (await client.get("/api/v1/runs", headers=OWNER)).json()
    assert [(each["id"], each["jobs"]) for each in listed["items"]] == [("run-1", None)]
    assert (await client.post("/api/v1/runs/run-1/cancel", headers=OWNER)).status == 202
    assert (await client.post("/api/v1/runs/run-1/cancel", headers=OWNER)).status == 409
    assert {job.status for job in fake.jobs.rows.values()} == {JobStatus.CANCELLED}


async def test_runs_page_by_cursor(client: Client) -> None:
    for _ in range(3):
        await client.post("/api/v1/jobs", json=JOB, headers=OWNER)
    page = await (await client.get("/api/v1/runs?limit=2", headers=OWNER)).json()
    rest = await (await client.get(f"/api/v1/runs?limit=2&cursor={page['nextCursor']}", headers=OWNER)).json()
    assert [run["id"] for run in page["items"] + rest["items"]] == ["run-3", "run-2", "run-1"]
    assert rest["nextCursor"] is None
