"""Stale spawns: agents that were asked for and never came, so that their capacity is not lost for ever.

A spawn still in line for its scaler's semaphore is not stale, however old.  What ends is the spawn; whether that
is also a failure of the scaler is a second question, which needs to know what became of the job and whether
another coordinator adopted the agent meanwhile.
"""

from collections.abc import Mapping
from typing import Final

from kici.domain.ids import AgentId, InstanceId, Instant

WINDOW_MS_MIN: Final = 300_000
"""A shorter spawn deadline does not shorten the wait: an agent boots and registers well after `spawn` returned."""
EVENT: Final = "event"


def prune_window_ms(spawn_timeout_ms: int) -> int:
    return max(spawn_timeout_ms, WINDOW_MS_MIN)


def stale_spawns(
    started_at: Mapping[AgentId, Instant | None], *, now: Instant, spawn_timeout_ms: int
) -> dict[AgentId, int]:
    """The agents that came too late, with how many milliseconds they had.

    `started_at`: when the semaphore let the spawn of each agent that has not registered start; None: still in line.
    """
    window_ms = prune_window_ms(spawn_timeout_ms)
    return {
        agent_id: now - started
        for agent_id, started in started_at.items()
        if started is not None and now - started >= window_ms
    }


def counts_as_failure(*, job_ended: bool | None, adopted_by: InstanceId | None) -> bool:
    """Whether a pruned provision speaks against its scaler.

    `job_ended` None: there is no job, or it could not be asked.  `adopted_by` None: nobody, or it could not be
    asked.  What is not known counts as a failure: silence would hide an outage.
    """
    return not job_ended and adopted_by is None
