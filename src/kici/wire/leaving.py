"""When an agent without a job leaves."""

import msgspec

from kici.wire.messages import RegisterAck


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a scaler-made agent waits for a job, in seconds."""

    idle_seconds: float = 5.0
    pending_dispatch_seconds: float = 60.0


def leaves_after(ack: RegisterAck, *, scaler_managed: bool, jobs_done: int, patience: Patience) -> float | None:
    """Seconds without a job after which a registered agent exits; 0: at once; None: it stays.

    A scaler-made agent runs one job, or as many as `reuse` allows, each within the idle time of the one before.
    Before its first job it waits for ever in a warm pool, a while for a promised job, and hardly without one.
    """
    if not scaler_managed:
        return None
    if jobs_done > 0:
        reuse = ack.reuse
        if reuse is None or (reuse.max_jobs is not None and jobs_done >= reuse.max_jobs):
            return 0.0
        return max(0.0, reuse.idle_seconds)
    if ack.warm_pool:
        return None
    return patience.pending_dispatch_seconds if ack.pending_dispatch else patience.idle_seconds
