"""Claim codes over HTTP: a provisioning workflow or webhook may redeem one for the machine that it makes."""

from http import HTTPStatus
from typing import Annotated, Final

from aiohttp import hdrs
from msgspec import Meta

from kici.web.routing import Access, Body, Call, Route
from kici.web.views import API, View


class RedeemBody(Body, frozen=True, kw_only=True):
    claim_code: Annotated[str, Meta(min_length=1, max_length=200)]


class CredentialsView(View, frozen=True, kw_only=True):
    """What the agent of the machine needs.  The token is shown this once."""

    agent_token: str
    agent_id: str
    orchestrator_url: str
    labels: list[str]


async def redeem_claim(call: Call) -> CredentialsView:
    redeemed = await call.surface.claims.redeem(
        call.body_as(RedeemBody).claim_code, caller=call.request.remote or "unknown"
    )
    return CredentialsView(
        agent_token=redeemed.agent_token,
        agent_id=redeemed.agent_id,
        orchestrator_url=redeemed.orchestrator_url,
        labels=list(redeemed.labels),
    )


ROUTES: Final = (
    Route(
        method=hdrs.METH_POST,
        path=f"{API}/claims/redeem",
        needs=Access.PUBLIC,
        act=redeem_claim,
        summary="Trade a claim code for the credentials of its agent, once.  Needs no token; limited for who guesses.",
        tag="claims",
        body=RedeemBody,
        answer=CredentialsView,
        refusals=(HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS),
    ),
)
