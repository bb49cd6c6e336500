"""Chance: ids, jitter, secrets.  Seeded in tests."""

from typing import Protocol


class Entropy(Protocol):
    def hex(self, nbytes: int) -> str:
        """`nbytes` fresh random bytes as lower-case hex; fit for credentials."""
        ...

    def uniform(self, low: float, high: float) -> float: ...

    def bytes(self, count: int) -> bytes: ...
