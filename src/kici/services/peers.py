"""This coordinator among others on one store: what they could serve, what they ask of each other, who is gone.

The store holds the truth; hints only make it quick.  Alone, all of this finds nobody and does nothing.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, Never, Protocol

import msgspec

from kici.decide.peers import could_serve, has_idle
from kici.domain.errors import KiciError, StoreDown
from kici.domain.ids import InstanceId
from kici.domain.job import Demand
from kici.domain.peer import Capacity, Offer, PeerRequest, RequestKind
from kici.kit.ticker import Ticker
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.peers import Notifier, PeerStore, Topic
from kici.services.registry import AgentRegistry
from kici.services.scaler_manager import ScalerManager
from kici.services.store_outages import sits_out_outages

PRESENT_MS: Final = 60_000
"""A coordinator whose beat is older is absent."""
LOOK_SECONDS: Final = 2.0
PEERS_MAX: Final = 100
REQUESTS_BATCH: Final = 50
ANSWER_SECONDS_MAX: Final = 240.0
POLL_SECONDS: Final = 0.2

Act = Callable[[Mapping[str, object]], Awaitable[object]]
"""Does what a request asks; its answer is stored as JSON.  Must be safe to repeat."""


class PeerView:
    """What the other present coordinators could serve, as last read; and what this one tells them."""

    def __init__(
        self,
        *,
        store: PeerStore,
        registry: AgentRegistry,
        manager: ScalerManager,
        clock: Clock,
        instance_id: InstanceId,
        address: str = "",
    ) -> None:
        """`address`: where agents reach this coordinator."""
        self._address = address
        self._store = store
        self._registry = registry
        self._manager = manager
        self._clock = clock
        self._instance_id = instance_id
        self._others: Mapping[InstanceId, Capacity] = {}
        self._told: Capacity | None = None
        self._told_at = 0.0

    @property
    def others(self) -> frozenset[InstanceId]:
        return frozenset(self._others)

    @property
    def capacities(self) -> Iterable[Capacity]:
        """Of the others, as last read."""
        return self._others.values()

    def could_serve(self, demand: Demand) -> bool:
        """Whether another coordinator could."""
        return could_serve(self._others.values(), demand)

    def has_idle(self, demand: Demand) -> bool:
        """Whether an agent that waits elsewhere could take it."""
        return has_idle(self._others.values(), demand)

    async def run(self) -> Never:
        while True:
            with sits_out_outages("looking for peers"):
                await self.tick()
            await self._clock.sleep(LOOK_SECONDS)

    async def tick(self) -> None:
        """Look, and tell what changed: one that can read, but not write, still knows where the others are."""
        await self.look()
        mine = self._capacity()
        now = self._clock.monotonic()
        if mine != self._told or now - self._told_at >= PRESENT_MS / 1000 / 2:
            await self._store.put_capacity(self._instance_id, mine)
            self._told, self._told_at = mine, now

    async def look(self) -> None:
        """Who else is there, remembered until the next look that succeeds."""
        self._others = await self._store.capacities(
            except_instance_id=self._instance_id, present_ms=PRESENT_MS, limit=PEERS_MAX
        )

    def _capacity(self) -> Capacity:
        kinds: Counter[tuple[frozenset[str], frozenset[str]]] = Counter()
        for agent in self._registry:
            if agent.may_serve:
                kinds[(agent.shape.labels, agent.shape.gate)] += int(agent.is_free)
        return Capacity(
            agents=tuple(Offer(labels=labels, gate=gate, idle=idle) for (labels, gate), idle in kinds.items()),
            scalers=tuple(Offer(labels=entry.offers, gate=entry.gate) for entry in self._manager.fleet.router.entries),
            address=self._address,
        )


class Requests(Protocol):
    """Who asks other coordinators for acts."""

    async def ask(
        self, target: InstanceId, kind: RequestKind, payload: Mapping[str, object], *, seconds: float
    ) -> object: ...


class PeerRequests:
    """Asks others, and answers what others ask."""

    def __init__(
        self,
        *,
        store: PeerStore,
        notifier: Notifier,
        clock: Clock,
        entropy: Entropy,
        instance_id: InstanceId,
        acts: Mapping[RequestKind, Act],
    ) -> None:
        self._store = store
        self._notifier = notifier
        self._clock = clock
        self._entropy = entropy
        self._instance_id = instance_id
        self._acts = acts
        self._ticker = Ticker(LOOK_SECONDS)
        notifier.listen(Topic.REQUESTS, self._ticker.nudge)

    async def tell(self, target: InstanceId, kind: RequestKind, payload: Mapping[str, object]) -> str:
        """Put a request before another coordinator and go on.  Its id."""
        request = PeerRequest(
            id=self._entropy.hex(8), target=target, kind=kind, payload=msgspec.json.encode(payload).decode()
        )
        await self._store.ask_peer(request, ttl_ms=round(ANSWER_SECONDS_MAX * 1000))
        self._notifier.hint(Topic.REQUESTS)
        return request.id

    async def ask(
        self, target: InstanceId, kind: RequestKind, payload: Mapping[str, object], *, seconds: float
    ) -> object:
        """The answer of another coordinator; None when none came within `seconds` (240 at most)."""
        request_id = await self.tell(target, kind, payload)
        ends_at = self._clock.monotonic() + min(seconds, ANSWER_SECONDS_MAX)
        while self._clock.monotonic() < ends_at:
            answer = await self._store.peer_answer(request_id)
            if answer is not None:
                return msgspec.json.decode(answer)
            await self._clock.sleep(POLL_SECONDS)
        return None

    async def run(self) -> Never:
        while True:
            with sits_out_outages("answering peers"):
                await self.tick()
            await self._ticker.next()

    async def tick(self) -> int:
        """Answer what waits.  How many."""
        waiting = await self._store.peer_requests(self._instance_id, limit=REQUESTS_BATCH)
        for request in waiting:
            await self._store.answer_peer(request.id, await self._do(request))
        return len(waiting)

    async def _do(self, request: PeerRequest) -> str:
        act = self._acts.get(request.kind)
        if act is None:
            return msgspec.json.encode({"error": f"this coordinator does not serve {request.kind}"}).decode()
        try:
            answer = await act(msgspec.json.decode(request.payload))
        except StoreDown:
            raise  # asked again at the next look
        except KiciError as error:
            answer = {"error": str(error)}
        emit(Event.PEER_ANSWERED, kind=request.kind, request_id=request.id)
        return msgspec.json.encode(answer).decode()
