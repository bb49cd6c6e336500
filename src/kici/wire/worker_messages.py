"""Messages between a worker and a coordinator: one frozen class each, a closed union for each direction.

The form is that of the agents' messages: JSON text frames, `type` names the class, camelCase names, unknown fields
are ignored, an unknown type is answered by `unsupported`.  A worker tells what its host can make and what it holds;
a coordinator orders.  Orders with a `request_id` are answered by `answer`; all of them are safe to send again,
because what an agent id was ordered for never changes.
"""

from typing import Final

import msgspec

from kici.domain.verdict import AtCap
from kici.wire.messages import Message, Unsupported

WORKER_PROTOCOL: Final = 2
WORKER_PROTOCOL_MIN: Final = 1
CLEARS_BOOT_DATA: Final = 2
"""The first version in which a worker answers `agent.boot.clear`."""
ROLE: Final = "worker"
INVALID_PROOF: Final = "Invalid proof"
INVALID_TOKEN: Final = "Invalid token"
"""Reasons of a refusal that a worker tells apart."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of what messages are made of."""


# --- parts


class Amounts(_Part, frozen=True, kw_only=True):
    """Cores and bytes; 0: none declared."""

    cpus: float = 0.0
    memory_bytes: int = 0


class Caps(_Part, frozen=True, kw_only=True):
    """Most that may be in use at once; None: no limit."""

    cpus: float | None = None
    memory_bytes: int | None = None


class Wish(_Part, frozen=True, kw_only=True):
    """One declared side of resources, as the configuration spells it."""

    cpus: float | None = None
    memory: str | None = None


class Declared(_Part, frozen=True, kw_only=True):
    requests: Wish = Wish()
    limits: Wish = Wish()


class SetOffer(_Part, frozen=True, kw_only=True):
    """One label set of a scaler: what routing needs to know of it."""

    label_set: tuple[str, ...]
    """Declared labels, in the order of the worker's file."""
    offers: tuple[str, ...]
    """What a job may ask for."""
    agent_labels: tuple[str, ...]
    gate: tuple[str, ...] = ()
    """What a job must ask for."""
    taints: tuple[str, ...] = ()
    resources: Declared = Declared()
    runs_job_image: bool = False


class ScalerOffer(_Part, frozen=True, kw_only=True):
    name: str
    """In the worker's own file."""
    backend_type: str
    max_agents: int
    cap: Caps = Caps()
    spawns_at_once: int = 8
    roles: tuple[str, ...] | None = None
    reuse_idle_seconds: float | None = None
    reuse_max_jobs: int | None = None
    warm_size: int | None = None
    """Idle agents wanted for each label set; None: no pool."""
    warm_idle_seconds: float = 0.0
    sets: tuple[SetOffer, ...] = ()


class Held(_Part, frozen=True, kw_only=True):
    """An agent that the worker looks after."""

    agent_id: str
    scaler: str
    label_set: tuple[str, ...]
    ref: str
    spawned_at: int
    state: str
    owner: str
    """The coordinator that it was last ordered, or taken over, by."""
    registered: bool = False


class Gone(_Part, frozen=True, kw_only=True):
    """An agent whose compute ended by itself."""

    agent_id: str
    how: str


class Used(_Part, frozen=True, kw_only=True):
    """What agents hold together."""

    agents: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0


class Image(_Part, frozen=True, kw_only=True):
    """A job's own image, with resolved credentials."""

    image: str
    username: str | None = None
    password: str | None = None
    registry: str | None = None
    env: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Image({self.image!r})"  # no credential in a log


class FaultKind:
    """What a fault is, by what the coordinator should do."""

    NO_CAPACITY: Final = "no-capacity"
    REFUSED: Final = "refused"
    """The host refuses this launch, and will again."""
    JOB_REFUSED: Final = "job-refused"
    """This one job can never be started."""
    PERMANENT: Final = "permanent"
    RETRYABLE: Final = "retryable"


class Fault(_Part, frozen=True, kw_only=True):
    """Why an order was not carried out."""

    kind: str
    """One of `FaultKind`; any other is taken for retryable."""
    text: str
    after_seconds: float = 0.0
    cap: AtCap | None = None
    """The cap that left no room."""


# --- worker -> coordinator


class WorkerHello(Message, frozen=True, kw_only=True, tag="worker.hello"):
    """The first message."""

    worker_id: str
    name: str
    """What people call it."""
    nonce: str
    """For the coordinator's proof that it knows the credential, too."""
    protocol_version: int = 1
    """The first version did not say which it is."""
    version: str = ""
    role: str = ROLE


class WorkerJoin(Message, frozen=True, kw_only=True, tag="worker.join"):
    """Answer to a challenge: a one-time token, to be traded for a credential."""

    token: str

    def __repr__(self) -> str:
        return "WorkerJoin(...)"


class WorkerProof(Message, frozen=True, kw_only=True, tag="worker.proof"):
    """Answer to a challenge: that it knows its credential."""

    proof: str

    def __repr__(self) -> str:
        return "WorkerProof(...)"


class WorkerOffer(Message, frozen=True, kw_only=True, tag="worker.offer"):
    """What this host can make; replaces what was offered before."""

    scalers: tuple[ScalerOffer, ...]
    max_agents: int
    """Over all its scalers."""
    cap: Caps = Caps()
    defaults: Declared = Declared()
    is_draining: bool = False


class WorkerInventory(Message, frozen=True, kw_only=True, tag="worker.inventory"):
    """Everything that it holds, whoever ordered it, and what ended lately; after this the link is at work."""

    agents: tuple[Held, ...]
    gone: tuple[Gone, ...] = ()


class WorkerLoad(Message, frozen=True, kw_only=True, tag="worker.load"):
    """What agents that *other* coordinators ordered hold, by scaler."""

    scalers: dict[str, Used]


class SpawnProgress(Message, frozen=True, kw_only=True, tag="agent.progress"):
    agent_id: str
    kind: str
    detail: str
    at: int


class ComputeGone(Message, frozen=True, kw_only=True, tag="agent.gone"):
    """The compute of an agent ended by itself."""

    agent_id: str
    how: str


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """Exactly one for each order with a request id; which fields are set depends on the order."""

    request_id: str
    fault: Fault | None = None
    agents: tuple[Held, ...] = ()
    count: int = 0
    lines: tuple[str, ...] = ()
    vms: str = ""
    """JSON: what `vms.ask` asked for."""


class WorkerLeaving(Message, frozen=True, kw_only=True, tag="worker.leaving"):
    """It is about to stop."""

    reason: str
    keeps_agents: bool = False


class WorkerBeat(Message, frozen=True, kw_only=True, tag="worker.beat"):
    """A sign of life, both ways."""


# --- coordinator -> worker


class Challenge(Message, frozen=True, kw_only=True, tag="worker.challenge"):
    nonce: str
    instance_id: str


class Welcome(Message, frozen=True, kw_only=True, tag="worker.welcome"):
    instance_id: str
    proof: str = ""
    """That the coordinator knows the credential, too.  Empty: it has just made it."""
    credential: str | None = None
    """The new one, for a join token.  Keep it; it is not told again."""

    def __repr__(self) -> str:
        return f"Welcome({self.instance_id!r})"


class Refused(Message, frozen=True, kw_only=True, tag="worker.refused"):
    """Followed by a close."""

    reason: str
    is_permanent: bool = True
    """Coming again with the same credential or token cannot help."""


class SpawnAgent(Message, frozen=True, kw_only=True, tag="agent.spawn"):
    request_id: str
    scaler: str
    agent_id: str
    label_set: tuple[str, ...]
    labels: tuple[str, ...]
    gate: tuple[str, ...] = ()
    token: str | None = None
    token_id: str | None = None
    limits: Amounts = Amounts()
    requests: Amounts = Amounts()
    bound_job_id: str | None = None
    run_id: str | None = None
    image: Image | None = None

    def __repr__(self) -> str:
        return f"SpawnAgent({self.agent_id!r})"


class AbortSpawn(Message, frozen=True, kw_only=True, tag="agent.spawn.abort"):
    """Call a spawn off, in whatever state it is; answered when nothing is left of it."""

    request_id: str
    agent_id: str


class DestroyAgent(Message, frozen=True, kw_only=True, tag="agent.destroy"):
    """Answered when it is gone."""

    request_id: str
    agent_id: str
    reason: str


class MarkRegistered(Message, frozen=True, kw_only=True, tag="agent.registered"):
    """Repeated for each after every reconnect."""

    agent_id: str


class ClearBootData(Message, frozen=True, kw_only=True, tag="agent.boot.clear"):
    """Its agent has come: answered when nobody else there can read what it was told at its boot, or with a fault.

    No job starts on it before.
    """

    request_id: str
    agent_id: str


class RecoverAgents(Message, frozen=True, kw_only=True, tag="agents.recover"):
    """Which of these live?  They are the asking coordinator's from now on."""

    request_id: str
    scaler: str
    known: tuple[str, ...]


class ReapAgent(Message, frozen=True, kw_only=True, tag="agent.reap"):
    """Nobody owns this one: end whatever is there of it.  `count`: whether anything was."""

    request_id: str
    agent_id: str


class SweepOrphans(Message, frozen=True, kw_only=True, tag="agents.sweep"):
    """End what the asking coordinator once ordered of a scaler and does not name, and what nobody knows."""

    request_id: str
    scaler: str
    owned: tuple[str, ...]


class AskVms(Message, frozen=True, kw_only=True, tag="vms.ask"):
    """List the microVMs that run on the host, or stop some that nobody tracks."""

    request_id: str
    payload: str
    """JSON, as coordinators ask it of each other."""


class TailAgent(Message, frozen=True, kw_only=True, tag="agent.tail"):
    """The last lines that an agent program printed."""

    request_id: str
    agent_id: str
    lines: int


WorkerMessage = (
    WorkerHello
    | WorkerJoin
    | WorkerProof
    | WorkerOffer
    | WorkerInventory
    | WorkerLoad
    | SpawnProgress
    | ComputeGone
    | Answer
    | WorkerLeaving
    | WorkerBeat
    | Unsupported
)
WorkerOrder = (
    Challenge
    | Welcome
    | Refused
    | SpawnAgent
    | AbortSpawn
    | DestroyAgent
    | MarkRegistered
    | ClearBootData
    | RecoverAgents
    | ReapAgent
    | SweepOrphans
    | AskVms
    | TailAgent
    | WorkerBeat
    | Unsupported
)
"""What a coordinator sends."""
Request = (
    SpawnAgent
    | AbortSpawn
    | DestroyAgent
    | ClearBootData
    | RecoverAgents
    | ReapAgent
    | SweepOrphans
    | AskVms
    | TailAgent
)
"""What a worker answers."""


class LinkClose:
    """WebSocket close codes of the worker link, beside those of agents."""

    REFUSED: Final = 4050
    """Not let in, and never will be with this credential."""
    SUPERSEDED: Final = 4051
    """The same worker has opened a newer link."""
    THROTTLED: Final = 4052
