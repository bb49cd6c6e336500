"""One agent process as the backend tracks it, and how it is brought to its end with everything it started."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kici.backends.agent_lines import AgentLines
from kici.backends.bare_metal.records import AgentFiles, AgentRecord
from kici.decide.launch import Launch, LaunchHost, TreeKill, tree_kill_argv, tree_kill_outcome
from kici.domain.errors import Retryable
from kici.domain.ids import AgentId
from kici.kit.lines import READ_BYTES
from kici.ports.backend import Compute, ComputeState, OnEvent
from kici.ports.cgroups import Cgroup, Cgroups
from kici.ports.clock import Clock
from kici.ports.files import Files
from kici.ports.processes import Completed, Process, Processes, ProcessId, Starter

REMEMBERED_LINES: Final = 50
COMMAND_SECONDS: Final = 5.0
EMPTY_TRIES: Final = 100
EMPTY_SECONDS: Final = 0.02
BLOCKS_PER_PASS: Final = 16
"""Of an agent's output that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """How the backend reaches the host."""

    processes: Processes
    files: Files
    cgroups: Cgroups
    clock: Clock
    zygote: Starter | None = None
    """Starts this installation's own agent faster, where there is one."""


@dataclass(slots=True, kw_only=True, eq=False)
class Tracked:
    """One compute in the backend's hands."""

    record: AgentRecord
    on_event: OnEvent | None
    """None: found again after a restart."""
    state: ComputeState = ComputeState.SPAWNING
    registered: bool = False
    process: Process | None = None
    group: Cgroup | None = None
    lines: AgentLines | None = None
    """Its output, on its way to our log."""
    last_output: list[str] = field(default_factory=list)
    """Filled when it ends."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Its `spawn` call is over, either way."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    watch: asyncio.Task[None] | None = None

    @property
    def id(self) -> AgentId:
        return self.record.agent_id

    @property
    def ref(self) -> str:
        return "" if self.process is None else str(self.process.id.pid)

    def compute(self) -> Compute:
        return Compute(
            agent_id=self.id,
            label_set=self.record.label_set,
            ref=self.ref,
            spawned_at=self.record.spawned_at,
            state=self.state,
            registered=self.registered,
        )

    def started(self, process: Process) -> None:
        self.process = process
        self.record = replace(self.record, process=process.id)
        self.state = ComputeState.RUNNING

    def let_go(self) -> None:
        """Stop watching and give its handle back."""
        if self.watch is not None:
            self.watch.cancel()
        if self.process is not None:
            self.process.close()


class Ender:
    """Makes the group of an agent, and ends agents: politely, then by force, until nothing is left."""

    def __init__(self, *, tools: Tools, files: AgentFiles, host: LaunchHost) -> None:
        self._tools = tools
        self._files = files
        self._host = host

    def intend(self, agent: Tracked, launch: Launch) -> None:
        """Write down what is about to be made, before any of it is."""
        folders = () if launch.group is None else self._tools.cgroups.folders(agent.id, launch.group)
        agent.record = replace(agent.record, unit=launch.unit, groups=tuple(str(path) for path in folders))
        self._files.write(agent.record)

    def make_group(self, agent: Tracked, launch: Launch) -> None:
        """Make the control group that a launch wants.  One that sets no limits may be missing."""
        if launch.group is not None:
            try:
                agent.group = self._tools.cgroups.create(agent.id, launch.group)
            except Retryable:
                if launch.group.settings:
                    raise
                agent.record = replace(agent.record, groups=())

    def hear(self, agent: Tracked) -> None:
        """Let our log have what it printed since the last time.

        Of one that was made before this process, what it printed until now is in that one's log.
        """
        if agent.lines is None:
            read = 0 if agent.on_event is not None else self._files.printed_bytes(agent.id)
            agent.lines = AgentLines(agent.id, source="bare-metal", clock=self._tools.clock, read_bytes=read)
        for _ in range(BLOCKS_PER_PASS):
            start, data = self._files.printed(agent.id, agent.lines.read_bytes, READ_BYTES)
            agent.lines.read_bytes = start
            if not data:
                return
            agent.lines.feed(data)

    def find_group(self, record: AgentRecord) -> Cgroup | None:
        return self._tools.cgroups.find(tuple(Path(name) for name in record.groups)) if record.groups else None

    async def end(self, agent: Tracked, *, grace_seconds: float) -> None:
        """End a tracked agent and remove its files.  Raises `Retryable` when something of it is still there."""
        await self._end(agent.record, agent.process, agent.group, grace_seconds)
        self.hear(agent)
        if agent.lines is not None:
            agent.lines.finish()
        agent.last_output = self._files.tail(agent.id, REMEMBERED_LINES)
        await self._files.remove(agent.id)

    async def clear(self, agent_id: AgentId, record: AgentRecord | None) -> None:
        """The same for one that is only known by its record, or by its mark."""
        group = None if record is None else self.find_group(record)
        if record is None:
            await self._end_family(None, agent_id, 0)
        else:
            await self._end(record, None, group, 0)
        await self._files.remove(agent_id)

    async def _end(
        self, record: AgentRecord, process: Process | None, group: Cgroup | None, grace_seconds: float
    ) -> None:
        has_ended = process is not None and not process.is_alive()
        # A group holds everything that its program ever started, so an empty one needs no search.
        if not (has_ended and group is not None and group.kill()):
            await self._end_family(record.process, record.agent_id, grace_seconds)
        if record.unit is not None:
            await self._end_unit(record.unit)
        if group is not None and not await self._emptied(group):
            raise Retryable(f"processes of agent {record.agent_id} are still in {group.folders[0]} after KILL")

    async def _end_family(self, root: ProcessId | None, agent_id: AgentId, grace_seconds: float) -> None:
        if self._host.system == "win32":
            if root is not None:
                await self._end_windows_tree(root)
            return
        mark = self._files.mark(agent_id)
        if not await self._tools.processes.end_tree(root, mark=mark, grace_seconds=grace_seconds):
            raise Retryable(f"processes of agent {agent_id} are still there after KILL")

    async def _end_unit(self, unit: str) -> None:
        """Whatever left the family but not the scope.  A scope that is gone makes this fail, which is fine."""
        user = () if self._host.systemd == "system" else ("--user",)
        argv = ("systemctl", *user, "kill", "--signal=SIGKILL", f"{unit}.scope")
        try:
            await self._run(argv)
        except Retryable:
            return

    async def _end_windows_tree(self, root: ProcessId) -> None:
        process = self._tools.processes.adopt(root)
        if process is None:
            return
        try:
            done = await self._run(tree_kill_argv(self._host, root.pid))
            if tree_kill_outcome(done.code) is TreeKill.FAILED:
                raise Retryable(f"taskkill of process {root.pid} failed with code {done.code}: {done.output}")
            async with asyncio.timeout(COMMAND_SECONDS):
                await process.wait()
        except TimeoutError as error:
            raise Retryable(f"process {root.pid} is still there after taskkill") from error
        finally:
            process.close()

    async def _run(self, argv: Sequence[str]) -> Completed:
        return await self._tools.processes.run(argv, env=self._host.environment, timeout_seconds=COMMAND_SECONDS)

    async def _emptied(self, group: Cgroup) -> bool:
        for _ in range(EMPTY_TRIES):
            if group.kill() and group.remove():
                return True
            await self._tools.clock.sleep(EMPTY_SECONDS)
        return False
