"""A worker's host at the end of its links: orders in, answers and news out.

It decides nothing about jobs, and takes orders from every coordinator that it is linked to.  An order for an agent
that it has already is answered by what it has, so orders may come twice.  Every end is told to everybody who is
linked; progress goes to the coordinator that ordered.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol, assert_never

import msgspec

from kici.domain.errors import KiciError
from kici.domain.ids import AgentId, InstanceId, JobId, RunId, ScalerName, TokenId
from kici.domain.resources import Amount
from kici.domain.spawn import ScaleDownReason
from kici.kit.supervise import Supervisor
from kici.ports.backend import JobContainer, SpawnEvent, SpawnOrder
from kici.services.live_vms import LocalVms
from kici.services.worker_agents import HostAgents
from kici.services.worker_faults import fault_of
from kici.services.worker_holdings import Holding, Holdings
from kici.services.workers_offer import offer_of
from kici.wire.messages import Unsupported
from kici.wire.worker_messages import (
    AbortSpawn,
    Amounts,
    Answer,
    AskVms,
    Challenge,
    ClearBootData,
    ComputeGone,
    DestroyAgent,
    FaultKind,
    Gone,
    Held,
    Image,
    MarkRegistered,
    ReapAgent,
    RecoverAgents,
    Refused,
    Request,
    SpawnAgent,
    SpawnProgress,
    SweepOrphans,
    TailAgent,
    Welcome,
    WorkerBeat,
    WorkerInventory,
    WorkerLeaving,
    WorkerLoad,
    WorkerMessage,
    WorkerOrder,
)


class Seat(Protocol):
    """A coordinator that the worker is linked to."""

    @property
    def instance_id(self) -> InstanceId: ...

    def send(self, message: WorkerMessage) -> None: ...


class WorkerHost:
    def __init__(self, *, agents: HostAgents, supervisor: Supervisor) -> None:
        self._agents = agents
        self._vms = LocalVms(manager=agents, spawns=agents.holdings, registry=_Registered(agents.holdings))
        self._supervisor = supervisor
        self._seats: dict[InstanceId, Seat] = {}
        self._told: dict[InstanceId, WorkerLoad] = {}
        self._refused: set[InstanceId] = set()
        """Coordinators that were told that there is no room: they want to know when there is."""
        agents.progressed = self._progressed
        agents.gone = self._gone
        agents.changed = self._changed

    @property
    def linked_to(self) -> frozenset[InstanceId]:
        return frozenset(self._seats)

    def owner_of(self, agent_id: AgentId) -> InstanceId | None:
        """The coordinator that an agent is best served by."""
        holding = self._agents.holdings.get(agent_id)
        return None if holding is None else holding.owner

    # ------------------------------------------------------------------ links

    def attach(self, seat: Seat) -> None:
        """A coordinator let us in: tell it everything."""
        self._seats[seat.instance_id] = seat
        seat.send(offer_of(self._agents.fleet))
        seat.send(self._inventory())
        self._told[seat.instance_id] = load = self._load(seat.instance_id)
        if load.scalers:
            seat.send(load)

    def offer_again(self) -> None:
        """What this host can make has changed."""
        for seat in self._seats.values():
            seat.send(offer_of(self._agents.fleet))

    def detach(self, seat: Seat) -> None:
        """The link is gone.  A newer one of the same coordinator is not concerned."""
        if self._seats.get(seat.instance_id) is seat:
            del self._seats[seat.instance_id]
            self._told.pop(seat.instance_id, None)
            self._refused.discard(seat.instance_id)

    async def leave(self, *, keep_agents: bool) -> None:
        """The program ends."""
        for seat in self._seats.values():
            seat.send(WorkerLeaving(reason="the worker is stopped", keeps_agents=keep_agents))
        await self._agents.leave(keep_agents=keep_agents)

    # ------------------------------------------------------------------ orders

    def ordered(self, seat: Seat, order: WorkerOrder) -> None:
        """Begin what is ordered; orders are begun in the order in which they come."""
        match order:
            case SpawnAgent():
                self._spawn(seat, order)
            case AbortSpawn(agent_id=agent_id):
                self._answer(seat, order, lambda: self._aborted(AgentId(agent_id)))
            case DestroyAgent():
                self._answer(seat, order, lambda: self._destroyed(order))
            case MarkRegistered(agent_id=agent_id):
                self._agents.mark_registered(AgentId(agent_id))
            case ClearBootData(agent_id=agent_id):
                self._answer(seat, order, lambda: self._cleared(AgentId(agent_id)))
            case RecoverAgents():
                self._answer(seat, order, lambda: self._recovered(seat, order))
            case ReapAgent() | SweepOrphans() | AskVms() | TailAgent():
                self._answer(seat, order, lambda: self._looked(seat, order))
            case Challenge() | Welcome() | Refused() | WorkerBeat() | Unsupported():
                pass  # the protocol half deals with these
            case _:
                assert_never(order)

    def _spawn(self, seat: Seat, order: SpawnAgent) -> None:
        """Begun at once: what is ordered next may be its end."""
        try:
            holding = self._agents.begin(
                _order(order), scaler=ScalerName(order.scaler), owner=InstanceId(seat.instance_id)
            )
        except KiciError as error:
            self._refuse(seat, order.request_id, error)
            return
        self._supervisor.start(f"answer.{order.request_id}", self._spawned(seat, order.request_id, holding))

    async def _spawned(self, seat: Seat, request_id: str, holding: Holding) -> None:
        await holding.settled.wait()
        if holding.fault is not None:
            self._note_refusal(seat, holding.fault.kind)
            seat.send(Answer(request_id=request_id, fault=holding.fault))
        else:
            seat.send(Answer(request_id=request_id, agents=self._held((holding,))))

    def _answer(self, seat: Seat, order: Request, act: Callable[[], Awaitable[Answer]]) -> None:
        self._supervisor.start(f"answer.{order.request_id}", self._act(seat, order.request_id, act))

    async def _act(self, seat: Seat, request_id: str, act: Callable[[], Awaitable[Answer]]) -> None:
        try:
            answer = await act()
        except Exception as error:  # noqa: BLE001 - the border of a backend: whatever it raises is told
            self._refuse(seat, request_id, error)
        else:
            seat.send(msgspec.structs.replace(answer, request_id=request_id))

    def _refuse(self, seat: Seat, request_id: str, error: Exception) -> None:
        fault = fault_of(error)
        self._note_refusal(seat, fault.kind)
        seat.send(Answer(request_id=request_id, fault=fault))

    async def _aborted(self, agent_id: AgentId) -> Answer:
        await self._agents.abort(agent_id)
        return Answer(request_id="")

    async def _destroyed(self, order: DestroyAgent) -> Answer:
        agent_id = AgentId(order.agent_id)
        await self._agents.destroy(agent_id, ScaleDownReason(order.reason))
        return Answer(request_id="", lines=tuple(self._agents.tail(agent_id, 50)))

    async def _cleared(self, agent_id: AgentId) -> Answer:
        await self._agents.clear_boot_data(agent_id)
        return Answer(request_id="")

    async def _recovered(self, seat: Seat, order: RecoverAgents) -> Answer:
        known = frozenset(map(AgentId, order.known))
        found = self._agents.take_over(ScalerName(order.scaler), known, owner=seat.instance_id)
        return Answer(request_id="", agents=self._held(found))

    async def _looked(self, seat: Seat, order: ReapAgent | SweepOrphans | AskVms | TailAgent) -> Answer:
        match order:
            case ReapAgent(agent_id=agent_id):
                return Answer(request_id="", count=int(await self._agents.reap(AgentId(agent_id))))
            case SweepOrphans(scaler=scaler, owned=owned):
                known = frozenset(map(AgentId, owned))
                count = await self._agents.sweep(ScalerName(scaler), owner=seat.instance_id, owned=known)
                return Answer(request_id="", count=count)
            case AskVms(payload=payload):
                return await self._asked_for_vms(payload)
            case TailAgent(agent_id=agent_id, lines=lines):
                return Answer(request_id="", lines=tuple(self._agents.tail(AgentId(agent_id), lines)))
            case _:
                assert_never(order)

    async def _asked_for_vms(self, payload: str) -> Answer:
        try:
            found = await self._vms.answer(msgspec.json.decode(payload), self._agents.host_id)
        except KiciError as error:
            found = {"error": str(error)}
        return Answer(request_id="", vms=msgspec.json.encode(found).decode())

    # ------------------------------------------------------------------ news

    def _progressed(self, holding: Holding, event: SpawnEvent) -> None:
        seat = self._seats.get(holding.owner)
        if seat is not None:
            seat.send(SpawnProgress(agent_id=event.agent_id, kind=event.type, detail=event.detail, at=event.at))

    def _gone(self, agent_id: AgentId, how: str) -> None:
        for seat in self._seats.values():
            seat.send(ComputeGone(agent_id=agent_id, how=how))

    def _changed(self) -> None:
        """More or less is in use: tell those for whom it changed, and those who wait for room."""
        for instance_id, seat in self._seats.items():
            load = self._load(instance_id)
            if load != self._told.get(instance_id) or instance_id in self._refused:
                self._told[instance_id] = load
                self._refused.discard(instance_id)
                seat.send(load)

    def _note_refusal(self, seat: Seat, kind: str) -> None:
        if kind == FaultKind.NO_CAPACITY:
            self._refused.add(seat.instance_id)

    def _load(self, instance_id: InstanceId) -> WorkerLoad:
        return WorkerLoad(scalers=self._agents.holdings.used_by_others(instance_id))

    def _inventory(self) -> WorkerInventory:
        holdings = self._agents.holdings
        return WorkerInventory(
            agents=self._held(holdings),
            gone=tuple(Gone(agent_id=agent_id, how=how) for agent_id, how in holdings.gone().items()),
        )

    def _held(self, holdings: Iterable[Holding]) -> tuple[Held, ...]:
        computes = self._agents.computes()
        return tuple(holding.held(computes.get(holding.agent_id)) for holding in holdings)


class _Registered:
    """Agents of this host that coordinators have seen come."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings

    def get(self, agent_id: AgentId, /) -> object | None:
        holding = self._holdings.get(agent_id)
        return holding if holding is not None and holding.registered else None


def _order(order: SpawnAgent) -> SpawnOrder:
    """As a backend of this host takes it.  Where its agent connects to is for this host to say."""
    return SpawnOrder(
        agent_id=AgentId(order.agent_id),
        label_set=order.label_set,
        labels=order.labels,
        gate=frozenset(order.gate),
        token=order.token,
        token_id=None if order.token_id is None else TokenId(order.token_id),
        orchestrator_url="",
        limits=_amount(order.limits),
        requests=_amount(order.requests),
        bound_job_id=None if order.bound_job_id is None else JobId(order.bound_job_id),
        run_id=None if order.run_id is None else RunId(order.run_id),
        container=None if order.image is None else _container(order.image),
    )


def _amount(amounts: Amounts) -> Amount:
    return Amount(cpus=amounts.cpus, memory_bytes=amounts.memory_bytes)


def _container(image: Image) -> JobContainer:
    return JobContainer(
        image=image.image,
        username=image.username,
        password=image.password,
        registry=image.registry,
        env=image.env,
    )
