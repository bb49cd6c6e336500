"""Space on the disk of an engine on this host, looked at before each agent is made.

Of an engine elsewhere, or one that does not say where it keeps its things, nothing is known and nothing is asked.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from kici.backends.container.flights import Flights
from kici.backends.container.runtime import Runtimes
from kici.backends.disk_room import make_room
from kici.decide import disk
from kici.domain.errors import DeterministicRefusal
from kici.ports.engine import Engine

FreeBytes = Callable[[Path], int]
"""What this user may still write below a path.  Raises `Retryable`."""


class DiskRoom:
    """Of one engine."""

    def __init__(self, *, engine: Engine, flights: Flights, runtimes: Runtimes, free_bytes: FreeBytes | None) -> None:
        self._engine = engine
        self._flights = flights
        self._runtimes = runtimes
        self._free_bytes = free_bytes if engine.address.is_local else None
        self._folder: str | None = None
        self._is_asked = False

    async def ensure(self, remove_ended: Callable[[], Awaitable[int]]) -> None:
        """Raises `DeterministicRefusal` while there is too little, whatever could be removed.

        `remove_ended`: takes away the caller's own containers that ended and are nobody's; how many.
        """
        measure = self._free_bytes
        if measure is None or (folder := await self._where()) is None:
            return
        path = Path(folder)
        if not disk.is_short(measure(path)):
            return

        async def reclaim() -> int:
            return await remove_ended() + await self._runtimes.remove_others()

        verdict = await self._flights.run(
            "room", lambda _: make_room(lambda: measure(path), reclaim), on_progress_to_nobody
        )
        if not verdict.recovered:
            cure = (
                "make room there (`docker system prune` removes what no container uses), and jobs go on by themselves"
            )
            raise DeterministicRefusal(disk.shortage(f"the container engine in {folder}", verdict, cure))

    async def _where(self) -> str | None:
        if not self._is_asked:
            self._folder = await self._engine.folder()
            self._is_asked = True
        return self._folder


def on_progress_to_nobody(_: str) -> None:
    """There is nothing to tell."""
