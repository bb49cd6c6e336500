"""Who may do what: roles, permissions, and the record of what was done."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kici.domain.errors import Denied
from kici.domain.ids import Instant, TokenId
from kici.domain.secret import SecretRef


class Role(StrEnum):
    OWNER = "owner"
    ADMIN = "admin"
    AUDITOR = "auditor"
    SUBMITTER = "submitter"


class Permission(StrEnum):
    RUN_SUBMIT = "run.submit"
    RUN_READ = "run.read"
    RUN_CANCEL = "run.cancel"
    SCALER_READ = "scaler.read"
    SCALER_MANAGE = "scaler.manage"
    PEER_MANAGE = "peer.manage"
    ORCHESTRATOR_DRAIN = "orchestrator.drain"
    SETTINGS_READ = "settings.read"
    SETTINGS_MANAGE = "settings.manage"
    TOKEN_MANAGE = "token.manage"
    SECRET_READ = "secret.read"
    SECRET_WRITE = "secret.write"
    SECRET_DELETE = "secret.delete"
    SECRET_REVEAL = "secret.reveal"
    KEY_ROTATE = "key.rotate"
    ACCESS_LOG_READ = "access_log.read"
    EVENT_DLQ_READ = "event_dlq.read"
    EVENT_DLQ_MANAGE = "event_dlq.manage"


_P = Permission
_READS: Final = frozenset(
    {_P.RUN_READ, _P.SCALER_READ, _P.SETTINGS_READ, _P.SECRET_READ, _P.ACCESS_LOG_READ, _P.EVENT_DLQ_READ}
)
GRANTS: Final[dict[Role, frozenset[Permission]]] = {
    Role.OWNER: frozenset(Permission),
    Role.ADMIN: frozenset(Permission) - {_P.TOKEN_MANAGE, _P.KEY_ROTATE},
    Role.AUDITOR: _READS,
    Role.SUBMITTER: frozenset({_P.RUN_SUBMIT, _P.RUN_READ, _P.RUN_CANCEL}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiToken:
    """A bearer token of the HTTP API.  Only its hash is stored."""

    id: TokenId
    hash: str
    prefix: str
    name: str
    role: Role
    secret_contexts: frozenset[str] | None
    """Contexts whose secrets its jobs may name; None: all (a submitter without a list may name none)."""
    created_at: Instant
    expires_at: Instant | None
    revoked_at: Instant | None = None
    last_used_at: Instant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who asks: an authenticated caller, and what it may do."""

    name: str
    """For people and the access log."""
    role: Role
    token_id: TokenId | None = None
    secret_contexts: frozenset[str] | None = None
    """As in `ApiToken`."""

    def may(self, permission: Permission) -> bool:
        return permission in GRANTS[self.role]

    def may_use_context(self, context: str) -> bool:
        """Whether its jobs may name secrets of this context."""
        if self.secret_contexts is None:
            return self.role is not Role.SUBMITTER
        return context in self.secret_contexts

    def check_secrets(self, refs: Iterable[SecretRef]) -> None:
        """Raise `Denied` if one of these is not for its jobs to name."""
        for ref in sorted(refs, key=str):
            if ref.is_reserved:
                raise Denied(f"secret {ref}: contexts of the form __name__ are reserved")
            if not self.may_use_context(ref.context):
                raise Denied(f"{self.name} may not use secrets of context {ref.context!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRecord:
    at: Instant
    actor: str
    action: str
    target: str
    outcome: str
    detail: str = ""
    id: int = 0
    """Given by the store: higher is later."""
