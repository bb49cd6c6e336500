"""`kici submit`: a run file, followed to the end of its last job, each line behind the name of its job."""

import sys
from pathlib import Path
from typing import Final, NoReturn

import click

from kici.cli.build_files import with_files
from kici.cli.client import Client, Json, job_path, run_path
from kici.cli.connection import with_client
from kici.cli.errors import CliError, Refused
from kici.cli.following import FINISHED, INTERRUPTED, WAITING, Printer, chunk_bytes
from kici.cli.interrupting import Cancelling, forget_output
from kici.cli.output import took
from kici.cli.pausing import pause
from kici.cli.run import PIPE_CLOSED, SUBMIT_SECONDS, leave, new_key
from kici.cli.run_file import RunFile

PASS_SECONDS: Final = 0.4
AWAY_SECONDS: Final = 600.0
LINE_BYTES_MAX: Final = 64 * 1024
"""A longer line is printed in pieces."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@click.option("-d", "--detach", is_flag=True, help="Print the run's id and return.")
@with_client
def submit(client: Client, /, *, file: Path, detach: bool) -> NoReturn:
    """Submit the run FILE (YAML or JSON; - for standard input) and follow its jobs.

    A Dockerfile is looked for beside FILE, and goes along with what it copies, unless its job brings the files itself.
    Exits with 0 when all jobs succeeded, with 130 when it was interrupted (the run is cancelled), else with 1.
    """
    read = read_file(file)
    told = with_files(read.plain(), Path.cwd() if str(file) == "-" else file.parent)
    try:
        run = client.post("/api/v1/runs", told, key=new_key(), again_seconds=SUBMIT_SECONDS)
    except Refused as refusal:
        raise CliError(read.located(refusal)) from refusal
    if detach:
        click.echo(run["id"])
        leave(0)
    click.echo(f"kici: run {run['id']}  {client.page('/')}", err=True)
    leave(attend_run(client, run))


def read_file(path: Path) -> RunFile:
    """Raises `CliError` with line and column of what cannot be read."""
    from kici.config.yaml_source import parse  # the parser is not needed by other commands

    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    root, problems = parse(data, str(path))
    if problems or root is None:
        raise CliError("\n".join(map(str, problems)) or f"{path} is empty")
    return RunFile(str(path), root)


def attend_run(client: Client, run: Json) -> int:
    """Show all jobs until the run is over; the exit code."""
    cancelled = Cancelling(client, run_path(run["id"], "/cancel"))
    screen = Screen(client, Printer.standard())
    try:
        while True:
            run = client.request("GET", run_path(run["id"]), again_seconds=AWAY_SECONDS)
            is_over = screen.show(run["jobs"])
            if is_over and run["status"] not in ("running", "cancelling"):
                break
            pause(PASS_SECONDS)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        cancelled.cancel(force=False)
        forget_output()
        return PIPE_CLOSED
    click.echo(f"kici: run {run['id']} {run['status']}", err=True)
    if cancelled.is_asked:
        return INTERRUPTED
    return 0 if run["status"] == "success" else 1


class Screen:
    """Prints what is new about many jobs at each pass."""

    def __init__(self, client: Client, printer: Printer) -> None:
        self._client = client
        self._printer = printer
        self._after: dict[str, int] = {}
        self._status: dict[str, str] = {}
        self._told: dict[str, str] = {}
        self._drained: set[str] = set()
        self._lines: dict[tuple[str, str], _Lines] = {}

    def show(self, jobs: list[Json]) -> bool:
        """One pass.  Whether everything about every job was shown."""
        width = max((len(job["name"]) for job in jobs), default=0)
        for job in jobs:
            if job["id"] in self._drained:
                continue
            prefix = f"[{job['name']}]".ljust(width + 2) + " "
            if job["status"] not in WAITING:
                self._output(job, prefix)
            self._changes(job, prefix)
            if job["status"] in FINISHED:
                self._drained.add(job["id"])
        return len(self._drained) == len(jobs)

    def _output(self, job: Json, prefix: str) -> None:
        while True:
            after = self._after.get(job["id"], 0)
            page = self._client.request(
                "GET",
                job_path(job["id"], "/logs"),
                query={"after": after},
                headers={"Accept": "application/json"},
                again_seconds=AWAY_SECONDS,
            )
            for item in page["items"]:
                self._chunk(job, prefix, item["stream"], chunk_bytes(item))
            self._after[job["id"]] = page["next"]
            if page["next"] == after:
                return

    def _chunk(self, job: Json, prefix: str, stream: str, data: bytes) -> None:
        if stream == "system":
            return
        lines = self._lines.setdefault((job["id"], stream), _Lines(prefix.encode()))
        self._printer.chunk(stream, lines.add(data))

    def _changes(self, job: Json, prefix: str) -> None:
        """A line for each change of status, and one for the reason of a wait."""
        status, verdict = job["status"], job.get("verdict") or ""
        if status in FINISHED:
            for stream in ("stdout", "stderr"):
                rest = self._lines.pop((job["id"], stream), _Lines(b"")).rest()
                if rest:
                    self._printer.chunk(stream, rest)
        if status != self._status.get(job["id"]):
            self._status[job["id"]] = status
            click.echo(f"{prefix}{_status_text(job)}", err=True)
        elif status == "queued" and verdict and job["id"] not in self._told:
            self._told[job["id"]] = verdict
            click.echo(f"{prefix}waits: {verdict}", err=True)


def _status_text(job: Json) -> str:
    status = str(job["status"]).replace("_", " ")
    if job["status"] not in FINISHED:
        return status
    took_text = f" after {took(job)}" if took(job) else ""
    why = f": {job['verdict']}" if job["status"] != "success" and job.get("verdict") else ""
    return f"{status}{took_text}{why}"


class _Lines:
    """Whole lines of one stream, each behind a prefix."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._held = b""

    def add(self, data: bytes) -> bytes:
        """The lines that are complete now."""
        *whole, self._held = (self._held + data).split(b"\n")
        if len(self._held) > LINE_BYTES_MAX:
            whole.append(self._held)
            self._held = b""
        return b"".join(self._prefix + line + b"\n" for line in whole)

    def rest(self) -> bytes:
        """The last line, if it has no end."""
        held, self._held = self._held, b""
        return self._prefix + held + b"\n" if held else b""
