"""What the HTTP API stands on: one protocol for each group of services, and the rows that they answer with.

The API holds no rule of its own beyond reading requests and writing answers.  Errors are those of
`domain.errors`, and the border turns them into problem documents: `NotFound` 404, `Conflict` 409, `Denied` 403,
`NoCapacity` 429, `Faulty` and `Misconfigured` 422, `StoreDown` and `Retryable` 503.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kici.decide.classify import StopResult
from kici.decide.forget import Forgotten
from kici.domain.access import AccessRecord, Actor, ApiToken, Role
from kici.domain.agent import AgentFacts, AgentToken
from kici.domain.document import SubmitRun
from kici.domain.event import EventId, Payload, StoredEvent
from kici.domain.ids import AgentId, InstanceId, Instant, JobId, OrgId, RunId, TokenId
from kici.domain.instance import Instance
from kici.domain.job import Job, JobStatus, Run
from kici.domain.knobs import SettingRow
from kici.domain.logs import LogChunk
from kici.domain.paging import Mark
from kici.domain.secret import Rotation, SecretRef, SecretRow
from kici.domain.spawn import Spawn
from kici.domain.verdict import Verdict
from kici.domain.worker import JoinToken, Worker
from kici.domain.workflow import Registration
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.event_store import EventFilter
from kici.ports.live_vms import Listing
from kici.ports.store import JobFilter, Submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one instance makes of a job."""

    instance_id: InstanceId | None
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    job: Job
    findings: tuple[Finding, ...]
    """Nearest to running first; empty for a job that is over."""


class JobService(Protocol):
    async def submit(self, request: SubmitRun, actor: Actor, idempotency_key: str | None) -> Submitted:
        """Insert a run and its jobs, in the order of the request.

        `NoCapacity` when the queue is full, `Denied` for secret contexts that the actor may not use,
        `Misconfigured` for what only the installation can judge.
        """
        ...

    async def job(self, job_id: JobId) -> Job | None: ...

    async def run(self, run_id: RunId) -> Run | None: ...

    async def jobs(self, which: JobFilter) -> list[Job]: ...

    async def runs(self, *, before: Mark | None, limit: int) -> list[Run]: ...

    async def cancel_job(self, job_id: JobId, *, force: bool, reason: str) -> Job:
        """The job as it is now.  `NotFound`; `Conflict` when it is over already."""
        ...

    async def cancel_run(self, run_id: RunId, *, force: bool, reason: str) -> Run:
        """The run as it is now.  `NotFound`; `Conflict` when it is over already."""
        ...

    async def explain(self, job_id: JobId) -> Explanation:
        """`NotFound`."""
        ...

    async def verdicts(self, jobs: Sequence[Job]) -> Mapping[JobId, Verdict]:
        """The nearest stored verdict of each waiting job among these that has one.  Cheap: for listings."""
        ...

    async def wait(self, job_id: JobId, seconds: float, *, unlike: JobStatus) -> Job | None:
        """The job once its status differs from `unlike`, or as it is after `seconds`; None when there is none."""
        ...


class LogService(Protocol):
    async def read(self, job_id: JobId, *, after: int, bytes_max: int) -> list[LogChunk]: ...

    def follow(self, job_id: JobId, *, after: int) -> AsyncGenerator[LogChunk, None]:
        """All chunks after a position, as they arrive; ends when the job is over and everything was given.

        `NoCapacity` when too many follow already.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRow:
    agent_id: AgentId
    state: str
    """`booting`, `idle`, `busy`, `draining`, `away` (registered, not connected now) or `ending`."""
    instance_id: InstanceId
    labels: frozenset[str]
    gate: frozenset[str] = frozenset()
    scaler: str | None = None
    backend_type: str | None = None
    warm: bool = False
    job_ids: tuple[JobId, ...] = ()
    since: Instant | None = None
    """When it registered, or its spawn began."""
    facts: AgentFacts = field(default_factory=AgentFacts)


class Agents(Protocol):
    async def agents(self) -> list[AgentRow]:
        """Connected agents and those that are being made, of all instances."""
        ...

    async def agent(self, agent_id: AgentId) -> AgentRow | None: ...

    async def drain(self, agent_id: AgentId) -> AgentRow:
        """Let it finish its job and leave.  `NotFound`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """What everybody on a host holds of a machine pool."""

    name: str
    cpus_used: float
    cpus_max: float | None
    """The smallest of what the coordinators of the host allow.  None: no limit."""
    memory_bytes_used: int
    memory_bytes_max: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerRow:
    name: str
    type: str
    instance_id: InstanceId
    """Whose host it is on: a coordinator's or a worker's."""
    state: str
    """`ready`, `backoff`, `draining` or `retiring`."""
    label_sets: tuple[tuple[str, ...], ...]
    max_agents: int | None
    active: int
    """Computes in any state."""
    booting: int = 0
    warm_ready: int = 0
    warm_target: int = 0
    cpus_used: float = 0.0
    memory_bytes_used: int = 0
    machine_pool: PoolUse | None = None
    backoff_until: Instant | None = None
    last_error: str | None = None


class CheckStatus(StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row of a diagnosis."""

    name: str
    status: CheckStatus
    message: str
    duration_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadOutcome:
    instance_id: InstanceId
    outcome: str
    """`applied`, `unchanged`, `rejected`, or `unanswered` by another coordinator."""
    added: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()
    resurrected: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class Scalers(Protocol):
    async def status(self) -> list[ScalerRow]: ...

    async def diagnose(self, scaler: str | None) -> list[Check]:
        """`NotFound` for a scaler that does not exist."""
        ...

    async def reload(self) -> list[ReloadOutcome]: ...


class Queue(Protocol):
    async def queue(self, limit: int) -> list[Job]:
        """Waiting jobs, first in line first."""
        ...

    async def depth(self) -> int: ...

    async def show(self, job_id: JobId) -> Job:
        """`NotFound` unless it waits."""
        ...

    async def clear(self, *, reason: str) -> int:
        """Cancel everything that waits.  How many."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainState:
    draining: bool
    jobs_running: int


class Coordinator(Protocol):
    async def drain_state(self) -> DrainState: ...

    async def set_draining(self, draining: bool) -> DrainState: ...  # noqa: FBT001  # a setter of one flag

    def stop(self, *, keep_agents: bool) -> None:
        """Begin an ordered shutdown and return at once."""
        ...

    async def instances(self) -> list[Instance]: ...

    async def forget_peer(self, peer: str, *, is_acknowledged: bool) -> Forgotten:
        """Let go of a coordinator or worker that will never come back; what came of it."""
        ...

    async def leader(self) -> InstanceId | None:
        """Who leads by the store's clock."""
        ...

    async def not_ready(self) -> str | None:
        """Why it cannot serve yet or now; None: it can."""
        ...


class Tokens(Protocol):
    async def authenticate(self, plain: str) -> ApiToken | None:
        """The live token of this plain text."""
        ...

    async def create(
        self,
        *,
        name: str,
        role: Role,
        secret_contexts: frozenset[str] | None,
        expires_in_ms: int | None,
    ) -> tuple[ApiToken, str]:
        """The token and its plain text, which is never shown again."""
        ...

    async def tokens(self) -> list[ApiToken]: ...

    async def revoke(self, token_id: TokenId) -> bool: ...

    async def create_agent_token(
        self, *, name: str, labels: frozenset[str] | None, gate: frozenset[str], expires_in_ms: int | None
    ) -> tuple[AgentToken, str]: ...

    async def agent_tokens(self) -> list[AgentToken]: ...

    async def revoke_agent_token(self, token_id: TokenId) -> bool:
        """Its agents' connections are closed at once."""
        ...


class Settings(Protocol):
    async def show(self, org: OrgId | None) -> tuple[int, list[SettingRow]]:
        """Version and rows; org None: the cluster's."""
        ...

    async def patch(self, org: OrgId | None, changes: Mapping[str, int | None]) -> int:
        """The version afterwards.  None clears.  `Misconfigured` for unknown names and values out of bounds."""
        ...


class Secrets(Protocol):
    async def put(self, org: OrgId, ref: SecretRef, value: str) -> None: ...

    async def secrets(self, org: OrgId) -> list[SecretRow]: ...

    async def delete(self, org: OrgId, ref: SecretRef) -> bool: ...

    async def reveal(self, org: OrgId, ref: SecretRef) -> str | None: ...

    async def rotate(self) -> Rotation: ...


class Workflows(Protocol):
    async def apply(self, raw: object, actor: Actor) -> Registration:
        """Raises `Faulty`, or `Misconfigured` for what only the installation can judge."""
        ...

    async def workflows(self) -> list[Registration]: ...

    async def delete(self, ref: str) -> None:
        """`NotFound`."""
        ...


class Emission(Protocol):
    """What an emitted event became."""

    @property
    def emission_id(self) -> EventId: ...

    @property
    def targets(self) -> tuple[str, ...]: ...


class Events(Protocol):
    async def emit(
        self,
        name: str,
        payload: Payload,
        *,
        source: str,
        targets: Sequence[str] | None,
        caused_by: EventId | None,
    ) -> Emission:
        """`Denied` for reserved names and long chains, `NoCapacity` above the rate, `NotFound` for the cause."""
        ...

    async def events(self, which: EventFilter) -> list[StoredEvent]:
        """Newest first, without secrets."""
        ...

    async def event(self, event_id: EventId) -> StoredEvent | None: ...

    async def revive(self, event_id: EventId) -> bool:
        """Deliver an event that was given up after all.  False: it was not, or it is too late."""
        ...

    async def discard(self, event_id: EventId) -> bool: ...

    async def provisions(self) -> list[Spawn]:
        """Event spawns of all coordinators, oldest first."""
        ...


class Credentials(Protocol):
    """What a claim code is good for."""

    @property
    def agent_token(self) -> str: ...

    @property
    def agent_id(self) -> AgentId: ...

    @property
    def orchestrator_url(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...


class Claims(Protocol):
    async def redeem(self, code: str, *, caller: str) -> Credentials:
        """`Denied` with what is wrong with the code, `NoCapacity` for a caller that guesses."""
        ...


class AccessLog(Protocol):
    async def record(self, record: AccessRecord) -> None:
        """Best effort: never raises for a store that is down."""
        ...

    async def read(self, *, before: Mark | None, limit: int) -> list[AccessRecord]: ...


class LiveVms(Protocol):
    async def listing(self, target: InstanceId | None, *, seconds: float) -> Listing:
        """The microVMs that run on a node; None: on this one.  Raises `NotFound`, `NodeSilent` or `NodeFailed`."""
        ...

    async def stop(self, target: InstanceId | None, vm_ids: Sequence[AgentId], *, seconds: float) -> list[StopResult]:
        """Stop those that nobody tracks; a result for each, in order."""
        ...


class Workers(Protocol):
    async def create_join_token(self, *, by: str, ttl_ms: int) -> tuple[JoinToken, str]:
        """The token and its plain text, which is never shown again."""
        ...

    async def join_tokens(self) -> list[JoinToken]:
        """Those that have not run out."""
        ...

    async def revoke_join_token(self, token_id: str) -> bool:
        """No host can join with it any more.  False: there was nothing to revoke."""
        ...

    async def workers(self) -> list[Worker]: ...

    async def revoke(self, worker_id: str) -> bool:
        """Its link is closed at once, its agents are ended.  False: there was nothing to revoke."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Everything that requests can reach."""

    jobs: JobService
    logs: LogService
    agents: Agents
    scalers: Scalers
    queue: Queue
    coordinator: Coordinator
    tokens: Tokens
    settings: Settings
    secrets: Secrets
    access_log: AccessLog
    live_vms: LiveVms
    workers: Workers
    workflows: Workflows
    events: Events
    claims: Claims
    metrics: Callable[[], bytes]
    """Prometheus text of this process."""
    clock: Clock
    entropy: Entropy
    version: str
    instance_id: InstanceId
