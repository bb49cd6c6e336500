"""What an agent reports of itself, and when."""

from kici.agent.figures import Figures
from kici.wire.messages import (
    STEP_SECONDS_MAX,
    AgentLeaving,
    AgentMetrics,
    ConfigAck,
    Heartbeat,
    JobAck,
    JobState,
    JobStatusReport,
    Message,
)


def sends(figures: Figures, message: Message, *, active_jobs: int = 0, dropped_lines: int = 0) -> list[Message]:
    return figures.with_report(message, active_jobs=active_jobs, dropped_lines=dropped_lines)


def ends(figures: Figures, job_id: str, state: JobState = "success", *, dropped_lines: int = 0) -> None:
    report = JobStatusReport(job_id=job_id, state=state)
    assert sends(figures, report, dropped_lines=dropped_lines) == [report]


def test_a_report_follows_each_registration_and_each_heartbeat_that_has_news() -> None:
    figures = Figures()
    assert sends(figures, ConfigAck()) == [ConfigAck(), AgentMetrics()]
    assert sends(figures, Heartbeat()) == [Heartbeat()]
    assert sends(figures, Heartbeat(), active_jobs=1) == [Heartbeat(), AgentMetrics(active_jobs=1)]
    assert sends(figures, Heartbeat(), active_jobs=1) == [Heartbeat()]
    assert sends(figures, ConfigAck(), active_jobs=1) == [ConfigAck(), AgentMetrics(active_jobs=1)]


def test_nothing_else_brings_a_report() -> None:
    figures = Figures()
    figures.wrote(10)
    assert sends(figures, JobAck(job_id="a")) == [JobAck(job_id="a")]


def test_an_agent_that_leaves_reports_before_it_does() -> None:
    figures = Figures()
    figures.step_began(100.0)
    figures.wrote(10)
    figures.wrote(5)
    figures.step_ended(102.5)
    ends(figures, "a", "failed", dropped_lines=4)
    farewell = AgentLeaving(reason="done")
    assert sends(figures, farewell) == [
        AgentMetrics(jobs={"failed": 1}, steps=1, step_seconds=[2.5], log_bytes=15, dropped_lines=4),
        farewell,
    ]
    assert (figures.jobs_total, figures.output_bytes) == (1, 15)


def test_amounts_are_reported_once() -> None:
    figures = Figures()
    figures.wrote(10)
    ends(figures, "a")
    ends(figures, "a")  # told again after the connection was lost
    ends(figures, "b", "running")
    ends(figures, "b")
    assert sends(figures, Heartbeat())[1:] == [AgentMetrics(jobs={"success": 2}, log_bytes=10)]
    figures.wrote(1)
    assert sends(figures, Heartbeat())[1:] == [AgentMetrics(log_bytes=1)]


def test_a_step_that_could_not_begin_is_none() -> None:
    figures = Figures()
    figures.step_ended(5.0)
    assert sends(figures, Heartbeat()) == [Heartbeat()]


def test_waiting_with_output_counts_when_it_begins_and_shows_while_it_lasts() -> None:
    figures = Figures()
    for wants in (True, False, False, True, False):
        figures.reads(wants)
    assert sends(figures, Heartbeat())[1:] == [AgentMetrics(backpressure=True, backpressure_events=2)]
    assert sends(figures, Heartbeat())[1:] == []
    figures.reads(True)
    assert sends(figures, Heartbeat())[1:] == [AgentMetrics()]


def test_a_report_stays_small_however_many_steps_ran() -> None:
    figures = Figures()
    for number in range(STEP_SECONDS_MAX + 5):
        figures.step_began(float(number))
        figures.step_ended(number + 0.5)
    (report,) = sends(figures, Heartbeat())[1:]
    assert isinstance(report, AgentMetrics)
    assert report.steps == STEP_SECONDS_MAX + 5
    assert len(report.step_seconds) == STEP_SECONDS_MAX
