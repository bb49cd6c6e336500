"""A store that can be slow, silent or lie about its commits: any store behind a seam of faults.

A fault before the commit leaves nothing written; one after it leaves everything written and answers `StoreDown`
all the same.  Callers must cope with both, because they cannot tell them apart.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from kici.domain.errors import StoreDown
from kici.testing.seeded_entropy import SeededEntropy

S = TypeVar("S")


@dataclass(slots=True, kw_only=True)
class StoreFaults:
    """What goes wrong; change it at any moment."""

    entropy: SeededEntropy = field(default_factory=SeededEntropy)
    is_down: bool = False
    """Nothing is answered."""
    loses_answers: bool = False
    """Everything is done, and nothing is answered."""
    chance_before: float = 0.0
    """Of failing before the commit."""
    chance_after: float = 0.0
    """Of failing after the commit."""
    delay_seconds: tuple[float, float] | None = None
    """Drawn anew for each call; None: no time passes."""
    calls: Counter[str] = field(default_factory=Counter)
    """How often each method was called."""


def faulty(store: S, faults: StoreFaults) -> S:
    """The same store, of the same type, behind `faults`.  Put it where a service would get the store."""
    return cast(S, _FaultyStore(store, faults))  # it answers to every name that the store has


class _FaultyStore:
    def __init__(self, store: object, faults: StoreFaults) -> None:
        self._store = store
        self._faults = faults

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._store, name)
        faults = self._faults

        async def call(*args: Any, **kwargs: Any) -> Any:
            faults.calls[name] += 1
            if faults.delay_seconds is not None:
                await asyncio.sleep(faults.entropy.uniform(*faults.delay_seconds))
            if faults.is_down or faults.entropy.chance(faults.chance_before):
                raise StoreDown(f"{name}: the store did not answer (a fault)")
            answer = await method(*args, **kwargs)
            if faults.loses_answers or faults.entropy.chance(faults.chance_after):
                raise StoreDown(f"{name}: the answer was lost (a fault)")
            return answer

        return call
