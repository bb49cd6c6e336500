"""Asks another coordinator whether it can work: its `/ready`, at the address that agents know."""

import asyncio
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import aiohttp

ANSWER_SECONDS: Final = 3.0
_SCHEMES: Final = {"ws": "http", "wss": "https"}


class HttpPeerProbe:
    """Implements `ports.peers.PeerProbe`."""

    async def is_ready(self, address: str) -> bool:
        parts = urlsplit(address)
        scheme = _SCHEMES.get(parts.scheme, parts.scheme)
        url = f"{scheme}://{parts.netloc}{parts.path.removesuffix('/').removesuffix('/ws')}/ready"
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                aiohttp.ClientSession() as session,
                session.get(url, allow_redirects=False) as answer,
            ):
                return answer.status == HTTPStatus.OK
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False
