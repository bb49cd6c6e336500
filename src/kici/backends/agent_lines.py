"""What an agent program prints goes on in the log of whoever made it, a line each, but not without a limit.

Which job it was for is added where the log is written: the agent may get its job later than it prints.
"""

import json
import logging
from typing import Final

from kici.decide.agent_output import SERVICE, said, without_tokens
from kici.domain.ids import AgentId
from kici.kit.lines import LineBuffer
from kici.ports.clock import Clock

log = logging.getLogger("kici.agents")

LINES_MAX: Final = 200
"""Lines of one agent in one window; its program prints a handful for each job."""
WINDOW_SECONDS: Final = 10.0


class AgentLines:
    """The printed lines of one agent."""

    def __init__(self, agent_id: AgentId, *, source: str, clock: Clock, read_bytes: int = 0) -> None:
        """`read_bytes`: so much of its output is not for us, because it was printed before."""
        self._agent_id = agent_id
        self._source = source
        self._clock = clock
        self._buffer = LineBuffer()
        self.read_bytes = read_bytes
        """How much of the file was taken."""
        self._window_ends_at = 0.0
        self._count = 0
        self._dropped = 0

    def feed(self, data: bytes) -> None:
        """The next block of its output."""
        self.read_bytes += len(data)
        self._buffer.feed(data)
        self._say_all()

    def finish(self) -> None:
        """It prints no more: an unfinished line counts, too."""
        self._buffer.finish()
        self._say_all()

    def say(self, line: str) -> None:
        """One whole line."""
        now = self._clock.monotonic()
        if now >= self._window_ends_at:
            self._window_ends_at, self._count = now + WINDOW_SECONDS, 0
        self._count += 1
        if self._count > LINES_MAX:
            self._dropped += 1
            return
        if self._dropped:
            self._write("warning", f"[dropped {self._dropped} lines]", {})
            self._dropped = 0
        record = said(without_tokens(line))
        self._write(record.level, record.text, record.more)

    def _say_all(self) -> None:
        while (line := self._buffer.take()) is not None:
            self.say(line)

    def _write(self, level: str, text: str, more: dict[str, object]) -> None:
        facts = {"service": SERVICE, "agent_id": self._agent_id, "logs_source": self._source, "text": text}
        if more:
            facts["more"] = json.dumps(more, ensure_ascii=False)
        log.log(logging.getLevelNamesMapping()[level.upper()], "agent.output", extra={"kici": facts})
