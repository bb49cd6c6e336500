"""No query of the embedded store costs more because a table grows: each finds its rows by an index."""

import re
from collections.abc import Iterator

import pytest

from kici.stores.query import Query
from kici.stores.sqlite.core import IN_MEMORY, Core

GROWING = ("jobs", "runs", "job_needs", "log_chunks", "access_log", "idempotency_keys", "demand_classes")
"""Tables that grow with what is submitted, not with what is connected."""
WALKS = {
    # Newest first, as many as asked for.
    Query.JOBS_LISTED: {"SCAN jobs"},
    Query.RUNS_LISTED: {"SCAN runs USING INDEX runs_created"},
    # Oldest first, up to a limit.
    Query.OLDEST_JOBS: {"SCAN jobs"},
    # Counted as a whole, from an index alone.
    Query.COUNTS_BY_STATUS: {"SCAN jobs USING COVERING INDEX jobs_by_status"},
    # One step into the index.
    Query.WAITING_CLASSES: {"SEARCH jobs USING COVERING INDEX jobs_queue"},
}


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    core = Core(IN_MEMORY)
    core.migrate()
    yield core
    core.close()


def plan(core: Core, query: Query) -> list[str]:
    sql = core._queries[query]
    params = dict.fromkeys(sql.parameters)
    params.update({name: "[]" for name in sql.parameters if name.endswith(("s", "_ids")) and name != "attempts"})
    return [
        row["detail"]
        for statement in sql.statements
        for row in core._writer.execute(f"EXPLAIN QUERY PLAN {statement}", params)
    ]


@pytest.mark.parametrize("query", Query)
def test_finds_rows_by_an_index(core: Core, query: Query) -> None:
    steps = plan(core, query)
    table = "|".join(GROWING)
    walks = {step for step in steps if re.match(rf"SCAN ({table})\b", step)} - WALKS.get(query, set())
    assert not walks, steps


@pytest.mark.parametrize("query", [Query.CLAIM_OLDEST, Query.QUEUED_OF_CLASS, Query.MARK_UNROUTABLE])
def test_walks_one_class_of_the_queue(core: Core, query: Query) -> None:
    steps = plan(core, query)
    assert any("jobs_queue (class_id=?)" in step for step in steps), steps
    assert not any("TEMP B-TREE" in step for step in steps), steps


@pytest.mark.parametrize("query", [Query.CLAIM_JOB, Query.START_JOB, Query.FINISH_LONE_JOB, Query.REQUEUE_JOB])
def test_moves_one_row_by_its_id(core: Core, query: Query) -> None:
    assert any("sqlite_autoindex_jobs_1 (id=?)" in step for step in plan(core, query))


def test_hops_from_class_to_class(core: Core) -> None:
    steps = plan(core, Query.WAITING_CLASSES)
    assert any("jobs_queue (class_id>?)" in step for step in steps), steps


def test_reads_output_in_its_order(core: Core) -> None:
    steps = plan(core, Query.READ_LOG)
    assert any("log_chunks_of_job (job_id=? AND position>?)" in step for step in steps), steps
