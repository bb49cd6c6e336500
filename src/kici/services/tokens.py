"""Credentials: made, checked, revoked, and cleaned up.

Plain texts exist only in the answer that makes them; the store holds their SHA-256 and a few characters for
people.  Checking is one lookup by hash, remembered for a few seconds.  A revocation takes effect at once here
(listeners close live connections); other coordinators are told by whoever revokes, and forget by themselves
within `CACHE_SECONDS`.

Expiry governs admission: an expired ephemeral token still admits its own agent while a job names that agent,
so that a long job does not die of a short credential.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, Generic, Never, Protocol, TypeVar

from kici.decide.registration import authenticate
from kici.domain.access import ApiToken, Role
from kici.domain.agent import AgentKind, AgentToken
from kici.domain.errors import Denied, StoreDown
from kici.domain.ids import AgentId, InstanceId, Instant, TokenId
from kici.domain.job import HELD_BY_AGENT, Job
from kici.kit.ticker import Ticker
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.store import TokenStore

AGENT_PREFIX: Final = "kat_"
API_PREFIX: Final = "kici_"
OWNER_TOKEN_NAME: Final = "owner-token"
_SHOWN: Final = 12
_SECRET_BYTES: Final = 32
CACHE_SECONDS: Final = 10.0
CACHED_MAX: Final = 4096
PURGE_SECONDS: Final = 60.0
PURGE_BATCH: Final = 5000
LISTED_MAX: Final = 10_000

T = TypeVar("T", AgentToken, ApiToken)
OnRevoked = Callable[[TokenId], None]
LookUp = Callable[[str], Awaitable[T | None]]


class TokensAndJobs(TokenStore, Protocol):
    """What this service needs of the store."""

    async def held_jobs(self, agent_id: AgentId) -> list[Job]: ...


def hash_token(plain: str) -> str:
    return hashlib.sha256(plain.encode()).hexdigest()


def _is_over(token: AgentToken | ApiToken, now: Instant) -> bool:
    return token.expires_at is not None and token.expires_at <= now


class Tokens:
    def __init__(self, *, store: TokensAndJobs, clock: Clock, entropy: Entropy) -> None:
        self._store = store
        self._clock = clock
        self._entropy = entropy
        self._agents: _Remembered[AgentToken] = _Remembered(clock)
        self._api: _Remembered[ApiToken] = _Remembered(clock)
        self._listeners: list[OnRevoked] = []
        self._revocations = 0

    # --- agents

    def new_agent_token(
        self,
        *,
        kind: AgentKind,
        labels: frozenset[str] | None = None,
        gate: frozenset[str] = frozenset(),
        agent_id: AgentId | None = None,
        expires_in_ms: int | None = None,
        name: str = "",
    ) -> tuple[AgentToken, str]:
        """A token that is not stored yet, for callers that write it together with a spawn; and its plain text."""
        assert (kind is AgentKind.EPHEMERAL) == (agent_id is not None), "an ephemeral token is for one agent"
        plain, now = self._plain(AGENT_PREFIX), self._clock.now()
        token = AgentToken(
            id=self._token_id(),
            hash=hash_token(plain),
            prefix=plain[:_SHOWN],
            kind=kind,
            labels=labels,
            gate=gate,
            agent_id=agent_id,
            created_at=now,
            expires_at=None if expires_in_ms is None else Instant(now + expires_in_ms),
            name=name,
        )
        return token, plain

    async def create_agent_token(
        self, *, name: str, labels: frozenset[str] | None, gate: frozenset[str], expires_in_ms: int | None
    ) -> tuple[AgentToken, str]:
        """Make and store a token for agents that people start themselves."""
        token, plain = self.new_agent_token(
            kind=AgentKind.STATIC, labels=labels, gate=gate, expires_in_ms=expires_in_ms, name=name
        )
        await self._store.create_agent_token(token)
        return token, plain

    async def verify_agent(self, plain: str) -> AgentToken:
        """The token that an agent presents, fit to begin with; registration then judges what the agent claims.

        Raises `Denied` with a reason that is safe to tell the peer, or `StoreDown`.
        """
        token = await self._found(plain, self._agents, self._store.agent_token)
        now = self._clock.now()
        at_work = token is not None and _is_over(token, now) and await self._is_at_work(token)
        refusal = authenticate(token, now=now, holds_job=at_work)
        if refusal is not None or token is None:
            raise Denied(refusal.reason if refusal else "unknown token")
        return token

    async def agent_tokens(self) -> list[AgentToken]:
        return await self._store.agent_tokens(limit=LISTED_MAX)

    async def revoke_agent_token(self, token_id: TokenId) -> bool:
        """False: there was nothing to revoke.  Listeners are told either way: closing twice does no harm."""
        revoked = await self._store.revoke_agent_token(token_id)
        self.forget(token_id)
        return revoked

    # --- people and programs

    async def create(
        self,
        *,
        name: str,
        role: Role,
        secret_contexts: frozenset[str] | None = None,
        expires_in_ms: int | None = None,
        plain: str | None = None,
    ) -> tuple[ApiToken, str]:
        """Make and store a token; its plain text, drawn by chance unless it is given, is never shown again."""
        plain, now = plain or self._plain(API_PREFIX), self._clock.now()
        token = ApiToken(
            id=self._token_id(),
            hash=hash_token(plain),
            prefix=plain[:_SHOWN],
            name=name,
            role=role,
            secret_contexts=secret_contexts,
            created_at=now,
            expires_at=None if expires_in_ms is None else Instant(now + expires_in_ms),
        )
        await self._store.create_api_token(token)
        return token, plain

    async def authenticate(self, plain: str) -> ApiToken | None:
        """The token of this plain text, if it is good now.  Raises `StoreDown`."""
        token = await self._found(plain, self._api, self._store.api_token)
        is_good = token is not None and token.revoked_at is None and not _is_over(token, self._clock.now())
        return token if is_good else None

    async def tokens(self) -> list[ApiToken]:
        return await self._store.api_tokens(limit=LISTED_MAX)

    async def revoke(self, token_id: TokenId) -> bool:
        """Revoke a token of a person or program.  False: there was nothing to revoke."""
        revoked = await self._store.revoke_api_token(token_id)
        self.forget(token_id)
        return revoked

    async def owner_token(self, current: str | None, *, of: InstanceId, wanted: str | None = None) -> str | None:
        """What must be written to the file `owner-token`; None: leave it alone.

        `current` is what the file holds.  A file that this store knows stays as it is, even when its token was
        revoked: that was somebody's wish.  Without a file (or with one of another store) there is a new token,
        and the lost ones of that name are revoked.  `wanted`: the new one, unless this store knows it already.
        """
        name = f"{OWNER_TOKEN_NAME}-{of}"
        if current and await self._store.api_token(hash_token(current)) is not None:
            return None
        for token in await self.tokens():
            if token.name == name and token.revoked_at is None:
                await self.revoke(token.id)
        if wanted is not None and await self._store.api_token(hash_token(wanted)) is not None:
            return wanted  # of another coordinator on the same store, or this one's from before
        _, plain = await self.create(name=name, role=Role.OWNER, plain=wanted)
        return plain

    # --- revocation and clean-up

    def on_revoked(self, listener: OnRevoked) -> None:
        """Call `listener(token_id)` at every revocation: it closes the connections that use the token."""
        self._listeners.append(listener)

    def forget(self, token_id: TokenId) -> None:
        """A token was revoked, here or elsewhere: drop it from memory and tell the listeners."""
        self._revocations += 1
        self._agents.drop(token_id)
        self._api.drop(token_id)
        for listener in self._listeners:
            listener(token_id)

    async def purge(self) -> int:
        """Delete ephemeral tokens that can admit nobody any more.  How many."""
        purged = PURGE_BATCH
        total = 0
        while purged == PURGE_BATCH:
            purged = await self._store.purge_agent_tokens(expired_before=self._clock.now(), limit=PURGE_BATCH)
            total += purged
        return total

    # --- how

    async def _is_at_work(self, token: AgentToken) -> bool:
        if token.agent_id is None:
            return False
        return any(job.status in HELD_BY_AGENT for job in await self._store.held_jobs(token.agent_id))

    async def _found(self, plain: str, remembered: "_Remembered[T]", look_up: LookUp[T]) -> T | None:
        token_hash = hash_token(plain)
        token = remembered.get(token_hash)
        if token is None:
            token = await self._look_up(token_hash, look_up)
            if token is not None and token.revoked_at is None:
                remembered.put(token)
        return token

    async def _look_up(self, token_hash: str, look_up: LookUp[T]) -> T | None:
        while True:  # a revocation meanwhile may be newer than the row: look again
            revocations = self._revocations
            token = await look_up(token_hash)
            if revocations == self._revocations:
                return token

    def _plain(self, prefix: str) -> str:
        return prefix + self._entropy.hex(_SECRET_BYTES)

    def _token_id(self) -> TokenId:
        return TokenId(self._entropy.hex(8))


class TokenPurge:
    """Deletes dead ephemeral tokens every minute.  Safe on every coordinator; one is enough."""

    def __init__(self, *, tokens: Tokens) -> None:
        self._tokens = tokens
        self._ticker = Ticker(PURGE_SECONDS)

    async def run(self) -> Never:
        while True:
            await self.tick()
            await self._ticker.next()

    async def tick(self) -> int:
        """How many went.  An unreachable store is left for the next pass."""
        try:
            return await self._tokens.purge()
        except StoreDown:
            return 0


class _Remembered(Generic[T]):
    """Valid tokens of the last seconds, by hash.  Unknown ones are not kept: anybody can make those up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens: OrderedDict[str, tuple[float, T]] = OrderedDict()

    def get(self, token_hash: str) -> T | None:
        found = self._tokens.get(token_hash)
        if found is None or self._clock.monotonic() >= found[0]:
            return None
        return found[1]

    def put(self, token: T) -> None:
        self._tokens[token.hash] = (self._clock.monotonic() + CACHE_SECONDS, token)
        self._tokens.move_to_end(token.hash)
        if len(self._tokens) > CACHED_MAX:
            self._tokens.popitem(last=False)

    def drop(self, token_id: TokenId) -> None:
        for key in [key for key, (_, token) in self._tokens.items() if token.id == token_id]:
            del self._tokens[key]
