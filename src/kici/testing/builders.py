"""Valid objects for tests: everything has a sensible value, and a test states only what it is about."""

from dataclasses import replace
from typing import Any, Final

from kici.domain.access import ApiToken, Role
from kici.domain.agent import AgentFacts, AgentKind, AgentSession, AgentToken
from kici.domain.ids import (
    DEFAULT_ORG,
    AgentId,
    ClassId,
    ConnectionId,
    InstanceId,
    Instant,
    JobId,
    RunId,
    ScalerName,
    TokenId,
)
from kici.domain.instance import Instance
from kici.domain.job import Demand, Job, JobSpec, JobStatus, NewJob, NewRun
from kici.domain.resources import Amount, Ask, ResourceRequest, Shape
from kici.domain.spawn import Reservation, Spawn, SpawnState
from kici.testing.sim_clock import SIM_START

HERE: Final = InstanceId("instance-a")
AGENT: Final = AgentId("scaler-bare-metal-0123abcd")
SCALER: Final = ScalerName("local")


def a_demand(*labels: str, cpus: float | None = None, memory: str | None = None, **fields: Any) -> Demand:
    """What a job asks for; `cpus` and `memory` are requests."""
    resources = ResourceRequest(requests=Ask(cpus=cpus, memory=memory))
    return Demand(labels=frozenset(labels), resources=resources, **fields)


def a_spec(*command: str, **fields: Any) -> JobSpec:
    return JobSpec(command=command or ("true",), **fields)


def a_new_run(**fields: Any) -> NewRun:
    return replace(NewRun(id=RunId("run-1"), name="build", org=DEFAULT_ORG, submitted_by="tester"), **fields)


def a_new_job(id: str = "job-1", *labels: str, **fields: Any) -> NewJob:
    return replace(NewJob(id=JobId(id), name=id, demand=a_demand(*labels), spec=a_spec()), **fields)


def a_job(**fields: Any) -> Job:
    """Queued, unless told otherwise; set what the status implies yourself."""
    job = Job(
        seq=1,
        id=JobId("job-1"),
        run_id=RunId("run-1"),
        name="test",
        org=DEFAULT_ORG,
        status=JobStatus.QUEUED,
        class_id=ClassId(1),
        spec=a_spec(),
        demand=a_demand("linux"),
        needs=(),
        created_at=SIM_START,
        queued_at=SIM_START,
        expires_at=None,
        agent_id=None,
        owner_instance_id=None,
        dispatched_at=None,
        ack_deadline=None,
        attempts=0,
        recovery_deadline=None,
        started_at=None,
        finished_at=None,
        exit_code=None,
        signal=None,
        reason=None,
        scaler=None,
        cancel_requested_at=None,
        last_provisioning_error=None,
        unroutable_since=None,
        offers=0,
    )
    return replace(job, **fields)


def a_running_job(agent_id: AgentId = AGENT, **fields: Any) -> Job:
    held = {
        "status": JobStatus.RUNNING,
        "agent_id": agent_id,
        "owner_instance_id": HERE,
        "dispatched_at": SIM_START,
        "started_at": SIM_START,
        "attempts": 1,
        "offers": 1,
    }
    return a_job(**{**held, **fields})


def a_shape(cpus: float = 0.0, memory_bytes: int = 0) -> Shape:
    """Requests and limits alike."""
    amount = Amount(cpus=cpus, memory_bytes=memory_bytes)
    return Shape(requests=amount, limits=amount)


def a_spawn(**fields: Any) -> Spawn:
    """A booting warm spawn of a local scaler."""
    spawn = Spawn(
        agent_id=AGENT,
        scaler=SCALER,
        backend_type="bare-metal",
        state=SpawnState.BOOTING,
        label_set=("linux", "x64"),
        labels=("linux", "x64", "kici:agent:bare-metal", "kici:scaler:local"),
        gate=frozenset(),
        shape=a_shape(),
        machine_pool=None,
        provisioning_targets=(),
        roles=None,
        token_id=None,
        owner_instance_id=HERE,
        spawned_at=SIM_START,
    )
    return replace(spawn, **fields)


def a_reservation(spawn: Spawn | None = None, **fields: Any) -> Reservation:
    """That of a spawn."""
    spawn = spawn or a_spawn()
    reservation = Reservation(
        agent_id=spawn.agent_id,
        scaler=spawn.scaler,
        shape=spawn.shape,
        machine_pool=spawn.machine_pool,
        owner_instance_id=spawn.owner_instance_id,
        reserved_at=spawn.spawned_at,
    )
    return replace(reservation, **fields)


def a_session(**fields: Any) -> AgentSession:
    """A static agent, connected here."""
    session = AgentSession(
        agent_id=AgentId("agent-1"),
        instance_id=HERE,
        connection_id=ConnectionId("connection-1"),
        labels=frozenset({"linux", "x64"}),
        gate=frozenset(),
        token_id=None,
        scaler=None,
        backend_type=None,
        facts=AgentFacts(),
        registered_at=SIM_START,
    )
    return replace(session, **fields)


def an_agent_token(**fields: Any) -> AgentToken:
    """An ephemeral token of `AGENT`, valid for an hour."""
    token = AgentToken(
        id=TokenId("token-1"),
        hash="0" * 64,
        prefix="kat_00000000",
        kind=AgentKind.EPHEMERAL,
        labels=None,
        gate=frozenset(),
        agent_id=AGENT,
        created_at=SIM_START,
        expires_at=Instant(SIM_START + 3_600_000),
    )
    return replace(token, **fields)


def an_api_token(**fields: Any) -> ApiToken:
    token = ApiToken(
        id=TokenId("api-token-1"),
        hash="1" * 64,
        prefix="kici_1111111",
        name="test",
        role=Role.ADMIN,
        secret_contexts=None,
        created_at=SIM_START,
        expires_at=None,
    )
    return replace(token, **fields)


def an_instance(**fields: Any) -> Instance:
    instance = Instance(
        id=HERE,
        role="coordinator",
        version="0.1.0",
        address="http://127.0.0.1:4000",
        started_at=SIM_START,
        last_beat_at=SIM_START,
    )
    return replace(instance, **fields)
