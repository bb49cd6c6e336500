"""A client of firecracker's own interface: HTTP on a Unix socket in the machine's directory.

Small on purpose: requests and answers are short, and one connection serves one machine's start.  An answer other
than a success is raised with its status and what the VMM said.
"""

import asyncio
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kici.adapters.unix_sockets import connect
from kici.decide.microvm_firecracker import ApiCall
from kici.domain.errors import DeterministicRefusal, Retryable

CALL_SECONDS: Final = 10.0
"""Longest that one request may take, unless it says otherwise."""
ANSWER_BYTES_MAX: Final = 256 * 1024
POLL_SECONDS: Final = 0.005
POLL_SECONDS_MAX: Final = 0.1


class ApiRefused(DeterministicRefusal):
    """The VMM answered, and will not do it."""

    def __init__(self, call: ApiCall, status: int, text: str) -> None:
        super().__init__(f"firecracker refuses {call.method} {call.path} with {status}: {text}")
        self.status = status
        self.text = text


class FirecrackerApi:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, socket: Path) -> Self:
        """Raises `Retryable` when nobody listens there."""
        try:
            return cls(*await connect(socket))
        except OSError as error:
            raise Retryable(f"no VMM listens on {socket}: {error.strerror or error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    async def send(self, call: ApiCall, *, seconds: float = CALL_SECONDS) -> Any:
        """The decoded answer; None for an empty one.  Raises `ApiRefused`, or `Retryable` when the VMM is gone."""
        body = b"" if call.body is None else json.dumps(call.body, separators=(",", ":")).encode()
        head = (
            f"{call.method} {call.path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(seconds):
                self._writer.write(head.encode() + body)
                await self._writer.drain()
                status, answer = await self._answer()
        except TimeoutError as error:
            raise Retryable(f"firecracker did not answer {call.method} {call.path} in {seconds:g} s") from error
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise Retryable(f"firecracker ended during {call.method} {call.path}: {error!r}") from error
        if not 200 <= status < 300:
            raise ApiRefused(call, status, _fault(answer))
        return json.loads(answer) if answer else None

    async def _answer(self) -> tuple[int, bytes]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        length = 0
        for line in lines[1:]:
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-length":
                length = int(value)
        if length > ANSWER_BYTES_MAX:
            raise ValueError(f"an answer of {length} bytes is not read")
        return status, await self._reader.readexactly(length)


def _fault(answer: bytes) -> str:
    try:
        told = json.loads(answer)
    except ValueError:
        return answer.decode(errors="replace")[:2048]
    return str(told.get("fault_message", told) if isinstance(told, dict) else told)[:2048]
