"""What the agent reports of itself: how much it did since it last said so, and how it is now.

A report goes along with what is sent anyway: when the agent has registered, at every heartbeat, and before it leaves.
Amounts are increments, so that the coordinator adds them up without knowing one agent from another.
"""

from collections import Counter
from typing import Final

from kici.wire.messages import (
    STEP_SECONDS_MAX,
    AgentLeaving,
    AgentMetrics,
    ConfigAck,
    EndState,
    Heartbeat,
    JobStatusReport,
    Message,
)

NOTHING_NEW: Final = AgentMetrics()


class Figures:
    """Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.jobs_total = 0
        self.output_bytes = 0
        self._jobs: Counter[EndState] = Counter()
        self._counted: str | None = None
        """The job whose end is counted: its report may be sent more than once."""
        self._steps = 0
        self._step_seconds: list[float] = []
        self._step_began_at: float | None = None
        self._log_bytes = 0
        self._dropped_lines = 0
        self._holds_back = False
        self._held_back = 0
        self._last = NOTHING_NEW

    def step_began(self, now: float) -> None:
        self._step_began_at = now

    def step_ended(self, now: float) -> None:
        """Also called for a step that could not begin."""
        if self._step_began_at is None:
            return
        self._steps += 1
        if len(self._step_seconds) < STEP_SECONDS_MAX:
            self._step_seconds.append(max(0.0, now - self._step_began_at))
        self._step_began_at = None

    def wrote(self, count: int) -> None:
        """The step wrote so many bytes."""
        self.output_bytes += count
        self._log_bytes += count

    def reads(self, wants: bool) -> None:  # noqa: FBT001 (the answer itself)
        """Whether more of the step's output is read, or the step has to wait."""
        self._held_back += not wants and not self._holds_back
        self._holds_back = not wants

    def with_report(self, message: Message, *, active_jobs: int, dropped_lines: int) -> list[Message]:
        """What to send for `message`: itself, and a report where one is due.

        `dropped_lines`: of the job that the agent holds, so far.
        """
        match message:
            case JobStatusReport():
                self._reported(message, dropped_lines)
                return [message]
            case AgentLeaving():
                return [*self._report(active_jobs), message]
            case Heartbeat():
                return [message, *self._report(active_jobs)]
            case ConfigAck():
                self._last = NOTHING_NEW
                return [message, *self._report(active_jobs, is_first=True)]
            case _:
                return [message]

    def _reported(self, report: JobStatusReport, dropped_lines: int) -> None:
        if report.state != "running" and report.job_id != self._counted:
            self._counted = report.job_id
            self.jobs_total += 1
            self._jobs[report.state] += 1
            self._dropped_lines += dropped_lines

    def _report(self, active_jobs: int, *, is_first: bool = False) -> list[Message]:
        report = AgentMetrics(
            active_jobs=active_jobs,
            backpressure=self._holds_back,
            jobs=dict(self._jobs),
            steps=self._steps,
            step_seconds=self._step_seconds,
            log_bytes=self._log_bytes,
            dropped_lines=self._dropped_lines,
            backpressure_events=self._held_back,
        )
        if report == self._last and not is_first:
            return []
        self._last = AgentMetrics(active_jobs=active_jobs, backpressure=self._holds_back)
        self._jobs, self._step_seconds = Counter(), []
        self._steps = self._log_bytes = self._dropped_lines = self._held_back = 0
        return [report]
