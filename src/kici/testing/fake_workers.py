"""Workers behind the HTTP API, in memory."""

from dataclasses import dataclass, field, replace

from kici.domain.ids import Instant
from kici.domain.worker import WORKER_ROLE, JoinToken, Worker

NOW = Instant(1_750_000_000_000)


@dataclass
class FakeWorkers:
    rows: dict[str, Worker] = field(default_factory=dict)
    tokens: list[JoinToken] = field(default_factory=list)

    def add(self, worker: Worker) -> None:
        self.rows[worker.id] = worker

    async def create_join_token(self, *, by: str, ttl_ms: int) -> tuple[JoinToken, str]:
        token = JoinToken(
            id=f"join-{len(self.tokens)}",
            hash="",
            role=WORKER_ROLE,
            created_by=by,
            created_at=NOW,
            expires_at=Instant(NOW + ttl_ms),
        )
        self.tokens.append(token)
        return token, f"kici_join_v1.x.{token.id}"

    async def join_tokens(self) -> list[JoinToken]:
        return list(self.tokens)

    async def revoke_join_token(self, token_id: str) -> bool:
        kept = [token for token in self.tokens if token.id != token_id]
        is_gone = len(kept) < len(self.tokens)
        self.tokens = kept
        return is_gone

    async def workers(self) -> list[Worker]:
        return list(self.rows.values())

    async def revoke(self, worker_id: str) -> bool:
        worker = self.rows.get(worker_id)
        if worker is None or worker.revoked_at is not None:
            return False
        self.rows[worker_id] = replace(worker, revoked_at=NOW, linked_to=())
        return True
