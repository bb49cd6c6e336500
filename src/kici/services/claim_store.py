"""Claim codes: made for the agent of a machine that does not exist yet, redeemed once, on any coordinator.

Consumption is committed before a token is made: when that fails the code is lost, and its machine with it, which
is better than two tokens.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Protocol

from kici.domain.agent import AgentKind, AgentToken
from kici.domain.claim import CODE_BYTES, INVALID, PREFIX_CHARS, PendingClaim, hash_code, refusal_of
from kici.domain.errors import Denied, NoCapacity
from kici.domain.ids import AgentId, Instant, ScalerName
from kici.observe.events import Event, emit
from kici.ports.backend import SpawnOrder
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.event_store import ClaimRows

FAILURES_MAX: Final = 20
FAILURE_SECONDS: Final = 60.0
CALLERS_MAX: Final = 10_000


class Mints(Protocol):
    def new_agent_token(
        self,
        *,
        kind: AgentKind,
        labels: frozenset[str] | None = None,
        gate: frozenset[str] = frozenset(),
        agent_id: AgentId | None = None,
        expires_in_ms: int | None = None,
        name: str = "",
    ) -> tuple[AgentToken, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeemed:
    """What a claim code was good for."""

    agent_token: str
    agent_id: AgentId
    orchestrator_url: str
    labels: tuple[str, ...]


class ClaimStore:
    """Implements `ports.events.ClaimCodes`."""

    def __init__(self, *, store: ClaimRows, mints: Mints, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._mints = mints
        self._clock = clock
        self._entropy = entropy
        self._failures: OrderedDict[str, list[float]] = OrderedDict()
        """Refused codes of each caller within the last minute."""

    async def register(self, order: SpawnOrder, *, scaler: ScalerName, ttl_ms: int, agent_token_ttl_ms: int) -> str:
        """A new code for the agent of an order.  Raises `StoreDown`."""
        code = self._entropy.hex(CODE_BYTES)
        await self._store.register_claim(
            PendingClaim(
                hash=hash_code(code),
                prefix=code[:PREFIX_CHARS],
                agent_id=order.agent_id,
                scaler=scaler,
                labels=order.labels,
                gate=order.gate,
                agent_token_ttl_ms=agent_token_ttl_ms,
                orchestrator_url=order.orchestrator_url,
                expires_at=Instant(0),  # the store's clock says when
            ),
            ttl_ms=ttl_ms,
        )
        return code

    async def redeem(self, code: str, *, caller: str) -> Redeemed:
        """Trade a code for its agent's token, once.

        Raises `Denied` with what is wrong with the code, `NoCapacity` for a caller that guesses, or `StoreDown`.
        """
        if len(self._recent(caller)) >= FAILURES_MAX:
            raise NoCapacity("too many claim codes from this address were refused; try again in a minute")
        claim = await self._store.redeem_claim(hash_code(code))
        if claim is None:
            self._refused(caller)
            raise Denied(refusal_of(await self._store.describe_claim(hash_code(code))))
        token, plain = self._mints.new_agent_token(
            kind=AgentKind.EPHEMERAL,
            labels=frozenset(claim.labels),
            gate=claim.gate,
            agent_id=claim.agent_id,
            expires_in_ms=claim.agent_token_ttl_ms,
        )
        if not await self._store.give_token(token):
            emit(Event.CLAIM_REFUSED, level=logging.WARNING, agent_id=claim.agent_id, claim=claim.prefix)
            raise Denied(INVALID)  # its machine was given back meanwhile
        emit(Event.CLAIM_REDEEMED, agent_id=claim.agent_id, claim=claim.prefix, scaler=claim.scaler)
        return Redeemed(
            agent_token=plain,
            agent_id=claim.agent_id,
            orchestrator_url=claim.orchestrator_url,
            labels=claim.labels,
        )

    async def invalidate(self, agent_id: AgentId) -> None:
        """Its codes are good for nothing any more.  Raises `StoreDown`."""
        await self._store.invalidate_claims(agent_id)

    def _refused(self, caller: str) -> None:
        self._failures[caller] = [*self._recent(caller), self._clock.monotonic()]
        self._failures.move_to_end(caller)
        if len(self._failures) > CALLERS_MAX:
            self._failures.popitem(last=False)

    def _recent(self, caller: str) -> list[float]:
        since = self._clock.monotonic() - FAILURE_SECONDS
        return [at for at in self._failures.get(caller, ()) if at > since]
