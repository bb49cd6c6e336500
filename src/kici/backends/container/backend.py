"""Agents in containers of an engine that others use too.

Everything that is made carries labels from before it exists: this installation, this scaler, this agent.  Only what
carries them all is ever touched.  A container outlives its coordinator; the next one finds it by its labels.  An end
is noticed by the engine's events, and found by looking where events were missed.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kici.backends.agent_lines import AgentLines
from kici.backends.container.compute import Tracked, how_it_ended, tracked_again, unseen
from kici.backends.container.house import ContainerTools, House, Houses
from kici.backends.container.maker import Maker, MakerSettings
from kici.backends.container.watch import Watch
from kici.backends.ending import LastOutputs, end_all, to_its_end
from kici.decide import container_plan as plan
from kici.domain.errors import DeterministicRefusal, KiciError, NoCapacity, Permanent, Retryable
from kici.domain.ids import AgentId, ScalerName
from kici.domain.labels import set_key
from kici.domain.spawn import ScaleDownReason
from kici.kit.crowd import each
from kici.ports.backend import Compute, ComputeState, OnEvent, OnExit, SpawnEvent, SpawnEventType, SpawnOrder
from kici.ports.engine import ContainerInfo, EngineDown, FindEngine

log = logging.getLogger(__name__)

END_SECONDS_MAX: Final = 180.0
STOP_SECONDS: Final = 10
TAIL_LINES: Final = 50
SWEEP_AT_ONCE: Final = 16
"""Orphans that are ended at a time: most of it is waiting for those that do not want to."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    scaler: ScalerName
    """Name of the configuration entry: whose agents these are."""
    type: str
    """What this scaler's agents are said to be made of."""
    owner: str
    """The installation; it outlives the process."""
    max_agents: int
    """Most containers at once on this engine."""
    sets: tuple[plan.ContainerSet, ...]
    """Settings of each label set."""
    is_isolated: bool = True
    """Whether agents live on the isolated network, under rules."""
    extra_hosts: tuple[str, ...] = ()
    """Further names that agents can resolve."""
    is_local: bool = True
    """Whether the engine is on this machine."""
    stop_seconds: int = STOP_SECONDS
    """How long an agent may take to end when asked before it is forced."""


class ContainerBackend:
    """Rules of every backend: `ports.backend.Backend`."""

    def __init__(
        self,
        *,
        settings: ContainerSettings,
        find_engine: FindEngine,
        houses: Houses,
        tools: ContainerTools,
        on_exit: OnExit,
    ) -> None:
        self._find_engine = find_engine
        self._houses = houses
        self._tools = tools
        self._on_exit = on_exit
        self._agents: dict[AgentId, Tracked] = {}
        self._gone = LastOutputs()
        self._settings = settings
        self._sets: Mapping[str, plan.ContainerSet] = {}
        self._watch: Watch | None = None
        self.configure(settings)

    @property
    def type(self) -> str:
        return self._settings.type

    @property
    def spawns_on_local_host(self) -> bool:
        return self._settings.is_local

    def configure(
        self, settings: ContainerSettings, find_engine: FindEngine | None = None, houses: Houses | None = None
    ) -> None:
        """Serve a changed entry from now on; running agents are not touched.  Name and owner cannot change."""
        assert (settings.scaler, settings.owner) == (self._settings.scaler, self._settings.owner)
        self._settings = settings
        self._find_engine = find_engine or self._find_engine
        self._houses = houses or self._houses
        self._sets = {set_key(chosen.labels): chosen for chosen in settings.sets}

    def active_count(self) -> int:
        return len(self._agents)

    def computes(self) -> tuple[Compute, ...]:
        return tuple(agent.compute() for agent in self._agents.values())

    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        try:
            agent, chosen = self._admit(order, on_event)
        except (NoCapacity, Permanent) as error:
            self._report(order.agent_id, on_event, SpawnEventType.FAILED, str(error))
            raise
        try:
            self._report(agent.id, on_event, SpawnEventType.PROVISIONING, "starting a container")
            await self._make(agent, chosen, order)
        except EngineDown as error:
            await self._failed(agent, on_event, error)
            raise DeterministicRefusal(str(error)) from error
        except BaseException as error:
            await self._failed(agent, on_event, error)
            raise
        finally:
            agent.settled.set()
        compute = agent.compute()
        self._report(agent.id, on_event, SpawnEventType.CONNECTING, f"container {compute.ref} runs")
        return compute

    async def destroy(self, agent_id: AgentId, reason: ScaleDownReason) -> None:
        agent = self._agents.get(agent_id)
        if agent is not None:
            await agent.settled.wait()
            await to_its_end(
                self._end(agent, self._settings.stop_seconds),
                seconds=END_SECONDS_MAX,
                what=f"ending agent {agent_id} ({reason})",
            )

    def mark_registered(self, agent_id: AgentId) -> None:
        agent = self._agents.get(agent_id)
        if agent is not None:
            agent.registered = True

    async def recover(self, known: frozenset[AgentId]) -> tuple[Compute, ...]:
        wanted = known - self._agents.keys()
        if not wanted:
            return ()
        now = self._tools.clock.now()
        try:
            found = await self._house().engine.containers(self._labels())
        except (EngineDown, DeterministicRefusal) as error:
            # Whether they live is known when the engine answers again; until then they are not given up.
            log.warning("engine.away", extra={"kici": {"scaler": self._settings.scaler, "error": str(error)}})
            agents = [unseen(agent_id, now=now) for agent_id in sorted(wanted)]
        else:
            mine = [one for one in found if AgentId(one.labels.get(plan.AGENT, "")) in wanted]
            agents = [tracked_again(one, now=now) for one in mine if one.is_running]
            for one in mine:
                if not one.is_running:
                    await self._clear(one)
        for agent in agents:
            self._agents[agent.id] = agent
            self._capture(agent)
        self._watching()
        return tuple(agent.compute() for agent in agents)

    async def reap_unowned(self, agent_id: AgentId) -> bool:
        if agent_id in self._agents:
            await self.destroy(agent_id, ScaleDownReason.SHUTDOWN)
            return True
        try:
            found = await self._house().engine.containers(self._labels(agent_id))
        except KiciError as error:
            log.warning("orphans.unknown", extra={"kici": {"agent_id": agent_id, "error": str(error)}})
            return False
        for one in found:
            await self._clear(one)
        return bool(found)

    async def cleanup_orphans(self, owned: frozenset[AgentId]) -> int:
        house = self._house()
        found = await house.engine.containers(self._labels())
        orphans = [one for one in found if AgentId(one.labels.get(plan.AGENT, "")) not in owned | self._agents.keys()]
        failures: list[str] = []

        async def remove(one: ContainerInfo) -> None:
            work = self._sweep(house, one)
            try:
                await to_its_end(work, seconds=END_SECONDS_MAX, what=f"removing container {one.name}")
            except KiciError as error:
                failures.append(f"container {one.name} could not be removed: {error}")

        await each(orphans, remove, at_once=SWEEP_AT_ONCE)
        if self._settings.is_isolated and house.fencing is not None:
            await house.fencing.reclaim(lambda: [agent.address for agent in self._agents.values() if agent.address])
        if failures:
            raise Retryable("; ".join(sorted(failures)))
        return sum(one.is_running for one in orphans)

    async def shutdown_all(self) -> None:
        await end_all(self._agents, self.destroy)

    async def release_all(self) -> None:
        for agent in list(self._agents.values()):
            await agent.settled.wait()
            if self._agents.pop(agent.id, None) is agent:
                agent.let_go()

    def tail(self, agent_id: AgentId, lines: int) -> list[str]:
        agent = self._agents.get(agent_id)
        known = list(agent.output) if agent is not None else self._gone.of(agent_id) or []
        return known[-lines:] if lines > 0 else []

    # ------------------------------------------------------------------ making

    def _admit(self, order: SpawnOrder, on_event: OnEvent) -> tuple[Tracked, plan.ContainerSet]:
        """Check and track, before the first await."""
        settings = self._settings
        chosen = self._sets.get(set_key(order.label_set))
        if chosen is None:
            raise Permanent(f"scaler {settings.scaler} has no label set [{', '.join(order.label_set)}] any more")
        if len(self._agents) >= settings.max_agents:
            raise NoCapacity(f"scaler {settings.scaler} already has its maximum of {settings.max_agents} agents here")
        assert order.agent_id not in self._agents, f"agent id {order.agent_id} is minted once"
        agent = self._agents[order.agent_id] = Tracked(
            id=order.agent_id, label_set=order.label_set, spawned_at=self._tools.clock.now(), on_event=on_event
        )
        return agent, chosen

    async def _make(self, agent: Tracked, chosen: plan.ContainerSet, order: SpawnOrder) -> None:
        settings = self._settings
        house = self._house()
        await house.room.ensure(self._remove_ended)
        maker = Maker(
            house=house,
            settings=MakerSettings(
                scaler=settings.scaler,
                owner=settings.owner,
                is_isolated=settings.is_isolated,
                extra_hosts=settings.extra_hosts,
            ),
            environment=dict(self._tools.environment),
        )
        told = ""

        def progress(text: str) -> None:
            nonlocal told
            if text != told and agent.on_event is not None:
                told = text
                self._report(agent.id, agent.on_event, SpawnEventType.PROVISIONING, text)

        self._watching()
        await maker.make(agent, chosen, order, progress)
        agent.state = ComputeState.RUNNING
        self._capture(agent)
        self._watching().look(agent.id)  # it may have ended before anybody looked

    async def _failed(self, agent: Tracked, on_event: OnEvent, error: BaseException) -> None:
        """Take back a start that failed, and tell with the last that was printed."""
        await to_its_end(self._undo(agent), seconds=END_SECONDS_MAX, what=f"undoing the start of agent {agent.id}")
        detail = str(error) or "the start was called off"
        self._report(agent.id, on_event, SpawnEventType.FAILED, detail + _captured(list(agent.output)))

    async def _undo(self, agent: Tracked) -> None:
        """What resists is found by its labels, by `cleanup_orphans`."""
        try:
            if agent.is_attempted:
                await self._remove(agent, grace_seconds=0)
        except KiciError as error:
            log.warning("spawn.undo_failed", extra={"kici": {"agent_id": agent.id, "error": str(error)}})
        self._forget(agent)

    # ------------------------------------------------------------------ ending

    async def _end(self, agent: Tracked, grace_seconds: int) -> None:
        async with agent.ending:
            if self._agents.get(agent.id) is agent:
                agent.state = ComputeState.DESTROYING
                await self._remove(agent, grace_seconds=grace_seconds)
                self._forget(agent)

    async def _remove(self, agent: Tracked, *, grace_seconds: int) -> None:
        """The container and its rules.  Raises `Retryable` when either may still be there.

        Its rules go when it runs no more (it may have something to say until then) and before it does: its address
        is free for another one from then on.
        """
        try:
            house = self._house()
            found = await house.engine.containers(self._labels(agent.id))
            for one in found:
                if grace_seconds > 0 and one.is_running:
                    await house.engine.stop(one.id, grace_seconds)
            await self._unfence(house, agent)
            for one in found:
                await self._last_output(house, agent, one.id)
                _ = await house.engine.remove(one.id)
        except Retryable:
            raise
        except KiciError as error:
            raise Retryable(f"agent {agent.id} could not be ended: {error}") from error

    async def _unfence(self, house: House, agent: Tracked) -> None:
        fencing = house.fencing
        if fencing is None or not self._settings.is_isolated:
            return
        if agent.address is None and agent.on_event is None:
            agent.address = await fencing.rules_of(agent.id)  # it was admitted before this process started
        if agent.address is not None:
            await fencing.dismiss(agent.id, agent.address)

    async def _clear(self, found: ContainerInfo) -> None:
        """One that nobody tracks."""
        agent = tracked_again(found, now=self._tools.clock.now())
        await to_its_end(
            self._remove(agent, grace_seconds=5), seconds=END_SECONDS_MAX, what=f"removing container {found.name}"
        )

    async def _sweep(self, house: House, one: ContainerInfo) -> None:
        """One of many.  Rules of those that ended before are left to the reclaim that follows: they have no address."""
        if one.is_running:
            await house.engine.stop(one.id, 5)
        fencing = house.fencing
        address = None if fencing is None else one.addresses.get(fencing.network.name)
        if fencing is not None and address is not None and self._settings.is_isolated:
            await fencing.dismiss(AgentId(one.labels.get(plan.AGENT, "")), address)
        _ = await house.engine.remove(one.id)

    async def _remove_ended(self) -> int:
        """What ended and nobody looks after any more, such as a failed clean-up left behind; how many."""
        found = await self._house().engine.containers(self._labels())
        ended = [
            one for one in found if not one.is_running and AgentId(one.labels.get(plan.AGENT, "")) not in self._agents
        ]
        for one in ended:
            await self._clear(one)
        return len(ended)

    def _forget(self, agent: Tracked) -> None:
        if self._agents.get(agent.id) is agent:
            del self._agents[agent.id]
        self._gone.keep(agent.id, list(agent.output))
        agent.let_go()

    async def ended(self, agent: Tracked, found: ContainerInfo | None) -> None:
        """A container ended by itself: clear up, then tell."""
        if agent.state is not ComputeState.RUNNING or self._agents.get(agent.id) is not agent:
            return
        how = how_it_ended(found)
        try:
            await self._end(agent, 0)
        except Retryable as error:
            log.warning("spawn.remains", extra={"kici": {"agent_id": agent.id, "error": str(error)}})
            agent.state = ComputeState.RUNNING
            return  # the next look finds it again
        ref = f"container {agent.ref} of agent {agent.id} {how}"
        if agent.registered or agent.on_event is None:
            self._on_exit(agent.id, ref)
            return
        tail = _captured(list(agent.output)) or "; it printed nothing"
        self._report(agent.id, agent.on_event, SpawnEventType.FAILED, f"{ref} before it registered{tail}")

    # ------------------------------------------------------------------ output

    def _capture(self, agent: Tracked) -> None:
        agent.capture = self._tools.supervisor.spawn(f"output {agent.id}", self._follow(agent))

    async def _follow(self, agent: Tracked) -> None:
        """Remember what the agent program prints.  That it cannot be read harms nobody."""
        lines = AgentLines(agent.id, source="container", clock=self._tools.clock)
        try:
            async for line in self._house().engine.follow(agent.handle, lines=TAIL_LINES):
                agent.printed(line)
                lines.say(line)
        except KiciError as error:
            log.warning("output.lost", extra={"kici": {"agent_id": agent.id, "error": str(error)}})

    async def _last_output(self, house: House, agent: Tracked, container: str) -> None:
        """All that it printed, now that it prints no more."""
        agent.let_go()
        try:
            lines = await house.engine.logs(container, lines=TAIL_LINES)
        except KiciError as error:
            log.warning("output.lost", extra={"kici": {"agent_id": agent.id, "error": str(error)}})
            return
        agent.output.clear()
        for line in lines:
            agent.printed(line)

    # ------------------------------------------------------------------ small things

    def _house(self) -> House:
        """Raises `DeterministicRefusal` while there is no engine."""
        return self._houses.at(self._find_engine())

    def _labels(self, agent_id: AgentId | None = None) -> dict[str, str]:
        return plan.owned_by(self._settings.owner, self._settings.scaler, agent_id)

    def _watching(self) -> Watch:
        if self._watch is None:
            self._watch = Watch(
                house=self._house,
                labels=self._labels(),
                agents=lambda: tuple(self._agents.values()),
                ended=self.ended,
                clock=self._tools.clock,
            )
            self._tools.supervisor.service(f"watch {self._settings.scaler}", self._watch.run)
        return self._watch

    def _report(self, agent_id: AgentId, on_event: OnEvent, kind: SpawnEventType, detail: str) -> None:
        on_event(SpawnEvent(agent_id=agent_id, type=kind, detail=detail, at=self._tools.clock.now()))


def _captured(output: list[str]) -> str:
    text = _CONTROL.sub("", "\n".join(output[-TAIL_LINES:]))
    return f"\n--- captured output ---\n{text}" if text else ""
