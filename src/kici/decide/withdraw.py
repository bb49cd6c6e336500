"""Withdrawal: provisions whose job is over before their machine came are taken back, and that is no failure.

Only event provisions, and only once the scale-up is known to be out: a scale-down before its scale-up would leak
the machine.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import Enum, auto

from kici.decide.prune import EVENT, BootingSpawn
from kici.domain.ids import AgentId, InstanceId, JobId
from kici.domain.provision import ProvisionNews
from kici.domain.spawn import SpawnState


def withdrawable(spawns: Iterable[BootingSpawn]) -> list[BootingSpawn]:
    """Spawns whose job should be asked after: one query for all of them."""
    return [
        spawn for spawn in spawns if spawn.backend_type == EVENT and spawn.is_settled and spawn.bound_job_id is not None
    ]


def withdrawals(spawns: Iterable[BootingSpawn], ended: Set[JobId]) -> list[AgentId]:
    """Agents to withdraw, given which jobs are over.  A job that nobody knows is not over.

    Act only if the same spawn is still booting: its agent may have registered since.
    """
    return [spawn.agent_id for spawn in withdrawable(spawns) if spawn.bound_job_id in ended]


class Teardown(Enum):
    """Who ends the machine of a withdrawn provision."""

    OURS = auto()
    """Send the scale-down, reason `job-complete`; the row goes once it is delivered."""
    ADOPTERS = auto()
    REAPERS = auto()
    """Not known who has it: leave the row, and nothing else."""


def teardown_of(*, adopter_known: bool, adopted_by: InstanceId | None) -> Teardown:
    """`adopter_known` False: the store could not be asked."""
    if not adopter_known:
        return Teardown.REAPERS
    return Teardown.OURS if adopted_by is None else Teardown.ADOPTERS


# --- what its owner does about a spawn that it takes for booting


@dataclass(frozen=True, slots=True)
class Forget:
    """Somebody else looks after it, or nothing is left of it."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Its job is over: give the machine back, and call it no failure."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Its machine will not come."""

    why: str


def what_to_do(news: ProvisionNews, me: InstanceId) -> Forget | Withdraw | Fail | None:
    """None: go on waiting for its agent."""
    if news.state is None or news.adopted_by not in (None, me):
        return Forget()
    if news.failure is not None and news.state is SpawnState.BOOTING:
        return Withdraw() if news.job_over else Fail(news.failure)
    if news.state is SpawnState.ENDING:
        return Forget()
    if news.job_over and news.state is SpawnState.BOOTING:
        return Withdraw()
    return None
