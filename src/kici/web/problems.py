"""Failures as RFC 9457 problem documents: the border where our errors become statuses."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web

from kici.domain.errors import Conflict, Denied, KiciError, Misconfigured, NoCapacity, NotFound, Permanent, Retryable
from kici.domain.strict import Fault, Faulty

log = logging.getLogger(__name__)

PROBLEM_TYPE: Final = "application/problem+json"
NO_CAPACITY_SECONDS: Final = 5


class ProblemFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a request, with the path of what is wrong."""

    path: str
    detail: str


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str = ""
    instance: str = ""
    errors: list[ProblemFault] = []


class ProblemError(Exception):
    """Raised by handlers and by the plumbing: answers with this problem."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        faults: tuple[Fault, ...] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.faults = faults
        self.headers = dict(headers or {})


_STATUS: Final[tuple[tuple[type[KiciError], HTTPStatus], ...]] = (
    (NotFound, HTTPStatus.NOT_FOUND),
    (Conflict, HTTPStatus.CONFLICT),
    (Denied, HTTPStatus.FORBIDDEN),
    (NoCapacity, HTTPStatus.TOO_MANY_REQUESTS),
    (Retryable, HTTPStatus.SERVICE_UNAVAILABLE),
    (Misconfigured, HTTPStatus.UNPROCESSABLE_ENTITY),
    (Permanent, HTTPStatus.UNPROCESSABLE_ENTITY),
)


def translate(error: Exception) -> ProblemError:
    """Any failure of a handler as the problem to answer with.  What nobody foresaw is logged, and not shown."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, Faulty):
        detail = "the document has faults" if len(error.faults) > 1 else str(error)
        return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, detail, faults=error.faults)
    if isinstance(error, web.HTTPException):
        return _of_aiohttp(error)
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return ProblemError(status, str(error), headers=_retry_after(error))
    log.error("request.failed", exc_info=error)
    return ProblemError(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of the coordinator; its log has the details")


def _retry_after(error: KiciError) -> dict[str, str]:
    if isinstance(error, NoCapacity):
        return {"Retry-After": str(NO_CAPACITY_SECONDS)}
    return {"Retry-After": str(max(1, round(error.after_seconds)))} if isinstance(error, Retryable) else {}


_DETAILS: Final = {
    HTTPStatus.NOT_FOUND: "there is nothing at this path; /api/v1/openapi.json lists what there is",
    HTTPStatus.METHOD_NOT_ALLOWED: "this path does not answer that method; see the Allow header",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "the body is larger than this path accepts",
}


def _of_aiohttp(error: web.HTTPException) -> ProblemError:
    status = HTTPStatus(error.status)
    kept = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
    return ProblemError(status, _DETAILS.get(status, error.reason), headers=kept)


def response(error: ProblemError, path: str) -> web.Response:
    slug = error.status.phrase.lower().replace(" ", "-").replace("'", "")
    problem = Problem(
        type=f"urn:kici:problem:{slug}",
        title=error.status.phrase,
        status=error.status.value,
        detail=error.detail,
        instance=path[:500],
        errors=[ProblemFault(path=fault.path, detail=fault.message) for fault in error.faults],
    )
    return web.Response(
        body=msgspec.json.encode(problem), status=error.status, content_type=PROBLEM_TYPE, headers=error.headers
    )


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:  # the request border: every failure becomes an answer
        if isinstance(error, web.HTTPException) and error.status < HTTPStatus.BAD_REQUEST:
            raise
        return response(translate(error), request.path)
