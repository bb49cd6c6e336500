"""What the agent's side of the conversation asks of its program, and what the program tells it of a step.

Structs, as all that an agent knows: each dataclass costs its start half a millisecond.
"""

from enum import IntEnum

import msgspec

from kici.wire.messages import AgentMessage, JobStart


class ExitCode(IntEnum):
    """How the agent program ends."""

    DONE = 0
    REFUSED = 1
    """The coordinator will never take this agent: a bad token, a used claim code."""
    MISCONFIGURED = 2
    ORPHANED = 3
    """No coordinator was reached for too long."""
    CRASHED = 4
    """A fault of the agent itself: its log has the story."""


class Connect(msgspec.Struct, frozen=True):
    """Open a new connection; answer by `connected` or `disconnected`."""

    url: str


class Send(msgspec.Struct, frozen=True):
    message: AgentMessage


class Disconnect(msgspec.Struct, frozen=True):
    """Close the present connection; answer by `disconnected`."""

    code: int
    reason: str


class StartStep(msgspec.Struct, frozen=True):
    """Start the job's step; answer by `step_started` and `step_ended`, or by `step_ended` alone."""

    start: JobStart


class StopStep(msgspec.Struct, frozen=True):
    """Ask the step to end, and kill what is left of it after the grace (0: at once)."""

    job_id: str
    grace_seconds: float


class Exit(msgspec.Struct, frozen=True):
    """Kill what still runs, clean up, end the program.  Nothing follows this effect."""

    code: ExitCode
    reason: str


class Note(msgspec.Struct, frozen=True):
    """Something for the agent's own log."""

    event: str
    text: str = ""


Effect = Connect | Send | Disconnect | StartStep | StopStep | Exit | Note


class StepEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a step's process ended: by itself (`exit_code`), by a signal, or it never started (`error`)."""

    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
