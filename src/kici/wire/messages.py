"""Messages between an agent and its coordinator: one frozen class each, a closed union for each direction.

JSON text frames; the field `type` names the class; names on the wire are camelCase; bytes travel as base64.
Unknown fields are ignored.  Times are milliseconds.  Every message has a golden file.
"""

from typing import Annotated, Final, Literal

import msgspec

PROTOCOL_VERSION: Final = 1
PROTOCOL_VERSION_MIN: Final = 1
FRAME_BYTES_MAX: Final = 4 * 1024 * 1024

StreamNumber = Literal[1, 2]
STDOUT: Final = 1
STDERR: Final = 2

JobState = Literal["running", "success", "failed", "cancelled", "timed_out"]
EndState = Literal["success", "failed", "cancelled", "timed_out"]
STEP_SECONDS_MAX: Final = 1000
_Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="type", omit_defaults=True):
    """Base of all messages."""


class JobRef(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A job that an agent still holds when it registers."""

    job_id: str
    run_id: str
    phase: str
    """`acked`: not told to start yet; `running`; `finished`: the final status is not acknowledged yet."""


class JobVerdict(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What to do with a job that the agent listed, or was expected to list."""

    job_id: str
    action: str
    """`resume`: go on, output from the given offsets; `start`: a `job.start` follows; `drop`: kill and forget it."""
    stdout_offset: int = 0
    """Offset after the last stored byte; the agent sends from here."""
    stderr_offset: int = 0


# --- agent -> coordinator


class AuthRequest(Message, frozen=True, kw_only=True, tag="auth.request"):
    token: str | None = None
    protocol_version: int = PROTOCOL_VERSION

    def __repr__(self) -> str:
        return "AuthRequest(...)"  # the token stays out of logs


class AgentRegister(Message, frozen=True, kw_only=True, tag="agent.register"):
    agent_id: str
    labels: list[str] = []
    platform: str = "linux"
    arch: str = "x64"
    version: str = ""
    max_concurrency: int = 1
    in_flight_jobs: list[JobRef] = []
    hostname: str = ""
    cpu_count: int = 0
    total_memory_mb: int = 0
    running_as_user: str = ""
    running_as_uid: int | None = None
    scaler_managed: bool = False
    incarnation: str = ""
    """Tells this run of the agent's program from others under the same id."""
    connection_number: int = 0
    """Of this run; a registration that arrives after that of a later connection is refused."""


class ConfigAck(Message, frozen=True, kw_only=True, tag="config.ack"):
    """The agent took what it needs from its boot configuration."""


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    active_jobs: int = 0


class AgentStatus(Message, frozen=True, kw_only=True, tag="agent.status"):
    """The agent's own view: sent when it starts or stops draining."""

    active_jobs: int
    draining: bool = False


class AgentMetrics(Message, frozen=True, kw_only=True, tag="agent.metrics"):
    """How the agent is, and what it did since its last report: sent after `config.ack`, with heartbeats, at the end."""

    active_jobs: _Amount = 0
    backpressure: bool = False
    """Its step has to wait, because output is not taken as fast as it is written."""
    jobs: dict[EndState, _Amount] = {}
    """Jobs that ended, by how."""
    steps: _Amount = 0
    step_seconds: Annotated[list[_Seconds], msgspec.Meta(max_length=STEP_SECONDS_MAX)] = []
    """How long each of these steps ran."""
    log_bytes: _Amount = 0
    dropped_lines: _Amount = 0
    backpressure_events: _Amount = 0


class JobAck(Message, frozen=True, kw_only=True, tag="job.ack"):
    job_id: str


class JobReject(Message, frozen=True, kw_only=True, tag="job.reject"):
    job_id: str
    reason: str
    """`busy` or `draining`."""


class JobStatusReport(Message, frozen=True, kw_only=True, tag="job.status"):
    """`running`: the step's process started; else how the job ended (sent after its last output)."""

    job_id: str
    state: JobState
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    stdout_bytes: int = 0
    """Total length of the stream: what must be stored before the end is."""
    stderr_bytes: int = 0


class LogChunkMessage(Message, frozen=True, kw_only=True, tag="log.chunk"):
    job_id: str
    stream: StreamNumber
    offset: int
    data: bytes


class AgentLeaving(Message, frozen=True, kw_only=True, tag="agent.leaving"):
    """The agent is about to close on purpose and exit: `idle`, `done`, `drained`, `orphaned` or `signal`."""

    reason: str


class ClaimCredentials(Message, frozen=True, kw_only=True, tag="scaler.claim-credentials"):
    """Trade a single-use code for credentials.  Allowed in every phase, before authentication above all."""

    request_id: str
    claim_code: str

    def __repr__(self) -> str:
        return f"ClaimCredentials({self.request_id!r})"


# --- coordinator -> agent


class AuthSuccess(Message, frozen=True, kw_only=True, tag="auth.success"):
    connection_id: str


class AuthFailure(Message, frozen=True, kw_only=True, tag="auth.failure"):
    reason: str


class Reuse(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Present on a scaler-made agent that may take follow-up jobs."""

    idle_seconds: float
    max_jobs: int | None = None


class RegisterAck(Message, frozen=True, kw_only=True, tag="register.ack"):
    agent_id: str
    labels: list[str] = []
    scaler_managed: bool = False
    pending_dispatch: bool = False
    """A job is bound to this agent and follows."""
    warm_pool: bool = False
    """Stay until a job comes or the orchestrator ends you."""
    reuse: Reuse | None = None
    jobs: list[JobVerdict] = []
    coordinators: list[str] = []
    """Addresses of all coordinators: where to go when this one is lost."""
    heartbeat_ms: int = 30_000
    reconnect_max_ms: int = 60_000


class CoordinatorsChanged(Message, frozen=True, kw_only=True, tag="coordinators"):
    """Coordinators came or went since `register.ack`."""

    coordinators: list[str] = []
    """Addresses of all of them now."""


class JobDispatch(Message, frozen=True, kw_only=True, tag="job.dispatch"):
    """An offer.  Nothing may start before `job.start`."""

    job_id: str
    run_id: str
    name: str = ""


class JobContainer(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The container that an agent makes for one job.  Exactly one of `image` and `dockerfile`."""

    image: str | None = None
    dockerfile: str | None = None
    """Path in `context`."""
    context: dict[str, str] = {}
    """Files that the image is built from: their text by their path."""
    target: str | None = None
    args: dict[str, str] = {}
    username: str | None = None
    password: str | None = None
    registry: str | None = None
    """With `username` and `password`: where they are good for."""
    cpus: float = 0
    """0: the agent's default limit."""
    memory_bytes: int = 0
    """0: the agent's default limit."""

    def __repr__(self) -> str:
        return f"JobContainer({self.image or self.dockerfile!r})"


class JobStart(Message, frozen=True, kw_only=True, tag="job.start"):
    """The coordinator committed `running`: do it now."""

    job_id: str
    run_id: str
    name: str = ""
    command: list[str]
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    """Environment name -> plain value.  For the step's own process only; masked in its output."""
    timeout_ms: int | None = None
    """None: the agent's default."""
    max_log_bytes: int | None = None
    """Output kept, both streams together; None: the agent's default."""
    container: JobContainer | None = None
    """None: the job runs where the agent is."""

    def __repr__(self) -> str:
        return f"JobStart({self.job_id!r})"  # no command, environment or secret in a log


class JobCancel(Message, frozen=True, kw_only=True, tag="job.cancel"):
    job_id: str
    reason: str = ""
    grace_ms: int = 30_000
    force: bool = False
    """Kill at once."""


class JobStatusAck(Message, frozen=True, kw_only=True, tag="job.status.ack"):
    """The final status is committed (or the job is not yours): forget the job."""

    job_id: str


class LogAck(Message, frozen=True, kw_only=True, tag="log.ack"):
    """Everything before `offset` of this stream is stored."""

    job_id: str
    stream: StreamNumber
    offset: int


class Credentials(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What a claim code is good for: become this agent."""

    agent_token: str
    agent_id: str
    orchestrator_url: str = ""
    labels: list[str] = []

    def __repr__(self) -> str:
        return f"Credentials({self.agent_id!r})"


class ClaimCredentialsResponse(Message, frozen=True, kw_only=True, tag="scaler.claim-credentials.response"):
    """Exactly one of `credentials` and `error`."""

    request_id: str
    credentials: Credentials | None = None
    error: str | None = None
    retryable: bool = False
    """The error says nothing about the code: it may be offered again."""


class AgentExit(Message, frozen=True, kw_only=True, tag="agent.exit"):
    """Finish the current job, if any, then leave."""

    reason: str


class ErrorMessage(Message, frozen=True, kw_only=True, tag="error"):
    code: str
    """`INVALID_MESSAGE`, `NOT_OWNED`, `RATE_LIMITED`, ..."""
    message: str = ""


class Unsupported(Message, frozen=True, kw_only=True, tag="unsupported"):
    """Either side: a message type it does not know.  The connection goes on."""

    what: str


AgentMessage = (
    AuthRequest
    | AgentRegister
    | ConfigAck
    | Heartbeat
    | AgentStatus
    | AgentMetrics
    | JobAck
    | JobReject
    | JobStatusReport
    | LogChunkMessage
    | AgentLeaving
    | ClaimCredentials
    | Unsupported
)
CoordinatorMessage = (
    AuthSuccess
    | AuthFailure
    | RegisterAck
    | CoordinatorsChanged
    | JobDispatch
    | JobStart
    | JobCancel
    | JobStatusAck
    | LogAck
    | ClaimCredentialsResponse
    | AgentExit
    | ErrorMessage
    | Unsupported
)


class CloseCode:
    """WebSocket close codes.  Permanent ones end the agent program; after the others it comes back."""

    GOING_AWAY: Final = 1001
    UNAUTHORIZED: Final = 4001
    TIMEOUT: Final = 4002
    INVALID_MESSAGE: Final = 4003
    HEARTBEAT: Final = 4004
    PROTOCOL: Final = 4005
    INTERNAL: Final = 4006
    HANDOVER: Final = 4007
    AUTH_FAILED: Final = 4010
    ACK_TIMEOUT: Final = 4031
    SUPERSEDED: Final = 4032
    DISMISSED: Final = 4033
    """The coordinator has no use for this agent: its compute is being torn down."""

    PERMANENT: Final = frozenset({UNAUTHORIZED, AUTH_FAILED, DISMISSED})
