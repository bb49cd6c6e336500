"""Making room on a disk before something is put there: thresholds and words are `decide.disk`."""

from collections.abc import Awaitable, Callable

from kici.decide import disk

Measure = Callable[[], int]
"""Free bytes now.  Raises `Retryable` when they cannot be read."""
Reclaim = Callable[[], Awaitable[int]]
"""Remove what nobody uses any more; how many things."""


async def make_room(measure: Measure, reclaim: Reclaim) -> disk.DiskVerdict:
    """Removes nothing while there is enough space."""
    free = measure()
    if not disk.is_short(free):
        return disk.judge(free_bytes_after=free)
    reaped = await reclaim()
    return disk.judge(free_bytes_after=measure(), reaped=reaped)
