"""Lines of a growing file whose writer is not to be trusted: every buffer is bounded.

`LineBuffer` turns blocks of bytes into lines and holds those that nobody has taken yet.  `follow` reads a file
through it until it is told to stop.
"""

import codecs
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

LINE_MAX: Final = 65_536
"""Characters of a line that are kept."""
QUEUE_MAX: Final = 10_000
"""Lines that wait, the mark of dropped ones included."""
READ_BYTES: Final = 64 * 1024
POLL_SECONDS: Final = 0.1
_CUT: Final = " [truncated]"


class LineBuffer:
    """Bytes in, lines out; empty ones are left out.  When too many wait, the oldest go and one mark says how many."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._unfinished = ""
        self._skips = False
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._is_marked = False

    def feed(self, data: bytes) -> None:
        """Take the next block.  A character may begin in one and end in the next."""
        first, *rest = self._decode(data).split("\n")
        self._extend(first)
        for part in rest:
            self._end_line()
            self._extend(part)

    def finish(self) -> None:
        """The unfinished last line counts as one."""
        self._extend(self._decode(b"", final=True))
        self._end_line()

    def take(self) -> str | None:
        """The next line; None when none waits."""
        if self._is_marked:
            self._is_marked = False
            return f"[dropped {self._dropped} lines]"
        return self._lines.popleft() if self._lines else None

    def _extend(self, text: str) -> None:
        if self._skips:
            return
        self._unfinished += text
        if len(self._unfinished) > LINE_MAX:
            self._push(self._unfinished[:LINE_MAX] + _CUT)
            self._unfinished = ""
            self._skips = True

    def _end_line(self) -> None:
        line = self._unfinished.removesuffix("\r")
        if line and not self._skips:
            self._push(line)
        self._unfinished = ""
        self._skips = False

    def _push(self, line: str) -> None:
        self._lines.append(line)
        while len(self._lines) + self._is_marked > QUEUE_MAX:
            self._lines.popleft()
            self._dropped += 1
            self._is_marked = True


async def follow(
    read: Callable[[int, int], bytes],
    size: Callable[[], int],
    *,
    sleep: Callable[[float], Awaitable[None]],
    is_over: Callable[[], bool],
) -> AsyncIterator[str]:
    """Lines of a file from its beginning, as they come, until `is_over` and all that is there was given.

    `read(offset, bytes_max)` and `size()` look at the file.  One that has become shorter is read from its
    beginning again: its writer's output was cut.
    """
    buffer = LineBuffer()
    offset = 0
    while True:
        is_last = is_over()
        data = read(offset, READ_BYTES)
        offset += len(data)
        buffer.feed(data)
        while (line := buffer.take()) is not None:
            yield line
        if data:
            continue
        if is_last:
            break
        if size() < offset:
            offset = 0
        else:
            await sleep(POLL_SECONDS)
    buffer.finish()
    while (line := buffer.take()) is not None:
        yield line
