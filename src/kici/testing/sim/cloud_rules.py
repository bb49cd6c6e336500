"""What must hold of machines that a provider makes, of the events that ask for them, and of who leads.

As in `checkers`, written down a second time, from what was committed and what the provider did.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, assert_never

from kici.domain.event import SCALE_DOWN, SCALE_UP, EventState
from kici.domain.ids import AgentId
from kici.domain.job import JobStatus
from kici.domain.spawn import ScaleDownReason, SpawnState
from kici.ports.backend import SpawnOrder
from kici.stores.query import Query
from kici.testing.sim.ledger import AgentTruth, Ledger
from kici.testing.sim.trace import WORLD, Trace
from kici.testing.sim.watched import Adoption, EventChange, FailureCounted, LeaseChange, SpawnChange, TokenMade

CLOUD: Final = "cloud"
"""The name of the scaler."""
_LIVE: Final = frozenset({EventState.PENDING, EventState.AWAITING})
_GIVEN_UP: Final = frozenset({ScaleDownReason.HEARTBEAT_TIMEOUT, ScaleDownReason.SPAWN_TIMEOUT})


@dataclass(slots=True)
class _Provision:
    """One order for a machine."""

    is_asked: bool = False
    """Its scale-up was written."""
    tokens: int = 0
    has_come: bool = False
    """Its agent registered."""
    delivered: Counter[str] = field(default_factory=Counter)
    """Scale-downs, by target."""


class CloudRules:
    def __init__(self, ledger: Ledger, trace: Trace, *, may_lose: Callable[[AgentTruth], str | None]) -> None:
        self._ledger = ledger
        self._trace = trace
        self._check = trace.check
        self._may_lose = may_lose
        self._provisions: dict[AgentId, _Provision] = {}
        self.sees_others: Callable[[], bool] = lambda: True
        """Whether the store shows another coordinator alive, or knows of no other."""
        self.leader: str | None = None
        """Who leads, or did last."""
        self.on_their_way: dict[str, None] = {}
        """Events that are neither handled nor given up."""

    # ------------------------------------------------------------------ the store

    def committed(self, change: EventChange | TokenMade | Adoption | FailureCounted | LeaseChange) -> None:
        match change:
            case EventChange():
                self._event(change)
            case TokenMade():
                self._token(change)
            case Adoption():
                self._adoption(change)
            case FailureCounted():
                self._failure(change)
            case LeaseChange():
                self._lease(change)
            case _:
                assert_never(change)

    def _event(self, change: EventChange) -> None:
        if change.subject is None:
            return
        agent_id = AgentId(change.subject)
        self._trace.tell(f"{change.name} {change.before} -> {change.after} {change.reason or ''}".rstrip(), agent_id)
        if change.after in _LIVE:
            self.on_their_way[change.id] = None
        else:
            self.on_their_way.pop(change.id, None)
        provision = self._provision(agent_id)
        if change.name == SCALE_UP and change.before is None:
            provision.is_asked = True
            self._trace.count("scale-up")
        if change.name == SCALE_DOWN and change.after is EventState.PROCESSED:
            self._trace.count("scale-down delivered")
            provision.delivered[change.target] += 1
            times = provision.delivered[change.target]
            self._check(times == 1, f"{times} scale-downs were delivered for one machine", agent_id)

    def _token(self, change: TokenMade) -> None:
        if change.agent_id is None or not change.agent_id.startswith("scaler-event-"):
            return
        provision = self._provision(change.agent_id)
        provision.tokens += 1
        self._check(provision.tokens == 1, "a claim code was good for a second token", change.agent_id)

    def _adoption(self, change: Adoption) -> None:
        self._trace.tell(f"passes from {change.before} to {change.after}", change.agent_id)
        self._trace.count("machine adopted anew")
        self._check(not change.is_held, "a machine was adopted from one that still has its agent", change.agent_id)

    def _failure(self, change: FailureCounted) -> None:
        self._trace.tell("counts as a machine that did not come", change.agent_id)
        self._trace.count("provision failed")
        has_come = self._provision(change.agent_id).has_come
        self._check(not has_come, "a machine that came was counted as one that did not", change.agent_id)

    def _lease(self, change: LeaseChange) -> None:
        if change.token == change.token_before and change.holder == change.holder_before:
            return
        self.leader = change.holder
        self._trace.tell(f"{change.holder} leads, term {change.token}", WORLD)
        self._trace.count("term")
        is_newer = change.token_before is None or change.token > change.token_before
        self._check(is_newer, f"a term began with token {change.token} after {change.token_before}", WORLD)

    def spawn(self, change: SpawnChange) -> None:
        """A row of the cloud scaler moved; the ledger knows it already."""
        provision = self._provision(change.agent_id)
        if change.before is None:
            taken = sum(spawn.scaler == CLOUD for spawn in self._ledger.spawns.values())
            most = self._ledger.caps[CLOUD].agents
            self._check(taken <= most, f"{taken} machines of the cloud, its cap is {most}", change.agent_id)
        if change.after is SpawnState.REGISTERED:
            provision.has_come = True
        if change.after is SpawnState.ENDING and change.reason in _GIVEN_UP:
            self._given_up(change)
        if change.after is None and provision.is_asked:
            is_told = provision.delivered.total() > 0
            self._check(is_told, "a row was deleted, and nobody was told to remove its machine", change.agent_id)

    def _given_up(self, change: SpawnChange) -> None:
        if change.by is Query.CONDEMN_PROVISION:
            self._trace.count("machine reaped")
            self._check(
                self.sees_others(), "a machine was reaped by one that sees no other coordinator", change.agent_id
            )
        agent = self._ledger.agents.get(change.agent_id)
        if agent is not None and agent.process is not None:
            why = self._may_lose(agent)
            self._check(why is not None, "a machine was given up while its agent was well", change.agent_id)

    # ------------------------------------------------------------------ the provider

    def truth_of(self, agent_id: AgentId, order: SpawnOrder) -> AgentTruth:
        """A fresh one for each computer; which of them is the agent shows when one registers."""
        truth = AgentTruth(
            agent_id=agent_id,
            labels=frozenset((*order.labels, "kici:os:linux", "kici:arch:x64")),
            gate=order.gate,
            order=order,
            jobs_max=1,
        )
        self._ledger.agents.setdefault(agent_id, truth)
        return truth

    def machine_made(self, agent_id: AgentId, order: SpawnOrder) -> bool:
        """Whether there is a row for it.  An order may be late; then its agent is refused, and it is switched off."""
        is_known = agent_id in self._ledger.spawns
        self._trace.tell(f"its machine was made{'' if is_known else ', which nobody waits for any more'}", agent_id)
        self._trace.count("cloud machine made" if is_known else "cloud machine made late")
        del order
        return is_known

    def machine_gone(self, agent_id: AgentId, how: str) -> None:
        self._trace.tell(f"its machine is gone: {how}", agent_id)

    def torn_down(self, agent_id: AgentId, reason: str) -> None:
        """The provider was told to remove a machine, and did."""
        self._trace.tell(f"its machine was removed: {reason}", agent_id)
        agent = self._ledger.agents.get(agent_id)
        if agent is None:
            return
        for job in self._ledger.held_by(agent_id):
            is_at_work = agent.process is not None and agent.process.has_step and agent.running == job.job_id
            if job.status in {JobStatus.RUNNING, JobStatus.RECOVERING} and is_at_work:
                why = self._may_lose(agent)
                self._check(why is not None, "a machine was removed while its job ran", agent_id, job.job_id)

    def _provision(self, agent_id: AgentId) -> _Provision:
        return self._provisions.setdefault(agent_id, _Provision())
