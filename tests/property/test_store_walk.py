"""Whatever is called in whatever order, the embedded store keeps the rules of jobs and runs."""

import pytest
from tests.contract.store_walk import Walk

from kici.stores.sqlite.open import open_sqlite
from kici.testing.contracts.store_rules import check_rules
from kici.testing.virtual_time import virtual

CALLS = 250


@pytest.mark.parametrize("seed", range(12))
@virtual
async def test_keeps_the_rules(seed: int) -> None:
    walk = Walk(seed)
    store = open_sqlite(":memory:")
    await store.migrate()
    for number in range(CALLS):
        name, call = walk.draw()
        await walk.do(call, store)
        if number % 10 == 9:
            try:
                await check_rules(store)
            except AssertionError as broken:
                raise AssertionError(f"seed {seed}, call {number} ({name}) or one of the ten before") from broken
    await check_rules(store)
    counts = await store.counts_by_status()
    assert len(counts) > 4, f"seed {seed} went nowhere: {counts}"
    await store.close()


async def test_walks_the_same_way_again() -> None:
    seen = []
    for _ in range(2):
        walk = Walk(1)
        store = open_sqlite(":memory:")
        await store.migrate()
        answers = [await walk.do(walk.draw()[1], store) for _ in range(100)]
        seen.append((answers, await walk.see(store)))
        await store.close()
    assert seen[0] == seen[1]
