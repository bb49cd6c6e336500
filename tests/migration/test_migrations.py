"""Schema changes: twins in both dialects, applied once by whoever comes first, and together what `schema.sql` says."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
from tests.engines import Server, postgres_server

import kici.stores
from kici.domain.errors import KiciError
from kici.stores.migrations import migrations
from kici.stores.postgres.open import open_postgres
from kici.stores.query import split_statements
from kici.stores.sqlite.core import Core
from kici.stores.sqlite.open import open_sqlite

STORES = Path(kici.stores.__path__[0])
SQLITE, POSTGRES = STORES / "sqlite", STORES / "postgres"
ALL = [migration.number for migration in migrations(SQLITE / "migrations")]
MIGRATORS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
async def url(server: Server) -> AsyncIterator[str]:
    async with server.database() as url:
        yield url


def test_dialects_have_the_same_migrations() -> None:
    twins = [[(each.number, each.name) for each in migrations(folder / "migrations")] for folder in (SQLITE, POSTGRES)]
    assert twins[0] == twins[1]
    assert len(ALL) > 0


@pytest.mark.parametrize("name", ["1_expand_a.sql", "0001_change_a.sql", "0001_expand_.sql", "0001_expand_a-b.sql"])
def test_refuses_a_file_that_is_no_migration(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="is not named"):
        migrations(tmp_path)


def test_refuses_numbers_with_a_gap(tmp_path: Path) -> None:
    for name in ("0001_expand_a.sql", "0003_contract_b.sql"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="numbered 1, 2, 3"):
        migrations(tmp_path)


def sqlite_schema(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    return connection.execute(
        "SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY 1, 2"
    ).fetchall()


async def test_sqlite_migrations_make_the_snapshot(tmp_path: Path) -> None:
    store = open_sqlite(str(tmp_path / "a.db"))
    assert await store.migrate() == ALL
    await store.close()
    snapshot = sqlite3.connect(tmp_path / "b.db")
    for statement in split_statements((SQLITE / "schema.sql").read_text()):
        snapshot.execute(statement)
    migrated = sqlite3.connect(tmp_path / "a.db")
    assert sqlite_schema(migrated) == sqlite_schema(snapshot)
    snapshot.close()
    migrated.close()


@pytest.mark.spec("scaler 23.7.10")
async def test_sqlite_twice_is_once(tmp_path: Path) -> None:
    for expected in (ALL, []):
        store = open_sqlite(str(tmp_path / "kici.db"))
        assert await store.migrate() == expected
        assert await store.migrate() == []
        await store.close()


async def test_sqlite_several_at_once_are_one(tmp_path: Path) -> None:
    stores = [open_sqlite(str(tmp_path / "kici.db")) for _ in range(MIGRATORS)]
    applied = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(applied) == [[]] * (MIGRATORS - 1) + [ALL]
    for store in stores:
        assert await store.settings_version() == 0
        await store.close()


def test_sqlite_failed_migration_leaves_nothing(tmp_path: Path) -> None:
    core = Core(str(tmp_path / "kici.db"))
    core._writer.execute("CREATE TABLE meta (name TEXT)")  # in the way of the last table
    with pytest.raises(KiciError, match="meta"):
        core.migrate()
    assert [name for _, name, _ in sqlite_schema(core._writer)] == ["meta"]
    core._writer.execute("DROP TABLE meta")
    assert core.migrate() == ALL
    core.close()


CATALOGUE = {
    "columns": """
        SELECT table_name, column_name, data_type, collation_name, is_nullable, column_default, is_identity,
            identity_generation
        FROM information_schema.columns WHERE table_schema = 'public' ORDER BY 1, 2""",
    "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1",
    "constraints": """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace ORDER BY 1, 2""",
    "functions": """
        SELECT proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY 1""",
    "options": "SELECT relname, reloptions FROM pg_class WHERE relnamespace = 'public'::regnamespace ORDER BY 1",
}


async def postgres_schema(url: str) -> dict[str, list[tuple[object, ...]]]:
    connection = await asyncpg.connect(url)
    try:
        return {what: [tuple(row) for row in await connection.fetch(query)] for what, query in CATALOGUE.items()}
    finally:
        await connection.close()


@pytest.mark.engine("postgres")
async def test_postgres_migrations_make_the_snapshot(server: Server, url: str) -> None:
    store = open_postgres(url)
    assert await store.migrate() == ALL
    await store.close()
    async with server.database() as snapshot:
        connection = await asyncpg.connect(snapshot)
        await connection.execute((POSTGRES / "schema.sql").read_text())
        await connection.close()
        migrated = await postgres_schema(url)
        assert migrated == await postgres_schema(snapshot)
        assert len(migrated["columns"]) > 100


@pytest.mark.spec("scaler 23.7.10")
@pytest.mark.engine("postgres")
async def test_postgres_twice_is_once(url: str) -> None:
    for expected in (ALL, []):
        store = open_postgres(url)
        assert await store.migrate() == expected
        assert await store.migrate() == []
        await store.close()


@pytest.mark.engine("postgres")
async def test_postgres_several_at_once_are_one(url: str) -> None:
    stores = [open_postgres(url) for _ in range(MIGRATORS)]
    applied = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(applied) == [[]] * (MIGRATORS - 1) + [ALL]
    for store in stores:
        assert await store.settings_version() == 0
        await store.close()


@pytest.mark.engine("postgres")
async def test_postgres_failed_migration_leaves_nothing(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE TABLE meta (name TEXT)")
    store = open_postgres(url)
    with pytest.raises((KiciError, AssertionError), match="meta"):
        await store.migrate()
    tables = await connection.fetch("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace")
    assert [table["relname"] for table in tables] == ["meta"]
    await connection.execute("DROP TABLE meta")
    assert await store.migrate() == ALL
    await connection.close()
    await store.close()
