"""Looks at all processes of the host, shared: one serves everybody who asked before it began.

A look reads two files of every process.  When many agents end at once, each would do that for itself, several times.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kici.adapters import proc


class Seen(NamedTuple):
    """All processes at one moment, and the marks of those that carry one."""

    processes: Mapping[int, proc.Seen]
    marks: Mapping[int, str]


def see() -> Seen:
    """Look, here and now.  Takes milliseconds."""
    processes = proc.snapshot()
    return Seen(processes, proc.marks(processes))


@dataclass(slots=True, eq=False)
class _Look:
    seen: Seen | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Looks:
    def __init__(self, see: Callable[[], Seen] = see) -> None:
        self._see = see
        self._coming: _Look | None = None
        """Not begun yet: whoever asks now can wait for it."""
        self._looking = asyncio.Lock()

    async def look(self) -> Seen:
        """What a look that begins after this call sees."""
        while True:
            coming = self._coming
            if coming is None:
                return await self._lead()
            await coming.over.wait()
            if coming.seen is not None:
                return coming.seen

    async def _lead(self) -> Seen:
        self._coming = mine = _Look()
        try:
            async with self._looking:
                self._coming = None
                mine.seen = await asyncio.to_thread(self._see)
            return mine.seen
        finally:
            if self._coming is mine:
                self._coming = None
            mine.over.set()
