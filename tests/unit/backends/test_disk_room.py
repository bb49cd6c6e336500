"""Making room on a disk before something is put there."""

import pytest

from kici.backends.disk_room import make_room

GIB = 1024**3


class Disk:
    def __init__(self, free: int, *leftovers: int) -> None:
        self.free = free
        self.leftovers = list(leftovers)

    def measure(self) -> int:
        return self.free

    async def reclaim(self) -> int:
        count = len(self.leftovers)
        self.free += sum(self.leftovers)
        self.leftovers.clear()
        return count


@pytest.mark.spec("scaler 40")
async def test_with_enough_space_nothing_is_removed() -> None:
    disk = Disk(2 * GIB, 5 * GIB)
    verdict = await make_room(disk.measure, disk.reclaim)
    assert (verdict.recovered, verdict.reaped, verdict.free_bytes_after) == (True, 0, 2 * GIB)
    assert disk.leftovers


@pytest.mark.spec("scaler 40")
async def test_too_little_space_is_recovered_from_leftovers() -> None:
    disk = Disk(GIB // 10, 3 * GIB, 2 * GIB)
    verdict = await make_room(disk.measure, disk.reclaim)
    assert (verdict.recovered, verdict.reaped, verdict.free_bytes_after) == (True, 2, 5 * GIB + GIB // 10)


@pytest.mark.spec("scaler 40")
async def test_without_leftovers_it_stays_too_little() -> None:
    disk = Disk(GIB // 10)
    verdict = await make_room(disk.measure, disk.reclaim)
    assert (verdict.recovered, verdict.reaped) == (False, 0)
