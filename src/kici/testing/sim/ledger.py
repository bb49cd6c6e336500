"""What a simulation knows to be true, kept apart from what the program believes: jobs, agents, spawn rows.

Kept by what was committed (see `watched`) and by what agents and machines did.  The checkers compare it with every
move; nothing of the program reads it.
"""

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final

from kici.domain.ids import AgentId, JobId, RunId
from kici.domain.job import HELD_BY_AGENT, Demand, JobStatus, RunStatus
from kici.domain.spawn import SpawnState
from kici.ports.backend import SpawnOrder
from kici.wire.messages import JobStatusReport

if TYPE_CHECKING:
    from kici.testing.sim.agent import SimAgent

SELF_LABELS: Final = ("kici:os:linux", "kici:arch:x64")
"""What every simulated agent adds to its labels by itself."""


@dataclass(slots=True, kw_only=True, eq=False)
class JobTruth:
    job_id: JobId
    run_id: RunId
    name: str
    demand: Demand
    status: JobStatus
    agent_id: AgentId | None = None
    granted_to: AgentId | None = None
    """For whom `running` was committed."""
    started_by: AgentId | None = None
    """Who started its step."""
    produced: dict[int, bytearray] = field(default_factory=lambda: {1: bytearray(), 2: bytearray()})
    stored: dict[int, int] = field(default_factory=lambda: {1: 0, 2: 0})
    """Bytes of each stream that are in the store."""
    reports: list[tuple[AgentId, JobStatusReport]] = field(default_factory=list)
    """Final statuses that agents sent."""
    acked_by: set[AgentId] = field(default_factory=set)
    """Agents that acknowledged its offer."""

    @property
    def is_held(self) -> bool:
        return self.status in HELD_BY_AGENT


@dataclass(slots=True, kw_only=True, eq=False)
class AgentTruth:
    agent_id: AgentId
    labels: frozenset[str]
    gate: frozenset[str] = frozenset()
    order: SpawnOrder | None = None
    """Of a scaler-made agent."""
    jobs_max: int | None = None
    """How many jobs it may run in its life; None: any number."""
    host: str = ""
    """Where its machine is; empty: it has none."""
    made_in_run: int = 0
    """Which run of the coordinator there made it: a later one does not know how many jobs it had."""
    jobs_started: int = 0
    running: JobId | None = None
    """The job whose step it started last."""
    process: "SimAgent | None" = None
    """The program, while it lives."""
    doomed: str | None = None
    """Somebody wanted it to end: its jobs may fail."""


@dataclass(slots=True)
class SpawnTruth:
    state: SpawnState
    job_id: JobId | None
    scaler: str


@dataclass(slots=True)
class Caps:
    agents: int
    cpus: float
    memory_bytes: float

    def widen(self, agents: int, cpus: float | None, memory_bytes: int | None) -> None:
        self.agents = max(self.agents, agents)
        self.cpus = max(self.cpus, inf if cpus is None else cpus)
        self.memory_bytes = max(self.memory_bytes, inf if memory_bytes is None else memory_bytes)


@dataclass(slots=True)
class MachineTruth:
    order: SpawnOrder
    scaler: str
    host: str
    resists: bool = False
    """Its end was tried and could not be confirmed."""


@dataclass(slots=True)
class Ledger:
    jobs: dict[JobId, JobTruth] = field(default_factory=dict)
    runs: dict[RunId, RunStatus] = field(default_factory=dict)
    agents: dict[AgentId, AgentTruth] = field(default_factory=dict)
    spawns: dict[AgentId, SpawnTruth] = field(default_factory=dict)
    machines: dict[AgentId, MachineTruth] = field(default_factory=dict)
    """Those that exist."""
    reservations: dict[AgentId, None] = field(default_factory=dict)
    sessions: dict[AgentId, str] = field(default_factory=dict)
    coordinator_runs: dict[str, int] = field(default_factory=dict)
    """How often the coordinator of each host was started."""
    caps: dict[str, Caps] = field(default_factory=dict)
    """Of each scaler, and of a host under the empty name: the largest that were in force in this run."""
    pool_cpus: float = 0.0
    """The largest cap of the machine pool that was in force in this run; 0: there is no pool."""
    pooled: frozenset[str] = frozenset()
    """Scalers that are billed to it."""
    warm_max: dict[str, int] = field(default_factory=dict)
    """The largest number of warm agents that was wanted of each scaler, for each coordinator."""
    jobs_max: dict[str, int | None] = field(default_factory=dict)
    """How many jobs an agent of each scaler may run; None: any number."""
    demands: dict[str, Demand] = field(default_factory=dict)
    """What jobs ask for, by their names."""

    def held_by(self, agent_id: AgentId) -> list[JobTruth]:
        return [job for job in self.jobs.values() if job.is_held and job.agent_id == agent_id]
