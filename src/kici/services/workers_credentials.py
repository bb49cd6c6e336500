"""How a host becomes a worker and shows that it is one: one-time join tokens, credentials, throttled failures.

Plain texts exist only in the answers that make them; the store holds hashes.  A credential is proved, never sent; it
is good at every coordinator of the store, until somebody revokes it.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from kici.domain.errors import StoreDown
from kici.domain.ids import Instant
from kici.domain.worker import WORKER_ROLE, JoinClaim, JoinToken, Worker, join_token_text, read_join_token
from kici.observe.events import Event, emit
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.workers import WorkerStore
from kici.wire.worker_messages import INVALID_PROOF, INVALID_TOKEN, WorkerHello, WorkerJoin, WorkerProof
from kici.wire.worker_proof import COORDINATOR, WORKER, hash_of, is_proof, proof_of

JOIN_TTL_MS: Final = 3_600_000
FAILURES_MAX: Final = 5
WINDOW_SECONDS: Final = 60.0
PEERS_MAX: Final = 10_000
_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Admitted:
    proof: str
    """That we know the credential."""
    credential: str | None = None
    """A new one, for a join token."""


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    reason: str
    is_permanent: bool = True


class Throttle:
    """At most so many failures a minute of one address or one worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def is_over(self, *peers: str) -> bool:
        return any(len(self._recent(peer)) >= FAILURES_MAX for peer in peers)

    def failed(self, *peers: str) -> None:
        for peer in peers:
            self._recent(peer).append(self._clock.monotonic())
            self._failures.move_to_end(peer)
        while len(self._failures) > PEERS_MAX:
            self._failures.popitem(last=False)

    def _recent(self, peer: str) -> deque[float]:
        failures = self._failures.setdefault(peer, deque(maxlen=FAILURES_MAX))
        while failures and self._clock.monotonic() - failures[0] >= WINDOW_SECONDS:
            failures.popleft()
        return failures


class WorkerCredentials:
    def __init__(self, *, store: WorkerStore, clock: Clock, entropy: Entropy, instance_id: str) -> None:
        self._store = store
        self._clock = clock
        self._entropy = entropy
        self._instance_id = instance_id
        self._throttle = Throttle(clock)

    async def create_join_token(self, *, by: str, ttl_ms: int = JOIN_TTL_MS) -> tuple[JoinToken, str]:
        """A token that makes one host a worker, and its plain text, which is never shown again."""
        now = self._clock.now()
        claim = JoinClaim(role=WORKER_ROLE, expires_at=Instant(now + ttl_ms))
        plain = join_token_text(claim, self._entropy.hex(_SECRET_BYTES))
        token = JoinToken(
            id=self._entropy.hex(8),
            hash=hash_of(plain),
            role=claim.role,
            created_by=by,
            created_at=now,
            expires_at=claim.expires_at,
        )
        await self._store.create_join_token(token)
        return token, plain

    async def judge(
        self, hello: WorkerHello, shown: WorkerProof | WorkerJoin, *, nonce: str, remote: str
    ) -> Admitted | NotAdmitted:
        """Whether this is a worker.  `nonce`: what we challenged it with."""
        peers = (f"address {remote}", f"worker {hello.worker_id}")
        if self._throttle.is_over(*peers):
            return NotAdmitted("Too many failures; come back in a minute", is_permanent=False)
        try:
            judged = await self._judge(hello, shown, nonce)
        except StoreDown:
            return NotAdmitted("The store cannot be asked; come back", is_permanent=False)
        if isinstance(judged, NotAdmitted):
            self._throttle.failed(*peers)
            emit(Event.WORKER_REFUSED, worker_id=hello.worker_id, remote=remote, reason=judged.reason)
        return judged

    async def revoke(self, worker_id: str) -> bool:
        """False: there was nothing to revoke."""
        return await self._store.revoke_worker(worker_id)

    async def _judge(self, hello: WorkerHello, shown: WorkerProof | WorkerJoin, nonce: str) -> Admitted | NotAdmitted:
        if isinstance(shown, WorkerJoin):
            return await self._join(hello, shown.token)
        worker = await self._store.worker(hello.worker_id)
        if worker is None:
            return NotAdmitted("Unknown credential")
        if worker.revoked_at is not None:
            return NotAdmitted("Credential revoked")
        if not is_proof(shown.proof, worker.credential_hash, side=WORKER, nonce=nonce, who=hello.worker_id):
            return NotAdmitted(INVALID_PROOF)
        return Admitted(self._proof(worker.credential_hash, hello))

    async def _join(self, hello: WorkerHello, token: str) -> Admitted | NotAdmitted:
        try:
            claim = read_join_token(token)
        except ValueError:
            return NotAdmitted(INVALID_TOKEN)
        if claim.role != WORKER_ROLE:
            return NotAdmitted("Role mismatch")
        credential = self._entropy.hex(_SECRET_BYTES)
        worker = Worker(id=hello.worker_id, name=hello.name, version=hello.version, joined_at=self._clock.now())
        is_joined = await self._store.join_worker(
            worker, token_hash=hash_of(token), role=WORKER_ROLE, credential_hash=hash_of(credential)
        )
        if not is_joined:
            return NotAdmitted(INVALID_TOKEN)
        emit(Event.WORKER_JOINED, worker_id=hello.worker_id, name=hello.name)
        return Admitted(self._proof(hash_of(credential), hello), credential)

    def _proof(self, credential_hash: str, hello: WorkerHello) -> str:
        return proof_of(credential_hash, side=COORDINATOR, nonce=hello.nonce, who=self._instance_id)
