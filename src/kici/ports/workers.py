"""Hosts that spawn for coordinators: how orders reach them, how they reach coordinators, what is stored of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kici.domain.errors import NoCapacity, Retryable
from kici.domain.ids import AgentId, InstanceId, Instant
from kici.domain.spawn import Spawn
from kici.domain.verdict import AtCap
from kici.domain.worker import JoinToken, Worker
from kici.ports.backend import Backend, ForgettingBackend
from kici.ports.link import LinkHandler
from kici.ports.live_vms import BootDataBackend
from kici.wire.worker_messages import Answer, Held, MarkRegistered, Request, SpawnProgress

OnAnswer = Callable[[Answer], None]


class WorkerFull(NoCapacity):
    """The host of a worker has no room for one more agent; the verdict says which cap it is."""

    def __init__(self, message: str, verdict: AtCap) -> None:
        super().__init__(message)
        self.verdict = verdict


class Unanswered(Retryable):
    """No answer came to an order: it may have been carried out."""


class WorkerChannel(Protocol):
    """Orders to one worker, over whatever connection there is at the moment."""

    @property
    def name(self) -> str:
        """What people call the worker."""
        ...

    @property
    def is_linked(self) -> bool: ...

    @property
    def protocol(self) -> int:
        """The version of the link that the worker spoke last."""
        ...

    @property
    def is_given_up(self) -> bool:
        """An operator gave the worker up: what it held is nobody's any more, and no order will reach it."""
        ...

    async def ask(
        self,
        order: Callable[[str], Request],
        *,
        what: str,
        seconds: float | None,
        on_answer: OnAnswer = lambda answer: None,
    ) -> Answer:
        """Send `order(request id)` now and again after each reconnect, until it is answered.

        An answer may carry a fault.  `on_answer` is called when it comes, before anything that came after it.
        Raises `Unanswered` naming `what` when there is none within `seconds` (None: the caller has a deadline of its
        own) or when the worker stays away.
        """
        ...

    def tell(self, order: MarkRegistered) -> None:
        """Send without an answer; lost while there is no connection."""
        ...


class RemoteScaler(Backend, BootDataBackend, ForgettingBackend, Protocol):
    """What the keeper of a worker's link tells the backend of one of its scalers."""

    def offered(self, sets: Sequence[tuple[str, ...]], max_agents: int) -> None:
        """What the worker says of the scaler from now on."""
        ...

    def expect(self, rows: Sequence[Spawn]) -> None:
        """Agents that the worker should hold, by their rows: they count as alive until it tells."""
        ...

    def compared(self, held: Mapping[AgentId, Held], gone: Mapping[AgentId, str]) -> None:
        """The worker is back and says what it holds, and what ended of late."""
        ...

    def progressed(self, progress: SpawnProgress) -> bool:
        """Whether the agent is one of this scaler's."""
        ...

    def ended(self, agent_id: AgentId, how: str) -> bool:
        """The compute of an agent ended by itself.  Whether the agent is one of this scaler's."""
        ...


class Dialer(Protocol):
    """Opens connections to coordinators."""

    async def dial(self, url: str, handler: LinkHandler) -> None:
        """Open a connection and serve it to its end.  Raises `Retryable` when it cannot be opened."""
        ...


class WorkerKeys(Protocol):
    """What a worker keeps of its right to be one."""

    def credential(self) -> str | None: ...

    def keep(self, credential: str | None) -> None:
        """On disk when this returns.  None: the one that there is was refused for good."""
        ...

    def join_token(self) -> str | None: ...


class WorkerStore(Protocol):
    """`join_tokens`, `workers` and `worker_links`.  Of secrets only hashes come here."""

    async def create_join_token(self, token: JoinToken) -> None: ...

    async def join_tokens(self, *, limit: int, now: Instant | None = None) -> list[JoinToken]:
        """Those that have not run out, oldest first."""
        ...

    async def revoke_join_token(self, token_id: str, *, now: Instant | None = None) -> bool:
        """It is good no more; who has joined with it stays.  False: there is none that is good."""
        ...

    async def join_worker(
        self, worker: Worker, *, token_hash: str, role: str, credential_hash: str, now: Instant | None = None
    ) -> bool:
        """Trade a token that is neither expired nor used (but by this same worker) for a credential, in one unit.

        False: the token is not good, and nothing was written.  The credential before, if any, is good no more.
        """
        ...

    async def worker(self, worker_id: str) -> Worker | None: ...

    async def workers(self, *, limit: int) -> list[Worker]: ...

    async def revoke_worker(self, worker_id: str, *, now: Instant | None = None) -> bool:
        """Its credential, and tokens that it used, are good no more.  False: there was nothing to revoke."""
        ...

    async def link_workers(
        self, worker_ids: Sequence[str], instance_id: InstanceId, *, now: Instant | None = None
    ) -> frozenset[str]:
        """These are linked to this coordinator, still.  Those of them that are workers still."""
        ...

    async def unlink_worker(self, worker_id: str, instance_id: InstanceId) -> None: ...

    async def take_over_worker_spawns(
        self, worker_id: str, to: InstanceId, *, fresh_ms: int, now: Instant | None = None
    ) -> list[Spawn]:
        """Spawns and reservations of a worker whose owner has not been linked to it within `fresh_ms` are ours.

        The rows that moved.  None do unless we are linked ourselves; of a revoked worker, all do.
        """
        ...

    async def purge_join_tokens(self, *, now: Instant | None = None) -> int:
        """Forget tokens that ran out a day ago.  How many."""
        ...
