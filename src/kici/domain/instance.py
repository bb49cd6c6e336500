"""Coordinators that share the store, and their leases."""

from dataclasses import dataclass

from kici.domain.ids import InstanceId, Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One row of `cluster_instances`."""

    id: InstanceId
    role: str
    version: str
    address: str
    started_at: Instant
    last_beat_at: Instant
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Sole right to a duty until `expires_at` by the store's clock; `token` only grows and fences its writes."""

    name: str
    holder: InstanceId
    token: int
    expires_at: Instant
