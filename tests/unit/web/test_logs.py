import base64
import json

import pytest
from aiohttp import ClientPayloadError, ClientResponse, web
from aiohttp.test_utils import TestClient

from kici.domain.errors import StoreDown
from kici.domain.ids import JobId
from kici.domain.job import JobStatus
from kici.domain.logs import Stream
from kici.testing.fake_surface import FakeSurface

Client = TestClient[web.Request, web.Application]
OWNER = {"Authorization": "Bearer owner"}
EVENTS = {**OWNER, "Accept": "text/event-stream"}
LOGS = "/api/v1/jobs/job-1/logs"
ID = JobId("job-1")


@pytest.fixture
def over(fake: FakeSurface) -> FakeSurface:
    """A job that is over, with some output."""
    fake.jobs.add(status=JobStatus.SUCCESS, exit_code=0)
    fake.logs.add(ID, Stream.STDOUT, b"out\n")
    fake.logs.add(ID, Stream.SYSTEM, b"agent made\n")
    fake.logs.add(ID, Stream.STDERR, b"err\xff\n")
    fake.logs.add(ID, Stream.STDOUT, b"more")
    return fake


def parsed(text: str) -> list[tuple[str, dict[str, object], int | None]]:
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            events.append((fields["event"], json.loads(fields["data"]), int(fields["id"]) if "id" in fields else None))
    return events


async def next_event(response: ClientResponse) -> tuple[str, dict[str, object], int | None]:
    return parsed((await response.content.readuntil(b"\n\n")).decode())[0]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", b"out\nerr\xff\nmore"),
        ("?stream=stdout", b"out\nmore"),
        ("?stream=stderr", b"err\xff\n"),
        ("?stream=system", b"agent made\n"),
        ("?after=3", b"more"),
        ("?follow=true", b"out\nerr\xff\nmore"),
    ],
)
async def test_text_is_byte_exact(client: Client, over: FakeSurface, query: str, expected: bytes) -> None:
    response = await client.get(LOGS + query, headers=OWNER)
    assert response.content_type == "text/plain"
    assert await response.read() == expected


async def test_events_keep_the_streams_apart_and_carry_ids(client: Client, over: FakeSurface) -> None:
    response = await client.get(LOGS, headers=EVENTS)
    assert response.content_type == "text/event-stream"
    events = parsed(await response.text())
    chunks = [event for event in events if event[2] is not None]
    assert chunks == [
        ("stdout", {"offset": 0, "text": "out\n"}, 1),
        ("system", {"offset": 0, "text": "agent made\n"}, 2),
        ("stderr", {"offset": 0, "base64": base64.b64encode(b"err\xff\n").decode()}, 3),
        ("stdout", {"offset": 4, "text": "more"}, 4),
    ]
    name, job, position = events[-1]
    assert (name, position) == ("end", None)
    assert (job["status"], job["exitCode"]) == ("success", 0)


async def test_events_resume_after_the_last_id(client: Client, over: FakeSurface) -> None:
    response = await client.get(LOGS, headers={**EVENTS, "Last-Event-ID": "3"})
    events = parsed(await response.text())
    assert [position for _, _, position in events if position is not None] == [4]


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 30, "٣"])
async def test_an_id_that_is_not_ours_is_refused(client: Client, over: FakeSurface, last: str) -> None:
    response = await client.get(LOGS, headers={**EVENTS, "Last-Event-ID": last})
    assert response.status == 400


async def test_a_follower_sees_output_and_moves_as_they_come(client: Client, fake: FakeSurface) -> None:
    fake.jobs.add()
    response = await client.get(LOGS, headers=EVENTS)
    name, job, _ = await next_event(response)
    assert (name, job["status"]) == ("status", "queued")
    fake.jobs.change(ID, status=JobStatus.RUNNING, agent_id="agent-1")
    name, job, _ = await next_event(response)
    assert (name, job["status"]) == ("status", "running")
    fake.logs.add(ID, Stream.STDOUT, b"line\n")
    assert await next_event(response) == ("stdout", {"offset": 0, "text": "line\n"}, 1)
    fake.jobs.change(ID, status=JobStatus.FAILED, exit_code=2)
    rest = parsed((await response.content.read()).decode())
    assert rest[-1][0] == "end"
    assert rest[-1][1]["exitCode"] == 2


async def test_a_page_of_json_gives_what_comes_next(client: Client, over: FakeSurface) -> None:
    headers = {**OWNER, "Accept": "application/json"}
    items, after, step = [], 0, -1
    while after != step:
        step = after
        page = await (await client.get(f"{LOGS}?after={after}", headers=headers)).json()
        items += [(item["stream"], item.get("text") or item["base64"]) for item in page["items"]]
        after = page["next"]
    assert [stream for stream, _ in items] == ["stdout", "system", "stderr", "stdout"]


async def test_a_log_of_no_job_is_404(client: Client) -> None:
    assert (await client.get(LOGS, headers=EVENTS)).status == 404


async def test_an_outage_cuts_the_stream_instead_of_ending_it(client: Client, over: FakeSurface) -> None:
    over.logs.failure = StoreDown("gone")
    for headers, query in ((OWNER, "?follow=true"), (EVENTS, "")):
        response = await client.get(LOGS + query, headers=headers)
        with pytest.raises(ClientPayloadError):
            await response.read()


async def test_a_shutdown_does_not_wait_for_followers(client: Client, fake: FakeSurface) -> None:
    fake.jobs.add()
    response = await client.get(LOGS, headers=EVENTS)
    await next_event(response)
    app = client.app
    assert app is not None
    await app.shutdown()
    with pytest.raises(ClientPayloadError):
        await response.content.read()
