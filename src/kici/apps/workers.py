"""Workers of a coordinator: wired around its object graph.  Without any, all of this does nothing."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kici.backends.remote.backend import RemoteBackend
from kici.domain.ids import AgentId, InstanceId, ScalerName
from kici.domain.worker import JoinToken, Worker
from kici.kit.supervise import Supervisor
from kici.ports.workers import Unanswered, WorkerChannel
from kici.services.workers import Workers
from kici.services.workers_credentials import WorkerCredentials
from kici.services.workers_rows import WorkerRows
from kici.wire.worker_messages import AskVms

WORKERS_MAX: Final = 10_000

if TYPE_CHECKING:
    from kici.apps.assembly import Coordinator


class WorkerParts:
    def __init__(self, one: "Coordinator") -> None:
        given = one.given
        self._one = one
        self.credentials = WorkerCredentials(
            store=given.store, clock=given.clock, entropy=given.entropy, instance_id=one.instance_id
        )
        self.rows = WorkerRows(
            store=given.store,
            book=one.book,
            spawns=one.spawns,
            teardown=one.teardown,
            clock=given.clock,
            instance_id=one.instance_id,
            compute_ended=one.sessions.compute_ended,
        )
        self.links = Workers(
            credentials=self.credentials,
            rows=self.rows,
            manager=one.manager,
            spawns=one.spawns,
            make_backend=self._backend,
            capacity_freed=one.pending.capacity_freed,
            foreign_ended=self._foreign_ended,
            supervisor=given.supervisor,
            clock=given.clock,
            entropy=given.entropy,
            instance_id=one.instance_id,
        )
        one.recovery.of_workers = self.links.expect
        self.links.pools_changed = one.pools.elsewhere

    def start(self, supervisor: Supervisor) -> None:
        supervisor.service("workers", self.links.run)

    async def create_join_token(self, *, by: str, ttl_ms: int) -> tuple[JoinToken, str]:
        """The token and its plain text, which is never shown again."""
        await self._one.given.store.purge_join_tokens()
        return await self.credentials.create_join_token(by=by, ttl_ms=ttl_ms)

    async def join_tokens(self) -> list[JoinToken]:
        return await self._one.given.store.join_tokens(limit=WORKERS_MAX)

    async def revoke_join_token(self, token_id: str) -> bool:
        return await self._one.given.store.revoke_join_token(token_id)

    async def workers(self) -> list[Worker]:
        return await self._one.given.store.workers(limit=WORKERS_MAX)

    async def revoke(self, worker_id: str) -> bool:
        """Take a host's right to be a worker, end what it holds of ours.  False: there was nothing to revoke."""
        is_revoked = await self.credentials.revoke(worker_id)
        if is_revoked:
            await self.links.revoked(worker_id)
        return is_revoked

    def is_linked(self, worker_id: str) -> bool:
        return self.links.is_linked(worker_id)

    async def linked_to(self, worker_id: str) -> Sequence[InstanceId]:
        return next((worker.linked_to for worker in await self.workers() if worker.id == worker_id), ())

    async def ask_vms(self, worker_id: str, payload: Mapping[str, object], *, seconds: float) -> object:
        """What a linked worker says of its live microVMs; None when it does not in time."""
        host = self.links.host(worker_id)
        text = msgspec.json.encode(payload).decode()
        try:
            assert host is not None, worker_id
            answer = await host.channel.ask(
                lambda request_id: AskVms(request_id=request_id, payload=text), what="list microVMs", seconds=seconds
            )
        except Unanswered:
            return None
        return msgspec.json.decode(answer.vms)

    def _backend(self, scaler: ScalerName, backend_type: str, channel: WorkerChannel) -> RemoteBackend:
        given = self._one.given
        return RemoteBackend(
            scaler=scaler,
            backend_type=backend_type,
            channel=channel,
            on_exit=self._one.sessions.compute_ended,
            supervisor=given.supervisor,
            clock=given.clock,
        )

    def _foreign_ended(self, agent_id: AgentId, how: str) -> None:
        """Proof of death, if the agent is one that we hold or wait for; else its owner is told as well."""
        if self._one.registry.get(agent_id) is not None or agent_id in self._one.absences:
            self._one.sessions.compute_ended(agent_id, how)
