"""What the HTTP API stands on, answered by the services of one coordinator."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kici.apps.agent_rows import elsewhere, made_row
from kici.apps.assembly import Coordinator
from kici.decide.forget import Forgotten
from kici.decide.prune import EVENT
from kici.domain.access import Actor
from kici.domain.document import SubmitRun
from kici.domain.errors import NotFound, StoreDown
from kici.domain.event import EventId, Payload, StoredEvent
from kici.domain.ids import AgentId, InstanceId, JobId, RunId, ScalerName
from kici.domain.instance import Instance
from kici.domain.job import STARTED, Job, JobStatus, Run
from kici.domain.paging import Mark
from kici.domain.peer import RequestKind
from kici.domain.spawn import Spawn, SpawnState
from kici.domain.verdict import Verdict
from kici.observe.events import Event, emit
from kici.ports.event_store import EventFilter
from kici.ports.live_vms import BridgedBackend
from kici.ports.store import JobFilter, Submitted
from kici.services.elector import LEASE
from kici.services.event_emitter import Emitted
from kici.services.machine_pools import cap_text
from kici.services.registry import ConnectedAgent
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.spawn_book import TrackedSpawn
from kici.web.scaler_rows import once_each
from kici.web.surface import (
    AgentRow,
    Check,
    CheckStatus,
    DrainState,
    Explanation,
    Finding,
    PoolUse,
    ReloadOutcome,
    ScalerRow,
    Surface,
)

SPAWNS_LISTED_MAX: Final = 100_000
ERROR_SHOWN: Final = 120
_WAITING: Final = frozenset({JobStatus.QUEUED, JobStatus.DISPATCHED, JobStatus.PENDING})


def surface_of(coordinator: Coordinator, *, version: str, stop: Callable[[bool], None]) -> Surface:
    """`stop(keep agents)` begins the shutdown of the program."""
    scalers = _Scalers(coordinator)
    coordinator.cluster.own_scalers = lambda: msgspec.to_builtins(scalers.own())
    return Surface(
        jobs=_Jobs(coordinator),
        logs=coordinator.logs,
        agents=_Agents(coordinator),
        scalers=scalers,
        queue=_Queue(coordinator),
        coordinator=_Control(coordinator, stop),
        tokens=coordinator.tokens,
        settings=coordinator.settings,
        secrets=coordinator.secrets,
        access_log=coordinator.access_log,
        live_vms=coordinator.cluster.live_vms,
        workers=coordinator.workers,
        workflows=coordinator.events.workflows,
        events=_Events(coordinator),
        claims=coordinator.claims,
        metrics=coordinator.render_metrics,
        clock=coordinator.given.clock,
        entropy=coordinator.given.entropy,
        version=version,
        instance_id=coordinator.instance_id,
    )


class _Jobs:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._jobs = coordinator.jobs

    async def submit(self, request: SubmitRun, actor: Actor, idempotency_key: str | None) -> Submitted:
        await self._coordinator.settings.view(request.org)  # so that its own values are known below
        submitted = await self._jobs.submit(request, actor, idempotency_key)
        self._coordinator.metrics.jobs_submitted.inc(len(submitted.jobs))
        return submitted

    async def job(self, job_id: JobId) -> Job | None:
        return await self._jobs.job(job_id)

    async def run(self, run_id: RunId) -> Run | None:
        return await self._jobs.run(run_id)

    async def jobs(self, which: JobFilter) -> list[Job]:
        return await self._jobs.jobs(which)

    async def runs(self, *, before: Mark | None, limit: int) -> list[Run]:
        return await self._jobs.runs(before=before, limit=limit)

    async def cancel_job(self, job_id: JobId, *, force: bool, reason: str) -> Job:
        return await self._jobs.cancel_job(job_id, force=force, reason=reason)

    async def cancel_run(self, run_id: RunId, *, force: bool, reason: str) -> Run:
        return await self._jobs.cancel_run(run_id, force=force, reason=reason)

    async def explain(self, job_id: JobId) -> Explanation:
        job = await self._jobs.job(job_id)
        if job is None:
            raise NotFound(f"no job {job_id}")
        found = await self._coordinator.cluster.explain.findings(job)
        return Explanation(job=job, findings=tuple(Finding(instance_id=one, verdict=verdict) for one, verdict in found))

    async def verdicts(self, jobs: Sequence[Job]) -> Mapping[JobId, Verdict]:
        found: dict[JobId, Verdict] = {}
        for job in jobs:
            nearest = await self._coordinator.cluster.explain.nearest(job) if job.status in _WAITING else None
            if nearest is not None:
                found[job.id] = nearest
        return found

    async def wait(self, job_id: JobId, seconds: float, *, unlike: JobStatus) -> Job | None:
        return await self._jobs.wait(job_id, seconds, unlike=unlike)


class _Agents:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def agents(self) -> list[AgentRow]:
        connected = [self._connected(agent) for agent in self._coordinator.registry]
        known = {row.agent_id for row in connected}
        made = [self._made(tracked) for tracked in self._coordinator.spawns if tracked.agent_id not in known]
        here = {row.agent_id: row for row in (*connected, *made)}
        others: list[AgentRow] = []
        if self._coordinator.cluster.peers.others:  # alone, memory knows all
            others = await elsewhere(self._coordinator.given.store, self._coordinator.instance_id, known)
        return sorted({**here, **{row.agent_id: row for row in others}}.values(), key=lambda row: row.agent_id)

    async def agent(self, agent_id: AgentId) -> AgentRow | None:
        agent = self._coordinator.registry.get(agent_id)
        if agent is not None:
            return self._connected(agent)
        return next((row for row in await self.agents() if row.agent_id == agent_id), None)

    async def drain(self, agent_id: AgentId) -> AgentRow:
        agent = self._coordinator.registry.get(agent_id)
        if agent is not None and self._coordinator.sessions.drain_agent(agent_id):
            return self._connected(agent)
        row = await self.agent(agent_id)
        if row is None or row.instance_id == self._coordinator.instance_id:
            raise NotFound(f"no agent {agent_id} is connected")
        await self._coordinator.cluster.requests.tell(row.instance_id, RequestKind.DRAIN_AGENT, {"agentId": agent_id})
        return row

    def _connected(self, agent: ConnectedAgent) -> AgentRow:
        state = "draining" if agent.draining else "busy" if agent.jobs else "idle"
        return AgentRow(
            agent_id=agent.agent_id,
            state=state,
            instance_id=self._coordinator.instance_id,
            labels=agent.labels,
            gate=agent.shape.gate,
            scaler=agent.scaler,
            backend_type=agent.spawn.backend_type if agent.spawn else None,
            warm=agent.spawn is not None and agent.spawn.bound_job_id is None,
            job_ids=agent.job_ids,
            since=agent.registered_at,
            facts=agent.facts,
        )

    def _made(self, tracked: TrackedSpawn) -> AgentRow:
        spawn = tracked.spawn
        is_ending = tracked.is_ending or spawn.state is SpawnState.ENDING
        state = "ending" if is_ending else "booting" if spawn.state is SpawnState.BOOTING else "away"
        return made_row(spawn, state=state, instance_id=self._coordinator.instance_id)


class _Scalers:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def status(self) -> list[ScalerRow]:
        """Of all coordinators that answer, and of their workers; one's own first."""
        cluster = self._coordinator.cluster
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(cluster.scalers_of(other), name=f"scalers of {other}")
                for other in sorted(cluster.peers.others)
            ]
        return once_each([*self.own(), *(row for task in asked for row in _rows(task.result()))])

    def own(self) -> list[ScalerRow]:
        return [self._row(runtime) for runtime in self._coordinator.manager.fleet.runtimes.values()]

    async def diagnose(self, scaler: str | None) -> list[Check]:
        runtimes = self._coordinator.manager.fleet.runtimes
        if scaler is not None and ScalerName(scaler) not in runtimes:
            raise NotFound(f"no scaler {scaler}; there are: {', '.join(runtimes) or 'none'}")
        asked = [runtime for name, runtime in runtimes.items() if scaler in (None, name)]
        rows = [self._check(runtime) for runtime in asked]
        rows += await _bridge_checks(asked)
        if scaler is None:
            rows += [self._pool_check(*found) for found in self._coordinator.machine_pools.faults().items()]
        return rows or [Check(name="scaler", status=CheckStatus.PASS, message="no scaler is configured")]

    async def reload(self) -> list[ReloadOutcome]:
        """On all coordinators at once; each takes its own files."""
        cluster = self._coordinator.cluster
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(cluster.reload_of(other), name=f"reload {other}")
                for other in sorted(cluster.peers.others)
            ]
            mine = await self._coordinator.reload_scalers()
        reports = {self._coordinator.instance_id: mine, **dict(task.result() for task in asked)}
        return [
            ReloadOutcome(
                instance_id=instance_id,
                outcome=report.outcome,
                added=report.added,
                updated=report.updated,
                retired=report.retired,
                resurrected=report.resurrected,
                problems=report.problems,
            )
            for instance_id, report in reports.items()
        ]

    def _row(self, runtime: ScalerRuntime) -> ScalerRow:
        coordinator = self._coordinator
        deferred = coordinator.failures.refusal(runtime.name)
        recent = coordinator.failures.recent(runtime.name, coordinator.given.clock.now())
        used = coordinator.book.of(runtime.name)
        is_retiring = coordinator.reload is not None and runtime.name in coordinator.reload.retiring
        idle = "retiring" if is_retiring else "backoff" if deferred else "ready"
        state = "draining" if coordinator.drain.closed else idle
        ready, target = coordinator.pools.of_scaler(runtime.name)
        host = runtime.elsewhere
        return ScalerRow(
            name=runtime.name,
            type=runtime.backend.type,
            instance_id=coordinator.instance_id if host is None else InstanceId(host.worker_id),
            state=state,
            label_sets=tuple(
                entry.label_set for entry in coordinator.manager.fleet.router.entries if entry.scaler == runtime.name
            ),
            max_agents=runtime.caps.agents_max,
            active=runtime.backend.active_count(),
            booting=sum(tracked.is_booting and tracked.runtime is runtime for tracked in coordinator.spawns),
            warm_ready=ready,
            warm_target=target,
            cpus_used=used.cpu_micros / 1_000_000,
            memory_bytes_used=used.memory_bytes,
            machine_pool=self._pool(runtime.machine_pool),
            backoff_until=None if deferred is None else deferred.until,
            last_error=None if recent.last is None else recent.last.detail,
        )

    def _pool(self, name: str | None) -> PoolUse | None:
        ledger = self._coordinator.machine_pools.known().get(name or "")
        if name is None or ledger is None:
            return None
        used, cap = ledger.usage, ledger.cap
        return PoolUse(
            name=name,
            cpus_used=used.cpu_micros / 1_000_000,
            cpus_max=cap.cpus,
            memory_bytes_used=used.memory_bytes,
            memory_bytes_max=cap.memory_bytes,
        )

    def _pool_check(self, name: str, fault: str | None) -> Check:
        ledger = self._coordinator.machine_pools.known().get(name)
        status, message = CheckStatus.PASS, f"{len(ledger.rows) if ledger else 0} agents of this host hold part of it"
        if fault is not None:
            status, message = CheckStatus.FAIL, fault
        elif ledger is not None and ledger.is_disputed:
            declared = ", ".join(f"{instance}: {cap_text(cap)}" for instance, cap in sorted(ledger.caps.items()))
            status = CheckStatus.WARN
            message = f"coordinators of this host do not agree on its cap ({declared}); the smallest is in force"
        return Check(name=f"machine-pool:{name}", status=status, message=message)

    def _check(self, runtime: ScalerRuntime) -> Check:
        recent = self._coordinator.failures.recent(runtime.name, self._coordinator.given.clock.now())
        name, active = f"scaler:{runtime.name}", runtime.backend.active_count()
        reload = self._coordinator.reload
        retires = reload is not None and runtime.name in reload.retiring
        prefix = f"retiring ({active} agent(s) left) - " if retires else ""
        if recent.last is None:
            held = f"{active} of {runtime.caps.agents_max} agents, no failure in 5 minutes"
            return Check(name=name, status=CheckStatus.PASS, message=prefix + held)
        error = recent.last.detail
        shown = error if len(error) <= ERROR_SHOWN else f"{error[: ERROR_SHOWN - 1]}…"
        failed = f"{recent.bound} spawns for jobs and {recent.unbound} others failed in 5 minutes: {shown}"
        status = CheckStatus.FAIL if recent.bound else CheckStatus.WARN
        return Check(name=name, status=status, message=prefix + failed)


async def _bridge_checks(runtimes: Iterable[ScalerRuntime]) -> list[Check]:
    """The bridges of microVMs, each once."""
    bridges = [await each.backend.bridge_state() for each in runtimes if isinstance(each.backend, BridgedBackend)]
    return [
        Check(
            name=f"firecracker:{bridge.name}",
            status=CheckStatus.PASS if not bridge.faults else CheckStatus.WARN if bridge.heals else CheckStatus.FAIL,
            message="; ".join(bridge.faults) + " (mended before the next machine)" * bridge.heals
            if bridge.faults
            else "healthy",
        )
        for bridge in {bridge.name: bridge for bridge in bridges}.values()
    ]


class _Queue:
    def __init__(self, coordinator: Coordinator) -> None:
        self._jobs = coordinator.jobs
        self._store = coordinator.given.store

    async def queue(self, limit: int) -> list[Job]:
        return await self._jobs.queue(limit)

    async def depth(self) -> int:
        return await self._store.queued_count()

    async def show(self, job_id: JobId) -> Job:
        job = await self._store.job(job_id)
        if job is None or job.status not in _WAITING:
            raise NotFound(f"no job {job_id} waits" if job is None else f"job {job_id} does not wait: {job.status}")
        return job

    async def clear(self, *, reason: str) -> int:
        return await self._jobs.clear_queue(reason=reason)


class _Events:
    def __init__(self, coordinator: Coordinator) -> None:
        self._events = coordinator.events
        self._store = coordinator.given.store

    async def emit(
        self,
        name: str,
        payload: Payload,
        *,
        source: str,
        targets: Sequence[str] | None,
        caused_by: EventId | None,
    ) -> Emitted:
        return await self._events.emitter.emit(name, payload, source=source, targets=targets, caused_by=caused_by)

    async def events(self, which: EventFilter) -> list[StoredEvent]:
        return await self._store.events(which)

    async def event(self, event_id: EventId) -> StoredEvent | None:
        return await self._store.event(event_id)

    async def revive(self, event_id: EventId) -> bool:
        revived = await self._store.revive_event(event_id)
        self._events.router.nudge()
        return revived

    async def discard(self, event_id: EventId) -> bool:
        return await self._store.discard_event(event_id)

    async def provisions(self) -> list[Spawn]:
        rows = await self._store.spawns(owner=None, limit=SPAWNS_LISTED_MAX)
        return [row for row in rows if row.backend_type == EVENT]


class _Control:
    def __init__(self, coordinator: Coordinator, stop: Callable[[bool], None]) -> None:
        self._coordinator = coordinator
        self._stop = stop

    async def drain_state(self) -> DrainState:
        counts = await self._coordinator.given.store.counts_by_status()
        return DrainState(
            draining=self._coordinator.drain.draining,
            jobs_running=sum(counts.get(status, 0) for status in STARTED | {JobStatus.DISPATCHED}),
        )

    async def set_draining(self, draining: bool) -> DrainState:  # noqa: FBT001 - the port's signature
        coordinator = self._coordinator
        coordinator.drain.draining = draining
        coordinator.heartbeat.nudge()
        emit(Event.DRAIN_CHANGED, instance_id=coordinator.instance_id, draining=draining)
        if not draining:
            for agent in coordinator.registry:
                await coordinator.dispatcher.drain(agent)
            coordinator.pending.capacity_freed()
        return await self.drain_state()

    def stop(self, *, keep_agents: bool) -> None:
        self._stop(keep_agents)

    async def instances(self) -> list[Instance]:
        return await self._coordinator.given.store.instances(limit=1000)

    async def forget_peer(self, peer: str, *, is_acknowledged: bool) -> Forgotten:
        return await self._coordinator.cluster.forget_peer.forget(peer, is_acknowledged=is_acknowledged)

    async def leader(self) -> InstanceId | None:
        store = self._coordinator.given.store
        lease = await store.lease(LEASE)
        return None if lease is None or lease.expires_at <= await store.database_now() else lease.holder

    async def not_ready(self) -> str | None:
        if not self._coordinator.is_recovered:
            return "still recovering what the last process left"
        if self._coordinator.drain.stopping:
            return "stopping"
        try:
            await self._coordinator.given.store.ping()
        except StoreDown as error:
            return str(error)
        return None


def _rows(answer: object) -> list[ScalerRow]:
    """What another coordinator told of its scalers; nothing where it did not, or as this version does not know it."""
    try:
        return msgspec.convert(answer, dict[str, list[ScalerRow]])["scalers"]
    except (msgspec.ValidationError, KeyError):
        return []
