"""The store as a simulated coordinator sees it: slow, sometimes down, sometimes silent about what it did.

An error before the commit leaves nothing written, one after it leaves everything written; the program cannot tell
them apart.  It may also be killed at either moment.  Calls that are under way at the same time overtake each other,
as they do on the connections of a pool.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from kici.domain.errors import StoreDown
from kici.ports.store import Store
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.sim.life import Life
from kici.testing.sim.plan import Plan
from kici.testing.sim.trace import Trace

SLOW_SECONDS: Final = (0.5, 8.0)
REFUSED_SECONDS: Final = (0.001, 2.0)
"""How long a store that is down takes to say so."""


@dataclass(slots=True, kw_only=True)
class Weather:
    """What the store does to its callers."""

    plan: Plan
    entropy: SeededEntropy
    is_down: bool = False
    is_fair: bool = False
    """Faults have stopped."""

    def happens(self, kind: str) -> bool:
        return self.entropy.chance(self.plan.odds.get(kind, 0.0)) and not self.is_fair

    def seconds(self) -> float:
        if self.happens("slow-store"):
            return self.entropy.uniform(*SLOW_SECONDS)
        return self.entropy.uniform(*self.plan.store_seconds)


def behind(store: Store, weather: Weather, life: Life, trace: Trace, *, kills: Callable[[str], bool]) -> Store:
    """The same store for one run of a program.  `kills(where)`: whether the program dies at this point."""
    return cast(Store, _Seam(store, weather, life, trace, kills))  # it answers to every name that the store has


class _Seam:
    def __init__(self, store: Store, weather: Weather, life: Life, trace: Trace, kills: Callable[[str], bool]) -> None:
        self._store = store
        self._weather = weather
        self._life = life
        self._trace = trace
        self._kills = kills

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._store, name)
        weather, life, trace, kills = self._weather, self._life, self._trace, self._kills

        async def call(*args: Any, **kwargs: Any) -> Any:
            seconds = weather.seconds()
            await life.sleep(seconds / 2)
            if weather.is_down:
                await life.sleep(weather.entropy.uniform(*REFUSED_SECONDS))
                raise StoreDown(f"{name}: the store is down")
            if weather.happens("error-before"):
                trace.count("store error before commit")
                raise StoreDown(f"{name}: the store did not answer")
            if kills("kill-before-commit"):
                raise asyncio.CancelledError
            answer = await method(*args, **kwargs)
            if kills("kill-after-commit"):
                raise asyncio.CancelledError
            if weather.happens("error-after"):
                trace.count("store error after commit")
                trace.tell(f"{name}: done, and the answer lost")
                raise StoreDown(f"{name}: the answer was lost")
            await life.sleep(seconds / 2)
            return answer

        setattr(self, name, call)
        return call
