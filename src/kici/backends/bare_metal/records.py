"""What is remembered of each agent process, so that it can be found again by whoever starts here next.

`agents/<id>.json` is written before the process exists (then without one) and removed when nothing of it is left.
`agents/<id>.log` is where the process itself writes.  Both lie beside those of other scalers in one folder.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kici.decide.agent_output import without_tokens
from kici.domain.ids import AgentId, Instant, JobId, RunId, ScalerName, TokenId
from kici.ports.files import Files
from kici.ports.processes import ProcessId

log = logging.getLogger(__name__)

TAIL_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    agent_id: AgentId
    scaler: ScalerName
    label_set: tuple[str, ...]
    labels: tuple[str, ...]
    gate: frozenset[str]
    token_id: TokenId | None
    spawned_at: Instant
    process: ProcessId | None = None
    """None: it was about to be started."""
    groups: tuple[str, ...] = ()
    """Directories of its control group."""
    unit: str | None = None
    """The systemd scope that it was started in."""
    bound_job_id: JobId | None = None
    run_id: RunId | None = None


class AgentFiles:
    """Records, output and work folders of agent processes in one data directory."""

    def __init__(self, files: Files, data_dir: Path) -> None:
        self._files = files
        self._agents = data_dir / "agents"
        self._work = data_dir / "work"

    @property
    def mark_prefix(self) -> str:
        """What the marks of all our processes begin with: no other installation's do."""
        return f"{self._agents}/"

    def mark(self, agent_id: AgentId) -> str:
        return f"{self.mark_prefix}{agent_id}"

    def output(self, agent_id: AgentId) -> Path:
        return self._agents / f"{agent_id}.log"

    def work(self, agent_id: AgentId) -> Path:
        return self._work / agent_id

    def prepare(self, agent_id: AgentId) -> None:
        self._files.make_folder(self.work(agent_id))

    def remove_unfinished(self) -> None:
        """What a crash in the midst of a write left.  Nobody else writes here: a data directory has one process."""
        for name in self._files.names(self._agents):
            if name.startswith("."):
                self._files.remove(self._agents / name)

    def write(self, record: AgentRecord) -> None:
        self._files.make_folder(self._agents)
        self._files.write(self._path(record.agent_id), msgspec.json.encode(record))

    def read(self, agent_id: AgentId) -> AgentRecord | None:
        """None also for a record that cannot be understood: its processes are still found by their marks."""
        data = self._files.read(self._path(agent_id))
        if data is None:
            return None
        try:
            return msgspec.json.decode(data, type=AgentRecord)
        except msgspec.MsgspecError as error:
            log.warning("record.unreadable", extra={"kici": {"agent_id": agent_id, "error": str(error)}})
            return None

    def records(self, scaler: ScalerName) -> Iterator[AgentRecord]:
        for name in self._files.names(self._agents):
            if name.endswith(".json") and not name.startswith("."):
                record = self.read(AgentId(name.removesuffix(".json")))
                if record is not None and record.scaler == scaler:
                    yield record

    async def remove(self, agent_id: AgentId) -> None:
        """Everything of one agent; its record last, so that an interrupted removal is found and finished."""
        await self._files.remove_folder(self.work(agent_id))
        for path in (self.output(agent_id), self._older(agent_id), self._path(agent_id)):
            self._files.remove(path)

    def printed_bytes(self, agent_id: AgentId) -> int:
        """Length of its output now."""
        return self._files.size(self.output(agent_id))

    def printed(self, agent_id: AgentId, since: int, bytes_max: int) -> tuple[int, bytes]:
        """The next block of its output after so many bytes, and where that begins: anew where the file did."""
        path = self.output(agent_id)
        start = since if since <= self._files.size(path) else 0
        return start, self._files.read_from(path, start, bytes_max)

    def bound_output(self, agent_id: AgentId, bytes_max: int) -> None:
        """Keep the output below its limit: when it is above, its last half moves aside and the file starts anew.

        The process appends to the same open file all the time; what it writes in between is lost.
        """
        path = self.output(agent_id)
        size = self._files.size(path)
        if size > bytes_max:
            keep = bytes_max // 2
            self._files.write(self._older(agent_id), self._files.read_from(path, size - keep, keep))
            self._files.truncate(path)

    def tail(self, agent_id: AgentId, lines: int) -> list[str]:
        """Last lines of its output, from at most the last 64 KiB."""
        data = b""
        for path in (self._older(agent_id), self.output(agent_id)):
            size = self._files.size(path)
            data += self._files.read_from(path, max(0, size - TAIL_BYTES), TAIL_BYTES)
        text = without_tokens(data[-TAIL_BYTES:].decode(errors="replace"))
        return text.splitlines()[-lines:] if lines > 0 else []

    def _path(self, agent_id: AgentId) -> Path:
        return self._agents / f"{agent_id}.json"

    def _older(self, agent_id: AgentId) -> Path:
        return self._agents / f"{agent_id}.log.1"
