"""Programs for tests from the outside: each test has a data directory, and on PostgreSQL a database, of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines import Server, migrated_database, postgres_server

from kici.testing.programs import CoordinatorProgram


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with postgres_server() as started:
        yield started


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.engine("postgres"))])
def kici(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CoordinatorProgram]:
    """A coordinator on each store, in turn."""
    if request.param == "sqlite":
        with CoordinatorProgram(tmp_path / "data") as program:
            yield program
        return
    with (
        migrated_database(request.getfixturevalue("server")) as url,
        CoordinatorProgram(tmp_path / "data", extra=["--database-url", url]) as program,
    ):
        yield program
