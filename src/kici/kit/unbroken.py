"""For how long something has been seen at every look."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Unbroken(Generic[Key]):
    """Remembers since when, by whatever clock the owner uses; one look without it starts it anew."""

    def __init__(self) -> None:
        self._since: dict[Key, float] = {}

    def look(self, seen: Iterable[Key], *, now: float, seconds: float) -> frozenset[Key]:
        """Take in one look: those that have been seen for so many seconds."""
        self._since = {key: self._since.get(key, now) for key in seen}
        return frozenset(key for key, since in self._since.items() if now - since >= seconds)

    def forget(self) -> None:
        """What could not be looked at cannot be judged: every one starts anew."""
        self._since.clear()
