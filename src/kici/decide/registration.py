"""Admission of agents: who may authenticate, and who may register as what.

Token expiry governs admission only: a connection that was admitted lives on, and an ephemeral token that expired
meanwhile still admits its own agent while a job names that agent.  Revocation ends everything.

An id of the shape that scalers mint is never taken for a static agent: without the record that carries its gate
(spawn row, session row or state file) it is refused, since an agent without a gate would take jobs that were
never meant for its platform.

Close codes are the protocol's; this layer may not import the wire, and a test compares them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kici.decide.prune import EVENT
from kici.domain.agent import AgentKind, AgentToken
from kici.domain.ids import AgentId, Instant, TokenId, is_scaler_agent
from kici.domain.labels import ROLES, canonical, outside_scope, role_labels
from kici.domain.spawn import Spawn, SpawnState

PRIVILEGED_ROOT_LABEL: Final = "kici:privileged:root"

INVALID: Final = 4003
INTERNAL: Final = 4006
AUTH_FAILED: Final = 4010
DISMISSED: Final = 4033
_PERMANENT: Final = frozenset({AUTH_FAILED, DISMISSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Close the connection."""

    close_code: int
    reason: str
    reclaims: bool = False
    """Destroy what this host may still hold for the id: nothing owns it."""

    @property
    def is_permanent(self) -> bool:
        """The agent program ends instead of coming back."""
        return self.close_code in _PERMANENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    labels: frozenset[str]
    """Canonical."""
    gate: frozenset[str]
    scaler_managed: bool
    supersedes: bool
    """An older connection of the same agent is to be closed; that is no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """What an agent says of itself when it registers."""

    agent_id: AgentId
    labels: frozenset[str]
    uid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """What we wrote down about a scaler-made agent before it existed."""

    gate: frozenset[str]
    labels: tuple[str, ...]
    token_id: TokenId | None
    is_ending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConnection:
    """The connection that a registered agent of this id has now."""

    token_id: TokenId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What was looked up about the claimant."""

    record: AgentRecord | None = None
    record_readable: bool = True
    """False: the lookup failed, which is no evidence that there is no record."""
    live: LiveConnection | None = None
    holds_job: bool = False
    """A dispatched, running, recovering or cancelling job names this agent id."""


def authenticate(token: AgentToken | None, *, now: Instant, holds_job: bool) -> Refuse | None:
    """None: go on to registration.  `token` None: no such token; `holds_job`: of the agent the token is for."""
    if token is None:
        return _denied("the token is not known; create one with `kici-admin agent-token create`")
    if token.revoked_at is not None:
        return _denied(f"token {token.prefix} is revoked")
    if token.expires_at is not None and now >= token.expires_at:
        if token.kind is AgentKind.EPHEMERAL and holds_job:
            return None
        return _denied(f"token {token.prefix} is expired")
    return None


def admit_agent(
    claimant: Claimant, token: AgentToken | None, *, now: Instant, known: Known, requires_token: bool = True
) -> Accept | Refuse:
    """Judge one registration, first or repeated.  `token` None is all right only if none is required."""
    if token is not None or requires_token:
        refusal = authenticate(token, now=now, holds_job=known.holds_job)
        if refusal is not None:
            return refusal
    labels = frozenset(canonical(claimant.labels))
    refusal = (
        _check_root(claimant, labels)
        or _check_labels(labels, token, known.record)
        or _check_owner(claimant, token)
        or _check_live(claimant, token, known.live)
        or _check_record(claimant, token, known)
    )
    if refusal is not None:
        return refusal
    record = known.record
    return Accept(
        labels=labels,
        gate=record.gate if record else token.gate if token else frozenset(),
        scaler_managed=record is not None,
        supersedes=known.live is not None,
    )


def _check_root(claimant: Claimant, labels: frozenset[str]) -> Refuse | None:
    if PRIVILEGED_ROOT_LABEL in labels and claimant.uid != 0:
        return _denied(f"label {PRIVILEGED_ROOT_LABEL} is only for agents that run as root")
    return None


def _check_labels(labels: frozenset[str], token: AgentToken | None, record: AgentRecord | None) -> Refuse | None:
    if token is None:
        allowed = None if record is None else frozenset(record.labels)
    elif token.kind is AgentKind.STATIC and token.labels is not None:
        allowed = token.labels | set(role_labels(ROLES))
    else:
        allowed = token.labels
    extra = outside_scope(labels, allowed)
    if extra:
        return _denied(f"its token does not cover the labels {', '.join(sorted(extra))}")
    return None


def _check_owner(claimant: Claimant, token: AgentToken | None) -> Refuse | None:
    if token is not None and token.kind is AgentKind.EPHEMERAL and token.agent_id != claimant.agent_id:
        return _denied("its token was made for another agent")
    return None


def _check_live(claimant: Claimant, token: AgentToken | None, live: LiveConnection | None) -> Refuse | None:
    if live is None or live.token_id == (token.id if token else None):
        return None
    return Refuse(
        close_code=INVALID,
        reason=f"agent id {claimant.agent_id} is connected with another token; choose another KICI_AGENT_ID",
    )


def _check_record(claimant: Claimant, token: AgentToken | None, known: Known) -> Refuse | None:
    if not is_scaler_agent(claimant.agent_id):
        return None
    if not known.record_readable:
        return Refuse(close_code=INTERNAL, reason="Scaler state unavailable")
    record = known.record
    if record is None:
        return Refuse(close_code=INTERNAL, reason="Scaler state unavailable: no record of this agent", reclaims=True)
    if record.is_ending:
        return Refuse(close_code=DISMISSED, reason="this agent is being torn down")
    if token is not None and record.token_id != token.id:
        return _denied("this agent was made with another token")
    return None


def _denied(reason: str) -> Refuse:
    return Refuse(close_code=AUTH_FAILED, reason=reason)


def may_be_elsewhere(spawn: Spawn | None, connection_number: int, jobs: Sequence[object]) -> bool:
    """Whether the store may know more of a scaler's agent than its maker's memory (`spawn`; None: we did not make it).

    One that is being booted as far as we know, but lists jobs or was connected, was at another coordinator first.
    """
    came_before = connection_number > 1 or bool(jobs)
    return spawn is None or spawn.backend_type == EVENT or (spawn.state is SpawnState.BOOTING and came_before)
