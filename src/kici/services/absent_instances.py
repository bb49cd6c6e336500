"""Coordinators that died: what they held is settled by the leader, after graces that let agents find their way.

Their started jobs wait for agents to come to another coordinator; their offered jobs go back to the queue; rows
of what they had spawned on their hosts go once they have been silent for long.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Never, Protocol

from kici.domain.ids import InstanceId, Instant, is_scaler_agent
from kici.domain.job import STARTED, Job, JobStatus, Outcome
from kici.kit.unbroken import Unbroken
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.peers import PeerStore
from kici.ports.store import AgentStore, InstanceStore, JobStore
from kici.services.dispatcher import Dispatcher
from kici.services.elector import Elector
from kici.services.job_lifecycle import JobLifecycle
from kici.services.peers import PRESENT_MS
from kici.services.store_outages import sits_out_outages

INTERVAL_SECONDS: Final = 10.0
CONFIRM_SECONDS: Final = 25.0
"""How long one must be seen silent by this leader: longer than two beats, so that after an outage all have beaten."""
SPAWNS_SILENT_MS: Final = 120_000
BATCH: Final = 200
INSTANCES_MAX: Final = 1000


class Store(JobStore, AgentStore, InstanceStore, PeerStore, Protocol):
    """What settling reads and writes."""


class AbsentInstances:
    def __init__(
        self,
        *,
        store: Store,
        elector: Elector,
        dispatcher: Dispatcher,
        lifecycle: JobLifecycle,
        clock: Clock,
        instance_id: InstanceId,
        grace_ms: Callable[[bool], int],
    ) -> None:
        """`grace_ms(made by a scaler)`: how long an agent may take to come to another coordinator."""
        self._store = store
        self._elector = elector
        self._dispatcher = dispatcher
        self._lifecycle = lifecycle
        self._clock = clock
        self._instance_id = instance_id
        self._grace_ms = grace_ms
        self._silent = Unbroken[InstanceId]()

    async def run(self) -> Never:
        while True:
            await self._clock.sleep(INTERVAL_SECONDS)
            with sits_out_outages("looking for dead peers", then=self._silent.forget):
                await self.tick()

    async def tick(self) -> None:
        """One look at every known coordinator that does not beat."""
        if not self._elector.is_leader:
            self._silent.forget()
            return
        now = await self._store.database_now()
        known = await self._store.instances(limit=INSTANCES_MAX)
        silent = {one.id: now - one.last_beat_at for one in known if one.last_beat_at < now - PRESENT_MS}
        dead = self._dead(silent)
        for instance_id in sorted(dead):
            if self._elector.is_leader:
                await self._settle(instance_id, silent[instance_id])
        await self._store.purge_peer_requests()
        for job in await self._store.overdue_recoveries(limit=BATCH):
            if job.owner_instance_id in dead:
                await self._give_up(job)

    def _dead(self, silent: Mapping[InstanceId, int]) -> frozenset[InstanceId]:
        """Others that were seen silent for long enough without a break: after an outage of the store all are."""
        others = (instance_id for instance_id in silent if instance_id != self._instance_id)
        return self._silent.look(others, now=self._clock.monotonic(), seconds=CONFIRM_SECONDS)

    async def _settle(self, instance_id: InstanceId, silent_ms: int) -> None:
        for job in await self._store.jobs_owned_by(instance_id, limit=BATCH):
            if job.agent_id is None:
                continue
            if job.status is JobStatus.DISPATCHED:
                await self._dispatcher.requeue(job, reason=f"coordinator {instance_id} is gone")
            elif job.status in STARTED and job.recovery_deadline is None:
                # By the clock that will judge it: ours may differ.
                deadline = Instant(await self._store.database_now() + self._grace_ms(is_scaler_agent(job.agent_id)))
                await self._store.recover_job(job.id, job.agent_id, deadline=deadline, seen=job)
        if silent_ms >= SPAWNS_SILENT_MS:
            forgotten = await self._store.forget_spawns_of(instance_id)
            if forgotten:
                emit(Event.SPAWNS_FORGOTTEN, level=logging.WARNING, instance_id=instance_id, count=forgotten)

    async def _give_up(self, job: Job) -> None:
        reason = f"coordinator {job.owner_instance_id} is gone, and agent {job.agent_id} did not come to another"
        outcome = Outcome(status=JobStatus.FAILED, reason=reason)
        await self._lifecycle.end_lost(job, outcome)
