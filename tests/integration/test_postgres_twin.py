"""PostgreSQL and SQLite answer alike, call by call, whatever is called in whatever order."""

from collections.abc import Iterator

import pytest
from tests.contract.store_walk import Walk
from tests.engines import empty, migrated_database, postgres_server

from kici.stores.postgres.open import open_postgres
from kici.stores.sqlite.open import open_sqlite
from kici.testing.contracts.store_rules import check_rules

pytestmark = pytest.mark.engine("postgres")
CALLS = 400


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres_server() as server, migrated_database(server) as url:
        yield url


@pytest.mark.parametrize("seed", range(6))
async def test_answers_like_sqlite(seed: int, url: str) -> None:
    await empty(url)
    walk = Walk(seed)
    postgres, sqlite = open_postgres(url), open_sqlite(":memory:")
    await sqlite.migrate()
    try:
        for number in range(CALLS):
            name, call = walk.draw()
            answers = [await walk.do(call, store) for store in (postgres, sqlite)]
            assert answers[0] == answers[1], f"seed {seed}, call {number}: {name}"
            if number % 20 == 19:
                assert await walk.see(postgres) == await walk.see(sqlite), f"seed {seed}, before call {number}"
        await check_rules(postgres)
    finally:
        await postgres.close()
        await sqlite.close()
