"""What an agent knows when it starts."""

import msgspec

from kici.wire.leaving import Patience
from kici.wire.messages import AgentRegister
from kici.wire.outbox import WINDOW_BYTES


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults are those of the environment contract; durations are in the unit of their name."""

    url: str
    """Where to connect first; `ws://` or `wss://`."""
    register: AgentRegister
    """What it says of itself; the jobs it holds are filled in."""
    self_labels: tuple[str, ...] = ()
    """Labels that it adds to whatever labels it is given."""
    token: str | None = None
    """Its credential; None: none, which only a coordinator without authentication accepts."""
    claim_code: str | None = None
    """Traded for credentials when there is no token."""
    patience: Patience = Patience()
    """How long a scaler-made agent waits for a job."""
    orphan_seconds: float | None = 600.0
    """Without a coordinator for so long it kills its job and exits; None: it never gives up."""
    step_timeout_ms: int = 1_800_000
    """For jobs that say nothing: half an hour, so that a hung step does not hold a machine for ever."""
    log_bytes_max: int = 10 * 1024 * 1024
    """Output kept of one job, both streams together; the rest is cut with a notice."""
    window_bytes: int = WINDOW_BYTES
    """Output that may wait for acknowledgement: what a dead link can cost in memory."""
    drops_output: bool = False
    """When the coordinator is slow or away: drop output instead of letting the step wait."""

    def __repr__(self) -> str:
        """Without the credentials."""
        return f"AgentSettings(url={self.url!r}, register={self.register!r})"
