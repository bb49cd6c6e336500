"""Forgetting a coordinator or worker that is gone for good: its rows go, what they held is free.

What is allowed is `decide.forget`'s; the store does it only if the instance is still as silent as it was judged.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from kici.decide.forget import ForgetCase, ForgetOutcome, Forgotten, judge
from kici.domain.errors import StoreDown
from kici.domain.ids import InstanceId
from kici.domain.worker import Worker
from kici.observe.events import Event, emit
from kici.ports.event_store import ProvisionStore
from kici.ports.peers import PeerStore
from kici.ports.store import InstanceStore, JobStore
from kici.ports.workers import WorkerStore

INSTANCES_MAX: Final = 1000
JOBS_MAX: Final = 1000
WORKERS_MAX: Final = 10_000
WORKER_FRESH_MS: Final = 60_000
"""A link that its coordinator has not confirmed for so long is gone."""


class Store(InstanceStore, JobStore, PeerStore, ProvisionStore, WorkerStore, Protocol):
    """What forgetting reads and writes."""


class ForgetPeer:
    def __init__(
        self,
        *,
        store: Store,
        instance_id: InstanceId,
        grace_ms: Callable[[], int],
        revoke_worker: Callable[[str], Awaitable[bool]],
    ) -> None:
        """`grace_ms()`: the reaper's."""
        self._store = store
        self._instance_id = instance_id
        self._grace_ms = grace_ms
        self._revoke_worker = revoke_worker

    async def forget(self, peer: str, *, is_acknowledged: bool) -> Forgotten:
        """Never raises: an outcome says what came of it."""
        try:
            workers = await self._store.workers(limit=WORKERS_MAX)
            worker = next((one for one in workers if one.id == peer), None)
            found = await (self._worker(worker) if worker is not None else self._coordinator(peer, is_acknowledged))
        except StoreDown as error:
            return Forgotten(outcome=ForgetOutcome.ERROR, detail=str(error))
        if found.outcome is ForgetOutcome.FORGOTTEN:
            emit(Event.PEER_FORGOTTEN, level=logging.WARNING, instance_id=peer)
        return found

    async def _coordinator(self, peer: str, is_acknowledged: bool) -> Forgotten:  # noqa: FBT001 - passed on
        peer_id = InstanceId(peer)
        now = await self._store.database_now()
        case = ForgetCase(
            peer=peer_id,
            me=self._instance_id,
            known=tuple(await self._store.instances(limit=INSTANCES_MAX)),
            now=now,
            has_adopted=await self._store.has_adopted_provisions(peer_id),
            jobs=len(await self._store.jobs_owned_by(peer_id, limit=JOBS_MAX)),
            grace_ms=self._grace_ms(),
            is_acknowledged=is_acknowledged,
        )
        judged = judge(case)
        if judged.outcome is not ForgetOutcome.FORGOTTEN:
            return judged
        if await self._store.forget_instance(peer_id, heard_before=now):
            return judged
        return Forgotten(outcome=ForgetOutcome.CONNECTED, detail=f"{peer} is back")

    async def _worker(self, worker: Worker) -> Forgotten:
        seen_at = worker.last_seen_at
        now = await self._store.database_now()
        if worker.revoked_at is None and worker.linked_to and seen_at is not None and now - seen_at < WORKER_FRESH_MS:
            detail = f"worker {worker.name} is linked; `kici-admin worker revoke {worker.id}` cuts it off"
            return Forgotten(outcome=ForgetOutcome.CONNECTED, detail=detail)
        await self._revoke_worker(worker.id)
        return Forgotten(
            outcome=ForgetOutcome.FORGOTTEN, detail=f"worker {worker.name} is forgotten; what it held is free"
        )
