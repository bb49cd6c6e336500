"""What a coordinator is made of: the real world for the program, a simulated one for a simulation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kici.adapters.no_peers import NoPeers, NoProbe
from kici.apps.eventing import LOCK_WAIT_MS
from kici.config.model import ScalersConfig
from kici.domain.instance import Instance
from kici.domain.platform import Host
from kici.kit.supervise import Supervisor
from kici.ports.clock import Clock
from kici.ports.entropy import Entropy
from kici.ports.ledger import MachineLedger
from kici.ports.peers import Notifier, PeerProbe
from kici.ports.sealer import Sealer
from kici.ports.store import Store
from kici.ports.webhook import WebhookSender
from kici.services.elector import TTL_SECONDS
from kici.services.queue_gauge import DEEP_JOBS
from kici.services.reload import Builder, Read
from kici.services.scaler_runtime import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The scalers file that the fleet was made from, and how to take over a changed one."""

    config: ScalersConfig
    read: Read
    builder: Builder
    host: Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a coordinator is made of."""

    store: Store
    clock: Clock
    entropy: Entropy
    supervisor: Supervisor
    sealer: Sealer
    notifier: Notifier = field(default_factory=NoPeers)
    """How other coordinators on the same store are told to look."""
    probe: PeerProbe = field(default_factory=NoProbe)
    """How other coordinators are asked without the store."""
    instance: Instance
    fleet: Fleet
    configuration: Configuration | None = None
    """None: the fleet stays as it is, and has no warm pools."""
    ledger: MachineLedger | None = None
    """Of the machine pools of its host.  None: it shares none."""
    configured: Mapping[str, int] = field(default_factory=dict)
    """Defaults of live settings from the program's configuration."""
    authenticates_agents: bool = True
    leader_ttl_seconds: float = TTL_SECONDS
    log_bytes_max: int | None = None
    sweep_seconds: float = 10.0
    addresses: tuple[str, ...] = ()
    """Where agents reach the coordinators."""
    webhooks: WebhookSender | None = None
    """Who calls webhooks; None: nobody."""
    deep_queue_jobs: int = DEEP_JOBS
    """Waiting jobs at which a warning is logged; 0: never."""
    lock_wait_ms: int = LOCK_WAIT_MS
    """How long a spawn may wait while others count agents of its scaler."""
