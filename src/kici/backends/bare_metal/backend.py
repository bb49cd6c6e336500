"""Agents as plain processes of this host.

A process leads its own session, writes into a file, and is remembered in a record from before it exists until
nothing of it is left; so it neither needs this coordinator to live nor can it be lost by it.  How it is started is
decided by `decide.launch`.  Agents that are containers (a set with an image and no binaryPath) are not made here.
"""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kici.backends.bare_metal.compute import Ender, Tools, Tracked
from kici.backends.bare_metal.records import AgentFiles, AgentRecord
from kici.backends.ending import LastOutputs, end_all, to_its_end
from kici.decide.launch import Launch, LaunchHost, LaunchOrder, ProcessSet, Refusal, plan_launch
from kici.domain.errors import DeterministicRefusal, NoCapacity, Permanent, Retryable
from kici.domain.ids import AgentId, ScalerName
from kici.domain.labels import set_key
from kici.domain.spawn import ScaleDownReason
from kici.kit.supervise import Supervisor
from kici.ports.backend import Compute, ComputeState, OnEvent, OnExit, SpawnEvent, SpawnEventType, SpawnOrder
from kici.ports.processes import MARK, Exit, Process, ProcessId, Program

log = logging.getLogger(__name__)

END_SECONDS_MAX: Final = 90.0
"""Bound of any clean-up: asking, forcing, a folder of any size."""
TAIL_LINES: Final = 50
TAIL_CHARACTERS: Final = 2048
_AGENT_ID: Final = re.compile(r"scaler-[a-z-]+-[0-9a-f]{8}")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BareMetalSettings:
    scaler: ScalerName
    """Name of the configuration entry: whose agents these are."""
    max_agents: int
    """Most processes at once on this host."""
    sets: tuple[ProcessSet, ...]
    """Settings of each label set."""
    enforce_cgroups: bool
    """Whether limits are enforced, where this host can."""
    data_dir: Path
    """Folder that holds `agents` and `work`."""
    stop_seconds: float = 5.0
    """How long a process may take to end when asked before it is forced; longer than an agent needs (4 s)."""
    log_bytes_max: int = 8 * 1024 * 1024
    """Output of one agent program that is kept, in bytes.  Jobs' output does not go there."""
    log_check_seconds: float = 5.0
    """How often that is looked at, in seconds."""


class BareMetalBackend:
    """Rules of every backend: `ports.backend.Backend`."""

    def __init__(
        self, *, settings: BareMetalSettings, host: LaunchHost, tools: Tools, supervisor: Supervisor, on_exit: OnExit
    ) -> None:
        self._host = host
        self._tools = tools
        self._supervisor = supervisor
        self._on_exit = on_exit
        self._agents: dict[AgentId, Tracked] = {}
        self._gone = LastOutputs()
        self._files = AgentFiles(tools.files, settings.data_dir)
        self._ender = Ender(tools=tools, files=self._files, host=host)
        self._settings = settings
        self._sets: Mapping[str, ProcessSet] = {}
        self.configure(settings)

    @property
    def type(self) -> str:
        return "bare-metal"

    @property
    def spawns_on_local_host(self) -> bool:
        return True

    def configure(self, settings: BareMetalSettings) -> None:
        """Serve a changed entry from now on; running agents are not touched.  Name and folder cannot change."""
        assert settings.scaler == self._settings.scaler, "a scaler keeps its name"
        assert settings.data_dir == self._settings.data_dir, "agents are looked for where they were made"
        self._settings = settings
        self._sets = {set_key(chosen.labels): chosen for chosen in settings.sets}

    def active_count(self) -> int:
        return len(self._agents)

    def computes(self) -> tuple[Compute, ...]:
        return tuple(agent.compute() for agent in self._agents.values())

    async def spawn(self, order: SpawnOrder, on_event: OnEvent) -> Compute:
        try:
            agent = self._admit(order, on_event)
        except (NoCapacity, Permanent) as error:
            self._report(order.agent_id, on_event, SpawnEventType.FAILED, str(error))
            raise
        try:
            self._report(agent.id, on_event, SpawnEventType.PROVISIONING, "starting a process on this host")
            await self._launch(agent, order, self._plan(order))
        except BaseException as error:
            await to_its_end(self._undo(agent), seconds=END_SECONDS_MAX, what=f"undoing the start of agent {agent.id}")
            self._report(agent.id, on_event, SpawnEventType.FAILED, str(error) or "the start was called off")
            raise
        finally:
            agent.settled.set()
        compute = agent.compute()
        self._report(agent.id, on_event, SpawnEventType.CONNECTING, f"process {compute.ref} runs")
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
        found: list[Compute] = []
        self._files.remove_unfinished()
        marked = await self._marked()
        for record in list(self._files.records(self._settings.scaler)):
            if record.agent_id in known and record.agent_id not in self._agents:
                process = self._adopt(record, marked.get(record.agent_id, ()))
                if process is None:
                    await self._clear(record.agent_id, record)
                else:
                    found.append(self._track_again(record, process).compute())
        return tuple(found)

    async def reap_unowned(self, agent_id: AgentId) -> bool:
        if agent_id in self._agents:
            await self.destroy(agent_id, ScaleDownReason.SHUTDOWN)
            return True
        record = self._files.read(agent_id)
        if record is not None and record.scaler != self._settings.scaler:
            return False
        lives = agent_id in await self._marked()
        if record is not None or lives:
            await self._clear(agent_id, record)
        return record is not None or lives

    async def cleanup_orphans(self, owned: frozenset[AgentId]) -> int:
        marked = await self._marked()
        records = {record.agent_id: record for record in self._files.records(self._settings.scaler)}
        strays = {agent_id for agent_id in marked if self._files.read(agent_id) is None}
        count = 0
        for agent_id in sorted((records.keys() | strays) - owned - self._agents.keys()):
            await self._clear(agent_id, records.get(agent_id))
            count += agent_id in marked
        return count

    async def shutdown_all(self) -> None:
        await end_all(self._agents, self.destroy)

    async def release_all(self) -> None:
        for agent in list(self._agents.values()):
            await agent.settled.wait()
            if self._agents.pop(agent.id, None) is agent:
                agent.let_go()

    def tail(self, agent_id: AgentId, lines: int) -> list[str]:
        gone = self._gone.of(agent_id)
        if gone is not None:
            return gone[-lines:] if lines > 0 else []
        return self._files.tail(agent_id, lines)

    def _admit(self, order: SpawnOrder, on_event: OnEvent) -> Tracked:
        """Check and track, before the first await."""
        settings = self._settings
        if set_key(order.label_set) not in self._sets:
            raise Permanent(f"scaler {settings.scaler} has no label set [{', '.join(order.label_set)}] any more")
        if len(self._agents) >= settings.max_agents:
            raise NoCapacity(f"scaler {settings.scaler} already has its maximum of {settings.max_agents} agents here")
        assert order.agent_id not in self._agents, f"agent id {order.agent_id} is minted once"
        record = AgentRecord(
            agent_id=order.agent_id,
            scaler=settings.scaler,
            label_set=order.label_set,
            labels=order.labels,
            gate=order.gate,
            token_id=order.token_id,
            spawned_at=self._tools.clock.now(),
            bound_job_id=order.bound_job_id,
            run_id=order.run_id,
        )
        agent = self._agents[order.agent_id] = Tracked(record=record, on_event=on_event)
        return agent

    def _plan(self, order: SpawnOrder) -> Launch:
        launch = plan_launch(
            self._host,
            self._sets[set_key(order.label_set)],
            LaunchOrder(
                agent_id=order.agent_id,
                labels=order.labels,
                url=order.orchestrator_url,
                token=order.token,
                limits=order.limits,
                enforce_cgroups=self._settings.enforce_cgroups,
                mark=f"{MARK}={self._files.mark(order.agent_id)}",
            ),
        )
        if isinstance(launch, Refusal):
            raise DeterministicRefusal(launch.reason)
        return launch

    async def _launch(self, agent: Tracked, order: SpawnOrder, launch: Launch) -> None:
        self._ender.intend(agent, launch)
        self._files.prepare(agent.id)
        self._ender.make_group(agent, launch)
        program = Program(
            argv=launch.argv,
            env=launch.env,
            cwd=self._files.work(agent.id),
            output=self._files.output(agent.id),
            mark=self._files.mark(agent.id),
            groups=() if agent.group is None else agent.group.entries,
            inherits=() if order.proof is None else (order.proof,),
        )
        agent.started(await self._start(program, is_own_agent=launch.is_own_agent))
        self._files.write(agent.record)
        self._watch(agent)

    async def _start(self, program: Program, *, is_own_agent: bool) -> Process:
        if is_own_agent and self._tools.zygote is not None:
            try:
                return await self._tools.zygote.start(program)
            except Retryable as error:
                log.warning("zygote.failed", extra={"kici": {"error": str(error)}})
        return await self._tools.processes.start(program)

    async def _undo(self, agent: Tracked) -> None:
        """Take back a start that failed.  What resists stays on record, for `cleanup_orphans`."""
        try:
            await self._ender.end(agent, grace_seconds=0)
        except Retryable as error:
            log.warning("spawn.undo_failed", extra={"kici": {"agent_id": agent.id, "error": str(error)}})
        self._forget(agent)

    async def _end(self, agent: Tracked, grace_seconds: float) -> None:
        async with agent.ending:
            if self._agents.get(agent.id) is agent:
                agent.state = ComputeState.DESTROYING
                await self._ender.end(agent, grace_seconds=grace_seconds)
                self._forget(agent)

    def _forget(self, agent: Tracked) -> None:
        self._agents.pop(agent.id, None)
        self._gone.keep(agent.id, agent.last_output)
        agent.let_go()

    def _watch(self, agent: Tracked) -> None:
        agent.watch = self._supervisor.spawn(f"watch {agent.id}", self._until_gone(agent))

    async def _until_gone(self, agent: Tracked) -> None:
        """Wait for a process to end by itself; then clear up, then tell."""
        assert agent.process is not None, "only what was started is watched"
        how = await self._exit_of(agent, agent.process)
        was_asked = agent.state is ComputeState.DESTROYING
        agent.watch = None
        try:
            await self._end(agent, 0)
        except Retryable as error:
            log.warning("spawn.remains", extra={"kici": {"agent_id": agent.id, "error": str(error)}})
        if not was_asked:
            self._tell_gone(agent, how)

    async def _exit_of(self, agent: Tracked, process: Process) -> Exit:
        """Wait for the exit, and keep the output bounded meanwhile."""
        while True:
            try:
                async with asyncio.timeout(self._settings.log_check_seconds):
                    return await process.wait()
            except TimeoutError:
                self._ender.hear(agent)
                self._files.bound_output(agent.id, self._settings.log_bytes_max)

    def _tell_gone(self, agent: Tracked, how: Exit) -> None:
        if agent.registered or agent.on_event is None:
            self._on_exit(agent.id, f"process {agent.ref} of agent {agent.id} {how}")
            return
        detail = f"process {agent.ref} of agent {agent.id} {how} before it registered"
        tail = _CONTROL.sub("", "\n".join(agent.last_output[-TAIL_LINES:]))[-TAIL_CHARACTERS:]
        detail += f"; the end of its output:\n{tail}" if tail else "; it printed nothing"
        self._report(agent.id, agent.on_event, SpawnEventType.FAILED, detail)

    def _report(self, agent_id: AgentId, on_event: OnEvent, kind: SpawnEventType, detail: str) -> None:
        on_event(SpawnEvent(agent_id=agent_id, type=kind, detail=detail, at=self._tools.clock.now()))

    async def _marked(self) -> dict[AgentId, list[ProcessId]]:
        """Running processes of this data directory by agent, whatever scaler made them."""
        prefix = self._files.mark_prefix
        found: dict[AgentId, list[ProcessId]] = {}
        for mark, process_id in await self._tools.processes.marked(prefix):
            # Anybody may put anything into an environment; what is no id of ours becomes no path of ours.
            if _AGENT_ID.fullmatch(name := mark.removeprefix(prefix)):
                found.setdefault(AgentId(name), []).append(process_id)
        return found

    def _adopt(self, record: AgentRecord, marked: Sequence[ProcessId]) -> Process | None:
        """The running process of a record.  One that was cut short before its pid was written is known by its mark."""
        candidates = (record.process,) if record.process is not None else marked[:1]
        for process_id in candidates:
            return self._tools.processes.adopt(process_id)
        return None

    def _track_again(self, record: AgentRecord, process: Process) -> Tracked:
        agent = Tracked(record=record, on_event=None)
        agent.group = self._ender.find_group(record)
        agent.started(process)
        agent.settled.set()
        if record.process is None:
            self._files.write(agent.record)
        self._agents[agent.id] = agent
        self._watch(agent)
        return agent

    async def _clear(self, agent_id: AgentId, record: AgentRecord | None) -> None:
        """End and remove whatever is left of an agent that is not tracked."""
        await to_its_end(
            self._ender.clear(agent_id, record), seconds=END_SECONDS_MAX, what=f"clearing agent {agent_id}"
        )
