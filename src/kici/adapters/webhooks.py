"""Webhooks over HTTP: an event as a CloudEvent (structured JSON), signed by the rules of Standard Webhooks.

The libraries are imported at the first call: most coordinators never make one.
"""

import asyncio
import re
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final
from urllib.parse import quote, urlsplit

import aiohttp

from kici.domain.errors import Misconfigured, Permanent, Retryable
from kici.ports.clock import Clock
from kici.ports.webhook import WebhookCall

ANSWER_BYTES_MAX: Final = 2048
_SECRET: Final = re.compile(r"whsec_[A-Za-z0-9+/]{16,}={0,2}\Z")
_PASSING: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
_SERVER_FAULTS: Final = 500


class HttpWebhooks:
    """Implements `ports.webhook.WebhookSender`.  Belongs to the event loop that uses it first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def send(self, call: WebhookCall) -> None:
        body = encoded(call)
        headers = {**signed(call, body, self._now()), "Content-Type": "application/cloudevents+json"}
        where = urlsplit(call.url).netloc
        try:
            async with asyncio.timeout(call.timeout_seconds):
                async with self._open().post(call.url, data=body, headers=headers, allow_redirects=False) as answer:
                    status, text = answer.status, await answer.content.read(ANSWER_BYTES_MAX)
        except TimeoutError:
            raise Retryable(f"webhook {where} did not answer within {call.timeout_seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Retryable(f"webhook {where} cannot be reached: {type(error).__name__}: {error}") from error
        if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            return
        said = f"webhook {where} answered {status}{_shown(text)}"
        if status in _PASSING or status >= _SERVER_FAULTS:
            raise Retryable(said)
        raise Permanent(said)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now() / 1000, UTC)


def encoded(call: WebhookCall) -> str:
    """The body: a CloudEvent in structured mode."""
    from cloudevents.core.formats.json import JSONFormat
    from cloudevents.core.v1.event import CloudEvent

    attributes = {
        "id": call.id,
        "source": f"/kici/{quote(call.source)}",
        "type": call.name,
        "time": datetime.fromtimestamp(call.created_at / 1000, UTC),
        "datacontenttype": "application/json",
    }
    if call.subject is not None:
        attributes["subject"] = call.subject
    return JSONFormat().write(CloudEvent(attributes, dict(call.payload))).decode()


def signed(call: WebhookCall, body: str, now: datetime) -> dict[str, str]:
    """The headers of Standard Webhooks.  Raises `Misconfigured` for a secret that cannot sign."""
    from standardwebhooks.webhooks import Webhook

    if not _SECRET.match(call.secret):  # the library would skip what is no base64, and sign with the rest
        raise Misconfigured(
            f"the signing secret of webhook {urlsplit(call.url).netloc} is not whsec_ and base64; "
            "store the one that the receiver knows with `kici-admin secrets set`"
        )
    signature = Webhook(call.secret).sign(msg_id=call.id, timestamp=now, data=body)
    return {
        "webhook-id": call.id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": signature,
    }


def _shown(text: bytes) -> str:
    line = next((line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()), "")
    return f": {line[:200]}" if line else ""
