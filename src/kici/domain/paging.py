"""Where the next page of a listing begins, when it is ordered by time and several rows may share a millisecond."""

from dataclasses import dataclass
from typing import Self

from kici.domain.ids import Instant


@dataclass(frozen=True, slots=True)
class Mark:
    """The row that a page ended with, newest first: the next page holds what is older, or as old with a lower id."""

    at: Instant
    id: str

    @property
    def cursor(self) -> str:
        """The mark as a client carries it, which need not understand it."""
        return f"{self.at}.{self.id}"

    @classmethod
    def of_cursor(cls, cursor: str) -> Self:
        """From a cursor of the right form: `<ms>.<id>`."""
        at, id = cursor.split(".")
        return cls(Instant(int(at)), id)
