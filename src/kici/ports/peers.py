"""How coordinators on one store reach each other: rows for what must arrive, hints for what should be quick."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Never, Protocol

from kici.domain.ids import AgentId, ConnectionId, InstanceId, Instant, TokenId
from kici.domain.peer import Capacity, PeerRequest


class Topic(StrEnum):
    QUEUE = "queue"
    """Jobs are waiting that this coordinator may be able to take."""
    REQUESTS = "requests"
    """A request was put before somebody."""
    EVENTS = "events"
    """An event is to be delivered, or was given up."""


class Notifier(Protocol):
    """Tells other coordinators to look.  A hint may be lost or doubled; everybody also polls."""

    def hint(self, topic: Topic) -> None:
        """Tell the others soon.  Many hints become one; never fails, never waits."""
        ...

    def listen(self, topic: Topic, listener: Callable[[], None]) -> None:
        """Call `listener` at every hint of another coordinator."""
        ...

    async def run(self) -> Never:
        """Send and receive for ever.  Leave by cancellation."""
        ...


class PeerProbe(Protocol):
    """Asks other coordinators without the store."""

    async def is_ready(self, address: str) -> bool:
        """Whether the coordinator that agents reach at `address` can work now.  Within seconds; never fails."""
        ...


class PeerStore(Protocol):
    """`scaler_capacity` and `peer_requests`."""

    async def put_capacity(
        self, instance_id: InstanceId, capacity: Capacity, *, now: Instant | None = None
    ) -> None: ...

    async def capacities(
        self, *, except_instance_id: InstanceId, present_ms: int, limit: int, now: Instant | None = None
    ) -> Mapping[InstanceId, Capacity]:
        """Of the other instances whose beat is younger than `present_ms`."""
        ...

    async def ask_peer(self, request: PeerRequest, *, ttl_ms: int, now: Instant | None = None) -> None: ...

    async def peer_requests(
        self, target: InstanceId, *, limit: int, now: Instant | None = None
    ) -> list[PeerRequest]: ...

    async def answer_peer(self, request_id: str, answer: str, *, now: Instant | None = None) -> bool: ...

    async def peer_answer(self, request_id: str) -> str | None: ...

    async def purge_peer_requests(self, *, now: Instant | None = None) -> int: ...

    async def revoked_session_tokens(self, instance_id: InstanceId, *, limit: int) -> list[TokenId]:
        """Revoked tokens of agents connected to this instance."""
        ...

    async def connections_of(self, instance_id: InstanceId) -> dict[AgentId, ConnectionId]:
        """By which connection each agent is with this instance, as its session tells."""
        ...

    async def strays(self, instance_id: InstanceId, *, limit: int, now: Instant | None = None) -> list[AgentId]:
        """Agents of this instance's local spawns that have registered, are connected nowhere, and hold no job."""
        ...

    async def forget_spawns_of(self, instance_id: InstanceId, *, now: Instant | None = None) -> int:
        """Delete the local spawns and reservations of an instance that is silent for long.  How many spawns.

        Not those whose agents are connected to another instance that lives, and none whose agent holds a job.
        """
        ...

    async def forget_instance(
        self, instance_id: InstanceId, *, heard_before: Instant, now: Instant | None = None
    ) -> bool:
        """Delete an instance that is gone for good with its local spawns, reservations, sessions, addresses and links.

        Spawns are spared as by `forget_spawns_of`.  False: it has beaten in the minute before `heard_before`, or is
        not there; then nothing was written.
        """
        ...
