import asyncio

import pytest

from kici.domain.errors import StoreDown
from kici.testing.faulty_store import StoreFaults, faulty
from kici.testing.seeded_entropy import SeededEntropy
from kici.testing.virtual_time import virtual


class Counting:
    def __init__(self) -> None:
        self.count = 0

    async def add(self, amount: int, *, times: int = 1) -> int:
        self.count += amount * times
        return self.count


@virtual
async def test_without_faults_it_is_the_store() -> None:
    faults = StoreFaults()
    store = faulty(Counting(), faults)
    assert await store.add(2, times=3) == 6
    assert faults.calls["add"] == 1
    assert asyncio.get_running_loop().time() == 0


@virtual
async def test_down_means_that_nothing_is_written() -> None:
    real = Counting()
    with pytest.raises(StoreDown, match="add"):
        await faulty(real, StoreFaults(is_down=True)).add(1)
    assert real.count == 0


@virtual
async def test_a_lost_answer_means_that_it_was_written() -> None:
    real = Counting()
    with pytest.raises(StoreDown):
        await faulty(real, StoreFaults(loses_answers=True)).add(1)
    assert real.count == 1


@virtual
async def test_chances_fail_some_calls_and_delays_take_time() -> None:
    real = Counting()
    faults = StoreFaults(entropy=SeededEntropy(1), chance_before=0.2, chance_after=0.2, delay_seconds=(0.5, 1.5))
    store = faulty(real, faults)
    failures = 0
    for _ in range(200):
        try:
            await store.add(1)
        except StoreDown:
            failures += 1
    assert 40 < failures < 120
    assert 200 - failures < real.count < 200
    assert 100 < asyncio.get_running_loop().time() < 300


def test_what_the_store_does_not_have_is_not_there() -> None:
    with pytest.raises(AttributeError):
        _ = faulty(Counting(), StoreFaults()).subtract  # type: ignore[attr-defined]  # that is the point
