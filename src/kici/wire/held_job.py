"""The job that an agent holds, from its offer to the acknowledgement of its end."""

from enum import StrEnum

from kici.domain.errors import Bug
from kici.wire.agent_effects import StepEnd
from kici.wire.messages import STDERR, STDOUT, JobRef, JobState, JobStatusReport
from kici.wire.outbox import Outbox


class JobPhase(StrEnum):
    ACKED = "acked"
    """Offered and acknowledged; nothing of it has run."""
    RUNNING = "running"
    """Told to start."""
    FINISHED = "finished"
    """Ended; its final status is kept until it is acknowledged."""


class HeldJob:
    """At most one at a time; gone once its final status is acknowledged, or once the coordinator dropped it."""

    __slots__ = (
        "final",
        "is_cancelled",
        "is_stopped",
        "job_id",
        "outbox",
        "phase",
        "run_id",
        "timed_out",
        "timeout_ms",
    )

    def __init__(self, job_id: str, run_id: str) -> None:
        self.job_id = job_id
        self.run_id = run_id
        self.phase = JobPhase.ACKED
        self.outbox = Outbox(limit_bytes=0)
        self.final: JobStatusReport | None = None
        self.timeout_ms = 0
        self.timed_out = False
        self.is_cancelled = False
        self.is_stopped = False
        """The agent itself is being stopped."""

    def ref(self) -> JobRef:
        return JobRef(job_id=self.job_id, run_id=self.run_id, phase=self.phase.value)

    def start(self, outbox: Outbox, *, timeout_ms: int) -> None:
        if self.phase is not JobPhase.ACKED:
            raise Bug(f"job {self.job_id} was told to start while {self.phase.value}")
        self.phase = JobPhase.RUNNING
        self.outbox = outbox
        self.timeout_ms = timeout_ms

    def end(self, end: StepEnd) -> None:
        """The step is over and all its output was added."""
        self.phase = JobPhase.FINISHED
        self.outbox.finish()
        state, reason = self._verdict(end)
        self.final = JobStatusReport(
            job_id=self.job_id,
            state=state,
            exit_code=end.exit_code,
            signal=end.signal,
            reason=reason,
            stdout_bytes=self.outbox.total_bytes(STDOUT),
            stderr_bytes=self.outbox.total_bytes(STDERR),
        )

    def _verdict(self, end: StepEnd) -> tuple[JobState, str | None]:
        if self.is_cancelled:
            return "cancelled", end.error
        if self.timed_out:
            return "timed_out", f"ran longer than {self.timeout_ms / 1000:g} s"
        if self.is_stopped:
            return "failed", "the agent was told to stop (SIGTERM)"
        if end.error is not None:
            return "failed", end.error
        if end.signal is not None:
            return "failed", f"killed by signal {end.signal}"
        return ("success", None) if end.exit_code == 0 else ("failed", None)
