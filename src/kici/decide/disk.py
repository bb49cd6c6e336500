"""How full a disk may be before it is cleared, and what follows when that was not enough.

A disk that runs full takes databases, logs and running jobs with it.  So space is looked at before anything new is
put there; what nobody uses any more is removed first, and where that does not help nothing new is made.
"""

from dataclasses import dataclass
from typing import Final

FREE_BYTES_MIN: Final = 1024**3
"""Less than this is too little to begin anything."""
_GIB: Final = 1024**3
_MIB: Final = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskVerdict:
    """What a look at a disk came to."""

    reaped: int = 0
    """Things that were removed from it."""
    recovered: bool
    """Whether there is enough space now."""
    free_bytes_after: int


def is_short(free_bytes: int) -> bool:
    """Whether something must be removed before anything new is made."""
    return free_bytes < FREE_BYTES_MIN


def judge(*, free_bytes_after: int, reaped: int = 0) -> DiskVerdict:
    """Enough, after so many things were removed?"""
    return DiskVerdict(reaped=reaped, recovered=not is_short(free_bytes_after), free_bytes_after=free_bytes_after)


def shortage(place: str, verdict: DiskVerdict, cure: str) -> str:
    """One sentence for a person.  `place`: which disk; `cure`: what helps, as an order."""
    tried = f"{verdict.reaped} leftovers were removed" if verdict.reaped else "no leftovers were found to remove"
    free, needed = size(verdict.free_bytes_after), size(FREE_BYTES_MIN)
    return f"only {free} are free for {place}, {needed} are needed, and {tried}; {cure}"


def size(count: int) -> str:
    """Bytes for a person: `1.5 GiB`, `300 MiB`."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count // _MIB} MiB"
