"""Who a request comes from: bearer tokens, and the sessions of browsers.

A browser cannot keep a bearer token safely, so it trades a one-time code (printed by `kici up`) or a token for a
session cookie.  Codes and sessions live in this process only: after a restart people sign in again.  A session
stands for the token behind it and ends with it.
"""

from dataclasses import dataclass
from typing import Final

from kici.domain.access import Actor
from kici.domain.ids import Instant
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.web.surface import Tokens

CODE_MS: Final = 15 * 60 * 1000
SESSION_MS: Final = 12 * 3600 * 1000
CODES_MAX: Final = 100
SESSIONS_MAX: Final = 1000
_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class _Grant:
    token: str
    until: Instant


class Logins:
    def __init__(self, tokens: Tokens, clock: Clock, entropy: Entropy) -> None:
        self._tokens = tokens
        self._clock = clock
        self._entropy = entropy
        self._codes: dict[str, _Grant] = {}
        self._sessions: dict[str, _Grant] = {}

    async def actor_of_token(self, plain: str) -> Actor | None:
        token = await self._tokens.authenticate(plain) if plain.isascii() else None
        if token is None:
            return None
        return Actor(
            name=token.name or token.prefix,
            role=token.role,
            token_id=token.id,
            secret_contexts=token.secret_contexts,
        )

    async def actor_of_session(self, session: str) -> Actor | None:
        grant = self._sessions.get(session)
        if grant is None or grant.until <= self._clock.now():
            return None
        return await self.actor_of_token(grant.token)

    def code(self, token: str) -> tuple[str, Instant]:
        """A new one-time code for this token's bearer, and when it expires."""
        return self._grant(self._codes, token, CODE_MS, CODES_MAX)

    def session_of_code(self, code: str) -> str | None:
        """A new session; the code is spent."""
        grant = self._codes.pop(code, None)
        if grant is None or grant.until <= self._clock.now():
            return None
        return self.session(grant.token)

    def session(self, token: str) -> str:
        """A new session of a token that was found to be good."""
        return self._grant(self._sessions, token, SESSION_MS, SESSIONS_MAX)[0]

    def token_of_session(self, session: str) -> str | None:
        grant = self._sessions.get(session)
        return None if grant is None else grant.token

    def end(self, session: str) -> None:
        self._sessions.pop(session, None)

    def _grant(self, grants: dict[str, _Grant], token: str, ms: int, limit: int) -> tuple[str, Instant]:
        now = self._clock.now()
        for name in [name for name, grant in grants.items() if grant.until <= now]:
            del grants[name]
        while len(grants) >= limit:
            del grants[next(iter(grants))]
        name = self._entropy.hex(_BYTES)
        grants[name] = _Grant(token, Instant(now + ms))
        return name, grants[name].until
