"""Webhooks for real, on the loopback interface: signed, structured, and judged by their answer."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event
from cloudevents.core.formats.json import JSONFormat
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from kici.adapters.clock import RealClock
from kici.adapters.webhooks import HttpWebhooks
from kici.domain.errors import Misconfigured, Permanent, Retryable
from kici.domain.event import SCALE_UP, EventId
from kici.domain.ids import AgentId, Instant
from kici.ports.webhook import WebhookCall

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass
class Receiver:
    status: int = 204
    body: str = ""
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.got.append((dict(request.headers), await request.read()))
        headers = {"Location": "http://127.0.0.1:1/"} if self.status == 302 else {}
        return web.Response(status=self.status, text=self.body or None, headers=headers)


@asynccontextmanager
async def receiving() -> AsyncIterator[tuple[Receiver, Callable[..., Awaitable[None]]]]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    webhooks = HttpWebhooks(RealClock())

    async def send(**fields: object) -> None:
        await webhooks.send(replace(a_call(receiver.url), **fields))  # type: ignore[arg-type]  # what a test says

    try:
        yield receiver, send
    finally:
        await webhooks.close()
        await runner.cleanup()


def a_call(url: str) -> WebhookCall:
    return WebhookCall(
        url=url,
        secret=SECRET,
        id=EventId("evt-1"),
        name=SCALE_UP,
        subject=AgentId("scaler-event-00000001"),
        source="coordinator",
        payload={"agentId": "scaler-event-00000001", "claimCode": "c" * 64},
        created_at=Instant(1_750_000_000_123),
        timeout_seconds=5,
    )


async def test_the_receiver_can_verify_and_read_it() -> None:
    async with receiving() as (receiver, send):
        await send()
        ((headers, body),) = receiver.got
    assert Webhook(SECRET).verify(body, headers)["data"]["claimCode"] == "c" * 64
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_AAAA").verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body + b" ", headers)
    event = from_structured_event(HTTPMessage(headers, body), JSONFormat())
    assert (event.get_id(), event.get_type(), event.get_source()) == ("evt-1", SCALE_UP, "/kici/coordinator")
    assert event.get_subject() == "scaler-event-00000001"
    assert headers["Content-Type"] == "application/cloudevents+json"
    assert headers["webhook-id"] == "evt-1"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
async def test_what_may_pass_is_retryable(status: int) -> None:
    async with receiving() as (receiver, send):
        receiver.status, receiver.body = status, "\n come back later \nsecond line"
        with pytest.raises(Retryable, match=f"answered {status}: come back later"):
            await send()


@pytest.mark.parametrize("status", [302, 400, 401, 404, 410, 422])
async def test_the_rest_is_final_and_redirects_are_not_followed(status: int) -> None:
    async with receiving() as (receiver, send):
        receiver.status = status
        with pytest.raises(Permanent, match=str(status)):
            await send()
        assert len(receiver.got) == 1


async def test_nobody_there_is_retryable() -> None:
    async with receiving() as (_, send):
        with pytest.raises(Retryable, match="cannot be reached"):
            await send(url="http://127.0.0.1:1/")


async def test_no_answer_in_time_is_retryable() -> None:
    async with receiving() as (_, send):
        with pytest.raises(Retryable, match="did not answer within"):
            await send(timeout_seconds=0.0)


async def test_a_secret_that_cannot_sign_is_never_shown() -> None:
    async with receiving() as (receiver, send):
        with pytest.raises(Misconfigured, match="whsec_") as caught:
            await send(secret="whsec_not base64 at all!")
        assert "not base64 at all" not in str(caught.value)
        assert receiver.got == []


def test_a_call_hides_secret_and_payload() -> None:
    assert SECRET not in repr(a_call("http://x/"))
    assert "cccc" not in repr(a_call("http://x/"))
