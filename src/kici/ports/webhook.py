"""Calls to webhooks: one signed HTTP request for one event."""

from dataclasses import dataclass, field
from typing import Protocol

from kici.domain.event import EventId, Payload
from kici.domain.ids import AgentId, Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookCall:
    url: str
    secret: str = field(repr=False)
    """Of the signature: `whsec_` and base64, or any text."""
    id: EventId
    """The same at every attempt: how the receiver knows a repetition."""
    name: str
    subject: AgentId | None
    source: str
    payload: Payload = field(repr=False)
    """With its secrets."""
    created_at: Instant
    timeout_seconds: float


class WebhookSender(Protocol):
    async def send(self, call: WebhookCall) -> None:
        """Return when the receiver took it (2xx).

        Raises `Retryable` for what may pass (no answer, 408, 425, 429, 5xx), else `Permanent`.  Never says the
        secret or the payload.
        """
        ...

    async def close(self) -> None: ...
