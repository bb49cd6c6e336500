"""Credentials: tokens of people and of agents, and the secrets of jobs.

The plain text of a token is in the answer that makes it and nowhere else.  Listings of secrets have no values;
revealing one needs a permission of its own and is recorded.
"""

from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from aiohttp import hdrs
from msgspec import Meta

from kici.domain.access import ApiToken, Permission, Role
from kici.domain.agent import AgentKind, AgentToken
from kici.domain.errors import NotFound
from kici.domain.ids import DEFAULT_ORG, OrgId, TokenId
from kici.domain.labels import canonical
from kici.domain.secret import SecretRef, parse_secret_ref
from kici.domain.strict import Fault, Faulty
from kici.web.admin import ADMIN
from kici.web.jobs import Line
from kici.web.replays import IDEMPOTENCY_HEADER
from kici.web.routing import Body, Call, Route
from kici.web.views import View, moment, moment_or_none

Labels = Annotated[list[Line], Meta(max_length=64)]
Lifetime = Annotated[int, Meta(ge=1, le=10 * 366 * 24 * 3600)]


class NewToken(Body, frozen=True, kw_only=True):
    """A bearer token of this API."""

    name: Line
    role: Role
    secret_contexts: Annotated[list[Line], Meta(max_length=1000)] | None = None
    """Contexts whose secrets its jobs may name; absent: all, for a submitter none."""
    expires_in_seconds: Lifetime | None = None
    """Absent: it does not expire."""


class NewAgentToken(Body, frozen=True, kw_only=True):
    """A credential of agents that are started by hand."""

    name: Line = "agent"
    labels: Labels | None = None
    """Labels that its agents may carry; absent: any."""
    mandatory_labels: Labels = msgspec.field(default_factory=list)
    """Labels that a job must name to land on its agents."""
    expires_in_seconds: Lifetime | None = None


class NewSecret(Body, frozen=True, kw_only=True):
    """The value of a secret."""

    value: Annotated[str, Meta(min_length=1, max_length=512 * 1024, pattern=r"^[^\u0000]+$")]


class RotationView(View, frozen=True, kw_only=True):
    """What sealing all secrets by another key came to."""

    resealed: int
    kept: int
    """Sealed by that key before."""
    unreadable: list[str]
    """Organisation, context and key of those that no key opens: the old key must be kept for them."""


class SecretsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Whose secrets."""

    org: Line = DEFAULT_ORG


class TokenView(View, frozen=True, kw_only=True):
    id: str
    name: str
    prefix: str
    """How its plain text begins."""
    role: Role
    secret_contexts: list[str] | None
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None


class CreatedToken(View, frozen=True, kw_only=True):
    """`token` is the plain text: it is shown this once."""

    token: str
    details: TokenView


class TokenList(View, frozen=True, kw_only=True):
    items: list[TokenView]


class AgentTokenView(View, frozen=True, kw_only=True):
    id: str
    name: str
    prefix: str
    kind: AgentKind
    labels: list[str] | None
    mandatory_labels: list[str]
    agent_id: str | None
    created_at: datetime
    expires_at: datetime | None
    last_seen_at: datetime | None
    revoked_at: datetime | None


class CreatedAgentToken(View, frozen=True, kw_only=True):
    """`token` is the plain text: it is shown this once."""

    token: str
    details: AgentTokenView


class AgentTokenList(View, frozen=True, kw_only=True):
    items: list[AgentTokenView]


class SecretView(View, frozen=True, kw_only=True):
    context: str
    key: str
    updated_at: datetime


class SecretList(View, frozen=True, kw_only=True):
    items: list[SecretView]


class SecretValue(View, frozen=True, kw_only=True):
    value: str


def token_view(token: ApiToken) -> TokenView:
    return TokenView(
        id=token.id,
        name=token.name,
        prefix=token.prefix,
        role=token.role,
        secret_contexts=None if token.secret_contexts is None else sorted(token.secret_contexts),
        created_at=moment(token.created_at),
        expires_at=moment_or_none(token.expires_at),
        last_used_at=moment_or_none(token.last_used_at),
        revoked_at=moment_or_none(token.revoked_at),
    )


def agent_token_view(token: AgentToken) -> AgentTokenView:
    return AgentTokenView(
        id=token.id,
        name=token.name,
        prefix=token.prefix,
        kind=token.kind,
        labels=None if token.labels is None else sorted(token.labels),
        mandatory_labels=sorted(token.gate),
        agent_id=token.agent_id,
        created_at=moment(token.created_at),
        expires_at=moment_or_none(token.expires_at),
        last_seen_at=moment_or_none(token.last_seen_at),
        revoked_at=moment_or_none(token.revoked_at),
    )


def _milliseconds(seconds: int | None) -> int | None:
    return None if seconds is None else seconds * 1000


async def create_token(call: Call) -> CreatedToken:
    body = call.body_as(NewToken)
    token, plain = await call.surface.tokens.create(
        name=body.name,
        role=body.role,
        secret_contexts=None if body.secret_contexts is None else frozenset(body.secret_contexts),
        expires_in_ms=_milliseconds(body.expires_in_seconds),
    )
    return CreatedToken(token=plain, details=token_view(token))


async def list_tokens(call: Call) -> TokenList:
    return TokenList(items=[token_view(token) for token in await call.surface.tokens.tokens()])


async def revoke_token(call: Call) -> None:
    if not await call.surface.tokens.revoke(TokenId(call.part("token_id"))):
        raise NotFound(f"there is no live token {call.part('token_id')}; `kici-admin token list` shows them")


async def create_agent_token(call: Call) -> CreatedAgentToken:
    body = call.body_as(NewAgentToken)
    token, plain = await call.surface.tokens.create_agent_token(
        name=body.name,
        labels=None if body.labels is None else frozenset(canonical(body.labels)),
        gate=frozenset(canonical(body.mandatory_labels)),
        expires_in_ms=_milliseconds(body.expires_in_seconds),
    )
    return CreatedAgentToken(token=plain, details=agent_token_view(token))


async def list_agent_tokens(call: Call) -> AgentTokenList:
    return AgentTokenList(items=[agent_token_view(token) for token in await call.surface.tokens.agent_tokens()])


async def revoke_agent_token(call: Call) -> None:
    if not await call.surface.tokens.revoke_agent_token(TokenId(call.part("token_id"))):
        detail = f"there is no live agent token {call.part('token_id')}; `kici-admin agent-token list` shows them"
        raise NotFound(detail)


def _ref(call: Call) -> SecretRef:
    """The secret that is asked for; `Denied` to tokens that are limited to other contexts."""
    try:
        ref = parse_secret_ref(f"{call.part('context')}:{call.part('key')}")
    except ValueError as error:
        message = "context and key are 1 to 128 letters, digits, dots, underscores and hyphens"
        raise Faulty([Fault("$", message)]) from error
    call.actor.check_secrets([ref])
    return ref


def _org(call: Call) -> OrgId:
    return OrgId(call.query_as(SecretsQuery).org)


def _no_secret(call: Call) -> NotFound:
    return NotFound(f"there is no secret {_ref(call)} of organisation {_org(call)}")


async def list_secrets(call: Call) -> SecretList:
    """Of the contexts that the token may use."""
    rows = await call.surface.secrets.secrets(_org(call))
    views = [
        SecretView(context=row.ref.context, key=row.ref.key, updated_at=moment(row.updated_at))
        for row in rows
        if call.actor.may_use_context(row.ref.context)
    ]
    return SecretList(items=views)


async def put_secret(call: Call) -> None:
    await call.surface.secrets.put(_org(call), _ref(call), call.body_as(NewSecret).value)


async def delete_secret(call: Call) -> None:
    if not await call.surface.secrets.delete(_org(call), _ref(call)):
        raise _no_secret(call)


async def reveal_secret(call: Call) -> SecretValue:
    value = await call.surface.secrets.reveal(_org(call), _ref(call))
    if value is None:
        raise _no_secret(call)
    return SecretValue(value=value)


async def rotate_key(call: Call) -> RotationView:
    done = await call.surface.secrets.rotate()
    return RotationView(resealed=done.resealed, kept=done.kept, unreadable=list(done.unreadable))


_TAG: Final = "credentials"
_POST, _GET, _DELETE = hdrs.METH_POST, hdrs.METH_GET, hdrs.METH_DELETE
_SECRET: Final = f"{ADMIN}/secrets/{{context}}/{{key}}"
ROUTES: Final = (
    Route(
        method=_POST,
        path=f"{ADMIN}/tokens",
        needs=Permission.TOKEN_MANAGE,
        unscoped=True,
        act=create_token,
        summary="Make a token of this API.",
        tag=_TAG,
        body=NewToken,
        answer=CreatedToken,
        status=HTTPStatus.CREATED,
        audit="token.create",
        headers=(IDEMPOTENCY_HEADER,),
        is_replayed=True,
        refusals=(HTTPStatus.CONFLICT,),
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/tokens",
        needs=Permission.TOKEN_MANAGE,
        act=list_tokens,
        summary="Tokens of this API, without their plain text.",
        tag=_TAG,
        answer=TokenList,
    ),
    Route(
        method=_DELETE,
        path=f"{ADMIN}/tokens/{{token_id}}",
        needs=Permission.TOKEN_MANAGE,
        act=revoke_token,
        summary="Revoke a token.",
        tag=_TAG,
        status=HTTPStatus.NO_CONTENT,
        audit="token.revoke",
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=_POST,
        path=f"{ADMIN}/agent-tokens",
        needs=Permission.TOKEN_MANAGE,
        unscoped=True,
        act=create_agent_token,
        summary="Make a credential for agents that are started by hand.",
        tag=_TAG,
        body=NewAgentToken,
        body_is_optional=True,
        answer=CreatedAgentToken,
        status=HTTPStatus.CREATED,
        audit="agent_token.create",
        headers=(IDEMPOTENCY_HEADER,),
        is_replayed=True,
        refusals=(HTTPStatus.CONFLICT,),
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/agent-tokens",
        needs=Permission.TOKEN_MANAGE,
        act=list_agent_tokens,
        summary="Credentials of agents, without their plain text.",
        tag=_TAG,
        answer=AgentTokenList,
    ),
    Route(
        method=_DELETE,
        path=f"{ADMIN}/agent-tokens/{{token_id}}",
        needs=Permission.TOKEN_MANAGE,
        act=revoke_agent_token,
        summary="Revoke an agent credential; its agents' connections are closed.",
        tag=_TAG,
        status=HTTPStatus.NO_CONTENT,
        audit="agent_token.revoke",
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=_GET,
        path=f"{ADMIN}/secrets",
        needs=Permission.SECRET_READ,
        act=list_secrets,
        summary="Names of the secrets of an organisation.",
        tag=_TAG,
        query=SecretsQuery,
        answer=SecretList,
    ),
    Route(
        method=hdrs.METH_PUT,
        path=_SECRET,
        needs=Permission.SECRET_WRITE,
        act=put_secret,
        summary="Store a secret, or replace its value.",
        tag=_TAG,
        query=SecretsQuery,
        body=NewSecret,
        status=HTTPStatus.NO_CONTENT,
        audit="secret.write",
    ),
    Route(
        method=_DELETE,
        path=_SECRET,
        needs=Permission.SECRET_DELETE,
        act=delete_secret,
        summary="Delete a secret.",
        tag=_TAG,
        query=SecretsQuery,
        status=HTTPStatus.NO_CONTENT,
        audit="secret.delete",
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=_POST,
        path=f"{_SECRET}/reveal",
        needs=Permission.SECRET_REVEAL,
        act=reveal_secret,
        summary="The value of a secret.",
        tag=_TAG,
        query=SecretsQuery,
        answer=SecretValue,
        audit="secret.reveal",
        refusals=(HTTPStatus.NOT_FOUND,),
    ),
    Route(
        method=_POST,
        path=f"{ADMIN}/rotate-key",
        needs=Permission.KEY_ROTATE,
        unscoped=True,
        act=rotate_key,
        summary="Seal all secrets by the key that the coordinator was started with.",
        tag=_TAG,
        answer=RotationView,
        audit="key.rotate",
    ),
)
