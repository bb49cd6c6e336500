"""Agents: what one says of itself, and the row that says where it is connected."""

from dataclasses import dataclass
from enum import StrEnum

from kici.domain.ids import AgentId, ConnectionId, InstanceId, Instant, ScalerName, TokenId


class AgentKind(StrEnum):
    STATIC = "static"
    EPHEMERAL = "ephemeral"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """Self-reported facts; none of them grants anything."""

    platform: str = "linux"
    arch: str = "x64"
    version: str = ""
    hostname: str = ""
    cpu_count: int = 0
    memory_mb: int = 0
    user: str = ""
    uid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """One row of `agent_sessions`: a registered agent and the coordinator that holds its socket."""

    agent_id: AgentId
    instance_id: InstanceId
    connection_id: ConnectionId
    labels: frozenset[str]
    gate: frozenset[str]
    token_id: TokenId | None
    scaler: ScalerName | None
    backend_type: str | None
    facts: AgentFacts
    registered_at: Instant
    warm: bool = False
    """Made by a scaler without a job bound to it."""
    incarnation: str = ""
    """Run of the agent's program."""
    connection_number: int = 0
    """How many connections that run had opened by then, this one included."""

    def overtakes(self, other: "AgentSession") -> bool:
        """Whether this is a later connection of the same run."""
        return self.incarnation == other.incarnation and self.connection_number > other.connection_number


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentToken:
    """A credential of agents.  Only its hash is stored."""

    id: TokenId
    hash: str
    """SHA-256 of the plain text, hex."""
    prefix: str
    """First characters of the plain text, for people."""
    kind: AgentKind
    labels: frozenset[str] | None
    """Labels that its agents may carry; None: any."""
    gate: frozenset[str]
    agent_id: AgentId | None
    """The one agent that may use an ephemeral token."""
    created_at: Instant
    expires_at: Instant | None
    revoked_at: Instant | None = None
    last_seen_at: Instant | None = None
    name: str = ""
