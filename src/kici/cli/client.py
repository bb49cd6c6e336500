"""A small client of the HTTP API: one connection, JSON in and out, and event streams.

It is synchronous and built on the standard library, because a command must start fast.  What may be repeated
without harm (reading, and creating with an idempotency key) is tried again while the coordinator restarts.
"""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from kici.cli.errors import CliError, NoCoordinator, Refused
from kici.cli.pausing import monotonic, pause

API: Final = "/api/v1"
REQUEST_SECONDS: Final = 90.0
"""Longest that an answer may take; the longest long poll is 60 s."""
STREAM_SILENCE_SECONDS: Final = 45.0
"""A stream that says nothing for so long is dead: the coordinator sends a comment every 15 s."""
AGAIN_SECONDS: Final = 0.5
_LINE_BYTES_MAX: Final = 8 * 1024 * 1024
_UNREACHABLE: Final = (ConnectionError, TimeoutError, http.client.HTTPException, OSError)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event."""

    name: str
    data: Json
    id: int | None


class Client:
    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CliError(f"{url!r} is no address of a coordinator; give one such as http://127.0.0.1:4000")
        self.url = url.rstrip("/")
        self._parts = parts
        self._token = token
        self.request_seconds = REQUEST_SECONDS
        """Longest that an answer may take."""
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str, **query: object) -> Json:
        return self.request("GET", path, query=query, again_seconds=5.0)

    def post(self, path: str, body: object = None, *, key: str | None = None, again_seconds: float = 0.0) -> Json:
        headers = {"Idempotency-Key": key} if key else {}
        return self.request("POST", path, body=body, headers=headers, again_seconds=again_seconds if key else 0.0)

    def request(  # one request has these parts
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        again_seconds: float = 0.0,
    ) -> Json:
        """The decoded answer ({} for none).  `again_seconds`: how long to try again when nobody answers.

        Raises `Refused` with what the coordinator says, or `NoCoordinator`.
        """
        encoded = None if body is None else json.dumps(body).encode()
        sent = {**(headers or {}), **({"Content-Type": "application/json"} if encoded is not None else {})}
        until = monotonic() + again_seconds
        if method != "GET":
            self.close()  # an idle connection may be half closed, and this must not be sent twice
        is_fresh = self._connection is None
        while True:
            try:
                response = self._send(method, path + _query(query), encoded, sent)
                return _decoded(response, response.read())
            except _UNREACHABLE as error:
                self.close()
                if not is_fresh and method == "GET":
                    is_fresh = True  # the server had closed the idle connection
                    continue
                if monotonic() >= until:
                    raise self._absent(error) from error
            except Refused as refusal:
                if refusal.status != 503 or monotonic() >= until:
                    raise
            pause(AGAIN_SECONDS)

    def events(self, path: str, *, after: int) -> Iterator[ServerEvent]:
        """Events after a position until the stream ends.  Raises as `request`, also when the connection is lost."""
        connection = self._connect(STREAM_SILENCE_SECONDS)
        headers = {**self._headers(), "Accept": "text/event-stream", "Last-Event-ID": str(after)}
        try:
            connection.request("GET", self._parts.path.rstrip("/") + path, headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                _decoded(response, response.read())
            yield from _events(response)
        except _UNREACHABLE as error:
            raise self._absent(error) from error
        finally:
            connection.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def again(self) -> "Client":
        """Another client of the same coordinator, with a connection of its own."""
        return Client(self.url, self._token)

    def page(self, path: str) -> str:
        """The address of a page, for people."""
        return f"{self.url}{path}"

    def _send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = self._connect(self.request_seconds)
        self._connection.request(
            method, self._parts.path.rstrip("/") + path, body=body, headers={**self._headers(), **headers}
        )
        return self._connection.getresponse()

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=seconds)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _absent(self, error: BaseException) -> NoCoordinator:
        return NoCoordinator(
            f"no coordinator answers at {self.url} ({str(error) or type(error).__name__}).\n"
            "Start one with `kici up`, or name another with --url or KICI_URL."
        )


def job_path(job_id: str, rest: str = "") -> str:
    return f"{API}/jobs/{quote(job_id, safe='')}{rest}"


def run_path(run_id: str, rest: str = "") -> str:
    return f"{API}/runs/{quote(run_id, safe='')}{rest}"


def admin_path(*parts: str) -> str:
    return "/".join([f"{API}/admin", *(quote(part, safe="") for part in parts)])


def _query(query: Mapping[str, object] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _decoded(response: http.client.HTTPResponse, body: bytes) -> Json:
    try:
        answer = json.loads(body) if body else {}
    except ValueError:
        answer = {"detail": body[:200].decode(errors="replace")}
    if response.status < 400:
        return answer if isinstance(answer, dict) else {"items": answer}
    raise Refused(_problem_text(answer, response), status=response.status, answer=answer)


def _problem_text(answer: Json, response: http.client.HTTPResponse) -> str:
    lines = [str(answer.get("detail") or answer.get("title") or response.reason)]
    faults = answer.get("errors", [])
    if len(faults) > 1:
        lines += [f"  {fault['path']}: {fault['detail']}" for fault in faults]
    if response.status == 401:
        lines.append("Set KICI_TOKEN, or name the coordinator's data directory with --data-dir (it holds owner-token).")
    return "\n".join(lines)


def _events(response: http.client.HTTPResponse) -> Iterator[ServerEvent]:
    name, data, position = "message", "", None
    while raw := response.readline(_LINE_BYTES_MAX):
        line = raw.decode().rstrip("\r\n")
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield ServerEvent(name, json.loads(data), position)
            name, data, position = "message", "", None
        elif field == "event":
            name = value
        elif field == "data":
            data += value
        elif field == "id":
            position = int(value)
