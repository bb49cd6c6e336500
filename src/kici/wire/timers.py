"""Named deadlines of a machine without I/O."""

from collections.abc import Iterator
from typing import Generic, TypeVar

Name = TypeVar("Name")


class Timers(Generic[Name]):
    """At most one deadline for each name.  Times are whatever clock the owner uses."""

    __slots__ = ("_deadlines",)

    def __init__(self) -> None:
        self._deadlines: dict[Name, float] = {}

    def set(self, name: Name, at: float) -> None:
        self._deadlines[name] = at

    def clear(self, *names: Name) -> None:
        for name in names:
            self._deadlines.pop(name, None)

    def is_set(self, name: Name) -> bool:
        return name in self._deadlines

    def next(self) -> float | None:
        return min(self._deadlines.values(), default=None)

    def due(self, now: float) -> Iterator[Name]:
        """Take out and yield each name whose time has come, earliest first; what happens meanwhile counts."""
        while self._deadlines:
            name = min(self._deadlines, key=self._deadlines.__getitem__)
            if self._deadlines[name] > now:
                return
            del self._deadlines[name]
            yield name
