"""Who is well, and whom the program may give up: measured by a stopwatch that stands still while nobody could be."""

from collections.abc import Collection
from typing import Final

from kici.domain import knobs
from kici.testing.sim.agent import SimAgent
from kici.testing.sim.ledger import AgentTruth
from kici.testing.sim.network import ANYBODY
from kici.testing.sim.plan import Plan

LOOK_SECONDS: Final = 0.5
STATIC_GRACE_SECONDS: Final = 120.0
SURELY_SECONDS: Final = 15.0
"""Present for so long, an agent is beyond every race with its return."""
SLACK_SECONDS: Final = 2.0


class Wellness:
    def __init__(self, plan: Plan) -> None:
        self._made_grace_seconds = plan.settings[knobs.AGENT_RECONNECT_GRACE_MS.name] / 1000
        self._seconds = 0.0
        self._well: frozenset[str] = frozenset()

    def look(self, agents: list[SimAgent], *, well: Collection[str]) -> None:
        """Call it every `LOOK_SECONDS`; `well`: addresses at which agents could come to one that has its store."""
        if well:
            self._seconds += LOOK_SECONDS
        self._well = frozenset((*well, ANYBODY) if well else ())
        for agent in agents:
            agent.away_seconds += LOOK_SECONDS
            if agent.is_present:
                agent.away_seconds = 0.0
                agent.present_at = self._seconds
                agent.present_since = self._seconds if agent.present_since is None else agent.present_since
            else:
                agent.present_since = None

    def may_lose(self, agent: AgentTruth) -> str | None:
        """Why this agent may be given up: it is dead, somebody ended it, or it is away for too long."""
        process = agent.process
        if agent.doomed is not None or process is None:
            return agent.doomed or "it is dead"
        if process.was_turned_away:
            return "the store could not be asked when it came back"
        if process.is_present and process.present_since is not None:
            is_well = self._seconds - process.present_since > SURELY_SECONDS
            return None if is_well else "it came back just now"
        grace_seconds = STATIC_GRACE_SECONDS if agent.order is None else self._made_grace_seconds
        if process.away_seconds > grace_seconds and self._well.isdisjoint(process.urls):
            return "no coordinator that it knows is there"
        away_seconds = self._seconds - process.present_at
        return None if away_seconds + SLACK_SECONDS < grace_seconds else f"it is away for {away_seconds:.0f} s"
