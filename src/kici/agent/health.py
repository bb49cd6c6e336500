"""The agent's health port: three pages for probes and scrapers, on loopback only.

Just enough HTTP: one request for each connection, the path decides, nothing of the request is kept.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

REQUEST_BYTES_MAX: Final = 4096
REQUEST_SECONDS: Final = 5.0
LOOPBACK: Final = "127.0.0.1"


class Facts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What the pages show."""

    agent_id: str
    version: str
    connected: bool
    active_jobs: int
    jobs_total: int
    output_bytes: int


def page(path: str, facts: Facts) -> tuple[int, str, bytes]:
    """Status, content type and body."""
    match path:
        case "/health":
            return 200, "application/json", msgspec.json.encode(facts)
        case "/ready":
            return (200 if facts.connected else 503), "application/json", msgspec.json.encode(facts)
        case "/metrics":
            lines = (
                "# TYPE kici_agent_jobs_total counter",
                f"kici_agent_jobs_total {facts.jobs_total}",
                "# TYPE kici_agent_jobs_active gauge",
                f"kici_agent_jobs_active {facts.active_jobs}",
                "# TYPE kici_agent_log_bytes_total counter",
                f"kici_agent_log_bytes_total {facts.output_bytes}",
                "# TYPE kici_agent_connection_status gauge",
                f"kici_agent_connection_status {int(facts.connected)}",
            )
            return 200, "text/plain; version=0.0.4", "".join(f"{line}\n" for line in lines).encode()
        case _:
            return 404, "text/plain", b"/health, /ready and /metrics are here\n"


async def serve(port: int, facts: Callable[[], Facts]) -> asyncio.Server:
    """Raises `OSError` when the port is taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                line = await reader.readline()
                words = line.split()
                path = words[1].decode("ascii", "replace") if len(words) > 1 else ""
                status, kind, body = page(path.partition("?")[0], facts())
                head = f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # the prober went away
        finally:
            writer.close()

    return await asyncio.start_server(answer, LOOPBACK, port, limit=REQUEST_BYTES_MAX)
