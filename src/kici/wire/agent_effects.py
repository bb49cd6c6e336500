"""What the agent's side of the conversation asks of its program, and what the program tells it of a step."""

from dataclasses import dataclass
from enum import IntEnum

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


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a new connection; answer by `connected` or `disconnected`."""

    url: str


@dataclass(frozen=True, slots=True)
class Send:
    message: AgentMessage


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the present connection; answer by `disconnected`."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartStep:
    """Start the job's step; answer by `step_started` and `step_ended`, or by `step_ended` alone."""

    start: JobStart


@dataclass(frozen=True, slots=True)
class StopStep:
    """Ask the step to end, and kill what is left of it after the grace (0: at once)."""

    job_id: str
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Exit:
    """Kill what still runs, clean up, end the program.  Nothing follows this effect."""

    code: ExitCode
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the agent's own log."""

    event: str
    text: str = ""


Effect = Connect | Send | Disconnect | StartStep | StopStep | Exit | Note


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """How a step's process ended: by itself (`exit_code`), by a signal, or it never started (`error`)."""

    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
