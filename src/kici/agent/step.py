"""One step: a process in its own session, its output read by blocks, nothing of it left when it is over.

Environment and secrets go to the new process by `execve` alone, the one channel that nobody else can read: a pipe
could be opened by any process of the same user, and the agent's own environment and arguments never hold them.

A step is over when its process has ended, everything it left behind was killed (the agent adopts orphans, so they
all become its children), and both streams were read to their end.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kici.agent import host
from kici.agent.mask import Masker
from kici.wire.agent_effects import StepEnd
from kici.wire.messages import STDERR, STDOUT, StreamNumber

BLOCK_BYTES: Final = 64 * 1024
SWEEP_SECONDS: Final = 0.02
SWEEPS_MAX: Final = 250
STRAY_SECONDS: Final = 1.0
"""How long a stream without an end is awaited once no process of the step is left."""
NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


class RunAs(msgspec.Struct, frozen=True, kw_only=True):
    """Another user to run the step as."""

    uid: int
    gid: int
    groups: tuple[int, ...]


class StepOrder(msgspec.Struct, frozen=True, kw_only=True):
    command: Sequence[str]
    env: Mapping[str, str]
    """The whole environment, secrets included."""
    cwd: Path
    needles: tuple[bytes, ...]
    """What to hide in the output."""
    run_as: RunAs | None = None
    stdin: int | None = None
    """None: nothing to read."""

    def __repr__(self) -> str:
        """Without the secrets."""
        return f"StepOrder(command={self.command!r}, cwd={str(self.cwd)!r})"


class Step:
    """Calls back on the loop: `on_output` with masked bytes, `on_ended` once, last."""

    def __init__(
        self,
        order: StepOrder,
        *,
        on_output: Callable[[StreamNumber, bytes], None],
        on_ended: Callable[[StepEnd], None],
    ) -> None:
        self._order = order
        self._loop = asyncio.get_running_loop()
        self._on_output = on_output
        self._on_ended = on_ended
        self._process: subprocess.Popen[bytes] | None = None
        self._end: StepEnd | None = None
        self._is_swept = False
        self._sweeps = 0
        self._streams: dict[StreamNumber, int] = {}  # open read ends
        self._maskers: dict[StreamNumber, Masker] = {STDOUT: Masker(order.needles), STDERR: Masker(order.needles)}
        self._is_reading = True
        self._timers: list[asyncio.TimerHandle] = []

    def start(self) -> bool:
        """Whether the process is there; if not, `on_ended` has said why."""
        pipes: dict[StreamNumber, tuple[int, int]] = {STDOUT: os.pipe(), STDERR: os.pipe()}
        try:
            self._process = self._popen(pipes[STDOUT][1], pipes[STDERR][1])
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            for reader, _ in pipes.values():
                os.close(reader)
            self._on_ended(_not_started(self._order.command, error))
            return False
        finally:
            for _, writer in pipes.values():
                os.close(writer)
        for stream, (reader, _) in pipes.items():
            os.set_blocking(reader, False)
            self._streams[stream] = reader
            self._loop.add_reader(reader, self._on_readable, stream)
        return True

    def stop(self, grace_seconds: float) -> None:
        """TERM, and KILL after the grace; KILL at once for 0.  May be repeated with less patience."""
        if self._process is None or self._end is not None:
            return
        if grace_seconds <= 0:
            self._kill()
        else:
            host.signal_group(self._process.pid, signal.SIGTERM)
            self._timers.append(self._loop.call_later(grace_seconds, self._kill))

    def set_reading(self, wanted: bool) -> None:  # noqa: FBT001 (a switch)
        """Pause or resume reading: a step whose output nobody takes has to wait."""
        if wanted == self._is_reading:
            return
        self._is_reading = wanted
        for stream, reader in self._streams.items():
            if wanted:
                self._loop.add_reader(reader, self._on_readable, stream)
            else:
                self._loop.remove_reader(reader)

    def reaped(self, pid: int, code: int) -> None:
        """A child of the agent ended, with an exit code or a negated signal."""
        if self._process is None or pid != self._process.pid:
            return
        self._process.returncode = code
        self._end = self._end_of(code)
        for timer in self._timers:
            timer.cancel()
        self._sweep()

    def _end_of(self, code: int) -> StepEnd:
        return StepEnd(exit_code=code) if code >= 0 else StepEnd(signal=-code)

    def _popen(self, stdout: int, stderr: int) -> "subprocess.Popen[bytes]":
        run_as = self._order.run_as
        return subprocess.Popen(
            list(self._order.command),
            env=dict(self._order.env),
            cwd=self._order.cwd,
            stdin=subprocess.DEVNULL if self._order.stdin is None else self._order.stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            user=None if run_as is None else run_as.uid,
            group=None if run_as is None else run_as.gid,
            extra_groups=None if run_as is None else run_as.groups,
        )

    def _kill(self) -> None:
        if self._process is not None and self._end is None:
            host.signal_group(self._process.pid, signal.SIGKILL)
            host.kill(self._process.pid)

    def _sweep(self) -> None:
        """Kill what the step left behind, until nothing is left (or can be killed)."""
        left = host.children()
        for pid in left:
            host.kill(pid)
        self._sweeps += 1
        if left and self._sweeps < SWEEPS_MAX:
            self._loop.call_later(SWEEP_SECONDS, self._sweep)
            return
        self._is_swept = True
        self._loop.call_later(STRAY_SECONDS, self._close_stray)
        self._finish()

    def _on_readable(self, stream: StreamNumber) -> None:
        self._read(stream)

    def _read(self, stream: StreamNumber) -> bool:
        """Take one block; whether there may be another."""
        try:
            data = os.read(self._streams[stream], BLOCK_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._give(stream, self._maskers[stream].feed(data))
            return True
        self._close(stream)
        return False

    def _close(self, stream: StreamNumber) -> None:
        reader = self._streams.pop(stream)
        self._loop.remove_reader(reader)
        os.close(reader)
        self._give(stream, self._maskers[stream].finish())
        self._finish()

    def _give(self, stream: StreamNumber, data: bytes) -> None:
        if data:
            self._on_output(stream, data)

    def _close_stray(self) -> None:
        """A process that we may not see (another namespace) still holds a stream: do not wait for it."""
        for stream in tuple(self._streams):
            while self._is_reading and self._read(stream):
                pass
            if not self._is_reading:
                self._loop.call_later(STRAY_SECONDS, self._close_stray)
                return
            if stream in self._streams:
                self._close(stream)

    def _finish(self) -> None:
        if self._end is not None and self._is_swept and not self._streams:
            self._is_swept = False  # once
            self._on_ended(self._end)


def _not_started(command: Sequence[str], error: Exception) -> StepEnd:
    name = command[0] if command else ""
    match error:
        case FileNotFoundError():
            return StepEnd(exit_code=NOT_FOUND, error=f"command not found: {name}")
        case IndexError():
            return StepEnd(exit_code=NOT_FOUND, error="the command is empty")
        case PermissionError():
            return StepEnd(exit_code=NOT_EXECUTABLE, error=f"not executable: {name}")
        case _:
            return StepEnd(exit_code=NOT_EXECUTABLE, error=f"cannot start {name!r}: {error}")
