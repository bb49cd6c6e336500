"""Group commit of PostgreSQL's engine, without PostgreSQL: who writes for whom, and who is told what."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from kici.domain.errors import Conflict, StoreDown
from kici.stores.database import Step
from kici.stores.postgres.together import LANES, UNITS_MAX, Result, Together, Unit
from kici.stores.query import Query


def unit(name: str, *, lock: str | None = None) -> Unit:
    last = Step(Query.INSERT_SPAWN, {"agent_id": name}, told_apart_by="agent_id")
    return (last,) if lock is None else (Step(Query.TAKE_LOCK, {"lock_name": lock}), last)


def name_of(unit: Unit) -> str:
    return str(unit[-1].params["agent_id"])


class Server:
    """Writes down what it is asked, and answers when it is let."""

    def __init__(self) -> None:
        self.writes: list[list[str]] = []
        self.answers = asyncio.Event()
        self.errors: dict[str, Exception] = {}
        self.answered: Callable[[], object] = lambda: None
        self.together = Together(alone=self._alone, as_one=self._as_one)

    async def _alone(self, unit: Unit) -> Result:
        return (await self._as_one([unit]))[0]

    async def _as_one(self, units: Sequence[Unit]) -> list[Result]:
        names = [name_of(unit) for unit in units]
        self.writes.append(names)
        await self.answers.wait()
        for name in names:
            if name in self.errors:
                raise self.errors[name]
        self.answered()
        return [[[{"agent_id": name}]] for name in names]

    def asked(self, *names: str, lock: str | None = None) -> "list[asyncio.Task[Result]]":
        return [asyncio.create_task(self.together.unit(unit(name, lock=lock))) for name in names]


async def outcomes(tasks: "list[asyncio.Task[Result]]") -> list[object]:
    """Names that were written, and what others were told."""
    async with asyncio.timeout(5):
        found = await asyncio.gather(*tasks, return_exceptions=True)
    return [each if isinstance(each, BaseException) or not each else each[0][0]["agent_id"] for each in found]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_those_that_wait_are_written_as_one() -> None:
    server = Server()
    tasks = server.asked("a", "b", "c", "d", lock="one")
    await settled()
    assert server.writes == [["a"]]
    server.answers.set()
    assert await outcomes(tasks) == ["a", "b", "c", "d"]
    assert server.writes == [["a"], ["b", "c", "d"]]


async def test_one_write_gathers_while_another_is_under_way() -> None:
    server = Server()
    tasks = server.asked(*"abcdef")
    await settled()
    assert server.writes == [["a"], ["b"]]
    assert len(server.writes) == LANES
    server.answers.set()
    assert await outcomes(tasks) == list("abcdef")
    assert len(server.writes) <= 2 * LANES


async def test_one_write_has_a_limit_and_none_is_left_behind() -> None:
    server = Server()
    names = [str(number) for number in range(3 * UNITS_MAX)]
    tasks = server.asked(*names)
    await settled()
    server.answers.set()
    assert await outcomes(tasks) == names
    assert max(len(write) for write in server.writes) == UNITS_MAX
    assert sorted(name for write in server.writes for name in write) == sorted(names)


async def test_units_with_different_locks_do_not_mix() -> None:
    server = Server()
    tasks = server.asked("a", "b", "c", lock="one") + server.asked("x", "y", lock="other")
    await settled()
    assert server.writes == [["a"], ["x"]]
    server.answers.set()
    assert await outcomes(tasks) == ["a", "b", "c", "x", "y"]
    assert sorted(server.writes) == [["a"], ["b", "c"], ["x"], ["y"]]


async def test_two_of_one_name_are_written_apart() -> None:
    server = Server()
    tasks = server.asked("a", "b", "same", "c", "same", "d")
    await settled()
    server.answers.set()
    assert await outcomes(tasks) == ["a", "b", "same", "c", "same", "d"]
    assert all(len(write) == len(set(write)) for write in server.writes)


async def test_one_that_is_refused_takes_no_other_with_it() -> None:
    server = Server()
    server.errors["bad"] = Conflict("it is there already")
    tasks = server.asked("a", "b", "c", "bad", "d")
    await settled()
    server.answers.set()
    assert await outcomes(tasks) == ["a", "b", "c", server.errors["bad"], "d"]


async def test_all_are_told_that_the_store_is_down() -> None:
    server = Server()
    server.errors["c"] = StoreDown("gone")
    tasks = server.asked("a", "b", "c", lock="one")
    await settled()
    server.answers.set()
    assert await outcomes(tasks) == ["a", server.errors["c"], server.errors["c"]]
    assert server.writes == [["a"], ["b", "c"]], "who knows whether it was written must not write it again"


@pytest.mark.parametrize("cancelled", ["a", "b", "c", "d"])
async def test_a_caller_that_leaves_takes_no_other_with_it(cancelled: str) -> None:
    """The first one, the one who writes for the others, or one of those: whoever is left is told."""
    server = Server()
    tasks = dict(zip("abcd", server.asked("a", "b", "c", "d", lock="one"), strict=True))
    await settled()
    if cancelled != "a":  # b writes for the others
        server.answers.set()
        await tasks["a"]
        server.answers.clear()
        await settled()
        assert server.writes == [["a"], ["b", "c", "d"]]
    leaves = tasks.pop(cancelled)
    leaves.cancel()
    await settled()
    server.answers.set()
    assert await outcomes(list(tasks.values())) == list(tasks)
    assert isinstance((await outcomes([leaves]))[0], asyncio.CancelledError)
    assert await outcomes(server.asked("later", lock="one")) == ["later"]


async def test_a_turn_given_to_one_who_leaves_goes_to_the_next() -> None:
    server = Server()
    first, second, third = server.asked("a", "b", "c", lock="one")
    await settled()
    server.answered = lambda: asyncio.get_running_loop().call_soon(second.cancel)  # when its turn is said, not heard
    server.answers.set()
    assert await outcomes([first, third]) == ["a", "c"]
    assert second.cancelled()
    assert server.writes == [["a"], ["c"]]
    assert await outcomes(server.asked("later", lock="one")) == ["later"]


async def test_a_turn_is_not_given_to_one_who_has_just_left() -> None:
    server = Server()
    first, second, third = server.asked("a", "b", "c", lock="one")
    await settled()
    server.answered = second.cancel  # before its turn would be said, in the same turn of the loop
    server.answers.set()
    assert await outcomes([first, third]) == ["a", "c"]
    assert second.cancelled()
    assert server.writes == [["a"], ["c"]]
    assert await outcomes(server.asked("later", lock="one")) == ["later"]


async def test_a_unit_of_several_steps_shares_none_of_their_rows() -> None:
    """Two that name the same row in a step that is not the last one are written apart, too."""

    def ending(agent: str, event: str) -> Unit:
        return (
            Step(Query.END_PROVISION, {"agent_id": agent}, guard=True, told_apart_by="agent_id"),
            Step(Query.INSERT_SPAWN, {"agent_id": event}, told_apart_by="agent_id"),
        )

    server = Server()
    units = [ending("x", "1"), ending("y", "2"), ending("z", "3"), ending("z", "4"), ending("x", "5")]
    tasks = [asyncio.create_task(server.together.unit(unit)) for unit in units]
    await settled()
    assert server.writes == [["1"], ["2"]], "without a lock there are lanes"
    server.answers.set()
    assert await outcomes(tasks) == ["1", "2", "3", "4", "5"]
    assert not any({"3", "4"} <= set(write) for write in server.writes)


async def test_units_that_must_agree_in_something_are_written_apart_when_they_do_not() -> None:
    def slot(agent: str, scaler: str) -> Unit:
        params = {"agent_id": agent, "lock_name": scaler}
        return (Step(Query.INSERT_CLUSTER_SPAWN, params, told_apart_by="agent_id", alike_in="lock_name"),)

    server = Server()
    units = [slot("a", "one"), slot("b", "one"), slot("x", "other"), slot("c", "one"), slot("y", "other")]
    tasks = [asyncio.create_task(server.together.unit(unit)) for unit in units]
    await settled()
    server.answers.set()
    assert await outcomes(tasks) == ["a", "b", "x", "c", "y"]
    assert sorted(server.writes) == [["a"], ["b", "c"], ["x"], ["y"]]
