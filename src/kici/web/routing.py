"""Routes as a table: method, path, permission, request and answer types, handler.

Authorisation, strict reading of query and body, the access log and the OpenAPI description all follow from the
same row, so that none of them can be forgotten for a new route.  Order of judgement: who asks (401), may they
(403), is the query well-formed (400), the body's size (413), type (415), syntax (400) and meaning (422).
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import hdrs, web

from kici.domain.access import AccessRecord, Actor, Permission
from kici.domain.strict import Fault, Faulty, read, read_texts
from kici.web.logins import Logins
from kici.web.problems import Handler, ProblemError, translate
from kici.web.replays import IDEMPOTENCY_HEADER, Replays
from kici.web.surface import Surface

T = TypeVar("T")

BODY_BYTES_MAX: Final = 1024 * 1024
JSON: Final = "application/json"
IDEMPOTENCY_CHARS_MAX: Final = 200
SESSION_COOKIE: Final = "kici_session"


class Access(Enum):
    """Who may use a route that asks for no permission."""

    PUBLIC = "public"
    AUTHENTICATED = "authenticated"


class NoQuery(msgspec.Struct, frozen=True):
    """No parameters."""


class Body(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of request bodies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, judged and read."""

    request: web.Request
    surface: Surface
    caller: Actor | None
    query: object
    body: object

    @property
    def actor(self) -> Actor:
        """Who asks, on routes that are not public."""
        assert self.caller is not None
        return self.caller

    @property
    def idempotency_key(self) -> str | None:
        key = self.request.headers.get(IDEMPOTENCY_HEADER)
        if key is not None and not (0 < len(key) <= IDEMPOTENCY_CHARS_MAX and key.isprintable()):
            fault = Fault(IDEMPOTENCY_HEADER, f"expected 1 to {IDEMPOTENCY_CHARS_MAX} printable characters")
            raise ProblemError(HTTPStatus.BAD_REQUEST, str(fault), faults=(fault,))
        return key

    def part(self, name: str) -> str:
        """A part of the path."""
        return self.request.match_info[name]

    def query_as(self, kind: type[T]) -> T:
        assert isinstance(self.query, kind), kind
        return self.query

    def body_as(self, kind: type[T]) -> T:
        assert isinstance(self.body, kind), kind
        return self.body


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer with another status than the route's own, or with headers."""

    body: object = None
    status: HTTPStatus
    headers: tuple[tuple[str, str], ...] = ()


Act = Callable[[Call], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    path: str
    needs: Permission | Access
    unscoped: bool = False
    """Not for tokens that are limited to some secret contexts: it concerns everybody, or would lift that limit."""
    act: Act
    """Answers an `answer`, an `Answer` around one, or a response of its own."""
    summary: str
    tag: str
    query: type[msgspec.Struct] = NoQuery
    body: object = None
    """Type of the JSON body; None: there is none."""
    reads: Callable[[object], object] | None = None
    """Reads the decoded body where more than its type has to be judged."""
    body_is_optional: bool = False
    body_bytes_max: int = BODY_BYTES_MAX
    answer: object = None
    """Type of the JSON answer; None: no content."""
    status: HTTPStatus = HTTPStatus.OK
    also: tuple[HTTPStatus, ...] = ()
    """Other statuses that come with the same answer."""
    media: tuple[str, ...] = (JSON,)
    """Media types of the answer; others than JSON are text."""
    audit: str | None = None
    """Name of the action in the access log; None: not recorded."""
    headers: tuple[str, ...] = ()
    """Request headers beyond the usual, for the description."""
    is_replayed: bool = False
    """A repetition with the same idempotency key gets the first answer from `Replays`."""
    is_page: bool = False
    """For browsers only: not part of the described API."""
    refusals: tuple[HTTPStatus, ...] = ()
    """Statuses that this action itself may refuse with."""


_PART: Final = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}\Z")
"""What a part of a path may be; nothing that we name is anything else."""
NOBODY_NAME: Final = "anonymous"


class Plumbing:
    """Turns rows of the table into handlers."""

    def __init__(self, surface: Surface, logins: Logins) -> None:
        self._surface = surface
        self._logins = logins
        self._replays = Replays(surface.clock)

    def handler(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not all(_PART.match(part) for part in request.match_info.values()):
                raise web.HTTPNotFound
            actor = await self._authorised(request, route)
            if route.audit is None:
                return await self._serve(request, route, actor)
            try:
                response = await self._serve(request, route, actor)
            except Exception as error:
                problem = translate(error)
                await self._record(request, route, actor, f"refused {problem.status.value}", problem.detail)
                raise problem from error
            await self._record(request, route, actor, "ok")
            return response

        return handle

    async def _serve(self, request: web.Request, route: Route, actor: Actor | None) -> web.StreamResponse:
        call = Call(
            request=request,
            surface=self._surface,
            caller=actor,
            query=_query(request, route),
            body=await _body(request, route),
        )
        if route.is_replayed and call.idempotency_key is not None:
            return _respond(route, await self._once(route, call))
        return _respond(route, await route.act(call))

    async def _once(self, route: Route, call: Call) -> object:
        """Act, unless the same caller sent the same request with the same key before."""
        key = (call.actor.token_id or call.actor.name, route.path, call.idempotency_key or "")
        before = self._replays.begin(key, call.body)
        if before is not None:
            return before
        try:
            answer = await route.act(call)
        except BaseException:
            self._replays.failed(key)
            raise
        self._replays.done(key, answer)
        return answer

    async def _authorised(self, request: web.Request, route: Route) -> Actor | None:
        """None on public routes only."""
        if route.needs is Access.PUBLIC:
            return None
        actor = await self._actor(request)
        if actor is None:
            detail = "a bearer token is needed (Authorization: Bearer <token>) that is neither expired nor revoked"
            raise ProblemError(HTTPStatus.UNAUTHORIZED, detail, headers={"WWW-Authenticate": 'Bearer realm="kici"'})
        lack = _lack(route, actor)
        if lack is not None:
            if route.audit is not None:
                await self._record(request, route, actor, "denied", lack)
            raise ProblemError(HTTPStatus.FORBIDDEN, lack)
        return actor

    async def _actor(self, request: web.Request) -> Actor | None:
        scheme, _, plain = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() == "bearer" and plain.strip():
            return await self._logins.actor_of_token(plain.strip())
        session = request.cookies.get(SESSION_COOKIE)
        if not session:
            return None
        if request.method not in (hdrs.METH_GET, hdrs.METH_HEAD) and not _is_same_origin(request):
            raise ProblemError(HTTPStatus.FORBIDDEN, "a cookie authorises changes only from this site's own pages")
        return await self._logins.actor_of_session(session)

    async def _record(
        self, request: web.Request, route: Route, actor: Actor | None, outcome: str, detail: str = ""
    ) -> None:
        assert route.audit is not None
        await self._surface.access_log.record(
            AccessRecord(
                at=self._surface.clock.now(),
                actor=actor.name if actor else NOBODY_NAME,
                action=route.audit,
                target="/".join(request.match_info.values())[:200],
                outcome=outcome,
                detail=detail[:500],
            )
        )


def _lack(route: Route, actor: Actor) -> str | None:
    """Why this caller may not; None: it may."""
    who = f"{actor.name} ({actor.role.value})"
    if isinstance(route.needs, Permission) and not actor.may(route.needs):
        return f"{who} lacks the permission {route.needs.value}"
    if route.unscoped and actor.secret_contexts is not None:
        return f"the token of {who} is limited to some secret contexts; this takes one without such a limit"
    return None


def _is_same_origin(request: web.Request) -> bool:
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get(hdrs.ORIGIN, "")
    return origin.partition("://")[2] == request.host


def _query(request: web.Request, route: Route) -> object:
    repeated = sorted({name for name in request.query if len(request.query.getall(name)) > 1})
    try:
        if repeated:
            raise Faulty([Fault(f"?{name}", "is given more than once") for name in repeated])
        return read_texts(request.query, route.query)
    except Faulty as error:
        raise ProblemError(HTTPStatus.BAD_REQUEST, str(error), faults=error.faults) from error


async def _body(request: web.Request, route: Route) -> object:
    if route.body is None:
        return None
    raw = await _raw_body(request, route)
    if not raw and route.body_is_optional:
        return _judged({}, route)
    if request.content_type != JSON:
        detail = f"expected a body of type {JSON}, found {request.content_type}"
        raise ProblemError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail, headers={"Accept": JSON})
    return _judged(decode(raw), route)


async def _raw_body(request: web.Request, route: Route) -> bytes:
    """The whole body.  Stops reading at the limit, so that a liar about its length costs no memory."""
    detail = f"the body is larger than the limit of {route.body_bytes_max} bytes"
    if (request.content_length or 0) > route.body_bytes_max:
        raise ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
    parts = bytearray()
    async for part in request.content.iter_any():
        parts += part
        if len(parts) > route.body_bytes_max:
            raise ProblemError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail)
    return bytes(parts)


def _judged(raw: object, route: Route) -> object:
    if route.reads is not None:
        return route.reads(raw)
    kind: Any = route.body
    return read(raw, kind)


def decode(body: bytes) -> object:
    """JSON as plain data; a key that is given twice is refused, because readers disagree on which one counts."""
    try:
        msgspec.json.decode(body)
        return json.loads(body, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        if isinstance(error, Faulty):
            raise
        raise ProblemError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {str(error)[:200]}") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise Faulty([Fault("$", f"key {name[:80]!r} is given twice in one object") for name in twice])
    return found


_encoder: Final = msgspec.json.Encoder()


def _respond(route: Route, result: object) -> web.StreamResponse:
    if isinstance(result, web.StreamResponse):
        return result
    answer = result if isinstance(result, Answer) else Answer(body=result, status=route.status)
    if answer.body is None:
        return web.Response(status=HTTPStatus.NO_CONTENT, headers=answer.headers)
    return web.Response(
        body=_encoder.encode(answer.body), status=answer.status, content_type=JSON, headers=answer.headers
    )


def add_routes(app: web.Application, routes: Iterable[Route], plumbing: Plumbing) -> None:
    for route in routes:
        if route.method == hdrs.METH_GET:
            app.router.add_get(route.path, plumbing.handler(route), allow_head=True)
        else:
            app.router.add_route(route.method, route.path, plumbing.handler(route))
