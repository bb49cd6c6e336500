"""Workers that are linked to this coordinator: let in, listened to, and their scalers offered to jobs.

A worker's scalers are scalers of this coordinator like any other, while it is linked.  A lost link takes them out of
the routing at once and ends no agent; when the worker is back, what it holds is compared with what is tracked here.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Final, Never

from kici.decide.pool import Pool
from kici.domain.errors import StoreDown
from kici.domain.ids import AgentId, InstanceId
from kici.domain.spawn import Spawn
from kici.kit.supervise import Supervisor
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.link import Link
from kici.services.scaler_manager import ScalerManager
from kici.services.spawn_book import SpawnBook
from kici.services.store_outages import sits_out_outages
from kici.services.workers_channel import Channel
from kici.services.workers_credentials import Admitted, WorkerCredentials
from kici.services.workers_host import MakeBackend, RemoteHost, usage_of
from kici.services.workers_link import WorkerConnection
from kici.services.workers_rows import WorkerRows
from kici.wire.messages import CloseCode
from kici.wire.worker_gate import Judge, Linked, WorkerGate
from kici.wire.worker_messages import (
    Answer,
    ComputeGone,
    LinkClose,
    SpawnProgress,
    WorkerHello,
    WorkerLeaving,
    WorkerLoad,
    WorkerMessage,
    WorkerOffer,
)

TICK_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 10.0
REVOKED: Final = "Credential revoked"
_STRANGE: Final = re.compile(r"[^A-Za-z0-9._-]+")
NAME_MAX: Final = 64


class Workers:
    """Implements the gateway's handler, and `Desk` for connections."""

    def __init__(
        self,
        *,
        credentials: WorkerCredentials,
        rows: WorkerRows,
        manager: ScalerManager,
        spawns: SpawnBook,
        make_backend: MakeBackend,
        capacity_freed: Callable[[], None],
        foreign_ended: Callable[[AgentId, str], None],
        supervisor: Supervisor,
        clock: Clock,
        entropy: Entropy,
        instance_id: InstanceId,
    ) -> None:
        """`foreign_ended(agent id, how)`: proof of death of an agent that another coordinator looks after."""
        self.credentials = credentials
        self._rows = rows
        self._manager = manager
        self._spawns = spawns
        self._make_backend = make_backend
        self._capacity_freed = capacity_freed
        self._foreign_ended = foreign_ended
        self._supervisor = supervisor
        self._clock = clock
        self._entropy = entropy
        self._instance_id = instance_id
        self._fills: frozenset[str] = frozenset()
        """Workers whose warm pools this coordinator fills: one does for each."""
        self.pools_changed: Callable[[list[Pool]], None] = lambda pools: None
        """Set by the composition root: told which warm pools of workers are to be filled from here."""
        self._hosts: dict[str, RemoteHost] = {}
        self._linked: dict[str, WorkerConnection] = {}
        self._connections: dict[WorkerConnection, None] = {}
        self._looked_at = clock.monotonic()

    def host(self, worker_id: str) -> RemoteHost | None:
        return self._hosts.get(worker_id)

    def is_linked(self, worker_id: str) -> bool:
        return worker_id in self._linked

    def expect(self, rows: list[Spawn]) -> None:
        """After a restart, before anybody is let in: rows of agents on workers."""
        by_worker: dict[str, list[Spawn]] = defaultdict(list)
        for row in rows:
            if row.worker_id is not None:
                by_worker[row.worker_id].append(row)
        for worker_id, mine in by_worker.items():
            self._rows.expect(self._meet(worker_id), mine)
        self._publish()

    # ------------------------------------------------------------------ time

    async def run(self) -> Never:
        """Keep links, and what the store says of them.  Leave by cancellation."""
        while True:
            await self._clock.sleep(TICK_SECONDS)
            await self.tick()
            if self._clock.monotonic() - self._looked_at >= LOOK_SECONDS:
                self._looked_at = self._clock.monotonic()
                with sits_out_outages("looking after workers"):
                    await self.look()

    async def tick(self) -> None:
        """Let the timers of all links act, and let go of workers that nothing is left of."""
        for connection in tuple(self._connections):
            await connection.tick()
        for host in self._hosts.values():
            host.channel.tick()
        forgotten = [worker_id for worker_id in self._hosts if self._is_over(worker_id)]
        for worker_id in forgotten:
            del self._hosts[worker_id]
        if forgotten:
            self._publish()

    async def look(self) -> None:
        """One look at the store."""
        revoked = set(await self._rows.confirm(self._hosts[worker_id] for worker_id in self._linked))
        for worker_id, host in list(self._hosts.items()):
            if worker_id not in self._linked and not host.channel.is_given_up and await self._rows.is_revoked(host):
                revoked.add(worker_id)
        for worker_id in sorted(revoked):
            await self.revoked(worker_id)
        await self._rows.let_go()
        for worker_id in sorted(self._linked):
            await self._settle(worker_id)
        await self._share_pools()

    async def _share_pools(self) -> None:
        """Fill the warm pools of those workers whose pools nobody else fills."""
        with_pools = [worker_id for worker_id in self._linked if self._hosts[worker_id].pools]
        self._fills = await self._rows.fillable(with_pools)
        self._publish_pools()

    async def _settle(self, worker_id: str) -> None:
        """What the store has of agents of a linked worker, against what that holds."""
        host = self._hosts[worker_id]
        await self._rows.take_over(host)
        await self._rows.explain(host)

    # ------------------------------------------------------------------ links

    def connected(self, link: Link) -> WorkerConnection:
        """A new socket."""
        gate = WorkerGate(instance_id=self._instance_id, nonce=self._entropy.hex(16), now=self._clock.monotonic())
        connection = WorkerConnection(link=link, gate=gate, desk=self, clock=self._clock)
        self._connections[connection] = None
        return connection

    async def judge(self, connection: WorkerConnection, asked: Judge) -> None:
        judged = await self.credentials.judge(
            asked.hello, asked.proof, nonce=connection.gate.nonce, remote=connection.remote
        )
        if isinstance(judged, Admitted):
            connection.hello = asked.hello
            await connection.apply(connection.gate.welcomed(proof=judged.proof, credential=judged.credential))
        else:
            await connection.apply(connection.gate.refused(judged.reason, is_permanent=judged.is_permanent))

    async def linked(self, connection: WorkerConnection, told: Linked) -> None:
        """A worker told everything: from now on it works for us."""
        assert connection.hello is not None, "only who was let in is linked"
        worker_id = connection.hello.worker_id
        before = self._linked.pop(worker_id, None)
        if before is not None:
            await before.apply(before.gate.dismissed(LinkClose.SUPERSEDED, "the worker opened a newer link"))
        host = self._meet(worker_id)
        host.channel.name = self._name(connection.hello)
        host.channel.protocol = connection.hello.protocol_version
        host.channel.attach(connection.send)
        self._linked[worker_id] = connection
        host.offered(told.offer)
        host.loaded({})
        host.compared(told.inventory)
        host.channel.send_again()
        emit(Event.WORKER_LINKED, worker_id=worker_id, name=host.name, agents=len(told.inventory.agents))
        self._publish()
        self._capacity_freed()
        self._supervisor.start(f"settle.{worker_id}", self._settle_new(worker_id))

    async def _settle_new(self, worker_id: str) -> None:
        try:
            revoked = await self._rows.confirm([self._hosts[worker_id]])
            if not revoked:
                await self._settle(worker_id)
                await self._share_pools()
        except (StoreDown, KeyError) as error:  # looked at again soon
            emit(Event.STORE_DOWN, level=logging.WARNING, worker_id=worker_id, error=str(error))

    async def received(self, connection: WorkerConnection, message: WorkerMessage) -> None:
        """News of a linked worker."""
        assert connection.hello is not None, "only who was let in is linked"
        worker_id = connection.hello.worker_id
        if self._linked.get(worker_id) is not connection:
            return
        host = self._hosts[worker_id]
        match message:
            case Answer():
                host.channel.answered(message)
            case SpawnProgress():
                host.progressed(message)
            case ComputeGone(agent_id=agent_id, how=how):
                if not host.ended(message):
                    self._foreign_ended(AgentId(agent_id), how)
            case WorkerLoad(scalers=scalers):
                loads = scalers.items()
                host.loaded(
                    {
                        name: usage_of(agents=used.agents, cpus=used.cpus, memory_bytes=used.memory_bytes)
                        for name, used in loads
                    }
                )
                self._capacity_freed()
            case WorkerOffer():
                host.offered(message)
                self._publish()
                self._capacity_freed()
            case WorkerLeaving():
                host.is_leaving = True
                self._publish()
            case _:
                pass

    async def lost(self, connection: WorkerConnection, why: str) -> None:
        """A socket is gone."""
        self._connections.pop(connection, None)
        worker_id = "" if connection.hello is None else connection.hello.worker_id
        if self._linked.get(worker_id) is not connection:
            return
        del self._linked[worker_id]
        host = self._hosts[worker_id]
        host.channel.detach()
        emit(Event.WORKER_LOST, level=logging.WARNING, worker_id=worker_id, name=host.name, reason=why)
        self._publish()
        if host.is_leaving:
            self._supervisor.start(f"unlink.{worker_id}", self._rows.unlink([worker_id]))

    async def revoked(self, worker_id: str) -> None:
        """A worker is none any more."""
        connection = self._linked.get(worker_id)
        emit(Event.WORKER_REVOKED, level=logging.WARNING, worker_id=worker_id)
        if connection is not None:
            await connection.apply(connection.gate.refused(REVOKED, is_permanent=True))
        await self._rows.give_up(self._meet(worker_id), "was revoked")
        self._publish()

    async def let_go(self, why: str) -> None:
        """End all links: workers come back, and their agents find a way through others meanwhile."""
        for connection in tuple(self._connections):
            await connection.apply(connection.gate.dismissed(CloseCode.GOING_AWAY, why))

    async def leave(self) -> None:
        """The coordinator ends: workers and their agents go on, and nobody here waits for answers any more."""
        linked = sorted(self._linked)
        for connection in tuple(self._connections):
            await connection.apply(connection.gate.dismissed(CloseCode.GOING_AWAY, "the coordinator stops"))
        for host in self._hosts.values():
            host.channel.close("the coordinator stops")
        await self._rows.unlink(linked)

    # ------------------------------------------------------------------ how

    def _meet(self, worker_id: str) -> RemoteHost:
        host = self._hosts.get(worker_id)
        if host is None or host.channel.is_given_up:
            channel = Channel(clock=self._clock, entropy=self._entropy)
            host = RemoteHost(worker_id, channel=channel, make_backend=self._make_backend, clock=self._clock)
            self._hosts[worker_id] = host
        return host

    def _name(self, hello: WorkerHello) -> str:
        """What it calls itself, unless another does."""
        name = _STRANGE.sub("-", hello.name)[:NAME_MAX] or "worker"
        others = {host.name for worker_id, host in self._hosts.items() if worker_id != hello.worker_id}
        return name if name not in others else f"{name}-{hello.worker_id[:8]}"

    def _is_over(self, worker_id: str) -> bool:
        """Not linked, and no agent of it is looked after here, or will be: some may be taken over right now."""
        is_away = worker_id not in self._linked and not self._hosts[worker_id].settling.locked()
        return is_away and not any(tracked.spawn.worker_id == worker_id for tracked in self._spawns)

    def _publish(self) -> None:
        """Scalers of workers, as they are now, to whoever decides."""
        hosts = self._hosts.values()
        runtimes = {runtime.name: runtime for host in hosts for runtime in host.runtimes}
        self._manager.elsewhere(runtimes, [entry for host in hosts for entry in host.entries])
        self._publish_pools()

    def _publish_pools(self) -> None:
        filled = [host for worker_id, host in self._hosts.items() if worker_id in self._fills]
        self.pools_changed([pool for host in filled for pool in host.pools])
