"""Real chance, from the operating system."""

import random
import secrets


class SystemEntropy:
    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def hex(self, nbytes: int) -> str:
        return secrets.token_hex(nbytes)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)
