"""What `kici demo` shows while it plays: a live table on a terminal, a line for each change elsewhere."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from kici.cli.client import Json
from kici.cli.demo_jobs import ALL
from kici.cli.output import cell, duration, moment, print_table, took
from kici.cli.pausing import monotonic

if TYPE_CHECKING:
    from rich.table import Table

_TONES: Final = {
    "success": "green",
    "failed": "red",
    "timed_out": "red",
    "unroutable": "red",
    "cancelled": "yellow",
    "skipped": "yellow",
    "running": "blue",
}


class Screen(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, jobs: Mapping[str, Json], agents: int) -> None:
        """The jobs by name, and how many agents there are."""
        ...

    def say(self, text: str) -> None: ...


def a_screen() -> Screen:
    return LiveScreen() if sys.stdout.isatty() else LineScreen()


class LineScreen:
    def __init__(self) -> None:
        self._started_at = monotonic()
        self._told: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, jobs: Mapping[str, Json], agents: int) -> None:
        for name, job in jobs.items():
            if self._told.get(name) != job["status"]:
                self._told[name] = job["status"]
                self.say(f"{name.ljust(12)} {job['status']}{_note(job)}")

    def say(self, text: str) -> None:
        print(f"{monotonic() - self._started_at:6.1f}s  {text}", flush=True)


class LiveScreen:
    def __init__(self) -> None:
        from rich.live import Live  # only a terminal pays for it

        self._live: Live = Live(auto_refresh=True, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, jobs: Mapping[str, Json], agents: int) -> None:
        self._live.update(_table(jobs, agents))

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)


def _table(jobs: Mapping[str, Json], agents: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    over = sum(1 for job in jobs.values() if job["finishedAt"])
    table = Table(title=f"{over} of {len(jobs)} jobs over, {agents} agents", title_justify="left", expand=False)
    for head in ("job", "what it shows", "status", "agent", "took"):
        table.add_column(head, no_wrap=head != "what it shows")
    for name, job in jobs.items():
        status = Text(job["status"].replace("_", " "), style=_TONES.get(job["status"], "dim"))
        table.add_row(name, ALL[name].shows, status, cell(job["agentId"]), took(job))
    return table


def _note(job: Json) -> str:
    if job["finishedAt"]:
        why = f" ({job['verdict']})" if job["status"] not in ("success", "failed") and job["verdict"] else ""
        code = f", exit code {job['exitCode']}" if job["exitCode"] else ""
        return f"{code}{f' after {took(job)}' if took(job) else ''}{why}"
    return f" on {job['agentId']}" if job["status"] == "running" else ""


def waited(job: Json) -> str:
    """How long it took from submission to start."""
    if not job["startedAt"]:
        return ""
    return duration((moment(job["startedAt"]) - moment(job["createdAt"])).total_seconds())


def print_summary(jobs: Mapping[str, Json]) -> None:
    rows = []
    for name, job in jobs.items():
        sample = ALL[name]
        is_right = job["status"] == sample.expected and (sample.exit_code in (None, job["exitCode"]))
        ended = job["status"].replace("_", " ") + (f" ({job['exitCode']})" if job["exitCode"] else "")
        rows.append((name, sample.shows, ended, "as expected" if is_right else "UNEXPECTED", waited(job), took(job)))
    print_table(("JOB", "WHAT IT SHOWS", "ENDED", "", "WAITED", "TOOK"), rows, empty="There were no jobs.")
