"""The entropy port from a seed: equal seeds give equal draws, in every process."""

import random
from collections.abc import Sequence
from typing import Self, TypeVar

T = TypeVar("T")


class SeededEntropy:
    """Not fit for credentials outside of tests.

    `fork` gives each seam its own stream, so that one more draw at one of them leaves the others as they were.
    """

    def __init__(self, seed: int | str = 0) -> None:
        self.seed = seed
        self._random = random.Random(f"{seed}")  # text is hashed the same way in every process

    def fork(self, name: str) -> Self:
        return type(self)(f"{self.seed}/{name}")

    def hex(self, nbytes: int) -> str:
        return self._random.randbytes(nbytes).hex()

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def chance(self, probability: float) -> bool:
        """True with this probability: whether a fault happens."""
        return self._random.random() < probability

    def choice(self, options: Sequence[T]) -> T:
        """One of `options`, which must be in an explicit order (never a set)."""
        return self._random.choice(options)
