"""Every message of the worker link has a golden file: what this version writes, and must always be able to read.

A file is never edited after a release; a new field gets a new value in the example of the next version.
"""

import json
import typing
from pathlib import Path

import msgspec
import pytest

from kici.domain.ids import ScalerName
from kici.domain.verdict import AtCap, CapName, Dimension
from kici.wire.codec import encode
from kici.wire.messages import Message, Unsupported
from kici.wire.worker_codec import decode_from_worker, decode_order
from kici.wire.worker_messages import (
    AbortSpawn,
    Amounts,
    Answer,
    AskVms,
    Caps,
    Challenge,
    ClearBootData,
    ComputeGone,
    Declared,
    DestroyAgent,
    Fault,
    Gone,
    Held,
    Image,
    MarkRegistered,
    ReapAgent,
    RecoverAgents,
    Refused,
    ScalerOffer,
    SetOffer,
    SpawnAgent,
    SpawnProgress,
    SweepOrphans,
    TailAgent,
    Used,
    Welcome,
    Wish,
    WorkerBeat,
    WorkerHello,
    WorkerInventory,
    WorkerJoin,
    WorkerLeaving,
    WorkerLoad,
    WorkerMessage,
    WorkerOffer,
    WorkerOrder,
    WorkerProof,
)

GOLDEN = Path(__file__).parent / "golden"
AGENT = "scaler-container-0123abcd"
HELD = Held(
    agent_id=AGENT,
    scaler="docker",
    label_set=("linux", "docker"),
    ref="container 0123456789ab",
    spawned_at=1_750_000_000_000,
    state="running",
    owner="a-coordinator",
    registered=True,
)
DECLARED = Declared(requests=Wish(cpus=1.5, memory="2g"), limits=Wish(cpus=2.0, memory="4Gi"))
FROM_WORKER: list[Message] = [
    WorkerHello(worker_id="0123456789abcdef", name="build-7", nonce="a0", version="0.1.0", protocol_version=1),
    WorkerJoin(token="kici_join_v1.e30.00ff"),
    WorkerProof(proof="00ff"),
    WorkerOffer(
        scalers=(
            ScalerOffer(
                name="docker",
                backend_type="container",
                max_agents=4,
                cap=Caps(cpus=8.0, memory_bytes=2**34),
                spawns_at_once=2,
                roles=("builder",),
                reuse_idle_seconds=30.0,
                reuse_max_jobs=5,
                warm_size=2,
                warm_idle_seconds=300.0,
                sets=(
                    SetOffer(
                        label_set=("linux", "docker"),
                        offers=("docker", "kici:os:linux", "linux"),
                        agent_labels=("docker", "linux"),
                        gate=("gpu",),
                        taints=("windows",),
                        resources=DECLARED,
                        runs_job_image=True,
                    ),
                ),
            ),
        ),
        max_agents=10,
        cap=Caps(cpus=16.0, memory_bytes=2**35),
        defaults=DECLARED,
        is_draining=True,
    ),
    WorkerInventory(agents=(HELD,), gone=(Gone(agent_id=AGENT, how="exited with code 1"),)),
    WorkerLoad(scalers={"docker": Used(agents=2, cpus=3.0, memory_bytes=2**31)}),
    SpawnProgress(agent_id=AGENT, kind="scaler.provisioning", detail="pulling", at=1_750_000_000_000),
    ComputeGone(agent_id=AGENT, how="exited with code 1"),
    Answer(
        request_id="r1",
        fault=Fault(
            kind="no-capacity",
            text="all 4 agents are in use",
            after_seconds=1.0,
            cap=AtCap(
                cap=CapName.MAX_AGENTS,
                dimension=Dimension.AGENTS,
                used=4.0,
                requested=1.0,
                limit=4.0,
                scaler=ScalerName("docker"),
            ),
        ),
        agents=(HELD,),
        count=1,
        lines=("ready",),
        vms='{"results":[]}',
    ),
    WorkerLeaving(reason="stopped", keeps_agents=True),
    WorkerBeat(),
    Unsupported(what="a.newer.message"),
]
ORDERS: list[Message] = [
    Challenge(nonce="b1", instance_id="a-coordinator"),
    Welcome(instance_id="a-coordinator", proof="00ff", credential="cafe"),
    Refused(reason="Credential revoked", is_permanent=False),
    SpawnAgent(
        request_id="r1",
        scaler="docker",
        agent_id=AGENT,
        label_set=("linux", "docker"),
        labels=("docker", "linux"),
        gate=("gpu",),
        token="kat_0123",
        token_id="t-1",
        limits=Amounts(cpus=2.0, memory_bytes=2**31),
        requests=Amounts(cpus=1.0, memory_bytes=2**30),
        bound_job_id="job-1",
        run_id="run-1",
        image=Image(
            image="registry.example/ci:3", username="u", password="p", registry="registry.example", env={"A": "b"}
        ),
    ),
    AbortSpawn(request_id="r2", agent_id=AGENT),
    DestroyAgent(request_id="r3", agent_id=AGENT, reason="job-complete"),
    MarkRegistered(agent_id=AGENT),
    ClearBootData(request_id="r9", agent_id=AGENT),
    RecoverAgents(request_id="r4", scaler="docker", known=(AGENT,)),
    ReapAgent(request_id="r5", agent_id=AGENT),
    SweepOrphans(request_id="r6", scaler="docker", owned=(AGENT,)),
    TailAgent(request_id="r7", agent_id=AGENT, lines=50),
    AskVms(request_id="r8", payload='{"action":"list"}'),
    WorkerBeat(),
    Unsupported(what="an.older.message"),
]
CASES = [("worker", message) for message in FROM_WORKER] + [("order", message) for message in ORDERS]


def tag(kind: type[Message]) -> str:
    return str(kind.__struct_config__.tag)


def golden(side: str, message: Message) -> Path:
    return GOLDEN / f"{side}.{tag(type(message))}.json"


@pytest.mark.parametrize(
    ("side", "message"), CASES, ids=lambda value: value if isinstance(value, str) else tag(type(value))
)
def test_a_message_is_written_and_read_as_its_golden_file_says(side: str, message: Message) -> None:
    text = golden(side, message).read_bytes()
    decode = decode_from_worker if side == "worker" else decode_order
    assert decode(text) == message
    assert json.loads(encode(message)) == json.loads(text)


@pytest.mark.parametrize(
    ("side", "union", "examples"), [("worker", WorkerMessage, FROM_WORKER), ("order", WorkerOrder, ORDERS)]
)
def test_every_message_has_a_golden_file_and_every_file_a_message(
    side: str, union: typing.Any, examples: list[Message]
) -> None:
    kinds = typing.get_args(union)
    assert {type(example) for example in examples} == set(kinds)
    assert {path.name for path in GOLDEN.glob(f"{side}.*.json")} == {f"{side}.{tag(kind)}.json" for kind in kinds}


@pytest.mark.parametrize("message", FROM_WORKER + ORDERS, ids=lambda message: type(message).__name__)
def test_an_example_uses_every_field(message: Message) -> None:
    for field in msgspec.structs.fields(message):
        is_set = field.required or getattr(message, field.name) != field.default
        assert is_set or field.name in {"protocol_version", "role"}, field.name


@pytest.mark.parametrize("message", FROM_WORKER + ORDERS, ids=lambda message: type(message).__name__)
def test_no_secret_shows_in_a_log(message: Message) -> None:
    assert not any(secret in repr(message) for secret in ("kici_join", "kat_", "cafe", "password='p'", "proof='00ff'"))
