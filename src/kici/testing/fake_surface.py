"""The services behind the HTTP API, in memory: what its tests and those of its clients run against.

`FakeSurface().surface` is what the application is built on.  The plain text of each role's token is its name.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kici.adapters.clock import RealClock
from kici.domain.access import AccessRecord, Actor, ApiToken, Role
from kici.domain.agent import AgentKind, AgentToken
from kici.domain.document import SubmitRun
from kici.domain.errors import Conflict, KiciError, Misconfigured, NotFound
from kici.domain.ids import AgentId, Instant, JobId, OrgId, RunId, TokenId
from kici.domain.job import TERMINAL, Job, JobStatus, Run, RunStatus
from kici.domain.knobs import SettingRow
from kici.domain.logs import LogChunk, Stream
from kici.domain.paging import Mark
from kici.domain.secret import Rotation, SecretRef, SecretRow
from kici.domain.verdict import NoScalerMatches, Verdict
from kici.ports.clock import Clock
from kici.ports.store import JobFilter, Submitted
from kici.testing.builders import a_job
from kici.testing.fake_coordinator import ME as ME
from kici.testing.fake_coordinator import START as START
from kici.testing.fake_coordinator import FakeCoordinator
from kici.testing.fake_events import FakeClaims, FakeEvents, FakeWorkflows
from kici.testing.fake_vms import FakeLiveVms
from kici.testing.fake_workers import FakeWorkers
from kici.testing.seeded_entropy import SeededEntropy
from kici.web.surface import (
    AgentRow,
    Check,
    CheckStatus,
    Explanation,
    Finding,
    PoolUse,
    ReloadOutcome,
    ScalerRow,
    Surface,
)

NO_MATCH: Final = NoScalerMatches(labels=("gpu",))
ALL: Final = 1_000_000


@dataclass
class FakeJobs:
    rows: dict[JobId, Job] = field(default_factory=dict)
    run_rows: dict[RunId, Run] = field(default_factory=dict)
    keys: dict[str, Submitted] = field(default_factory=dict)
    requests: list[SubmitRun] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    """`force` of each cancel."""
    refusal: Exception | None = None
    """Raised by submissions."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, request: SubmitRun, actor: Actor, idempotency_key: str | None) -> Submitted:
        if self.refusal is not None:
            raise self.refusal
        actor.check_secrets(request.secret_refs())
        if idempotency_key in self.keys:
            return replace(self.keys[idempotency_key or ""], created=False)
        self.requests.append(request)
        run = self._new_run(request, actor)
        jobs = tuple(
            self.add(
                run_id=run.id,
                name=each.name,
                org=request.org,
                demand=each.demand,
                spec=each.spec,
                status=JobStatus.PENDING if each.needs else JobStatus.QUEUED,
            )
            for each in request.jobs
        )
        submitted = Submitted(run_id=run.id, jobs=jobs, created=True)
        if idempotency_key is not None:
            self.keys[idempotency_key] = submitted
        return submitted

    def _new_run(self, request: SubmitRun, actor: Actor) -> Run:
        run = Run(
            id=RunId(f"run-{len(self.run_rows) + 1}"),
            name=request.name,
            org=request.org,
            status=RunStatus.RUNNING,
            submitted_by=actor.name,
            created_at=Instant(START + len(self.run_rows)),
            finished_at=None,
            cancel_requested_at=None,
        )
        self.run_rows[run.id] = run
        return run

    def add(self, **fields: Any) -> Job:
        seq = len(self.rows) + 1
        job = a_job(**{"seq": seq, "id": JobId(f"job-{seq}"), "created_at": START, **fields})
        self.rows[job.id] = job
        return job

    def change(self, job_id: JobId, **fields: Any) -> Job:
        """Move a job by hand, and wake whoever waits for it."""
        self.rows[job_id] = replace(self.rows[job_id], **fields)
        self.changed.set()
        self.changed = asyncio.Event()
        return self.rows[job_id]

    async def job(self, job_id: JobId) -> Job | None:
        return self.rows.get(job_id)

    async def run(self, run_id: RunId) -> Run | None:
        return self.run_rows.get(run_id)

    async def jobs(self, which: JobFilter) -> list[Job]:
        found = [
            job
            for job in sorted(self.rows.values(), key=lambda job: -job.seq)
            if which.status in (None, job.status)
            and which.run_id in (None, job.run_id)
            and which.org in (None, job.org)
            and (which.before_seq is None or job.seq < which.before_seq)
        ]
        return found[: which.limit]

    async def runs(self, *, before: Mark | None, limit: int) -> list[Run]:
        found = [
            run
            for run in reversed(self.run_rows.values())
            if before is None or (run.created_at, run.id) < (before.at, before.id)
        ]
        return found[:limit]

    async def cancel_job(self, job_id: JobId, *, force: bool, reason: str) -> Job:
        job = self._existing(job_id)
        if job.status in TERMINAL:
            raise Conflict(f"job {job_id} is over")
        self.forced.append(force)
        return self.change(job_id, status=JobStatus.CANCELLED, reason=reason)

    async def cancel_run(self, run_id: RunId, *, force: bool, reason: str) -> Run:
        run = self.run_rows.get(run_id)
        if run is None:
            raise NotFound(f"no run {run_id}")
        if run.status is not RunStatus.RUNNING:
            raise Conflict(f"run {run_id} is over")
        for job in list(self.rows.values()):
            if job.run_id == run_id and job.status not in TERMINAL:
                await self.cancel_job(job.id, force=force, reason=reason)
        self.run_rows[run_id] = replace(run, status=RunStatus.CANCELLED)
        return self.run_rows[run_id]

    async def explain(self, job_id: JobId) -> Explanation:
        job = self._existing(job_id)
        found = (Finding(instance_id=ME, verdict=NO_MATCH),) if job.status is JobStatus.QUEUED else ()
        return Explanation(job=job, findings=found)

    async def verdicts(self, jobs: Sequence[Job]) -> Mapping[JobId, Verdict]:
        return {job.id: NO_MATCH for job in jobs if job.status is JobStatus.QUEUED}

    async def wait(self, job_id: JobId, seconds: float, *, unlike: JobStatus) -> Job | None:
        job = self.rows.get(job_id)
        if job is not None and job.status is unlike:
            try:
                async with asyncio.timeout(seconds):
                    await self.changed.wait()
            except TimeoutError:
                return self.rows.get(job_id)
        return self.rows.get(job_id)

    def _existing(self, job_id: JobId) -> Job:
        if job_id not in self.rows:
            raise NotFound(f"no job {job_id}")
        return self.rows[job_id]


@dataclass
class FakeLogs:
    jobs: FakeJobs
    chunks: dict[JobId, list[LogChunk]] = field(default_factory=dict)
    failure: KiciError | None = None
    """Raised to followers after what there is."""

    def add(self, job_id: JobId, stream: Stream, data: bytes) -> None:
        chunks = self.chunks.setdefault(job_id, [])
        offset = sum(len(chunk.data) for chunk in chunks if chunk.stream is stream)
        chunks.append(LogChunk(position=len(chunks) + 1, stream=stream, offset=offset, data=data, received_at=START))
        if job_id in self.jobs.rows:
            self.jobs.change(job_id)

    async def read(self, job_id: JobId, *, after: int, bytes_max: int) -> list[LogChunk]:
        """One chunk at a time, so that readers must page."""
        return [chunk for chunk in self.chunks.get(job_id, []) if chunk.position > after][:1]

    async def follow(self, job_id: JobId, *, after: int) -> AsyncGenerator[LogChunk, None]:
        while True:
            job, changed = self.jobs.rows[job_id], self.jobs.changed
            for chunk in self.chunks.get(job_id, [])[after:]:
                yield chunk
                after = chunk.position
            if self.failure is not None:
                raise self.failure
            if job.status in TERMINAL:
                return
            await changed.wait()


@dataclass
class FakeAgents:
    rows: dict[AgentId, AgentRow] = field(default_factory=dict)

    async def agents(self) -> list[AgentRow]:
        return list(self.rows.values())

    async def agent(self, agent_id: AgentId) -> AgentRow | None:
        return self.rows.get(agent_id)

    async def drain(self, agent_id: AgentId) -> AgentRow:
        if agent_id not in self.rows:
            raise NotFound(f"no agent {agent_id}")
        self.rows[agent_id] = replace(self.rows[agent_id], state="draining")
        return self.rows[agent_id]


@dataclass
class FakeScalers:
    checks: list[Check] = field(default_factory=list)
    outcome: str = "applied"

    async def status(self) -> list[ScalerRow]:
        row = ScalerRow(
            name="local",
            type="bare-metal",
            instance_id=ME,
            state="ready",
            label_sets=(("linux", "x64"),),
            max_agents=4,
            active=1,
            machine_pool=PoolUse(
                name="shared", cpus_used=1.5, cpus_max=4.0, memory_bytes_used=2**30, memory_bytes_max=2**31
            ),
        )
        return [row]

    async def diagnose(self, scaler: str | None) -> list[Check]:
        if scaler not in (None, "local"):
            raise NotFound(f"no scaler {scaler}")
        return self.checks or [Check(name="scaler:local", status=CheckStatus.PASS, message="well")]

    async def reload(self) -> list[ReloadOutcome]:
        return [ReloadOutcome(instance_id=ME, outcome=self.outcome, added=("gpu",))]


@dataclass
class FakeQueue:
    jobs: FakeJobs

    async def queue(self, limit: int) -> list[Job]:
        return [job for job in self.jobs.rows.values() if job.status is JobStatus.QUEUED][:limit]

    async def depth(self) -> int:
        return len(await self.queue(ALL))

    async def show(self, job_id: JobId) -> Job:
        for job in await self.queue(ALL):
            if job.id == job_id:
                return job
        raise NotFound(f"no job {job_id} waits")

    async def clear(self, *, reason: str) -> int:
        waiting = await self.queue(ALL)
        for job in waiting:
            await self.jobs.cancel_job(job.id, force=False, reason=reason)
        return len(waiting)


@dataclass
class FakeTokens:
    api: dict[str, ApiToken] = field(default_factory=dict)
    """By plain text."""
    agent: dict[TokenId, AgentToken] = field(default_factory=dict)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        for role in Role:
            self.api[role.value] = self._token(role.value, role, None)

    async def authenticate(self, plain: str) -> ApiToken | None:
        if self.failure is not None:
            raise self.failure
        token = self.api.get(plain)
        return None if token is None or token.revoked_at is not None else token

    async def create(
        self, *, name: str, role: Role, secret_contexts: frozenset[str] | None, expires_in_ms: int | None
    ) -> tuple[ApiToken, str]:
        plain = f"plain-{len(self.api)}"
        expires_at = None if expires_in_ms is None else Instant(START + expires_in_ms)
        self.api[plain] = replace(self._token(name, role, secret_contexts), expires_at=expires_at)
        return self.api[plain], plain

    async def tokens(self) -> list[ApiToken]:
        return list(self.api.values())

    async def revoke(self, token_id: TokenId) -> bool:
        for plain, token in self.api.items():
            if token.id == token_id and token.revoked_at is None:
                self.api[plain] = replace(token, revoked_at=START)
                return True
        return False

    async def create_agent_token(
        self, *, name: str, labels: frozenset[str] | None, gate: frozenset[str], expires_in_ms: int | None
    ) -> tuple[AgentToken, str]:
        token = AgentToken(
            id=TokenId(f"agent-token-{len(self.agent)}"),
            hash="",
            prefix="kat_0000",
            kind=AgentKind.STATIC,
            labels=labels,
            gate=gate,
            agent_id=None,
            created_at=START,
            expires_at=None if expires_in_ms is None else Instant(START + expires_in_ms),
            name=name,
        )
        self.agent[token.id] = token
        return token, "kat_00001111"

    async def agent_tokens(self) -> list[AgentToken]:
        return list(self.agent.values())

    async def revoke_agent_token(self, token_id: TokenId) -> bool:
        return self.agent.pop(token_id, None) is not None

    def _token(self, name: str, role: Role, contexts: frozenset[str] | None) -> ApiToken:
        return ApiToken(
            id=TokenId(f"token-{len(self.api)}"),
            hash="",
            prefix=name[:8],
            name=name,
            role=role,
            secret_contexts=contexts,
            created_at=START,
            expires_at=None,
        )


@dataclass
class FakeSettings:
    values: dict[tuple[OrgId | None, str], int] = field(default_factory=dict)
    version: int = 1

    async def show(self, org: OrgId | None) -> tuple[int, list[SettingRow]]:
        value = self.values.get((org, "queue_max_depth"))
        row = SettingRow(
            name="queue_max_depth",
            value=value,
            effective=100 if value is None else value,
            default=100,
            minimum=1,
            unit="jobs",
            description="Most jobs that may wait.",
        )
        return self.version, [row]

    async def patch(self, org: OrgId | None, changes: Mapping[str, int | None]) -> int:
        strange = sorted(changes.keys() - {"queue_max_depth"})
        if strange:
            raise Misconfigured(f"unknown settings: {strange}")
        for name, value in changes.items():
            self.values.pop((org, name), None)
            if value is not None:
                self.values[org, name] = value
        self.version += 1
        return self.version


@dataclass
class FakeSecrets:
    values: dict[tuple[OrgId, SecretRef], str] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    async def put(self, org: OrgId, ref: SecretRef, value: str) -> None:
        self.values[org, ref] = value

    async def secrets(self, org: OrgId) -> list[SecretRow]:
        return [SecretRow(ref=ref, updated_at=START) for owner, ref in self.values if owner == org]

    async def delete(self, org: OrgId, ref: SecretRef) -> bool:
        return self.values.pop((org, ref), None) is not None

    async def reveal(self, org: OrgId, ref: SecretRef) -> str | None:
        return self.values.get((org, ref))

    async def rotate(self) -> Rotation:
        return Rotation(resealed=len(self.values), kept=0, unreadable=self.unreadable)


@dataclass
class FakeAccessLog:
    records: list[AccessRecord] = field(default_factory=list)

    async def record(self, record: AccessRecord) -> None:
        self.records.append(record)

    async def read(self, *, before: Mark | None, limit: int) -> list[AccessRecord]:
        older = [each for each in self.records if before is None or (each.at, each.id) < (before.at, int(before.id))]
        return older[::-1][:limit]


class FakeSurface:
    """All of them together."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.jobs = FakeJobs()
        self.logs = FakeLogs(self.jobs)
        self.agents = FakeAgents()
        self.scalers = FakeScalers()
        self.queue = FakeQueue(self.jobs)
        self.coordinator = FakeCoordinator()
        self.tokens = FakeTokens()
        self.settings = FakeSettings()
        self.secrets = FakeSecrets()
        self.access_log = FakeAccessLog()
        self.live_vms = FakeLiveVms(ME)
        self.workers = FakeWorkers()
        self.workflows = FakeWorkflows()
        self.events = FakeEvents(self.workflows)
        self.claims = FakeClaims()
        self.surface = Surface(
            jobs=self.jobs,
            logs=self.logs,
            agents=self.agents,
            scalers=self.scalers,
            queue=self.queue,
            coordinator=self.coordinator,
            tokens=self.tokens,
            settings=self.settings,
            secrets=self.secrets,
            access_log=self.access_log,
            live_vms=self.live_vms,
            workers=self.workers,
            workflows=self.workflows,
            events=self.events,
            claims=self.claims,
            metrics=lambda: b"kici_orch_agents_active 0\n",
            clock=clock or RealClock(),
            entropy=SeededEntropy(),
            version="1.2.3",
            instance_id=ME,
        )
