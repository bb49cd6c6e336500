"""Log events: one line for each move, a name from the enum, facts as fields."""

import logging
from enum import StrEnum
from typing import Final

_log: Final = logging.getLogger("kici")


class Event(StrEnum):
    """Names of what happened: past tense, `<noun>.<verb>`.  Keep sorted."""

    ACCESS_UNRECORDED = "access.unrecorded"
    AGENT_LOST = "agent.lost"
    AGENT_MOVED = "agent.moved"
    AGENT_REFUSED = "agent.refused"
    AGENT_REGISTERED = "agent.registered"
    AGENT_RETURNED = "agent.returned"
    AGENT_SILENT = "agent.silent"
    BACKEND_STUCK = "backend.stuck"
    BEAT_FAILED = "beat.failed"
    DRAIN_CHANGED = "drain.changed"
    HINTS_LOST = "hints.lost"
    JOBS_PRUNED = "jobs.pruned"
    JOB_DISPATCHED = "job.dispatched"
    JOB_FINISHED = "job.finished"
    JOB_RECOVERING = "job.recovering"
    JOB_REQUEUED = "job.requeued"
    JOB_STARTED = "job.started"
    JOB_SUBMITTED = "job.submitted"
    LEDGER_DISPUTED = "ledger.disputed"
    LEDGER_FAILED = "ledger.failed"
    LEDGER_OPENED = "ledger.opened"
    ORPHANS_LEFT = "orphans.left"
    ORPHANS_REMOVED = "orphans.removed"
    PEER_ANSWERED = "peer.answered"
    POOL_REFUSED = "pool.refused"
    POOL_SHORT = "pool.short"
    QUEUE_DEEP = "queue.deep"
    RELOAD_APPLIED = "reload.applied"
    RELOAD_REJECTED = "reload.rejected"
    SCALER_RETIRED = "scaler.retired"
    SCALE_BURST = "scale.burst"
    SCALE_REFUSED = "scale.refused"
    SPAWNS_FORGOTTEN = "spawns.forgotten"
    SPAWN_ADMITTED = "spawn.admitted"
    SPAWN_CRASHED = "spawn.crashed"
    SPAWN_DESTROYED = "spawn.destroyed"
    SPAWN_DESTROY_FAILED = "spawn.destroy_failed"
    SPAWN_FAILED = "spawn.failed"
    SPAWN_LEFT = "spawn.left"
    SPAWN_LOST = "spawn.lost"
    SPAWN_PRUNED = "spawn.pruned"
    SPAWN_RECOVERED = "spawn.recovered"
    SPAWN_REGISTERED = "spawn.registered"
    SPAWN_SETTLED = "spawn.settled"
    SPAWN_WITHDRAWN = "spawn.withdrawn"
    STORE_DOWN = "store.down"
    TERM_LOST = "term.lost"
    TERM_WON = "term.won"


def emit(event: Event, *, level: int = logging.INFO, **fields: object) -> None:
    """Log one event.  Ids are always named `job_id`, `run_id`, `agent_id`, `instance_id`, `scaler`."""
    if _log.isEnabledFor(level):
        _log.log(level, event.value, extra={"kici": fields})
