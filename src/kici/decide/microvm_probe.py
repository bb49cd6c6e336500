"""Whether a microVM's process runs, judged by what a PID file and `/proc` say.

A PID is a number that others get next, so two questions are kept apart.  To *signal* a process its identity must be
confirmed: it is our VMM, in this machine's directory.  To *delete* a machine's files its process must not run at
all, confirmed or not.  Whatever could not be read is no evidence of anything.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kici.domain.ids import Instant

MTIME_GRACE_MS: Final = 60_000
"""How much later than its PID file a process may seem to have started: clocks are stepped."""
TICKS_PER_SECOND: Final = 100


class Liveness(StrEnum):
    GONE = "gone"
    RECYCLED = "recycled"
    """The number is somebody else's by now."""
    RUNNING = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What is known of one machine's process."""

    liveness: Liveness
    pid: int | None = None
    started: int | None = None
    """In clock ticks since boot; names the process together with its pid."""
    started_at: Instant | None = None
    is_confirmed: bool = False
    """It is provably this machine's VMM."""
    detail: str = ""
    """Why not, where it is not."""

    @property
    def is_running(self) -> bool:
        return self.liveness is Liveness.RUNNING


GONE: Final = Probe(liveness=Liveness.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen of the process that a PID file names."""

    pid: int
    pid_file_at: Instant
    """When the PID file was written."""
    started: int
    """In clock ticks since boot."""
    boot_at: Instant
    name: str
    """As the kernel has it, cut to 15 characters."""
    faults: tuple[str, ...] = ()
    """What contradicts that it is this machine's VMM."""


def parse_pid(text: str) -> int | None:
    """The number in a PID file; None for anything that names no process (0 would be our own group)."""
    stripped = text.strip()
    return int(stripped) if stripped.isascii() and stripped.isdigit() and int(stripped) > 0 else None


def judge(sight: Sight, *, name: str) -> Probe:
    """`name`: what our VMM is called by the kernel."""
    started_at = Instant(sight.boot_at + sight.started * 1000 // TICKS_PER_SECOND)
    if started_at > sight.pid_file_at + MTIME_GRACE_MS:
        return Probe(
            liveness=Liveness.RECYCLED, pid=sight.pid, detail=f"process {sight.pid} is younger than the PID file"
        )
    faults = list(sight.faults)
    if sight.name != name:
        faults.insert(0, f"process {sight.pid} is called {sight.name!r}, not {name!r}")
    return Probe(
        liveness=Liveness.RUNNING,
        pid=sight.pid,
        started=sight.started,
        started_at=started_at,
        is_confirmed=not faults,
        detail="; ".join(faults),
    )
