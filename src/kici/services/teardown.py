"""Taking a compute down, once, whoever asks and however often.

The order: mark the row `ending` (its job may be served by another spawn from then on), end the compute, give back
its part of the machine pool and its reservation, delete the row.  The row goes last, because it is how the compute
is found again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kici.decide.admit import Book
from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, InstanceId, JobId
from kici.domain.spawn import SERVING, ScaleDownReason
from kici.kit.backoff import exponential
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.ports.backend import ForgettingBackend
from kici.ports.clock import Clock
from kici.ports.store import JobStore, SpawnStore
from kici.services.machine_pools import MachinePools
from kici.services.spawn_book import SpawnBook, TrackedSpawn

RETRY_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 30.0


class Teardown:
    def __init__(
        self,
        *,
        store: SpawnStore,
        jobs: JobStore,
        book: Book,
        machine_pools: MachinePools,
        spawns: SpawnBook,
        supervisor: Supervisor,
        clock: Clock,
        instance_id: InstanceId,
    ) -> None:
        self._instance_id = instance_id
        self._store = store
        self._jobs = jobs
        self._book = book
        self._machine_pools = machine_pools
        self._spawns = spawns
        self._supervisor = supervisor
        self._clock = clock
        self._is_held = False
        self.capacity_freed: Callable[[], None] = lambda: None
        """Set by the composition root: the re-drive."""
        self.closing: Callable[[AgentId], None] = lambda agent_id: None
        """Set by the composition root: told when a compute begins to end, so that its agent gets no job any more."""
        self.all_gone: Callable[[], None] = lambda: None
        """Set by the composition root: told after each compute of which nothing is left."""

    def hold(self) -> None:
        """End no further compute, and decide on none: the next start goes on from the rows, with its agents back."""
        self._is_held = True

    def begin(self, tracked: TrackedSpawn, reason: ScaleDownReason, *, error: str | None = None) -> None:
        """Start to take it down in the background.  `error` is put on the bound job as its provisioning error."""
        if self._takes(tracked):
            self._supervisor.start(f"teardown.{tracked.agent_id}", self._all(tracked, reason, error))

    async def condemn(self, tracked: TrackedSpawn, reason: ScaleDownReason) -> None:
        """Free its job now, and take it down in the background."""
        if self._takes(tracked):
            await self._free_job(tracked, reason, None)
            self._supervisor.start(f"teardown.{tracked.agent_id}", self._rest(tracked, reason))

    def let_go(self, tracked: TrackedSpawn, reason: ScaleDownReason) -> None:
        """Its row is `ending` already: the unit that gave its job back made it so.  Take it down as well."""
        if self._takes(tracked):
            self._spawns.ending(tracked, reason)
            self._supervisor.start(f"teardown.{tracked.agent_id}", self._rest(tracked, reason))

    def _takes(self, tracked: TrackedSpawn) -> bool:
        """Once only, and not before its row is there to be ended.  Never while held: nobody is connected any more."""
        if self._is_held:
            return False
        if not tracked.is_written:
            tracked.is_unwanted = True
            return False
        takes = not tracked.is_ending
        tracked.is_ending = True
        if takes:
            self.closing(tracked.agent_id)
        return takes

    async def forget(self, tracked: TrackedSpawn, reason: ScaleDownReason, *, error: str | None, ends: bool) -> None:
        """Somebody else ends its compute: drop it here, and (`ends`) let its job be served by another."""
        if not self._takes(tracked):
            return
        if ends:
            await self._free_job(tracked, reason, error)
        await self._stop_spawning(tracked)
        if isinstance(tracked.runtime.backend, ForgettingBackend):
            tracked.runtime.backend.forget(tracked.agent_id)
        await self._machine_pools.release(tracked.spawn.machine_pool, tracked.agent_id)
        self._release(tracked)
        self._spawns.remove(tracked)
        self.all_gone()

    async def _all(self, tracked: TrackedSpawn, reason: ScaleDownReason, error: str | None) -> None:
        await self._free_job(tracked, reason, error)
        await self._rest(tracked, reason)

    async def _free_job(self, tracked: TrackedSpawn, reason: ScaleDownReason, error: str | None) -> None:
        """Mark the row; a store that is down must not keep the compute alive, so this is tried once here."""
        job_id = tracked.spawn.bound_job_id
        if error is not None and job_id is not None and not await self._tells(job_id, error):
            self._supervisor.start(f"tell.{tracked.agent_id}", self._tell(job_id, error))
        try:
            await self._store.end_spawn(
                tracked.agent_id, reason=error or reason, from_states=SERVING, by=self._instance_id
            )
        except StoreDown as failure:
            emit(Event.STORE_DOWN, agent_id=tracked.agent_id, error=str(failure))
        self._spawns.ending(tracked, reason)

    async def _tells(self, job_id: JobId, error: str) -> bool:
        """Put the error on the job, if it still waits.  False: the store did not take it."""
        try:
            await self._jobs.set_provisioning_error(job_id, error)
        except StoreDown as failure:
            emit(Event.STORE_DOWN, job_id=job_id, error=str(failure))
            return False
        return True

    async def _tell(self, job_id: JobId, error: str) -> None:
        """Without it, people would not learn why their job waits."""
        await self._clock.sleep(RETRY_SECONDS)
        while not await self._tells(job_id, error):
            await self._clock.sleep(RETRY_SECONDS)

    async def _rest(self, tracked: TrackedSpawn, reason: ScaleDownReason) -> None:
        await self._stop_spawning(tracked)
        await self._destroy(tracked, reason)
        await self._machine_pools.release(tracked.spawn.machine_pool, tracked.agent_id)
        self._release(tracked)
        await self._delete_row(tracked)
        self._spawns.remove(tracked)
        self.all_gone()
        emit(Event.SPAWN_DESTROYED, agent_id=tracked.agent_id, scaler=tracked.runtime.name, reason=reason)

    async def _stop_spawning(self, tracked: TrackedSpawn) -> None:
        """Abort a spawn under way; its backend undoes it."""
        task = tracked.task
        if task is None or task.done() or task is asyncio.current_task():
            return
        stopped = asyncio.Event()
        task.add_done_callback(lambda _: stopped.set())
        task.cancel()
        await stopped.wait()

    async def _destroy(self, tracked: TrackedSpawn, reason: ScaleDownReason) -> None:
        """End the compute; while that cannot be confirmed, try again for as long as it takes."""
        attempt = 0
        while True:
            if self._is_held:
                await asyncio.Event().wait()  # until the program ends
            attempt += 1
            try:
                await tracked.runtime.backend.destroy(tracked.agent_id, reason)
                self._spawns.yields(tracked)
                return
            except Exception as error:  # noqa: BLE001 - the border of a backend: whatever it raises, the compute is there
                delay = exponential(attempt, base=RETRY_SECONDS, maximum=RETRY_SECONDS_MAX)
                emit(
                    Event.SPAWN_DESTROY_FAILED,
                    level=logging.WARNING,
                    agent_id=tracked.agent_id,
                    error=str(error) or repr(error),
                    retry_seconds=delay,
                )
            self._spawns.resists(tracked)
            self._release(tracked)
            await self._clock.sleep(delay)

    def _release(self, tracked: TrackedSpawn) -> None:
        """Give the reservation back."""
        if self._book.release(tracked.agent_id) is not None:
            self.capacity_freed()

    async def _delete_row(self, tracked: TrackedSpawn) -> None:
        while True:
            try:
                await self._store.delete_spawn(tracked.agent_id)
                return
            except StoreDown:
                await self._clock.sleep(RETRY_SECONDS)
