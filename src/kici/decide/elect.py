"""Leadership as a term: who may trust itself, and until when.

The database times the lease; a leader times its own trust, from the moment *before* it asked, so that however slow
the answer was, it stops before anybody else can start.
"""

from dataclasses import dataclass

from kici.domain.instance import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One stretch of leadership; `token` fences its writes and only grows."""

    lease: Lease
    trusted_until: float
    """Monotonic seconds of this process."""

    @property
    def token(self) -> int:
        return self.lease.token

    def is_trusted(self, now: float) -> bool:
        return now < self.trusted_until


def term_of(lease: Lease, *, asked_at: float, ttl_seconds: float, margin_seconds: float) -> Term:
    """The term that a granted or renewed lease gives; `asked_at` is when the attempt began."""
    return Term(lease=lease, trusted_until=asked_at + ttl_seconds - margin_seconds)


def pause_seconds(ttl_seconds: float, *, is_leader: bool, jitter: float) -> float:
    """Until the next attempt: a leader renews three times in a term, others ask a little less often than it ends.

    `jitter` is from 0 to 1 and keeps followers apart.
    """
    return ttl_seconds / 3 if is_leader else ttl_seconds * (0.4 + 0.2 * jitter)
