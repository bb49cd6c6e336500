"""What coordinators tell each other about themselves: what they could serve, and requests for acts."""

from dataclasses import dataclass
from enum import StrEnum

from kici.domain.ids import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One kind of agent that an instance has or could make."""

    labels: frozenset[str]
    """What a job may ask for."""
    gate: frozenset[str] = frozenset()
    """What a job must ask for."""
    idle: int = 0
    """Agents of this kind that wait for a job right now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Everything that an instance could serve, as it last said."""

    agents: tuple[Offer, ...] = ()
    """Connected agents, by kind."""
    scalers: tuple[Offer, ...] = ()
    """Label sets of its scalers that take work."""
    address: str = ""
    """Where agents reach it; empty: they are not told."""


class RequestKind(StrEnum):
    """What one coordinator asks of another.  Every act is safe to repeat."""

    BOOT_DATA = "boot-data"
    """Clear what an agent that it made was told at its boot."""
    CANCEL = "cancel"
    """Tell the agent of a job, or of all jobs of a run, to stop."""
    DRAIN_AGENT = "drain-agent"
    EXPLAIN = "explain"
    """Say what it makes of a waiting job."""
    LIVE_VMS = "live-vms"
    """List the microVMs that run on its host, or stop some that nobody tracks."""
    RELOAD = "reload"
    SCALERS = "scalers"
    """Say how its scalers are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRequest:
    id: str
    target: InstanceId
    kind: RequestKind
    payload: str
    """JSON."""
