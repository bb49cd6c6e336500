"""A step in a container of its own: a program of ours makes the container and stands for the step here.

That program is told what to run over a socket, which nobody else can open, and looks after the container until it is
gone, however this agent ends.  Everything else is as with any step: its output is the program's, and its end.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from kici.agent.container_records import records_folder
from kici.agent.environment import ProgramSettings, may_reach_steps
from kici.agent.step import Step, StepOrder
from kici.wire.agent_effects import StepEnd
from kici.wire.container_order import (
    ASK,
    END,
    FAILED,
    LENGTH_BYTES,
    ContainerFailure,
    ContainerOrder,
    SandboxDescription,
)
from kici.wire.messages import JobContainer, JobStart, StreamNumber

PATIENCE_SECONDS: Final = 20.0
"""How long the program may take to remove a container before it is killed too; then a later one removes it."""
PROGRAM: Final = "kici.apps.job_container"


def order_of(start: JobStart, container: JobContainer, settings: ProgramSettings, agent_id: str) -> ContainerOrder:
    """What the program is told."""
    assert settings.engine is not None, "without an engine nothing is ordered"
    sandbox = settings.sandbox
    return ContainerOrder(
        engine=settings.engine,
        name=f"kici-job-{os.urandom(6).hex()}",
        agent_id=agent_id,
        job_id=start.job_id,
        run_id=start.run_id,
        folder=str(records_folder(settings.tmp)),
        container=container,
        command=start.command,
        env={name: value for name, value in {**start.env, **start.secrets}.items() if may_reach_steps(name)},
        sandbox=SandboxDescription(
            hardened=sandbox.hardened,
            pids_max=sandbox.pids_max,
            memory_bytes=sandbox.memory_bytes,
            cpus=sandbox.cpus,
            isolated=sandbox.isolated,
            root_read_only=sandbox.root_read_only,
            user=sandbox.user,
        ),
    )


def start_clearing(settings: ProgramSettings) -> None:
    """Have removed what agents that died left on engines, by a program that goes on by itself.  It may fail."""
    argv = (sys.executable, "-P", "-m", PROGRAM, "--clear", str(records_folder(settings.tmp)))
    null = subprocess.DEVNULL
    try:
        _ = subprocess.Popen(argv, env=settings.step_env, stdin=null, stdout=null, stderr=null, start_new_session=True)
    except OSError:
        return


class ContainerStep(Step):
    """Contract: `step.Step`."""

    def __init__(
        self,
        order: ContainerOrder,
        step: StepOrder,
        *,
        on_output: Callable[[StreamNumber, bytes], None],
        on_ended: Callable[[StepEnd], None],
    ) -> None:
        """`step`: environment and place of the program; its command is ours to know."""
        argv = (sys.executable, "-P", "-m", PROGRAM)
        super().__init__(
            msgspec.structs.replace(step, command=argv, run_as=None), on_output=on_output, on_ended=on_ended
        )
        body = msgspec.json.encode(order)
        self._unsent = len(body).to_bytes(LENGTH_BYTES) + body
        self._line: socket.socket | None = None

    def start(self) -> bool:
        self._line, theirs = socket.socketpair()
        with theirs:
            self._order = msgspec.structs.replace(self._order, stdin=theirs.fileno())
            is_started = super().start()
        if is_started:
            self._line.settimeout(0)
            self._loop.add_writer(self._line, self._send)
        else:
            self._line.close()
        return is_started

    def stop(self, grace_seconds: float) -> None:
        if self._line is None or self._end is not None:
            return
        if grace_seconds <= 0:
            self._say(END)
        else:
            self._say(ASK)
            self._timers.append(self._loop.call_later(grace_seconds, self._say, END))
        self._timers.append(self._loop.call_later(grace_seconds + PATIENCE_SECONDS, self._kill))

    def _say(self, letter: bytes) -> None:
        assert self._line is not None, "somebody listens from the start on"
        self._unsent += letter
        self._loop.add_writer(self._line, self._send)

    def _send(self) -> None:
        assert self._line is not None, "somebody listens from the start on"
        try:
            self._unsent = self._unsent[self._line.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # it has ended: whoever reaps it tells how
        if not self._unsent:
            self._loop.remove_writer(self._line)

    def _end_of(self, code: int) -> StepEnd:
        """What the program left behind says more than its exit code."""
        line, self._line = self._line, None
        if line is None:
            return super()._end_of(code)
        with line:
            self._loop.remove_writer(line)
            try:
                told = line.recv(64 * 1024) if code == FAILED else b""
            except OSError:
                told = b""
        if not told:
            return super()._end_of(code)
        return StepEnd(error=msgspec.json.decode(told, type=ContainerFailure).reason)
