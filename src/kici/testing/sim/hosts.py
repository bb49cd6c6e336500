"""The machine that a coordinator's local backends make their agents on.  It outlives the coordinator.

Each run of a coordinator sees it through a `HostView`, which does nothing any more once that run is dead.
"""

import asyncio
import contextvars
from collections.abc import Callable, Iterable
from typing import Final

from kici.domain.ids import AgentId
from kici.ports.backend import SpawnOrder
from kici.testing.fake_backend import FakeMachines, Machine
from kici.testing.fake_ledger import PooledHost
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.agent import AgentPlace, SimAgent
from kici.testing.sim.ledger import SELF_LABELS
from kici.testing.sim.life import Life
from kici.testing.sim.plan import Plan
from kici.wire.agent_settings import AgentSettings
from kici.wire.messages import AgentRegister
from kici.wire.outbox import WINDOW_BYTES

SMALL_WINDOW_BYTES: Final = 4096


class SimHost:
    def __init__(
        self, name: str, plan: Plan, entropy: SeededEntropy, place: AgentPlace, *, pooled: PooledHost | None
    ) -> None:
        """`pooled`: the machine pools that it shares with others, which are on the same machine then."""
        self.name = name
        self.pooled = pooled
        self.trace = place.trace
        self.ledger = place.ledger
        self.checkers = place.checkers
        self._plan = plan
        self._entropy = entropy
        self._place = place
        self.alive: dict[AgentId, Machine] = {}
        self.agents: dict[AgentId, SimAgent] = {}
        """Programs on machines that exist."""
        self.view: HostView | None = None
        """Of the present run of the coordinator."""
        self.is_kind = False
        """Faults have stopped."""

    def made(self, machine: Machine) -> None:
        """A machine was made: its agent boots, unless fate has it otherwise."""
        order = machine.order
        if self.pooled is not None and order.proof is not None:
            self.pooled.inherits(order.agent_id)
        self._place.checkers.machine_made(order, machine.scaler, self.name)
        loop = asyncio.get_running_loop()
        boot_seconds = self._entropy.uniform(5, 40) if self._happens("slow-boot") else self._entropy.uniform(0.05, 1)
        if self._happens("dies-before"):
            loop.call_later(self._entropy.uniform(0, boot_seconds), self.ends, order.agent_id, "exited with code 3")
        if self._happens("dies-after"):
            seconds = boot_seconds + self._entropy.uniform(0, 40)
            loop.call_later(seconds, self.ends, order.agent_id, "was killed by signal 9")
        if not self._happens("never-registers"):
            loop.call_later(boot_seconds, self._boot, order)

    def removed(self, agent_id: AgentId) -> None:
        """A backend ended a machine."""
        self._proves_no_more(agent_id)
        self._place.checkers.machine_ended(agent_id)
        agent = self.agents.pop(agent_id, None)
        if agent is not None:
            agent.crash("its machine was ended")

    def ends(self, agent_id: AgentId, how: str) -> None:
        """A machine ends by itself, and its backend is told (late, or never)."""
        if self.alive.pop(agent_id, None) is None:
            return
        self._proves_no_more(agent_id)
        self._place.checkers.machine_gone(agent_id, how)
        self._place.trace.count("machine died")
        agent = self.agents.pop(agent_id, None)
        if agent is not None:
            agent.crash(how, silently=self._happens("power-loss"))
        view = self.view
        watcher = None if view is None else view.watchers.pop(agent_id, None)
        if view is None or watcher is None or self._happens("exit-lost"):
            return
        seconds = self._entropy.uniform(1, 90) if self._happens("exit-late") else self._entropy.uniform(0, 0.05)
        asyncio.get_running_loop().call_later(seconds, view.tell, watcher, how, context=view.context)

    def _proves_no_more(self, agent_id: AgentId) -> None:
        if self.pooled is not None:
            self.pooled.agent_ended(agent_id)

    def gives_up(self, agent_id: AgentId, why: str) -> None:
        truth = self._place.ledger.agents.get(agent_id)
        if truth is not None:
            truth.doomed = truth.doomed or why

    def resists(self, agent_id: AgentId) -> None:
        if agent_id in self._place.ledger.machines:
            self._place.ledger.machines[agent_id].resists = True

    def terminate(self, agent_id: AgentId) -> None:
        agent = self.agents.get(agent_id)
        if agent is not None:
            agent.terminate()

    def _happens(self, kind: str) -> bool:
        return self._entropy.chance(self._plan.odds.get(kind, 0.0)) and not self.is_kind

    def _boot(self, order: SpawnOrder) -> None:
        if order.agent_id not in self.alive:
            return
        truth = self._place.ledger.agents[order.agent_id]
        settings = AgentSettings(
            url=order.orchestrator_url,
            register=AgentRegister(agent_id=order.agent_id, labels=[*order.labels, *SELF_LABELS], scaler_managed=True),
            token=order.token,
            window_bytes=SMALL_WINDOW_BYTES if self._entropy.chance(0.3) else WINDOW_BYTES,
        )
        agent = SimAgent(truth, settings, self._place, on_exit=lambda how: self.ends(order.agent_id, how))
        self.agents[order.agent_id] = agent
        agent.start()


class HostView(FakeMachines):
    """The host as one run of a coordinator sees it."""

    __slots__ = ("_host", "_kills", "_life", "context", "under_way")

    def __init__(self, host: SimHost, life: Life, *, kills: Callable[[str], bool]) -> None:
        """`kills(where)`: whether the program dies at this point."""
        super().__init__(alive=host.alive)
        self._host = host
        self._life = life
        self._kills = kills
        self.context = contextvars.copy_context()
        self.under_way: Callable[[], Iterable[AgentId]] = tuple
        """The agents that the program is making."""
        host.view = self

    def make(self, machine: Machine) -> None:
        self._die_here()
        super().make(machine)
        self._host.made(machine)
        self._die_here()

    def remove(self, agent_id: AgentId) -> bool:
        self._die_here()
        is_removed = super().remove(agent_id)
        if is_removed:
            self._host.removed(agent_id)
        self._die_here()
        return is_removed

    def terminate(self, agent_id: AgentId) -> None:
        self._life.check()
        self._host.terminate(agent_id)

    @property
    def is_kind(self) -> bool:
        """Faults have stopped."""
        return self._host.is_kind

    def is_asked(self, scaler: str, agent_id: AgentId) -> None:
        """A backend is asked to make an agent."""
        if self._life.is_alive:
            self._host.checkers.scaler_asked(self._host.name, scaler, agent_id)

    def refuses(self, scaler: str) -> None:
        """A backend says that it will not make agents."""
        if self._life.is_alive:
            self._host.checkers.scaler_refused(self._host.name, scaler, under_way=frozenset(self.under_way()))

    def gives_up(self, agent_id: AgentId, why: str) -> None:
        """A backend undoes what it made for this agent."""
        if self._life.is_alive:
            self._host.gives_up(agent_id, why)

    def resists(self, agent_id: AgentId) -> None:
        """The end of a machine could not be confirmed: from now on only the number of machines counts it."""
        self._host.resists(agent_id)

    def tell(self, watcher: Callable[[str], None], how: str) -> None:
        """The program hears that a machine ended."""
        if not self._life.is_alive or self._host.view is not self:
            return
        if self._life.frozen_seconds > 0:
            loop = asyncio.get_running_loop()
            loop.call_later(self._life.frozen_seconds, self.tell, watcher, how, context=self.context)
        else:
            watcher(how)

    def _die_here(self) -> None:
        self._life.check()
        self._kills("kill-in-backend")
        self._life.check()
