"""What makes several coordinators on one store a cluster: wired around the object graph of each.

Alone on its store a coordinator runs the same, and finds nobody.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kici.decide.dispatch import LossCause
from kici.decide.reap import reap_grace_ms
from kici.domain import knobs
from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, InstanceId
from kici.domain.job import Job
from kici.domain.peer import RequestKind
from kici.domain.spawn import Spawn
from kici.kit.supervise import Supervisor
from kici.ports.peers import Topic
from kici.services.absent_instances import AbsentInstances
from kici.services.clustering import OwnRows, PatientScaling, RemoteCancels
from kici.services.explain_all import ExplainAll
from kici.services.forget_peer import ForgetPeer
from kici.services.hand_over import HandOver
from kici.services.live_vms import LiveVms, LocalVms
from kici.services.peers import Act, PeerRequests, PeerView
from kici.services.reload import ReloadReport
from kici.services.strays import Strays
from kici.services.unrecorded import Unrecorded
from kici.wire.messages import CloseCode

RELOAD_SECONDS: Final = 30.0
STATUS_SECONDS: Final = 2.0

if TYPE_CHECKING:
    from kici.apps.assembly import Coordinator


class Cluster:
    def __init__(self, one: "Coordinator") -> None:
        given = one.given
        self._one = one
        self.own_scalers: Callable[[], object] = list
        """Set by whoever shows them: the state of one's own scalers, as JSON holds it."""
        self.peers = PeerView(
            store=given.store,
            registry=one.registry,
            manager=one.manager,
            clock=given.clock,
            instance_id=one.instance_id,
            address=next(iter(given.addresses), ""),
        )
        self.hand_over = self._hand_over()
        acts: dict[RequestKind, Act] = {}
        self.requests = PeerRequests(
            store=given.store,
            notifier=given.notifier,
            clock=given.clock,
            entropy=given.entropy,
            instance_id=one.instance_id,
            acts=acts,
        )
        self.own_rows = self._own_rows()
        cancels = RemoteCancels(
            store=given.store, requests=self.requests, lifecycle=one.lifecycle, instance_id=one.instance_id
        )
        acts[RequestKind.BOOT_DATA] = self.own_rows.asked_to_clear
        acts[RequestKind.CANCEL] = cancels.asked
        acts[RequestKind.RELOAD] = self._asked_to_reload
        acts[RequestKind.DRAIN_AGENT] = self._asked_to_drain
        self.live_vms = LiveVms(
            local=LocalVms(manager=one.manager, spawns=one.spawns, registry=one.registry),
            store=given.store,
            instance_id=one.instance_id,
            requests=self.requests,
            workers=_WorkersOf(one),
        )
        acts[RequestKind.LIVE_VMS] = self.live_vms.answer
        one.jobs.remote = cancels
        self._ask_around(acts)
        self._join()
        self._seek_the_lost()
        self.absent_instances = AbsentInstances(
            store=given.store,
            elector=one.elector,
            dispatcher=one.dispatcher,
            lifecycle=one.lifecycle,
            clock=given.clock,
            instance_id=one.instance_id,
            grace_ms=one.grace_ms,
        )

    def _seek_the_lost(self) -> None:
        """Agents whose whereabouts the store does not tell, or tells wrong."""
        one, given = self._one, self._one.given
        self.strays = Strays(
            store=given.store,
            spawns=one.spawns,
            teardown=one.teardown,
            is_known=lambda agent_id: one.registry.get(agent_id) is not None or agent_id in one.absences,
            clock=given.clock,
            instance_id=one.instance_id,
        )
        self.unrecorded = Unrecorded(
            store=given.store,
            registry=one.registry,
            sends_away=lambda agent_id, why: one.sessions.dismiss(
                agent_id, cause=LossCause.CONNECTION_CLOSED, code=CloseCode.INTERNAL, why=why
            ),
            clock=given.clock,
            instance_id=one.instance_id,
        )

    def _ask_around(self, acts: dict[RequestKind, Act]) -> None:
        """What operators are told about all, and what they say about others."""
        one, given = self._one, self._one.given
        self.explain = ExplainAll(
            explain=one.explain,
            store=given.store,
            peers=self.peers,
            requests=self.requests,
            instance_id=one.instance_id,
        )
        acts[RequestKind.EXPLAIN] = self.explain.answer
        acts[RequestKind.SCALERS] = self._asked_for_scalers
        self.forget_peer = ForgetPeer(
            store=given.store,
            instance_id=one.instance_id,
            grace_ms=lambda: reap_grace_ms(one.settings.peek(knobs.REROUTE_FLAP_GRACE_MS)),
            revoke_worker=lambda worker_id: one.workers.revoke(worker_id),
        )

    def _own_rows(self) -> OwnRows:
        one, given = self._one, self._one.given
        return OwnRows(
            store=given.store,
            peers=self.peers,
            spawns=one.spawns,
            manager=one.manager,
            teardown=one.teardown,
            tokens=one.tokens,
            requests=self.requests,
            supervisor=given.supervisor,
            clock=given.clock,
            instance_id=one.instance_id,
        )

    def _hand_over(self) -> HandOver:
        one, given = self._one, self._one.given
        return HandOver(
            heartbeat=one.heartbeat,
            peers=self.peers,
            registry=one.registry,
            sessions=one.sessions,
            probe=given.probe,
            leave_workers=lambda why: one.workers.links.let_go(why),
            own=given.addresses,
            clock=given.clock,
        )

    def _join(self) -> None:
        """Let the services know that there may be others."""
        one, given = self._one, self._one.given
        one.dispatcher.queued = lambda: given.notifier.hint(Topic.QUEUE)
        one.dispatcher.scale = PatientScaling(
            manager=one.manager,
            peers=self.peers,
            store=given.store,
            supervisor=given.supervisor,
            clock=given.clock,
        )
        given.notifier.listen(Topic.QUEUE, one.pending.look)
        one.pending.has_idle_elsewhere = self.peers.has_idle
        one.queue.leads = lambda: one.elector.is_leader
        one.queue.watches = self._watches
        one.queue.is_served_elsewhere = self.peers.could_serve
        one.absences.is_elsewhere = self.own_rows.is_elsewhere
        one.manager.foreign_gone = self.own_rows.ended_here
        one.manager.clear_foreign = self._clear_foreign

    def start(self, supervisor: Supervisor) -> None:
        supervisor.service("hints", self._one.given.notifier.run)
        supervisor.service("peers", self.peers.run)
        supervisor.service("hand-over", self.hand_over.run)
        supervisor.service("peer-requests", self.requests.run)
        supervisor.service("own-rows", self.own_rows.run)
        supervisor.service("strays", self.strays.run)
        supervisor.service("unrecorded-agents", self.unrecorded.run)
        supervisor.service("absent-instances", self.absent_instances.run)

    def _watches(self, job: Job) -> bool:
        """An overdue offer is ours to settle, or of a coordinator that is gone and we lead."""
        owner = job.owner_instance_id
        if owner in (None, self._one.instance_id):
            return True
        return self._one.elector.is_leader and owner not in self.peers.others

    async def _clear_foreign(self, spawn: Spawn) -> None:
        """Of an agent that another coordinator made: by its worker, if that is linked here, else by its maker."""
        host = None if spawn.worker_id is None else self._one.workers.links.host(spawn.worker_id)
        if host is not None and host.channel.is_linked:
            await host.backend_of(spawn).boot_data_read(spawn.agent_id)
        else:
            await self.own_rows.clear_boot_data(spawn)

    async def reload_of(self, other: InstanceId) -> tuple[InstanceId, ReloadReport]:
        """Let another coordinator take over its scalers files; what came of it."""
        try:
            answer = await self.requests.ask(other, RequestKind.RELOAD, {}, seconds=RELOAD_SECONDS)
        except StoreDown as error:
            return other, ReloadReport(outcome="unanswered", problems=(str(error),))
        if answer is None:
            why = f"it did not answer within {RELOAD_SECONDS:g} s; `kici-admin peers` says whether it is there"
            return other, ReloadReport(outcome="unanswered", problems=(why,))
        try:
            return other, msgspec.convert(answer, ReloadReport)
        except msgspec.ValidationError:
            return other, ReloadReport(outcome="rejected", problems=(f"it answered {answer}",))

    async def scalers_of(self, other: InstanceId) -> object:
        """How the scalers of another coordinator are; None when it does not say soon."""
        try:
            return await self.requests.ask(other, RequestKind.SCALERS, {}, seconds=STATUS_SECONDS)
        except StoreDown:
            return None

    async def _asked_for_scalers(self, payload: Mapping[str, object]) -> object:
        return {"scalers": self.own_scalers()}

    async def _asked_to_reload(self, payload: Mapping[str, object]) -> object:
        return msgspec.to_builtins(await self._one.reload_scalers())

    async def _asked_to_drain(self, payload: Mapping[str, object]) -> object:
        return {"drained": self._one.sessions.drain_agent(AgentId(str(payload["agentId"])))}


class _WorkersOf:
    """The workers of a coordinator, which are wired after its cluster."""

    def __init__(self, one: "Coordinator") -> None:
        self._one = one

    def is_linked(self, worker_id: str) -> bool:
        return self._one.workers.is_linked(worker_id)

    async def linked_to(self, worker_id: str) -> Sequence[InstanceId]:
        return await self._one.workers.linked_to(worker_id)

    async def ask_vms(self, worker_id: str, payload: Mapping[str, object], *, seconds: float) -> object:
        return await self._one.workers.ask_vms(worker_id, payload, seconds=seconds)
