"""The embedded store's writer: group commit that keeps each unit whole, and what callers learn when it fails."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kici.domain.errors import Bug, Conflict, StoreDown
from kici.stores.database import Step
from kici.stores.query import Query
from kici.stores.sqlite import core as core_module
from kici.stores.sqlite.core import IN_MEMORY, Core
from kici.stores.sqlite.engine import UNITS_PER_COMMIT_MAX, Threads
from kici.stores.sqlite.open import open_sqlite


def fact(name: str, value: str = "x") -> Step:
    return Step(Query.SET_META, {"name": name, "value": value})


def secret_token(id: str) -> Step:
    """Takes a hash that only one token may have."""
    params = {"id": id, "token_hash": "h", "token_prefix": "", "name": "", "role": "owner"}
    return Step(Query.CREATE_API_TOKEN, {**params, "secret_contexts": None, "created_at": 0, "expires_at": None})


NOTHING = Step(Query.REVOKE_API_TOKEN, {"token_id": "unknown", "now": 0}, guard=True)


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core(IN_MEMORY)
    core.migrate()
    yield core
    core.close()


@pytest.fixture
async def threads(tmp_path: Path) -> AsyncIterator[Threads]:
    threads = Threads(Core(str(tmp_path / "kici.db")))
    await threads.migrate()
    yield threads
    await threads.close()


def facts(core: Core) -> dict[str, str]:
    return {name: row["value"] for name in "abcdef" for row in core.read(Query.META, {"name": name})}


@asynccontextmanager
async def stuck(threads: Threads) -> AsyncIterator[None]:
    """The writer does nothing while the block runs."""
    entered, gate = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait()

    loop = asyncio.get_running_loop()
    held = asyncio.ensure_future(threads._by_writer(loop, hold))
    await asyncio.sleep(0)
    await loop.run_in_executor(None, entered.wait)
    try:
        yield
    finally:
        gate.set()
        await held


def test_commits_several_units_at_once(core: Core) -> None:
    statements: list[str] = []
    core._writer.set_trace_callback(statements.append)
    assert core.write([[fact("a")], [fact("b"), fact("c")]]) == [[[]], [[], []]]
    assert statements.count("COMMIT") == 1
    assert set(facts(core)) == {"a", "b", "c"}


def test_a_unit_that_fails_takes_no_other_with_it(core: Core) -> None:
    outcomes = core.write([[fact("a"), secret_token("1")], [fact("b"), secret_token("2")], [fact("c")]])
    assert isinstance(outcomes[1], Conflict)
    assert [outcomes[0], outcomes[2]] == [[[], []], [[]]]
    assert set(facts(core)) == {"a", "c"}


def test_a_guard_undoes_its_unit_only(core: Core) -> None:
    assert core.write([[fact("a"), NOTHING, fact("b")], [fact("c")]]) == [None, [[]]]
    assert set(facts(core)) == {"c"}


def test_a_failed_commit_fails_the_whole_batch(core: Core) -> None:
    def forbid(action: int, what: str | None, *_: object) -> int:
        return sqlite3.SQLITE_DENY if (action, what) == (sqlite3.SQLITE_TRANSACTION, "COMMIT") else sqlite3.SQLITE_OK

    core._writer.set_authorizer(forbid)
    outcomes = core.write([[fact("a")], [fact("b")]])
    assert [type(outcome) for outcome in outcomes] == [StoreDown, StoreDown]
    assert outcomes[0] is not outcomes[1]
    core._writer.set_authorizer(None)
    assert facts(core) == {}
    assert core.write([[fact("a")]]) == [[[]]]


def test_a_full_disk_fails_the_whole_batch(core: Core) -> None:
    pages = core._writer.execute("PRAGMA page_count").fetchone()[0]
    core._writer.execute(f"PRAGMA max_page_count = {pages + 2}")
    big = [[fact(name, "x" * 5000)] for name in "abcdef"]
    assert [type(outcome) for outcome in core.write(big)] == [StoreDown] * 6
    assert facts(core) == {}
    core._writer.execute("PRAGMA max_page_count = 100000")
    assert core.write(big) == [[[]]] * 6


def test_values_that_fit_no_column_are_a_bug_of_their_unit(core: Core) -> None:
    outcomes = core.write([[fact("a")], [Step(Query.SET_META, {"name": "b", "value": 2**70})], [fact("c")]])
    assert isinstance(outcomes[1], Bug)
    assert set(facts(core)) == {"a", "c"}


def test_says_where_it_failed_to_open(tmp_path: Path) -> None:
    with pytest.raises(StoreDown, match="data directory"):
        open_sqlite(str(tmp_path / "no" / "such" / "folder.db"))


def test_a_file_that_is_no_database_is_store_down(tmp_path: Path) -> None:
    path = tmp_path / "kici.db"
    path.write_bytes(b"not a database, but longer than a header would be" * 100)
    with pytest.raises(StoreDown, match="not a database"):
        open_sqlite(str(path))


async def test_shares_commits_between_callers(threads: Threads) -> None:
    statements: list[str] = []
    threads._core._writer.set_trace_callback(statements.append)
    async with asyncio.TaskGroup() as group:
        for number in range(400):
            group.create_task(threads.unit([fact(f"n{number}")]))
    commits = statements.count("COMMIT")
    assert 400 / UNITS_PER_COMMIT_MAX <= commits < 100
    assert len(await threads.read(Query.META, {"name": "n399"})) == 1


async def test_reads_what_was_written_before(threads: Threads) -> None:
    for number in range(200):
        await threads.unit([fact("a", str(number))])
        (row,) = await threads.read(Query.META, {"name": "a"})
        assert row["value"] == str(number)


async def test_reads_do_not_wait_for_the_writer(threads: Threads, tmp_path: Path) -> None:
    await threads.unit([fact("a", "old")])
    other = sqlite3.connect(tmp_path / "kici.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    write = asyncio.ensure_future(threads.unit([fact("a", "new")]))
    (row,) = await threads.read(Query.META, {"name": "a"})
    assert row["value"] == "old"
    assert not write.done()
    other.execute("ROLLBACK")
    other.close()
    await write
    (row,) = await threads.read(Query.META, {"name": "a"})
    assert row["value"] == "new"


async def test_a_database_that_stays_locked_is_store_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "BUSY_TIMEOUT_SECONDS", 0.05)
    store = open_sqlite(str(tmp_path / "kici.db"))
    await store.migrate()
    other = sqlite3.connect(tmp_path / "kici.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreDown, match="locked"):
        await store.set_meta("a", "b")
    other.close()
    await store.set_meta("a", "c")
    await store.close()


async def test_a_cancelled_caller_may_have_written(threads: Threads) -> None:
    async with stuck(threads):
        cancelled = asyncio.ensure_future(threads.unit([fact("a")]))
        other = asyncio.ensure_future(threads.unit([fact("b")]))
        await asyncio.sleep(0)
        cancelled.cancel()
    assert await other == [[]]
    assert cancelled.cancelled()
    assert len(await threads.read(Query.META, {"name": "a"})) == 1


async def test_refuses_more_than_it_can_queue(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kici.stores.sqlite.engine.UNITS_WAITING_MAX", 1)
    async with stuck(threads):
        first = asyncio.ensure_future(threads.unit([fact("a")]))
        await asyncio.sleep(0)
        with pytest.raises(StoreDown, match="1 writes wait"):
            await threads.unit([fact("b")])
    assert await first == [[]]


async def test_writes_what_was_asked_for_before_it_closes(tmp_path: Path) -> None:
    threads = Threads(Core(str(tmp_path / "kici.db")))
    await threads.migrate()
    writes = [asyncio.ensure_future(threads.unit([fact(f"n{number}")])) for number in range(50)]
    await asyncio.sleep(0)
    await threads.close()
    assert [await write for write in writes] == [[[]]] * 50
    for thread in threading.enumerate():
        if thread.name.startswith("kici-store"):
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} still runs"


async def test_a_failed_migration_is_raised(tmp_path: Path) -> None:
    threads = Threads(Core(str(tmp_path / "kici.db")))
    threads._core._writer.execute("CREATE TABLE meta (name TEXT)")
    with pytest.raises(StoreDown, match="meta already exists"):
        await threads.migrate()
    await threads.close()
