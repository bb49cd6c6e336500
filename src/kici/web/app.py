"""The HTTP application: all routes over one surface."""

import asyncio
from functools import cache
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import hdrs, web

from kici.web import admin, claims, credentials, events, jobs, logs, orphans, pages, peers, runs, workers, workflows
from kici.web.logins import Logins
from kici.web.openapi import describe
from kici.web.problems import problems
from kici.web.routing import JSON, Access, Call, Plumbing, Route, add_routes
from kici.web.surface import Surface
from kici.web.views import API

ROUTES: Final[tuple[Route, ...]] = (
    *pages.ROUTES,
    *jobs.ROUTES,
    *logs.ROUTES,
    *runs.ROUTES,
    *admin.ROUTES,
    *credentials.ROUTES,
    *workflows.ROUTES,
    *events.ROUTES,
    *claims.ROUTES,
    *orphans.ROUTES,
    *workers.ROUTES,
    *peers.ROUTES,
)
_API_POLICY: Final = "default-src 'none'; frame-ancestors 'none'"


def build_app(surface: Surface, logins: Logins) -> web.Application:
    """The application, open for further routes (the agents' gateway) until it is started.

    `logins` is where the coordinator mints the one-time link that it prints.
    """
    app = web.Application(middlewares=[problems], client_max_size=0)
    app[pages.LOGINS] = logins
    app[logs.STREAMS] = set[asyncio.Task[object]]()
    add_routes(app, (*ROUTES, _openapi_route(surface.version)), Plumbing(surface, logins))
    app.on_response_prepare.append(_harden)
    app.on_shutdown.append(logs.end_streams)
    return app


@cache
def _description(version: str) -> bytes:
    """Made when it is first asked for: that takes longer than everything else at the start."""
    return msgspec.json.encode(describe(ROUTES, version=version))


def _openapi_route(version: str) -> Route:
    async def openapi(call: Call) -> web.Response:
        return web.Response(body=_description(version), content_type=JSON, status=HTTPStatus.OK)

    return Route(
        method=hdrs.METH_GET,
        path=f"{API}/openapi.json",
        needs=Access.PUBLIC,
        act=openapi,
        summary="This description.",
        tag="description",
        is_page=True,
    )


async def _harden(request: web.Request, response: web.StreamResponse) -> None:
    headers = response.headers
    headers.setdefault("X-Content-Type-Options", "nosniff")
    headers.setdefault("Referrer-Policy", "no-referrer")
    headers.setdefault("Content-Security-Policy", _API_POLICY)
    headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
