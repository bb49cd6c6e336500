"""A scriptable backend under the contract of the real ones: slow, refusing, dying, repeating itself.

`FakeMachines` is the host or the cloud: it outlives the backend of one coordinator, so a new `FakeBackend` over the
same machines recovers what lives there.  What an agent of such a machine does is up to the test or the simulation:
it is told of machines that come and go by `on_made` and `on_gone`.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Final

from kici.backends.ending import end_all
from kici.domain.errors import DeterministicRefusal, KiciError, NoCapacity, Permanent, Retryable
from kici.domain.ids import AgentId, Instant, ScalerName
from kici.domain.labels import set_key
from kici.domain.spawn import ScaleDownReason
from kici.kit.finish import finish
from kici.ports.backend import Compute, ComputeState, OnEvent, OnExit, SpawnEvent, SpawnEventType, SpawnOrder
from kici.ports.clock import Clock

TAIL: Final = ["it started", "it said goodbye"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnScript:
    """What becomes of one spawn.  The default works at once and lives until it is ended."""

    seconds: float = 0.0
    """How long `spawn` takes; `inf`: until it is cancelled."""
    makes: bool = True
    """Whether the machine exists by the time that `error` is raised (and then has to be undone)."""
    error: KiciError | None = None
    """What `spawn` raises in the end."""
    settle_seconds: float = 0.0
    """How long `spawn` goes on once the machine exists: its agent may register meanwhile, or end."""
    dies_after_seconds: float | None = None
    """When the machine ends by itself, counted from the end of `spawn`."""
    repeats_events: bool = False
    """Report everything twice, as an honest backend never does but a service should bear."""
    destroy_seconds: float = 0.0
    destroy_failures: int = 0
    """How many calls of `destroy` cannot be confirmed before one is."""


@dataclass(slots=True, eq=False)
class Machine:
    order: SpawnOrder
    scaler: ScalerName
    script: SpawnScript
    spawned_at: Instant
    destroy_failures_left: int = 0


@dataclass(slots=True)
class FakeMachines:
    """Where the machines are.  Nothing here knows who owns them."""

    on_made: Callable[[SpawnOrder], None] = lambda order: None
    on_gone: Callable[[AgentId], None] = lambda agent_id: None
    alive: dict[AgentId, Machine] = field(default_factory=dict)
    watchers: dict[AgentId, Callable[[str], None]] = field(default_factory=dict)
    made: int = 0

    def make(self, machine: Machine) -> None:
        assert machine.order.agent_id not in self.alive, f"{machine.order.agent_id} is made once"
        self.alive[machine.order.agent_id] = machine
        self.made += 1
        self.on_made(machine.order)

    def remove(self, agent_id: AgentId) -> bool:
        self.watchers.pop(agent_id, None)
        if self.alive.pop(agent_id, None) is None:
            return False
        self.on_gone(agent_id)
        return True

    def die(self, agent_id: AgentId, how: str = "exited with code 1") -> None:
        """End a machine as if by itself; its backend notices, if there is one."""
        watcher = self.watchers.get(agent_id)
        if self.remove(agent_id) and watcher is not None:
            watcher(how)


@dataclass(slots=True, eq=False)
class _Tracked:
    order: SpawnOrder
    on_event: OnEvent | None
    spawned_at: Instant
    script: SpawnScript
    state: ComputeState = ComputeState.SPAWNING
    registered: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class FakeBackend:
    """`scripts` is asked for one script for each spawn; when it runs out, spawns just work."""

    def __init__(
        self,
        *,
        scaler: ScalerName,
        machines: FakeMachines,
        clock: Clock,
        on_exit: OnExit,
        sets: tuple[tuple[str, ...], ...] = (("linux",),),
        max_agents: int = 16,
    ) -> None:
        self.scaler = scaler
        self.machines = machines
        self.max_agents = max_agents
        self.scripts: Iterator[SpawnScript] = repeat(SpawnScript())
        self.backend_type = "bare-metal"
        self.is_local = True
        self.destroyed: list[tuple[AgentId, ScaleDownReason]] = []
        """Calls of `destroy` for tracked computes."""
        self._sets = {set_key(labels) for labels in sets}
        self._clock = clock
        self._on_exit = on_exit
        self._agents: dict[AgentId, _Tracked] = {}

    @property
    def type(self) -> str:
        return self.backend_type

    @property
    def spawns_on_local_host(self) -> bool:
        return self.is_local

    def configure(self, *, sets: tuple[tuple[str, ...], ...], max_agents: int) -> None:
        """Serve a changed entry from now on."""
        self._sets = {set_key(labels) for labels in sets}
        self.max_agents = max_agents

    def active_count(self) -> int:
        return len(self._agents)

    def computes(self) -> tuple[Compute, ...]:
        return tuple(self._compute(agent) for agent in self._agents.values())

    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        script = next(self.scripts, SpawnScript())
        agent = _Tracked(order, on_event, self._clock.now(), script)
        try:
            self._admit(order)
        except KiciError as error:
            self._report(agent, SpawnEventType.FAILED, str(error))
            raise
        self._agents[order.agent_id] = agent
        try:
            self._report(agent, SpawnEventType.PROVISIONING, "making a machine")
            await self._make(agent)
        except BaseException as error:
            await finish(self._undo(agent), seconds=60, what=f"undoing {order.agent_id}")
            self._report(agent, SpawnEventType.FAILED, str(error) or "the start was called off")
            raise
        finally:
            agent.settled.set()
        self._report(agent, SpawnEventType.CONNECTING, "the machine runs")
        return self._compute(agent)

    async def destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        agent = self._agents.get(agent_id)
        if agent is None:
            return
        self.destroyed.append((agent_id, reason))
        await agent.settled.wait()
        if self._agents.get(agent_id) is agent:
            await finish(self._end(agent), seconds=3600, what=f"ending {agent_id}")

    def mark_registered(self, agent_id: AgentId) -> None:
        if agent_id in self._agents:
            self._agents[agent_id].registered = True

    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        found = []
        for agent_id, machine in list(self._mine()):
            if agent_id in known and agent_id not in self._agents:
                agent = _Tracked(machine.order, None, machine.spawned_at, machine.script, ComputeState.RUNNING)
                agent.settled.set()
                self._agents[agent_id] = agent
                self.machines.watchers[agent_id] = partial(self._on_death, agent)
                found.append(self._compute(agent))
        return tuple(found)

    async def reap_unowned(self, agent_id: AgentId) -> bool:
        if agent_id in self._agents:
            await self.destroy(agent_id, ScaleDownReason.SHUTDOWN)
            return True
        return agent_id in dict(self._mine()) and self.machines.remove(agent_id)

    async def cleanup_orphans(self, owned: frozenset[AgentId]) -> int:
        orphans = [agent_id for agent_id, _ in self._mine() if agent_id not in owned | self._agents.keys()]
        return sum(self.machines.remove(agent_id) for agent_id in orphans)

    async def shutdown_all(self) -> None:
        await end_all(self._agents, self.destroy)

    async def release_all(self) -> None:
        for agent in list(self._agents.values()):
            await agent.settled.wait()
            self.machines.watchers.pop(agent.order.agent_id, None)
        self._agents.clear()

    def tail(self, agent_id: AgentId, lines: int) -> list[str]:
        return TAIL[-lines:] if lines > 0 else []

    def _admit(self, order: SpawnOrder) -> None:
        if set_key(order.label_set) not in self._sets:
            raise Permanent(f"scaler {self.scaler} has no label set [{', '.join(order.label_set)}]")
        if len(self._agents) >= self.max_agents:
            raise NoCapacity(f"scaler {self.scaler} already has its maximum of {self.max_agents} agents here")

    async def _make(self, agent: _Tracked) -> None:
        script = agent.script
        if script.seconds == float("inf"):
            await asyncio.Event().wait()
        await self._clock.sleep(script.seconds)
        if script.makes:
            machine = Machine(agent.order, self.scaler, script, agent.spawned_at, script.destroy_failures)
            self.machines.watchers[agent.order.agent_id] = partial(self._on_death, agent)
            self.machines.make(machine)
        if script.settle_seconds:
            await self._clock.sleep(script.settle_seconds)
            if script.makes and agent.order.agent_id not in self.machines.alive:
                raise Retryable(f"the machine of {agent.order.agent_id} ended while it was being started")
        if script.error is not None:
            raise script.error
        agent.state = ComputeState.RUNNING
        if script.dies_after_seconds is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(script.dies_after_seconds, self.machines.die, agent.order.agent_id)

    async def _undo(self, agent: _Tracked) -> None:
        self.machines.remove(agent.order.agent_id)
        self._agents.pop(agent.order.agent_id, None)

    async def _end(self, agent: _Tracked) -> None:
        agent.state = ComputeState.DESTROYING
        await self._clock.sleep(agent.script.destroy_seconds)
        machine = self.machines.alive.get(agent.order.agent_id)
        if machine is not None and machine.destroy_failures_left > 0:
            machine.destroy_failures_left -= 1
            raise Retryable(f"the end of {agent.order.agent_id} could not be confirmed")
        await self._undo(agent)

    def _on_death(self, agent: _Tracked, how: str) -> None:
        agent_id = agent.order.agent_id
        if self._agents.get(agent_id) is not agent or agent.state is not ComputeState.RUNNING:
            return
        del self._agents[agent_id]
        times = 2 if agent.script.repeats_events else 1
        if agent.registered or agent.on_event is None:
            for _ in range(times):
                self._on_exit(agent_id, how)
        else:
            self._report(agent, SpawnEventType.FAILED, f"{how} before it registered; {TAIL[-1]}")

    def _report(self, agent: _Tracked, kind: SpawnEventType, detail: str) -> None:
        event = SpawnEvent(agent_id=agent.order.agent_id, type=kind, detail=detail, at=self._clock.now())
        if agent.on_event is not None:
            for _ in range(2 if agent.script.repeats_events else 1):
                agent.on_event(event)

    def _compute(self, agent: _Tracked) -> Compute:
        return Compute(
            agent_id=agent.order.agent_id,
            label_set=agent.order.label_set,
            ref=f"machine of {agent.order.agent_id}",
            spawned_at=agent.spawned_at,
            state=agent.state,
            registered=agent.registered,
        )

    def _mine(self) -> Iterator[tuple[AgentId, Machine]]:
        return ((key, machine) for key, machine in self.machines.alive.items() if machine.scaler == self.scaler)


def refuses(reason: str = "this host refuses it") -> SpawnScript:
    """The host refuses the launch, and will again."""
    return SpawnScript(makes=False, error=DeterministicRefusal(reason))


def fails(reason: str = "it did not work", *, after_seconds: float = 0.0) -> SpawnScript:
    """It fails half way, with something made that has to be undone."""
    return replace(SpawnScript(error=Retryable(reason)), seconds=after_seconds)
