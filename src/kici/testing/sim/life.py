"""One run of a simulated program: once it is dead, nothing that belongs to it acts any more.

A killed process executes no `finally`.  Its coroutines here do, so every seam that they could reach the world
through (store, backend, link, clock) asks its `Life` first, and a dead one raises `CancelledError`.  What the
program did before its death stays done.
"""

import asyncio
from contextvars import ContextVar

from kici.domain.ids import Instant
from kici.testing.sim_clock import SimClock


class Life:
    """`CURRENT` is the life that the running task belongs to: tasks inherit it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self._frozen_until = 0.0
        self._sleepers: dict[asyncio.Future[None], None] = {}

    def check(self) -> None:
        if not self.is_alive:
            raise asyncio.CancelledError(f"{self.name} is dead")

    def die(self) -> None:
        """Whoever sleeps in it learns of it."""
        self.is_alive = False
        for sleeper in list(self._sleepers):
            sleeper.cancel()

    def freeze(self, seconds: float) -> None:
        """As SIGSTOP: whoever sleeps in it does not wake before; time goes on."""
        self._frozen_until = asyncio.get_running_loop().time() + seconds

    @property
    def frozen_seconds(self) -> float:
        """For how much longer it stands still."""
        return self._frozen_until - asyncio.get_running_loop().time() if self._frozen_until else 0.0

    async def unfrozen(self) -> None:
        """Return when it does not stand still."""
        while (seconds := self.frozen_seconds) > 0:
            await self._nap(seconds)
        self.check()

    async def sleep(self, seconds: float) -> None:
        await self._nap(seconds)
        if self._frozen_until:
            await self.unfrozen()

    async def _nap(self, seconds: float) -> None:
        self.check()
        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        self._sleepers[sleeper] = None
        handle = loop.call_later(max(0.0, seconds), _wake, sleeper)
        try:
            await sleeper
        finally:
            handle.cancel()
            del self._sleepers[sleeper]
        self.check()


CURRENT: ContextVar[Life | None] = ContextVar("CURRENT", default=None)


def is_dead() -> bool:
    """Whether the running task belongs to a program that is dead."""
    life = CURRENT.get()
    return life is not None and not life.is_alive


class MortalClock:
    """The clock of a machine, as a program reads it that may die."""

    def __init__(self, clock: SimClock, life: Life) -> None:
        self._clock = clock
        self._life = life

    def now(self) -> Instant:
        return self._clock.now()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._life.sleep(seconds)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
