"""The end of a coordinator, in order and within bounded time.

Nothing new is begun first; then jobs are settled, agents told, computes ended, and the coordinator's rows removed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from kici.decide.prune import EVENT
from kici.domain.errors import KiciError, StoreDown
from kici.domain.ids import AgentId, InstanceId
from kici.domain.job import STARTED, Job, JobStatus, Outcome
from kici.domain.spawn import ScaleDownReason
from kici.observe.events import Event, emit
from kici.ports.backend import Backend
from kici.ports.clock import Clock
from kici.ports.store import AgentStore, JobStore, Offer
from kici.services.agent_sessions import AgentSessions
from kici.services.drain_state import DrainState
from kici.services.elector import Elector
from kici.services.instance_heartbeat import InstanceHeartbeat
from kici.services.job_lifecycle import JobLifecycle
from kici.services.machine_pools import MachinePools
from kici.services.scaler_manager import ScalerManager
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.spawn_book import SpawnBook, TrackedSpawn
from kici.services.store_outages import sits_out_outages
from kici.services.teardown import Teardown

SHUTDOWN_SECONDS: Final = 15.0
JOBS_MAX: Final = 100_000


class Store(JobStore, AgentStore, Protocol):
    """What a shutdown writes."""


class Shutdown:
    def __init__(
        self,
        *,
        store: Store,
        lifecycle: JobLifecycle,
        sessions: AgentSessions,
        spawns: SpawnBook,
        machine_pools: MachinePools,
        teardown: Teardown,
        manager: ScalerManager,
        heartbeat: InstanceHeartbeat,
        elector: Elector,
        drain: DrainState,
        clock: Clock,
        instance_id: InstanceId,
    ) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._spawns = spawns
        self._machine_pools = machine_pools
        self._teardown = teardown
        self._manager = manager
        self._heartbeat = heartbeat
        self._elector = elector
        self._drain = drain
        self._clock = clock
        self._instance_id = instance_id

    async def run(self, *, keep_agents: bool) -> None:
        """Started jobs of local computes fail, others go back to the queue; `keep_agents`: everything lives on."""
        self._drain.stopping = True
        if keep_agents:
            self._teardown.hold()
            await self._each_backend(lambda backend: backend.release_all())
        else:
            await self._at_most(self._return_jobs())
        self._sessions.close_all("the coordinator stops")
        if not keep_agents:
            await self._end_computes()
            await self._machine_pools.leave(frozenset(tracked.agent_id for tracked in self._spawns))
        await self._registered()
        await self._at_most(self._remove_rows(keep_agents=keep_agents))

    async def _remove_rows(self, *, keep_agents: bool) -> None:
        await self._store.delete_sessions_of(self._instance_id)
        await self._elector.resign()
        if not keep_agents:  # else whose agents would they be?
            await self._heartbeat.leave()

    async def _at_most(self, work: Awaitable[None]) -> None:
        """A store that cannot be reached says so late, once for each call: it holds the end up only for a while."""
        with sits_out_outages("shutdown"):
            try:
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await work
            except TimeoutError:
                raise StoreDown(f"the store did not answer within {SHUTDOWN_SECONDS:g} s of the stop") from None

    async def _return_jobs(self) -> None:
        """Jobs of agents that end with us: those started fail with the reason, the others keep their place.

        Whether their agents are connected now or not; static ones are not ours to end, and come back with theirs.
        """
        try:
            held = await self._store.jobs_owned_by(self._instance_id, limit=JOBS_MAX)
        except StoreDown as error:
            emit(Event.STORE_DOWN, during="shutdown", error=str(error))
            return
        local = {tracked.agent_id for tracked in self._local()}
        for job in held:
            if job.agent_id is None or job.agent_id not in local:
                continue
            try:
                await self._return_job(job.agent_id, job)
            except StoreDown as error:
                emit(Event.STORE_DOWN, job_id=job.id, error=str(error))

    async def _return_job(self, agent_id: AgentId, job: Job) -> None:
        reason = "the coordinator was stopped while the job ran"
        requeued = await self._store.requeue_job(
            Offer(job.id, agent_id, job.offers), reason=reason, attempts_max=1_000_000, count_attempt=False
        )
        if requeued is None:
            for status, sources in (
                (JobStatus.CANCELLED, frozenset({JobStatus.CANCELLING})),
                (JobStatus.FAILED, STARTED - {JobStatus.CANCELLING}),
            ):
                await self._lifecycle.end(
                    job.id, Outcome(status=status, reason=reason), agent_id=agent_id, from_statuses=sources
                )

    async def _registered(self) -> None:
        """Let registrations under way end: what they write later would stay for ever."""
        ends_at = self._clock.monotonic() + SHUTDOWN_SECONDS
        while self._sessions.is_registering and self._clock.monotonic() < ends_at:
            await self._clock.sleep(0.02)

    async def _end_computes(self) -> None:
        for tracked in self._local():
            self._teardown.begin(tracked, ScaleDownReason.SHUTDOWN)
        ends_at = self._clock.monotonic() + SHUTDOWN_SECONDS
        while self._local() and self._clock.monotonic() < ends_at:
            await self._clock.sleep(0.02)
        for tracked in self._local():
            emit(Event.SPAWN_LEFT, level=logging.ERROR, agent_id=tracked.agent_id, scaler=tracked.runtime.name)
        await self._each_backend(lambda backend: backend.shutdown_all())

    def _local(self) -> list[TrackedSpawn]:
        """Spawns that end with us; machines of event scalers and agents on workers outlive us."""
        return [
            tracked
            for tracked in self._spawns
            if tracked.spawn.backend_type != EVENT and tracked.spawn.worker_id is None
        ]

    async def _each_backend(self, act: Callable[[Backend], Awaitable[None]]) -> None:
        async def one(runtime: ScalerRuntime) -> None:
            try:
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await act(runtime.backend)
            except (KiciError, TimeoutError) as error:
                emit(Event.BACKEND_STUCK, level=logging.ERROR, scaler=runtime.name, error=str(error))

        async with asyncio.TaskGroup() as group:
            for runtime in self._manager.local.runtimes.values():
                group.create_task(one(runtime), name=f"stop {runtime.name}")
