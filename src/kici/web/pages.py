"""Probes, metrics, the status page and how a browser signs in.

The pages are static files that hold no data; their script asks the API, with the session's cookie.
"""

from datetime import datetime
from http import HTTPStatus
from importlib import resources
from typing import Final

import msgspec
from aiohttp import hdrs, web

from kici.domain.access import GRANTS, Permission, Role
from kici.web.jobs import Line
from kici.web.logins import SESSION_MS, Logins
from kici.web.problems import ProblemError
from kici.web.routing import SESSION_COOKIE, Access, Answer, Body, Call, Route
from kici.web.views import API, View, moment

LOGINS: Final = web.AppKey("logins", Logins)
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
HTML: Final = "text/html"
_TYPES: Final = {".html": HTML, ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _static_files() -> dict[str, bytes]:
    folder = resources.files("kici.web").joinpath("static")
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


STATIC: Final = _static_files()


class Health(View, frozen=True, kw_only=True):
    status: str
    version: str
    instance: str


class Readiness(View, frozen=True, kw_only=True):
    ready: bool
    reason: str | None = None


class Whoami(View, frozen=True, kw_only=True):
    """The caller, and what it may do."""

    name: str
    role: Role
    permissions: list[Permission]
    instance: str
    version: str


class LoginCode(View, frozen=True, kw_only=True):
    """A link, relative to this address, that signs one browser in, once."""

    path: str
    expires_at: datetime


class LoginQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Where to go with a one-time code."""

    code: Line
    next: Line = "/"


class LoginBody(Body, frozen=True, kw_only=True):
    token: Line


async def health(call: Call) -> Health:
    return Health(status="ok", version=call.surface.version, instance=call.surface.instance_id)


async def ready(call: Call) -> Answer:
    reason = await call.surface.coordinator.not_ready()
    if reason is None:
        return Answer(body=Readiness(ready=True), status=HTTPStatus.OK)
    return Answer(body=Readiness(ready=False, reason=reason), status=HTTPStatus.SERVICE_UNAVAILABLE)


async def metrics(call: Call) -> web.Response:
    return web.Response(body=call.surface.metrics(), headers={hdrs.CONTENT_TYPE: METRICS_TYPE})


async def whoami(call: Call) -> Whoami:
    return Whoami(
        name=call.actor.name,
        role=call.actor.role,
        permissions=sorted(GRANTS[call.actor.role]),
        instance=call.surface.instance_id,
        version=call.surface.version,
    )


async def page(call: Call) -> web.Response:
    return _file("index.html")


async def static_file(call: Call) -> web.Response:
    if call.part("name") not in STATIC:
        raise web.HTTPNotFound
    return _file(call.part("name"))


def _file(name: str) -> web.Response:
    suffix = name[name.rfind(".") :]
    headers = {hdrs.CACHE_CONTROL: "no-cache", "Content-Security-Policy": PAGE_POLICY}
    return web.Response(body=STATIC[name], content_type=_TYPES[suffix], charset="utf-8", headers=headers)


def _bearer(request: web.Request, logins: Logins) -> str | None:
    """The plain token that authorised this request."""
    if hdrs.AUTHORIZATION in request.headers:
        return request.headers[hdrs.AUTHORIZATION].partition(" ")[2].strip()
    return logins.token_of_session(request.cookies.get(SESSION_COOKIE, ""))


async def make_code(call: Call) -> LoginCode:
    logins = call.request.app[LOGINS]
    token = _bearer(call.request, logins)
    assert token is not None
    code, until = logins.code(token)
    return LoginCode(path=f"/login?code={code}", expires_at=moment(until))


async def login_by_code(call: Call) -> web.Response:
    """Only a real visit spends the code; whatever probes links with HEAD does not."""
    query = call.query_as(LoginQuery)
    target = query.next if query.next.startswith("/") and query.next[1:2] not in ("/", "\\") else "/"
    response = web.Response(status=HTTPStatus.SEE_OTHER, headers={hdrs.LOCATION: target})
    if call.request.method == hdrs.METH_GET:
        session = call.request.app[LOGINS].session_of_code(query.code)
        if session is None:
            detail = "this sign-in link was used or is too old; `kici dashboard` prints a new one"
            raise ProblemError(HTTPStatus.GONE, detail)
        _set_session(call.request, response, session)
    return response


async def login_by_token(call: Call) -> web.Response:
    logins, token = call.request.app[LOGINS], call.body_as(LoginBody).token
    if await logins.actor_of_token(token) is None:
        raise ProblemError(HTTPStatus.UNAUTHORIZED, "this token is unknown, expired or revoked")
    response = web.Response(status=HTTPStatus.NO_CONTENT)
    _set_session(call.request, response, logins.session(token))
    return response


async def logout(call: Call) -> web.Response:
    call.request.app[LOGINS].end(call.request.cookies.get(SESSION_COOKIE, ""))
    response = web.Response(status=HTTPStatus.NO_CONTENT)
    response.del_cookie(SESSION_COOKIE)
    return response


def _set_session(request: web.Request, response: web.Response, session: str) -> None:
    is_secure = request.secure or request.headers.get("X-Forwarded-Proto") == "https"
    response.set_cookie(
        SESSION_COOKIE, session, max_age=SESSION_MS // 1000, httponly=True, samesite="Strict", secure=is_secure
    )


_GET, _POST = hdrs.METH_GET, hdrs.METH_POST
ROUTES: Final = (
    Route(
        method=_GET,
        path="/health",
        needs=Access.PUBLIC,
        act=health,
        summary="200 while the process is alive.",
        tag="probes",
        answer=Health,
    ),
    Route(
        method=_GET,
        path="/ready",
        needs=Access.PUBLIC,
        act=ready,
        summary="200 when it can serve; 503 with the reason until recovery is over and while the store is down.",
        tag="probes",
        answer=Readiness,
        also=(HTTPStatus.SERVICE_UNAVAILABLE,),
    ),
    Route(
        method=_GET,
        path="/metrics",
        needs=Permission.SCALER_READ,
        act=metrics,
        summary="Metrics for Prometheus.",
        tag="probes",
        media=("text/plain",),
    ),
    Route(
        method=_GET,
        path=f"{API}/whoami",
        needs=Access.AUTHENTICATED,
        act=whoami,
        summary="The caller, and what it may do.",
        tag="sessions",
        answer=Whoami,
    ),
    Route(
        method=_POST,
        path=f"{API}/login-codes",
        needs=Access.AUTHENTICATED,
        act=make_code,
        summary="A one-time link that signs a browser in as the caller.",
        tag="sessions",
        answer=LoginCode,
        status=HTTPStatus.CREATED,
    ),
    Route(
        method=_GET,
        path="/login",
        needs=Access.PUBLIC,
        act=login_by_code,
        summary="Sign in by a one-time code.",
        tag="sessions",
        query=LoginQuery,
        is_page=True,
    ),
    Route(
        method=_POST,
        path="/login",
        needs=Access.PUBLIC,
        act=login_by_token,
        summary="Sign in by a token.",
        tag="sessions",
        body=LoginBody,
        is_page=True,
    ),
    Route(
        method=_POST,
        path="/logout",
        needs=Access.PUBLIC,
        act=logout,
        summary="End the browser's session.",
        tag="sessions",
        is_page=True,
    ),
    *(
        Route(method=_GET, path=path, needs=Access.PUBLIC, act=page, summary="The status page.", tag="p", is_page=True)
        for path in ("/", "/jobs/{job_id}")
    ),
    Route(
        method=_GET,
        path="/static/{name}",
        needs=Access.PUBLIC,
        act=static_file,
        summary="Parts of the status page.",
        tag="pages",
        is_page=True,
    ),
)
