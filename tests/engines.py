"""A PostgreSQL server for tests: one that is given, or a throw-away cluster on the loopback interface.

`KICI_TEST_POSTGRES_URL` names a server on which databases may be created; without it, a cluster is made from
what is installed (see `kici.testing.engines`) and thrown away at the end.  Making a database takes a third of a
second, emptying one takes milliseconds: tests that need no more than an empty store share one.
"""

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from kici.stores.postgres.open import open_postgres
from kici.testing import engines
from kici.testing.postgres_cluster import Cluster

_numbers = itertools.count(1)
_TUNING = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "shared_buffers": "64MB",
    # The contract must hold whatever the server's default is.
    "default_transaction_isolation": "repeatable read",
    "deadlock_timeout": "50ms",
}
_WITHOUT_FSYNC = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@dataclass(frozen=True)
class Server:
    url: str
    """Of its maintenance database."""

    def database_url(self, name: str) -> str:
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    async def execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    @asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """URL of a new database without any schema, which is dropped afterwards."""
        name = f"kici_{os.getpid()}_{next(_numbers)}"
        await self.execute(f'CREATE DATABASE "{name}"')
        try:
            yield self.database_url(name)
        finally:
            await self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextmanager
def postgres_server(*, fsync: bool = False) -> Iterator[Server]:
    """The given server, or a cluster for as long as the block runs.  Ask `engines.absence` first."""
    given = os.environ.get(engines.POSTGRES_URL)
    if given:
        yield Server(given)
        return
    with own_cluster(fsync=fsync) as cluster:
        yield Server(cluster.url)


@contextmanager
def own_cluster(*, fsync: bool = False) -> Iterator[Cluster]:
    """A running cluster, thrown away afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kici-postgres-"))
    cluster = Cluster(folder)
    try:
        cluster.make(_TUNING | ({} if fsync else _WITHOUT_FSYNC))
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def migrated_database(server: Server) -> Iterator[str]:
    """URL of a database that has the whole schema."""
    name = f"kici_{os.getpid()}_{next(_numbers)}"

    async def make() -> None:
        await server.execute(f'CREATE DATABASE "{name}"')
        store = open_postgres(server.database_url(name))
        await store.migrate()
        await store.close()

    asyncio.run(make())
    try:
        yield server.database_url(name)
    finally:
        asyncio.run(server.execute(f'DROP DATABASE "{name}" WITH (FORCE)'))


async def empty(url: str) -> None:
    """Take a migrated database back to what migrations made of it."""
    connection = await asyncpg.connect(url)
    try:
        tables = await connection.fetch(
            "SELECT relname AS name FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
        )
        kept = {"schema_migrations", "meta"}
        statements = [f'DELETE FROM "{table["name"]}"' for table in tables if table["name"] not in kept]
        statements += ["DELETE FROM meta WHERE name <> 'settings_version'", "UPDATE meta SET value = '0'"]
        await connection.execute(";".join(statements))
    finally:
        await connection.close()
