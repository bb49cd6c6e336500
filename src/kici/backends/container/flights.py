"""Work that many want at once and that is done once: pulling an image, filling a volume."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from kici.domain.errors import KiciError, Retryable
from kici.kit.supervise import Supervisor

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Flight(Generic[T]):
    done: asyncio.Event = field(default_factory=asyncio.Event)
    results: list[T] = field(default_factory=list)
    error: KiciError | None = None
    listeners: list[Callable[[str], None]] = field(default_factory=list)

    def tell(self, text: str) -> None:
        for listener in tuple(self.listeners):
            listener(text)


class Flights:
    """One task for each key.  A caller that is cancelled leaves it to the others."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._flights: dict[Hashable, Flight[Any]] = {}

    async def run(
        self,
        key: Hashable,
        work: Callable[[Callable[[str], None]], Coroutine[Any, Any, T]],
        listener: Callable[[str], None],
    ) -> T:
        """The result of `work(tell)`, done by whoever came first.  `listener` hears what it tells from now on."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = Flight()
            self._supervisor.start(f"flight {hash(key) & 0xFFFF:x}", self._fly(key, flight, work(flight.tell)))
        flight.listeners.append(listener)
        try:
            await flight.done.wait()
        finally:
            flight.listeners.remove(listener)
        if flight.error is not None:
            raise flight.error
        if not flight.results:
            raise asyncio.CancelledError  # the program is stopping
        return cast("T", flight.results[0])  # the flight of this key was made by a caller of the same work

    async def _fly(self, key: Hashable, flight: Flight[T], work: Coroutine[Any, Any, T]) -> None:
        try:
            flight.results.append(await work)
        except KiciError as error:
            flight.error = error
        except Exception as error:
            flight.error = Retryable(f"this should not have happened: {error!r}")
            raise  # to be told in full by the supervisor
        finally:
            del self._flights[key]
            flight.done.set()
