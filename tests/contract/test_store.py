"""Every store keeps the contract of stores."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines import empty, migrated_database, postgres_server

from kici.stores.postgres.open import open_postgres
from kici.stores.sqlite.open import open_sqlite
from kici.testing.contracts.store import CASES, Case, run_case, statements_of
from kici.testing.virtual_time import virtual

cases = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.__name__, marks=[pytest.mark.spec(each) for each in statements_of(case)])
        for case in CASES
    ],
)


@cases
@virtual
async def test_sqlite_inline_in_memory(case: Case) -> None:
    store = open_sqlite(":memory:")
    await store.migrate()
    try:
        await run_case(case, store)
    finally:
        await store.close()


@cases
async def test_sqlite_file(case: Case, tmp_path: Path) -> None:
    store = open_sqlite(str(tmp_path / "kici.db"))
    await store.migrate()
    try:
        await run_case(case, store)
    finally:
        await store.close()


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    with postgres_server() as server, migrated_database(server) as url:
        yield url


@pytest.mark.engine("postgres")
@cases
async def test_postgres(case: Case, database_url: str) -> None:
    await empty(database_url)
    store = open_postgres(database_url)
    try:
        await run_case(case, store)
    finally:
        await store.close()
