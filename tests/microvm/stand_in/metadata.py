"""The metadata service as a guest sees it: HTTP at its address, on the guest's own interface."""

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Final

TTL_SECONDS_MAX: Final = 21_600


class Metadata:
    def __init__(self, settings: dict[str, Any], data: Callable[[], object]) -> None:
        self._needs_token = settings.get("version") == "V2"
        self._data = data
        self._tokens: dict[str, float] = {}
        self._server: asyncio.Server | None = None

    async def serve(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._met, sock=listener)

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ", 2)
                pairs = (line.partition(":") for line in head[1:] if line)
                fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
                status, kind, text = self.answer(method, target, fields)
                data = text.encode()
                told = f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
                writer.write(told.encode() + data)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, ValueError):
            writer.close()

    def answer(self, method: str, target: str, fields: dict[str, str]) -> tuple[int, str, str]:
        """Status, type and text."""
        if method == "PUT" and target.strip("/") == "latest/api/token":
            return self._token(fields)
        if method != "GET":
            return 405, "text/plain", "Not allowed HTTP method."
        if self._needs_token and not self._is_valid(fields.get("x-metadata-token", "")):
            return 401, "text/plain", "No MMDS token provided, or one that is not valid."
        found: Any = self._data()
        for part in filter(None, target.split("/")):
            if not isinstance(found, dict) or part not in found:
                return 404, "text/plain", f"Resource not found: {target}."
            found = found[part]
        if fields.get("accept") == "application/json":
            return 200, "application/json", json.dumps(found, separators=(",", ":"))
        if isinstance(found, dict):
            return 200, "text/plain", "\n".join(f"{key}/" if isinstance(found[key], dict) else key for key in found)
        return 200, "text/plain", str(found)

    def _token(self, fields: dict[str, str]) -> tuple[int, str, str]:
        ttl = fields.get("x-metadata-token-ttl-seconds", "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= TTL_SECONDS_MAX:
            return 400, "text/plain", "Token time to live value not found, or out of range."
        token = secrets.token_urlsafe(32)
        self._tokens[token] = time.monotonic() + int(ttl)
        return 200, "text/plain", token

    def _is_valid(self, token: str) -> bool:
        return self._tokens.get(token, 0) > time.monotonic()
