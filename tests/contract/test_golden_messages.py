"""Every message of the agent protocol has a golden file: what this version writes, and must always be able to read.

A file is never edited after a release; a new field gets a new value in the example of the next version.
"""

import json
import typing
from pathlib import Path

import msgspec
import pytest

from kici.wire.codec import decode_from_agent, decode_from_coordinator, encode
from kici.wire.messages import (
    AgentExit,
    AgentLeaving,
    AgentMessage,
    AgentMetrics,
    AgentRegister,
    AgentStatus,
    AuthFailure,
    AuthRequest,
    AuthSuccess,
    ClaimCredentials,
    ClaimCredentialsResponse,
    ConfigAck,
    CoordinatorMessage,
    CoordinatorsChanged,
    Credentials,
    ErrorMessage,
    Heartbeat,
    JobAck,
    JobCancel,
    JobContainer,
    JobDispatch,
    JobRef,
    JobReject,
    JobStart,
    JobStatusAck,
    JobStatusReport,
    JobVerdict,
    LogAck,
    LogChunkMessage,
    Message,
    RegisterAck,
    Reuse,
    Unsupported,
)

GOLDEN = Path(__file__).parent / "golden"

FROM_AGENT: list[Message] = [
    AuthRequest(token="kat_0123", protocol_version=1),
    AgentRegister(
        agent_id="scaler-bare-metal-0123abcd",
        labels=["linux", "kici:os:linux"],
        platform="linux",
        arch="x64",
        version="0.1.0",
        max_concurrency=1,
        in_flight_jobs=[JobRef(job_id="job-1", run_id="run-1", phase="running")],
        hostname="build-7",
        cpu_count=8,
        total_memory_mb=16000,
        running_as_user="ci",
        running_as_uid=1000,
        scaler_managed=True,
        incarnation="4711.250000",
        connection_number=2,
    ),
    ConfigAck(),
    Heartbeat(active_jobs=1),
    AgentStatus(active_jobs=1, draining=True),
    AgentMetrics(
        active_jobs=1,
        backpressure=True,
        jobs={"success": 2},
        steps=2,
        step_seconds=[0.5, 12.0],
        log_bytes=4096,
        dropped_lines=3,
        backpressure_events=1,
    ),
    JobAck(job_id="job-1"),
    JobReject(job_id="job-1", reason="busy"),
    JobStatusReport(
        job_id="job-1",
        state="failed",
        exit_code=3,
        signal=None,
        reason="a sentence",
        stdout_bytes=12,
        stderr_bytes=5,
    ),
    LogChunkMessage(job_id="job-1", stream=1, offset=4096, data=b"\x00\xffhello\n"),
    AgentLeaving(reason="done"),
    ClaimCredentials(request_id="claim", claim_code="kcl_0123"),
    Unsupported(what="a.newer.message"),
]
FROM_COORDINATOR: list[Message] = [
    AuthSuccess(connection_id="conn-1"),
    AuthFailure(reason="the token is revoked"),
    RegisterAck(
        agent_id="scaler-bare-metal-0123abcd",
        labels=["linux"],
        scaler_managed=True,
        pending_dispatch=True,
        warm_pool=True,
        reuse=Reuse(idle_seconds=30.0, max_jobs=5),
        jobs=[JobVerdict(job_id="job-1", action="resume", stdout_offset=12, stderr_offset=5)],
        coordinators=["wss://a.example/ws", "wss://b.example/ws"],
        heartbeat_ms=15_000,
        reconnect_max_ms=20_000,
    ),
    CoordinatorsChanged(coordinators=["wss://a.example/ws", "wss://c.example/ws"]),
    JobDispatch(job_id="job-1", run_id="run-1", name="test"),
    JobStart(
        job_id="job-1",
        run_id="run-1",
        name="test",
        command=["/bin/sh", "-e", "-c", "make test"],
        env={"CI": "true"},
        secrets={"TOKEN": "hush"},
        timeout_ms=1_800_000,
        max_log_bytes=1_000_000,
        container=JobContainer(
            image="ghcr.io/example/tool:1",
            dockerfile="ci/Dockerfile",
            context={"ci/Dockerfile": "FROM scratch\n"},
            target="test",
            args={"VERSION": "1"},
            username="me",
            password="hush",
            registry="ghcr.io",
            cpus=0.5,
            memory_bytes=536_870_912,
        ),
    ),
    JobCancel(job_id="job-1", reason="cancelled by a person", grace_ms=5000, force=True),
    JobStatusAck(job_id="job-1"),
    LogAck(job_id="job-1", stream=2, offset=5),
    ClaimCredentialsResponse(
        request_id="claim",
        credentials=Credentials(
            agent_token="kat_0123",
            agent_id="scaler-event-0123abcd",
            orchestrator_url="wss://a.example/ws",
            labels=["gpu"],
        ),
        error="exclusive with credentials",
        retryable=True,
    ),
    AgentExit(reason="scaled down"),
    ErrorMessage(code="NOT_OWNED", message="not owned by this agent"),
    Unsupported(what="an.older.message"),
]
CASES = [("agent", message) for message in FROM_AGENT] + [("coordinator", message) for message in FROM_COORDINATOR]


def tag(kind: type[Message]) -> str:
    return str(kind.__struct_config__.tag)


def golden(side: str, message: Message) -> Path:
    return GOLDEN / f"{side}.{tag(type(message))}.json"


@pytest.mark.parametrize(
    ("side", "message"), CASES, ids=lambda value: value if isinstance(value, str) else tag(type(value))
)
def test_a_message_is_written_and_read_as_its_golden_file_says(side: str, message: Message) -> None:
    text = golden(side, message).read_bytes()
    decode = decode_from_agent if side == "agent" else decode_from_coordinator
    assert decode(text) == message
    assert json.loads(encode(message)) == json.loads(text)


@pytest.mark.parametrize(
    ("side", "union", "examples"),
    [("agent", AgentMessage, FROM_AGENT), ("coordinator", CoordinatorMessage, FROM_COORDINATOR)],
)
def test_every_message_has_a_golden_file_and_every_file_a_message(
    side: str, union: typing.Any, examples: list[Message]
) -> None:
    kinds = typing.get_args(union)
    assert {type(example) for example in examples} == set(kinds)
    assert {path.name for path in GOLDEN.glob(f"{side}.*.json")} == {f"{side}.{tag(kind)}.json" for kind in kinds}


@pytest.mark.parametrize("message", FROM_AGENT + FROM_COORDINATOR, ids=lambda message: type(message).__name__)
def test_an_example_uses_every_field(message: Message) -> None:
    for field in msgspec.structs.fields(message):
        if field.name != "signal":  # a step ends by an exit code or by a signal
            assert field.required or getattr(message, field.name) != field.default or field.name in UNCHANGED
            assert getattr(message, field.name) != [], field.name


UNCHANGED = {"protocol_version", "platform", "arch", "max_concurrency"}
"""Fields whose default is the only sensible example."""
