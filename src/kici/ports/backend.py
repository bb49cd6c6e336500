"""What makes agents: containers, processes, machines."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from kici.domain.ids import AgentId, Instant, JobId, RunId, TokenId
from kici.domain.resources import Amount
from kici.domain.spawn import ScaleDownReason


class ComputeState(StrEnum):
    SPAWNING = "spawning"
    RUNNING = "running"
    DESTROYING = "destroying"


class SpawnEventType(StrEnum):
    PROVISIONING = "scaler.provisioning"
    NETWORK = "scaler.network"
    READY = "scaler.ready"
    FAILED = "scaler.failed"
    CONNECTING = "agent.connecting"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnEvent:
    """Progress of one spawn, for the run's log and for diagnosis."""

    agent_id: AgentId
    type: SpawnEventType
    detail: str
    at: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContainer:
    """The job's own image with resolved registry credentials (never logged)."""

    image: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    registry: str | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnOrder:
    """Everything a backend needs to make one agent."""

    agent_id: AgentId
    label_set: tuple[str, ...]
    """The declared set; the backend finds its settings by exact normalised equality."""
    labels: tuple[str, ...]
    """The full labels that the agent must carry."""
    gate: frozenset[str]
    token: str | None = field(repr=False)
    """Plain text of the agent's credential; None when agents are not authenticated."""
    token_id: TokenId | None = None
    """Which credential that is, for what the host remembers of the agent."""
    orchestrator_url: str
    limits: Amount
    """Enforced limits; a dimension of 0 is unlimited."""
    requests: Amount
    bound_job_id: JobId | None = None
    run_id: RunId | None = None
    container: JobContainer | None = None
    proof: int | None = None
    """A descriptor that a process inherits and its machine pool knows it by.  None: it is billed to no pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One tracked compute."""

    agent_id: AgentId
    label_set: tuple[str, ...]
    ref: str
    """What people find it by on its host: a pid, a container id."""
    spawned_at: Instant
    state: ComputeState
    registered: bool = False


OnEvent = Callable[[SpawnEvent], None]
"""Called synchronously on the loop.  A `FAILED` event after `spawn` returned means: this compute is gone."""


class Backend(Protocol):
    """One scaler's maker of agents.

    Rules that every backend obeys (the contract suite checks them):
    capacity is checked and the compute tracked before the first await; a failed or cancelled `spawn`
    undoes everything, emits `FAILED` once and tracks nothing; a refusal by the host itself raises
    `DeterministicRefusal`; a compute that is found gone after `spawn` returned is untracked and reported
    by `on_event(FAILED)` if its agent had not registered, by `on_exit` if it had; what is made is tagged with
    the agent id before it exists, so that it can be found again after a crash.
    """

    @property
    def type(self) -> str: ...

    @property
    def spawns_on_local_host(self) -> bool: ...

    def active_count(self) -> int:
        """Tracked computes in any state."""
        ...

    def computes(self) -> tuple[Compute, ...]: ...

    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        """Start one agent.  Cancelling the call aborts and undoes it.

        Raises `NoCapacity`, `DeterministicRefusal`, or `Permanent`/`Retryable` with the reason.
        """
        ...

    async def destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        """End one compute and everything made for it; returns when it is known to be gone.

        An unknown id is a silent no-op.  Raises `Retryable` when it could not be confirmed; it stays tracked.
        """
        ...

    def mark_registered(self, agent_id: AgentId) -> None:
        """Its agent registered: from now on its exit is no failed launch."""
        ...

    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        """After a restart: find the computes of `known` agents that still live, track and return them.

        Whatever else carries this scaler's mark is left for `reap_unowned`/`cleanup_orphans`.
        """
        ...

    async def reap_unowned(self, agent_id: AgentId) -> bool:
        """Destroy what this host holds for an id that nothing owns.  Whether anything was found."""
        ...

    async def cleanup_orphans(self, owned: frozenset[AgentId]) -> int:
        """Destroy every compute with this scaler's mark that is neither tracked nor in `owned`.  How many."""
        ...

    async def shutdown_all(self) -> None:
        """End everything tracked.  Raises `Retryable` that names whatever could not be confirmed to have ended."""
        ...

    async def release_all(self) -> None:
        """Forget everything tracked and let it live: the next start recovers it."""
        ...

    def tail(self, agent_id: AgentId, lines: int) -> list[str]:
        """Last lines of what the agent program itself printed."""
        ...


@runtime_checkable
class ForgettingBackend(Protocol):
    """A backend whose computes may pass to another coordinator."""

    def forget(self, agent_id: AgentId) -> None:
        """Somebody else looks after it now: track it no longer, and end nothing."""
        ...


OnExit = Callable[[AgentId, str], None]
"""The compute of a registered agent, or of any that `recover` returned, ended by itself: proof of death, with a
sentence that says how.  Called synchronously on the loop, once nothing of it is left."""
