"""Following one job to its end: its output byte for byte, and what happens to it meanwhile."""

import base64
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, TextIO

import click

from kici.cli.client import Client, Json, job_path
from kici.cli.errors import NoCoordinator, Refused
from kici.cli.pausing import monotonic, pause

RECONNECT_SECONDS: Final = 600.0
"""How long a follower waits for a coordinator that went away; a restart costs no running job."""
LINE_FIRST_SECONDS: Final = 5.0
LINE_EACH_SECONDS: Final = 30.0
FINISHED: Final = frozenset({"success", "failed", "cancelled", "timed_out", "unroutable", "skipped"})
WAITING: Final = frozenset({"pending", "queued"})
SIGNAL_BASE: Final = 128
SIGTERM: Final = 15
TIMED_OUT: Final = 124
NEVER_RAN: Final = 125
INTERRUPTED: Final = 130

OnChunk = Callable[[str, bytes], None]
OnJob = Callable[[Json], None]


def exit_code(job: Json) -> int:
    """What a command that ran a job exits with: as the job itself would have, as far as one number can say."""
    if job["status"] == "success":
        return 0
    if job.get("startedAt") is None:
        return NEVER_RAN
    if job["status"] == "timed_out":
        return TIMED_OUT
    if job.get("signal"):
        return SIGNAL_BASE + int(job["signal"])
    if job.get("exitCode"):
        return int(job["exitCode"])
    return SIGNAL_BASE + SIGTERM if job["status"] == "cancelled" else 1


def chunk_bytes(data: Json) -> bytes:
    if "base64" in data:
        return base64.b64decode(data["base64"])
    text: str = data.get("text", "")
    return text.encode()


def follow(client: Client, job_id: str, *, on_chunk: OnChunk, on_job: OnJob, after: int = 0) -> Json:
    """Hand over all output after a position, and the job at each change, until it is over.  Answers the job.

    Comes back to a coordinator that goes away meanwhile, without losing or repeating a byte.
    """
    lost_since: float | None = None
    while True:
        try:
            for event in client.events(job_path(job_id, "/logs"), after=after):
                lost_since = None
                if event.name == "end":
                    return event.data
                if event.name == "status":
                    on_job(event.data)
                elif event.id is not None and event.id > after:
                    on_chunk(event.name, chunk_bytes(event.data))
                    after = event.id
        except NoCoordinator:
            lost_since = _still_patient(lost_since)
        except Refused as refusal:
            if refusal.status not in (429, 503):
                raise
            lost_since = _still_patient(lost_since)
        pause(0.2 if lost_since is None else 1.0)


def _still_patient(lost_since: float | None) -> float:
    """Raises the error at hand when the coordinator has been away for too long."""
    now = monotonic()
    if lost_since is None:
        click.echo("kici: lost the coordinator; waiting for it to come back", err=True)
        return now
    if now - lost_since > RECONNECT_SECONDS:
        raise  # called while the error is handled
    return lost_since


@dataclass(slots=True)
class Printer:
    """Writes a job's streams to ours, unchanged and at once, and tells on the error output why it waits.

    On a terminal that is one line which goes away; elsewhere a line now and then, if the wait is long.
    """

    out: BinaryIO
    err: BinaryIO
    tell: TextIO
    started_at: float
    told: str = ""
    told_at: float = 0.0
    is_shown: bool = False

    @classmethod
    def standard(cls) -> "Printer":
        return cls(out=sys.stdout.buffer, err=sys.stderr.buffer, tell=sys.stderr, started_at=monotonic())

    def chunk(self, stream: str, data: bytes) -> None:
        if stream == "system":
            return
        self.clear()
        target = self.out if stream == "stdout" else self.err
        target.write(data)
        target.flush()

    def job(self, job: Json) -> None:
        verdict = job.get("verdict")
        if job["status"] not in WAITING or not verdict:
            self.clear()
            return
        if self.tell.isatty():
            self.clear()
            columns = _terminal_columns()
            self.tell.write(f"kici: {job['status']}: {verdict}"[: columns - 1])
            self.tell.flush()
            self.is_shown = True
        elif verdict != self.told and self._is_time():
            self.tell.write(f"kici: {job['status']}: {verdict}\n")
            self.tell.flush()
            self.told, self.told_at = verdict, monotonic()

    def clear(self) -> None:
        """Take the line about waiting away."""
        if self.is_shown:
            self.tell.write("\r\x1b[K")
            self.tell.flush()
            self.is_shown = False

    def _is_time(self) -> bool:
        now = monotonic()
        return now - self.started_at >= LINE_FIRST_SECONDS and (
            not self.told or now - self.told_at >= LINE_EACH_SECONDS
        )


def _terminal_columns() -> int:
    import shutil  # only a wait on a terminal needs it

    return shutil.get_terminal_size().columns


def ending(job: dict[str, Any]) -> str | None:
    """A sentence about an end that the exit code alone does not explain."""
    if job["status"] == "success" or (job["status"] == "failed" and job.get("exitCode")):
        return None
    return f"job {job['id']} {str(job['status']).replace('_', ' ')}: {job.get('verdict') or job.get('reason') or '?'}"
