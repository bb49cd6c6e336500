"""Group commit: units of the same queries that wait at the same time go to the server as one, step by step.

One transaction and one round trip for each step serve many callers; a caller that is alone pays nothing for it.
Whoever finds a lane free writes for all that wait, and hands the lane on.  When the server refuses such a write, each
unit is run alone, so that one that fails takes no other with it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kici.domain.errors import Bug, Conflict, KiciError, StoreDown
from kici.kit.finish import finish
from kici.stores.database import Rows, Step
from kici.stores.query import Query

UNITS_MAX: Final = 128
"""In one transaction: what it locks, others wait for."""
LANES: Final = 2
"""Writes of one kind under way at once: while the server commits one, the next gathers."""
FINISH_SECONDS: Final = 120.0

Unit = Sequence[Step]
Result = list[Rows] | None
Outcome = Result | KiciError | Bug
_Kind = tuple[tuple[object, ...], ...]


@dataclass(slots=True, eq=False)
class _Waiting:
    unit: Unit
    told: "asyncio.Future[Outcome | _Turn]"


class _Turn:
    """Said instead of an outcome: a lane is yours."""


@dataclass(slots=True, eq=False)
class _Kin:
    """Units that can be written together."""

    waiting: deque[_Waiting] = field(default_factory=deque)
    lanes_busy: int = 0


_YOUR_TURN: Final = _Turn()


class Together:
    def __init__(
        self,
        *,
        alone: Callable[[Unit], Awaitable[Result]],
        as_one: Callable[[Sequence[Unit]], Awaitable[list[Result]]],
    ) -> None:
        """`alone` runs one unit, `as_one` several in one transaction; both raise what `ports.store` promises."""
        self._alone = alone
        self._as_one = as_one
        self._kinds: dict[_Kind, _Kin] = {}

    async def unit(self, unit: Unit) -> Result:
        """Run a unit whose last step says by which column its rows are told apart.  Only its first may be a guard."""
        kind = _kind(unit)
        kin = self._kinds.setdefault(kind, _Kin())
        if kin.lanes_busy == (
            1 if _takes_a_lock(unit[0]) else LANES
        ):  # another would wait for that, and keep a connection
            outcome = await self._wait(kind, kin, unit)
            if not isinstance(outcome, _Turn):
                return _given(outcome)
        else:
            kin.lanes_busy += 1
        try:
            return await self._lead(kin, unit)
        finally:
            self._pass_on(kind, kin)

    async def _wait(self, kind: _Kind, kin: _Kin, unit: Unit) -> Outcome | _Turn:
        mine = _Waiting(unit, asyncio.get_running_loop().create_future())
        kin.waiting.append(mine)
        try:
            return await mine.told
        except asyncio.CancelledError:
            if mine in kin.waiting:
                kin.waiting.remove(mine)
            if mine.told.done() and not mine.told.cancelled() and mine.told.result() is _YOUR_TURN:
                self._pass_on(kind, kin)
            raise

    def _pass_on(self, kind: _Kind, kin: _Kin) -> None:
        while kin.waiting:
            told = kin.waiting.popleft().told
            if not told.done():  # it may have left, and not have taken itself out yet
                told.set_result(_YOUR_TURN)
                return
        kin.lanes_busy -= 1
        if not kin.lanes_busy:
            del self._kinds[kind]

    async def _lead(self, kin: _Kin, unit: Unit) -> Result:
        others = _gathered(unit, kin.waiting)
        if not others:
            return await self._alone(unit)
        writing = self._write(unit, others)
        return _given(await finish(writing, seconds=FINISH_SECONDS, what="a write for several callers"))

    async def _write(self, unit: Unit, others: Sequence[_Waiting]) -> Outcome:
        """The outcome of `unit`; the others are told theirs."""
        outcomes: list[Outcome] = [StoreDown("the write was cut off; it may or may not have happened")]
        try:
            outcomes = await self._outcomes([unit, *(other.unit for other in others)])
        finally:
            outcomes += outcomes[:1] * (1 + len(others) - len(outcomes))
            for other, outcome in zip(others, outcomes[1:], strict=True):
                if not other.told.done():
                    other.told.set_result(outcome)
        return outcomes[0]

    async def _outcomes(self, units: Sequence[Unit]) -> list[Outcome]:
        try:
            return [*await self._as_one(units)]
        except (Conflict, Bug):  # one of them is to blame, and all were undone
            return [await self._outcome(unit) for unit in units]
        except KiciError as error:
            return [error for _ in units]

    async def _outcome(self, unit: Unit) -> Outcome:
        try:
            return await self._alone(unit)
        except (KiciError, Bug) as error:
            return error


def _takes_a_lock(step: Step) -> bool:
    return step.told_apart_by is None or step.alike_in is not None


def _gathered(unit: Unit, waiting: deque[_Waiting]) -> list[_Waiting]:
    """Take those that can be written with `unit`, up to the first whose rows could not be told from another's."""
    names = _names(unit)
    found: list[_Waiting] = []
    while waiting and len(found) < UNITS_MAX - 1 and names.isdisjoint(_names(waiting[0].unit)):
        found.append(waiting.popleft())
        names |= _names(found[-1].unit)
    return found


def _names(unit: Unit) -> set[tuple[Query, object]]:
    return {(step.query, step.params[step.told_apart_by]) for step in unit if step.told_apart_by is not None}


def _kind(unit: Unit) -> _Kind:
    """What units that are written together have in common: their queries, and all of the steps that are run once."""
    return tuple((step.query, *_common(step)) for step in unit)


def _common(step: Step) -> Iterable[object]:
    if step.told_apart_by is None:
        return step.params.items()
    return () if step.alike_in is None else (step.params[step.alike_in],)


def _given(outcome: Outcome) -> Result:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
