"""Legal moves of a state machine as a table, and the check that uses it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from kici.domain.errors import Bug

S = TypeVar("S", bound=StrEnum)
Moves = Mapping[S, frozenset[S]]


def check_move(table: Moves[S], before: S, after: S, *, what: str) -> None:
    """Raise `Bug` unless `before -> after` is in the table."""
    if after not in table[before]:
        legal = ", ".join(sorted(table[before])) or "nothing"
        raise Bug(f"{what} cannot move from {before} to {after} (legal: {legal})")


def sources(table: Moves[S], after: S) -> frozenset[S]:
    """The states that may move to `after`: what a guarded write names in its condition."""
    return frozenset(before for before, targets in table.items() if after in targets)
