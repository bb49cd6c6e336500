"""What a guest and its VMM print: followed, bounded, and kept for who asks how it ended.

The guest writes as much as it likes and whatever it likes: every buffer has a limit, and so has the file itself.
"""

import logging
from collections import deque
from pathlib import Path
from typing import Final

from kici.decide.microvm_boot import is_alarming
from kici.domain.ids import AgentId
from kici.kit.lines import READ_BYTES, LineBuffer
from kici.ports.clock import Clock
from kici.ports.files import Files

log = logging.getLogger(__name__)

REMEMBERED_LINES: Final = 50
FILE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of one file on disk; it starts anew when it is above."""
PASS_BYTES_MAX: Final = 1024 * 1024
"""Read of one file in one pass; the rest waits for the next."""
PASS_SECONDS: Final = 0.5
SERIAL: Final = "firecracker-serial"
VMM: Final = "firecracker-vmm"


class _Tail:
    """One growing file."""

    def __init__(self, files: Files, path: Path, source: str) -> None:
        self._files = files
        self._path = path
        self._buffer = LineBuffer()
        self._offset = 0
        self.source = source

    def read(self) -> list[str]:
        """Complete lines since the last call."""
        size = self._files.size(self._path)
        if size < self._offset:
            self._offset = 0
        until = min(size, self._offset + PASS_BYTES_MAX)
        while self._offset < until:
            data = self._files.read_from(self._path, self._offset, min(READ_BYTES, until - self._offset))
            if not data:
                break
            self._offset += len(data)
            self._buffer.feed(data)
        if size > FILE_BYTES_MAX and self._offset == size:
            self._files.truncate(self._path)
            self._offset = 0
        return self._taken()

    def finish(self) -> list[str]:
        lines = self.read()
        self._buffer.finish()
        return lines + self._taken()

    def _taken(self) -> list[str]:
        lines = []
        while (line := self._buffer.take()) is not None:
            lines.append(line)
        return lines


class Console:
    """The two files of one machine."""

    def __init__(self, agent_id: AgentId, files: Files, *, console: Path, vmm_log: Path | None) -> None:
        self._agent_id = agent_id
        self._tails = [_Tail(files, console, SERIAL)]
        if vmm_log is not None:
            self._tails.append(_Tail(files, vmm_log, VMM))
        self._last: deque[str] = deque(maxlen=REMEMBERED_LINES)

    @property
    def last(self) -> list[str]:
        """What the guest printed last."""
        return list(self._last)

    async def follow(self, clock: Clock) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await clock.sleep(PASS_SECONDS)

    def look(self) -> None:
        """Take what is there now."""
        for tail in self._tails:
            self._tell(tail.source, tail.read())

    def finish(self) -> None:
        """The machine is gone: unfinished lines count too."""
        for tail in self._tails:
            self._tell(tail.source, tail.finish())

    def _tell(self, source: str, lines: list[str]) -> None:
        for line in lines:
            if source == SERIAL:
                self._last.append(line)
            level = logging.ERROR if is_alarming(line) else logging.DEBUG if source == SERIAL else logging.INFO
            if log.isEnabledFor(level):
                fields = {"agent_id": self._agent_id, "logs_source": source, "line": line}
                log.log(level, "vm.console", extra={"kici": fields})
