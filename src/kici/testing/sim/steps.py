"""Simulated steps of jobs: how long each runs, what it writes and when, how it ends and how it takes being stopped.

What a step does is drawn from its job's name, so it is the same whichever agent runs it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kici.testing.seeded_entropy import SeededEntropy
from kici.wire.agent_effects import StepEnd
from kici.wire.messages import STDERR, STDOUT, StreamNumber

STREAMS: Final[tuple[StreamNumber, ...]] = (STDOUT, STDOUT, STDERR)
SIGKILL: Final = 9
SIGTERM: Final = 15
SECONDS_MAX: Final = 90.0
PIECE_BYTES_MAX: Final = 3000

WELL: Final = StepEnd(exit_code=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScript:
    seconds: float = 1.0
    pieces: tuple[tuple[float, StreamNumber, bytes], ...] = ()
    """When, where and what it writes; in order of time."""
    end: StepEnd = WELL
    ignores_stop: bool = False
    """It takes a KILL to end it."""


def step_script(entropy: SeededEntropy, name: str) -> StepScript:
    """The script of a job's step."""
    own = entropy.fork(f"step/{name}")
    kind = own.uniform(0, 1)
    if kind < 0.03:
        return StepScript(end=StepEnd(error="no such program"), seconds=0.0)
    seconds = own.uniform(0.05, 3.0) if kind < 0.5 else own.uniform(3.0, 30.0) if kind < 0.9 else own.uniform(30, 90)
    pieces: list[tuple[float, StreamNumber, bytes]] = []
    for number in range(round(own.uniform(0, 5))):
        stream = own.choice(STREAMS)
        text = f"{name} {number} ".encode()
        size = round(own.uniform(1, PIECE_BYTES_MAX if own.chance(0.1) else 100))
        pieces.append((own.uniform(0, seconds), stream, (text * (size // len(text) + 1))[:size]))
    return StepScript(
        seconds=seconds,
        pieces=tuple(sorted(pieces)),
        end=_end(own),
        ignores_stop=own.chance(0.2),
    )


def _end(own: SeededEntropy) -> StepEnd:
    kind = own.uniform(0, 1)
    if kind < 0.75:
        return StepEnd(exit_code=0)
    if kind < 0.95:
        return StepEnd(exit_code=own.choice([1, 2, 127]))
    return StepEnd(signal=own.choice([SIGKILL, 11]))


class SimStep:
    """A running step.  `on_output` and `on_end` are called on the loop; after `on_end` nothing is."""

    def __init__(
        self,
        script: StepScript,
        *,
        on_output: Callable[[StreamNumber, bytes], None],
        on_end: Callable[[StepEnd], None],
    ) -> None:
        self._script = script
        self._on_output = on_output
        self._on_end = on_end
        self._handles: list[asyncio.TimerHandle] = []
        self._unread: deque[tuple[StreamNumber, bytes]] = deque()
        self._reads = True
        self._end: StepEnd | None = None
        self._is_over = False

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        for at, stream, data in self._script.pieces:
            self._handles.append(loop.call_later(at, self._write, stream, data))
        self._handles.append(loop.call_later(self._script.seconds, self._exits, self._script.end))

    def set_reading(self, reads: bool) -> None:  # noqa: FBT001 - the one thing to say
        self._reads = reads
        self._read()

    def stop(self, grace_seconds: float) -> None:
        """Ask it to end, and kill it after the grace."""
        loop = asyncio.get_running_loop()
        if not self._script.ignores_stop and grace_seconds > 0:
            self._handles.append(loop.call_later(min(0.2, grace_seconds), self._exits, StepEnd(signal=SIGTERM)))
        self._handles.append(loop.call_later(grace_seconds, self._exits, StepEnd(signal=SIGKILL)))

    def vanish(self) -> None:
        """Its machine is gone: it writes and ends no more."""
        self._is_over = True
        self._cancel()

    def _write(self, stream: StreamNumber, data: bytes) -> None:
        self._unread.append((stream, data))
        self._read()

    def _exits(self, end: StepEnd) -> None:
        if self._end is None:
            self._end = end
            self._cancel()
            self._read()

    def _read(self) -> None:
        """Give on what was written; the end comes after the last of it."""
        while self._unread and self._reads and not self._is_over:
            self._on_output(*self._unread.popleft())
        if self._end is not None and not self._unread and not self._is_over:
            self._is_over = True
            self._on_end(self._end)

    def _cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()
        self._handles.clear()
