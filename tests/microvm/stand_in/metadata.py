"""The metadata service as a guest sees it: HTTP at its address, on the guest's own interface.

Firecracker picks these frames out of what the guest sends before the host's network sees them.  Here the packet
filter does, at the interface's entrance and before its bridge: they go to a network of their own and nowhere else.
"""

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from tests.microvm.stand_in.outside import Outside

MAC: Final = "02:00:a9:fe:a9:fe"
TTL_SECONDS_MAX: Final = 21_600


class Metadata:
    def __init__(self, settings: dict[str, Any], data: Callable[[], object]) -> None:
        self._address = settings["ipv4_address"]
        self._needs_token = settings.get("version") == "V2"
        self._data = data
        self._tokens: dict[str, float] = {}
        self._server: asyncio.Server | None = None

    async def serve(self, outside: Outside, tap: str) -> None:
        """Raises `OSError` where the host's network cannot be arranged so."""
        listener = self._listener(outside, tap)
        self._server = await asyncio.start_server(self._met, sock=listener)

    def _listener(self, outside: Outside, tap: str) -> socket.socket:
        network = outside.new_network()
        ours = f"mmds{tap[-8:]}"
        peer = f"link add eth0 address {MAC} type veth peer name {ours} netns {os.getpid()}"
        lines = (
            peer,
            "link set lo up",
            f"addr add {self._address}/32 dev eth0",
            "link set eth0 up",
            "route add default dev eth0",
        )
        outside.run("ip", "-batch", "-", stdin="".join(f"{line}\n" for line in lines), network=network)
        outside.run("ip", "-batch", "-", stdin=f"link set {ours} up\n")
        hook = "type filter hook ingress device"
        rules = (
            f"add table netdev {ours}",
            f'add chain netdev {ours} guest {{ {hook} "{tap}" priority -500; policy accept; }}',
            f'add rule netdev {ours} guest ip daddr {self._address} ether daddr set {MAC} fwd to "{ours}"',
            f'add rule netdev {ours} guest ether daddr {MAC} fwd to "{ours}"',
            f'add chain netdev {ours} back {{ {hook} "{ours}" priority -500; policy accept; }}',
            f'add rule netdev {ours} back fwd to "{tap}"',
        )
        outside.run("nft", "-f", "-", stdin="".join(f"{rule}\n" for rule in rules))
        with outside.inside(network):
            return socket.create_server((self._address, 80))

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
