"""QEMU's monitor: one JSON object on each line, commands answered in order, events in between."""

import asyncio
import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kici.adapters.unix_sockets import connect
from kici.domain.errors import DeterministicRefusal, Retryable

COMMAND_SECONDS: Final = 10.0


class QmpRefused(DeterministicRefusal):
    """QEMU understood, and will not do it."""


class Qmp:
    """One connection; QEMU serves one at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, socket: Path) -> Self:
        """Raises `Retryable` when nobody listens there, or not to us."""
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                qmp = cls(*await connect(socket))
                await qmp._read()
                await qmp.execute("qmp_capabilities")
        except (OSError, ValueError) as error:  # a TimeoutError is an OSError
            raise Retryable(f"no QEMU answers on {socket}: {error!r}") from error
        return qmp

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    async def hand_over(self, name: str, descriptor: int) -> None:
        """Give QEMU an open file under a name, for one later command.  Raises as `execute` does."""
        _ = await self._ask({"execute": "getfd", "arguments": {"fdname": name}}, descriptor)

    async def execute(self, command: str, **arguments: object) -> Any:
        """The answer.  Raises `QmpRefused`, or `Retryable` when QEMU is gone."""
        return await self._ask({"execute": command, **({"arguments": arguments} if arguments else {})}, None)

    async def _ask(self, request: dict[str, object], descriptor: int | None) -> Any:
        command = request["execute"]
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                data = json.dumps(request).encode() + b"\n"
                if descriptor is None:
                    self._writer.write(data)
                    await self._writer.drain()
                else:
                    self._send_with(data, descriptor)
                while True:
                    told = await self._read()
                    if "return" in told:
                        return told["return"]
                    if "error" in told:
                        raise QmpRefused(f"QEMU refuses {command}: {told['error'].get('desc', told['error'])}")
        except (OSError, ValueError) as error:
            raise Retryable(f"QEMU ended during {command}: {error!r}") from error

    def _send_with(self, data: bytes, descriptor: int) -> None:
        """Beside the stream, in which nothing waits: every command is answered before the next."""
        own = os.dup(self._writer.get_extra_info("socket").fileno())
        with socket.socket(fileno=own) as plain:
            socket.send_fds(plain, [data], [descriptor])

    async def _read(self) -> dict[str, Any]:
        line = await self._reader.readline()
        if not line:
            raise ConnectionResetError("the monitor was closed")
        told = json.loads(line)
        if not isinstance(told, dict):
            raise ValueError(f"the monitor said {line[:100]!r}")
        return told
