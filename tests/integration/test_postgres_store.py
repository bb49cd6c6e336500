"""The store on a real PostgreSQL: several processes, lost servers, full pools, plans that hold while tables grow."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Never

import asyncpg
import pytest
from tests.engines import Server, own_cluster, postgres_server

from kici.domain.errors import Bug, Conflict, StoreDown
from kici.domain.ids import AgentId, ClassId, ConnectionId, InstanceId, JobId, RunId
from kici.domain.job import JobStatus, Outcome
from kici.domain.spawn import Spawn
from kici.ports.store import JobFilter, Offer, Registered, Store
from kici.stores.database import Step
from kici.stores.postgres.engine import HERE, Pool, session_settings
from kici.stores.postgres.open import open_postgres
from kici.stores.query import Numbered, Query, load, numbered
from kici.testing.builders import a_new_job, a_new_run, a_reservation, a_session, a_spawn, an_instance
from kici.testing.contracts.store_provisions import a_pending_claim
from kici.testing.contracts.store_rules import a_claim, after, agent, check_rules, together
from kici.testing.engines import postgres_bin

pytestmark = pytest.mark.engine("postgres")
ROOT = Path(__file__).parents[2]
BLOCKED = "SELECT count(*) FROM pg_locks WHERE NOT granted"
STATEMENTS = {query: numbered(sql) for query, sql in load(HERE / "queries").items()}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as server:
        yield server


@pytest.fixture
async def url(server: Server) -> AsyncIterator[str]:
    async with server.database() as url:
        store = open_postgres(url)
        await store.migrate()
        await store.close()
        yield url


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    store = open_postgres(url)
    yield store
    await store.close()


async def fill(store: Store, count: int, *, label: str = "", prefix: str = "job") -> None:
    """Queued jobs in runs of a hundred."""
    labels = (label,) if label else ()
    for first in range(0, count, 100):
        jobs = [a_new_job(f"{prefix}-{first + n}", *labels) for n in range(min(100, count - first))]
        await store.submit(a_new_run(id=RunId(f"run-{prefix}-{first}")), jobs, now=after(0))


async def test_prepares_every_statement(url: str) -> None:
    connection = await asyncpg.connect(url)
    for statement in STATEMENTS.values():
        await connection.prepare(statement.text)
    await connection.close()


@pytest.mark.spec("T1.1")
async def test_gives_each_job_to_one_claimer_of_two_processes(url: str, store: Store) -> None:
    for number in range(200):
        await fill(store, 1, label=f"class-{number % 3}", prefix=f"job{number}")
    classes = [str(each.class_id) for each in await store.waiting_classes(limit=10)]
    claimers = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.integration.postgres_claimer", url, name, *classes),
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for name in ("a", "b")
    ]
    for claimer in claimers:
        assert claimer.stdout is not None
        assert await claimer.stdout.readline() == b"ready\n"
    outputs = await together(claimer.communicate(b"go\n") for claimer in claimers)
    won = [output.split() for output, _ in outputs]
    assert sorted(won[0] + won[1]) == sorted(f"job{number}-0".encode() for number in range(200))
    assert all(won), "one process took everything; the other one was not there"
    for name, mine in zip(("a", "b"), won, strict=True):
        owned = await store.jobs_owned_by(InstanceId(f"instance-{name}"), limit=1000)
        assert {job.id.encode() for job in owned} == set(mine)


async def test_is_store_down_when_nobody_answers() -> None:
    store = open_postgres("postgresql://postgres@127.0.0.1:1/nowhere")
    with pytest.raises(StoreDown, match="can be reached"):
        await store.ping()
    await store.close()


async def test_goes_on_after_the_server_was_restarted() -> None:
    if postgres_bin() is None:
        pytest.skip("the only server here is given, and not ours to restart")
    with own_cluster(fsync=True) as cluster:
        store = open_postgres(cluster.url)
        await store.migrate()
        await together(store.ping() for _ in range(5))
        cluster.stop()
        with pytest.raises(StoreDown):
            await store.beat(an_instance())
        with pytest.raises(StoreDown):
            await store.instances(limit=1)
        cluster.start()
        await store.beat(an_instance())
        assert len(await store.instances(limit=1)) == 1
        await store.close()


async def test_goes_on_after_a_connection_was_killed(url: str, store: Store) -> None:
    await store.ping()
    other = await asyncpg.connect(url)
    await other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kici'")
    await other.close()
    for _ in range(2):  # the first may still hit the connection that is going away
        try:
            await store.ping()
        except StoreDown:
            continue
        break
    else:
        pytest.fail("the store did not connect again")


async def test_a_connection_in_a_state_that_the_driver_does_not_expect_is_replaced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.ping()

    async def confused(self: object, *args: object) -> Never:
        raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")

    with monkeypatch.context() as patch:
        patch.setattr(asyncpg.Connection, "fetch", confused)
        with pytest.raises(StoreDown, match="cannot switch"):
            await store.ping()
    await store.ping()


async def test_a_killed_write_is_store_down_and_undone(url: str, store: Store) -> None:
    await store.set_meta("a", "1")
    other = await asyncpg.connect(url)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("SELECT 1 FROM meta WHERE name = 'settings_version' FOR UPDATE")
    write = asyncio.ensure_future(store.patch_settings(None, {"a": 1}))
    await until_blocked(other)
    await other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kici'")
    with pytest.raises(StoreDown):
        await write
    await transaction.rollback()
    await other.close()
    assert await store.settings(None) == {}


async def until_blocked(connection: "asyncpg.Connection[Any]", count: int = 1) -> None:
    """Wait until so many wait for a lock."""
    async with asyncio.timeout(60):
        while await connection.fetchval(BLOCKED) < count:  # noqa: ASYNC110  # the server does not tell by itself
            await asyncio.sleep(0.01)


async def test_a_full_pool_is_store_down_after_a_while(url: str) -> None:
    store = open_postgres(url, pool_max=1, acquire_timeout_seconds=0.2, statement_timeout_seconds=20)
    other = await asyncpg.connect(url)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("SELECT 1 FROM meta WHERE name = 'settings_version' FOR UPDATE")
    blocked = asyncio.ensure_future(store.patch_settings(None, {"a": 1}))
    await until_blocked(other)
    with pytest.raises(StoreDown, match="no connection was free"):
        await store.ping()
    await transaction.rollback()
    assert await blocked == 1
    await store.ping()
    await other.close()
    await store.close()


async def test_a_statement_that_takes_too_long_is_store_down(url: str) -> None:
    store = open_postgres(url, statement_timeout_seconds=0.2)
    other = await asyncpg.connect(url)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("SELECT 1 FROM meta WHERE name = 'settings_version' FOR UPDATE")
    with pytest.raises(StoreDown, match="statement timeout"):
        await store.patch_settings(None, {"a": 1})
    await transaction.rollback()
    assert await store.patch_settings(None, {"a": 1}) == 1
    await other.close()
    await store.close()


async def test_a_cancelled_call_leaves_no_connection_behind(url: str) -> None:
    store = open_postgres(url, pool_max=1, acquire_timeout_seconds=5)
    other = await asyncpg.connect(url)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("SELECT 1 FROM meta WHERE name = 'settings_version' FOR UPDATE")
    for _ in range(3):
        call = asyncio.ensure_future(store.patch_settings(None, {"a": 1}))
        await until_blocked(other)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await transaction.rollback()
    assert await store.patch_settings(None, {"a": 1}) == 1
    assert await other.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'kici'") == 1
    await other.close()
    await store.close()


async def test_units_in_a_deadlock_are_run_again(url: str) -> None:
    pool = Pool(url, pool_max=10, acquire_timeout_seconds=5, statement_timeout_seconds=20)
    names = ("a", "b", "c")
    await pool.unit([Step(Query.SET_META, {"name": name, "value": "0"}) for name in names])
    other = await asyncpg.connect(url)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("SELECT 1 FROM meta WHERE name = 'b' FOR UPDATE")
    one, two = (
        asyncio.ensure_future(pool.unit([Step(Query.SET_META, {"name": name, "value": value}) for name in order]))
        for value, order in (("1", names), ("2", names[::-1]))
    )
    await until_blocked(other, 2)  # each has its first row and wants the one in the middle
    await transaction.rollback()
    assert await one == await two == [[], [], []]
    values = {(await pool.read(Query.META, {"name": name}))[0]["value"] for name in names}
    assert len(values) == 1, "units were not kept whole"
    assert await other.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") <= 1
    await other.close()
    await pool.close()


async def test_spawns_that_are_written_together_fail_alone(store: Store) -> None:
    """Among a hundred, one for a job that is served and one with an agent id that is taken."""

    async def insert(agent: int, job: int) -> Spawn | None:
        spawn = a_spawn(agent_id=AgentId(f"agent-{agent}"), bound_job_id=JobId(f"job-{job}"))
        return await store.insert_spawn(spawn, a_reservation(spawn), None)

    asked = [*((number, number) for number in range(98)), (98, 0), (1, 99)]
    told = await asyncio.gather(*(insert(*each) for each in asked), return_exceptions=True)
    assert told[2:98] == [None] * 96
    # Which of two rivals comes first is left to the server.
    for rivals, loss in (((0, 98), Spawn), ((1, 99), Conflict)):
        (winner,) = [number for number in rivals if told[number] is None]
        (lost,) = [told[number] for number in rivals if number != winner]
        assert isinstance(lost, loss)
        if isinstance(lost, Spawn):
            assert lost.agent_id == f"agent-{winner}"
    assert len(await store.spawns(owner=None, limit=1000)) == 98


async def test_agents_that_register_together_get_their_own_rows(store: Store) -> None:
    """Half of them were made for a job, and one of those has ended: it is refused, and nobody else."""
    jobs = [a_new_job(f"job-{number}") for number in range(20)]
    await store.submit(a_new_run(), jobs)

    async def register(number: int) -> Registered | None:
        agent_id = AgentId(f"agent-{number}")
        bound = a_claim(agent_id) if number < 20 else None
        return await store.register_agent(a_session(agent_id=agent_id), needs_spawn=number < 20, bound=bound)

    for number in range(1, 20):
        spawn = a_spawn(agent_id=AgentId(f"agent-{number}"), bound_job_id=JobId(f"job-{number}"))
        await store.insert_spawn(spawn, a_reservation(spawn), None)
    told = await asyncio.gather(*(register(number) for number in range(40)))
    assert told[0] is None
    assert [each.job.id for each in told[1:20] if each and each.job] == [f"job-{number}" for number in range(1, 20)]
    assert [each.spawn.agent_id for each in told[1:20] if each and each.spawn] == [f"agent-{n}" for n in range(1, 20)]
    assert all(each is not None and each.spawn is None and each.job is None for each in told[20:])
    assert len(await store.sessions(instance_id=None, limit=100)) == 39


async def test_a_crowd_that_comes_back_at_once_does_not_wait_for_connections(url: str) -> None:
    """What every returning agent asks for is answered to many in one round trip: nobody is told that the store is
    down because there are others."""
    store = open_postgres(url, pool_max=3, acquire_timeout_seconds=0.5)
    async with asyncio.timeout(60):
        await fill(store, 300)
        (waiting,) = await store.waiting_classes(limit=10)
        names = [f"agent-{number}" for number in range(2000)]
        await together(store.ping() for _ in range(3))  # all connections are there
        await together(store.held_jobs(AgentId(name)) for name in names)
        await together(store.agent_token(name) for name in names)
        await together(store.spawn(AgentId(name)) for name in names)
        sessions = [a_session(agent_id=AgentId(name), connection_id=ConnectionId(name)) for name in names]
        await together(store.register_agent(session, needs_spawn=False, bound=None) for session in sessions)
        found = await together(store.session(AgentId(name)) for name in names)
        assert [session and session.connection_id for session in found] == names
        claims = await together(store.claim_oldest([waiting.class_id], a_claim(AgentId(name))) for name in names)
        won = {name: job for name, job in zip(names, claims, strict=True) if job is not None}
        assert len({job.id for job in won.values()}) == len(won) == 300
        held = await together(store.held_jobs(AgentId(name)) for name in names)
        assert {job.agent_id: job.id for jobs in held for job in jobs} == {name: job.id for name, job in won.items()}
        released = await together(store.release_agent(AgentId(name), ConnectionId(name)) for name in names)
        assert all(released)
    await store.close()


async def test_many_may_be_the_first_to_ask_for_a_kind_of_machine(store: Store) -> None:
    """Submissions at the same moment, none of which finds the demand written down yet: all of them are taken."""
    await together(store.ping() for _ in range(16))
    for kind in range(40):
        jobs = [a_new_job(f"job-{kind}-{number}", f"label-{kind}") for number in range(16)]
        await together(store.submit(a_new_run(id=RunId(f"run-{job.id}")), [job]) for job in jobs)
    assert len(await store.waiting_classes(limit=100)) == 40


async def test_a_claim_code_is_redeemed_once_by_many_at_once(store: Store) -> None:
    claim = a_pending_claim()
    await store.register_claim(claim, ttl_ms=60_000)
    told = await asyncio.gather(*(store.redeem_claim(claim.hash) for _ in range(20)))
    assert sum(each is not None for each in told) == 1


async def test_a_refused_value_is_a_bug(store: Store) -> None:
    with pytest.raises(Bug, match="PostgreSQL"):
        await store.set_meta("a", "nul \0")
    with pytest.raises(Bug, match="PostgreSQL"):
        await store.beat(an_instance(started_at=2**80))
    await store.ping()


# --- plans


LISTS = {
    # Newest first, as many as asked for.
    Query.JOBS_LISTED: {"jobs_pkey"},
    # Oldest first, up to a limit.
    Query.OLDEST_JOBS: {"jobs_pkey"},
    Query.RUNS_LISTED: {"runs_created"},
    Query.ACCESS_LOG: {"access_log_at"},
    # Counted as a whole, from an index alone.
    Query.COUNTS_BY_STATUS: {"jobs_by_status", "jobs_queue"},
    Query.QUEUED_COUNT: {"jobs_queue", "jobs_by_status"},
    # One step into the index.
    Query.WAITING_CLASSES: {"jobs_queue"},
}
GROWING = {"jobs", "runs", "job_needs", "log_chunks", "access_log", "idempotency_keys", "demand_classes"}
RIGHT_INDEX = {
    Query.CLAIM_OLDEST: {"jobs_queue", "jobs_id_key", "demand_classes_pkey"},
    Query.QUEUED_OF_CLASS: {"jobs_queue", "demand_classes_pkey"},
    Query.MARK_UNROUTABLE: {"jobs_queue", "jobs_id_key"},
    Query.CLAIM_JOB: {"jobs_id_key", "demand_classes_pkey"},
    Query.CLAIM_BOUND: {"jobs_id_key", "demand_classes_pkey"},
    Query.START_JOB: {"jobs_id_key", "demand_classes_pkey"},
    Query.REQUEUE_JOB: {"jobs_id_key", "demand_classes_pkey"},
    Query.FINISH_LONE_JOB: {"jobs_id_key", "runs_pkey", "demand_classes_pkey"},
    Query.END_JOB: {"jobs_id_key", "demand_classes_pkey"},
    Query.JOBS_OF_RUN: {"jobs_of_run", "demand_classes_pkey"},
    Query.JOBS_BY_STATUS: {"jobs_by_status", "demand_classes_pkey"},
    Query.HELD_JOBS: {"jobs_held", "demand_classes_pkey"},
    Query.JOBS_OWNED_BY: {"jobs_owned", "demand_classes_pkey"},
    Query.OVERDUE_ACKS: {"jobs_ack", "demand_classes_pkey"},
    Query.OVERDUE_RECOVERIES: {"jobs_recovery", "demand_classes_pkey"},
    Query.EXPIRED_JOBS: {"jobs_expiry"},
    Query.UNROUTABLE_JOBS: {"jobs_unroutable"},
    Query.CLEAR_UNROUTABLE: {"jobs_unroutable", "jobs_id_key"},
    Query.READ_LOG: {"log_chunks_of_job"},
    Query.PRUNE_CLASSES: {"demand_classes_used", "demand_classes_pkey"},
}


@pytest.fixture(scope="module")
def plans(server: Server) -> dict[str, dict[Query, dict[str, Any]]]:
    """Generic plans of all queries, made at three moments: never analysed, analysed while empty, and when full."""

    async def make() -> dict[str, dict[Query, dict[str, Any]]]:
        async with server.database() as url:
            store = open_postgres(url)
            await store.migrate()
            found = {"new": await explained(url)}
            await run(url, "VACUUM ANALYZE")
            found["empty"] = await explained(url)
            await fill(store, 3000)
            found["filled"] = await explained(url)
            await run(url, "VACUUM ANALYZE")
            found["full"] = await explained(url)
            await store.close()
            return found

    return asyncio.run(make())


async def run(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(statement)
    await connection.close()


async def explained(url: str) -> dict[Query, dict[str, Any]]:
    connection = await asyncpg.connect(url, server_settings=session_settings(30))
    found = {}
    for query, statement in STATEMENTS.items():
        await connection.execute(f"PREPARE {query} AS {statement.text}")
        rows = await connection.fetch(f"EXPLAIN (FORMAT JSON) EXECUTE {query}{nulls(statement)}")
        found[query] = json.loads(rows[0][0])[0]["Plan"]
    await connection.close()
    return found


def nulls(statement: Numbered) -> str:
    return f"({', '.join(['NULL'] * len(statement.parameters))})" if statement.parameters else ""


def scans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if plan.get("Relation Name") in GROWING:
        yield plan
    for child in plan.get("Plans", ()):
        yield from scans(child)


@pytest.mark.parametrize("moment", ["new", "empty", "filled", "full"])
@pytest.mark.parametrize("query", Query)
def test_finds_rows_by_an_index(plans: dict[str, dict[Query, dict[str, Any]]], query: Query, moment: str) -> None:
    for scan in scans(plans[moment][query]):
        if scan["Node Type"] == "ModifyTable":
            continue
        assert scan["Node Type"] in {"Index Scan", "Index Only Scan"}, scan
        assert "Index Cond" in scan or scan["Index Name"] in LISTS.get(query, ()), scan
        if query in RIGHT_INDEX:
            assert scan["Index Name"] in RIGHT_INDEX[query], scan


async def test_a_plan_made_for_empty_tables_stays_good(url: str) -> None:
    """What a claim, a start, a finish and a return read does not grow with the backlog."""
    connection = await asyncpg.connect(url, server_settings=session_settings(30))
    await connection.execute("VACUUM ANALYZE")
    cases: list[tuple[Query, dict[str, Any]]] = []
    claim = {"agent_id": "a", "instance_id": "i", "ack_ms": 1, "scaler": None, "now": None}
    for query in (Query.CLAIM_OLDEST, Query.CLAIM_JOB, Query.REQUEUE_JOB, Query.START_JOB, Query.FINISH_LONE_JOB):
        await connection.execute(f"PREPARE {query} AS {STATEMENTS[query].text}")
        for _ in range(2):  # the plan is made and kept
            await connection.fetch(f"EXPLAIN EXECUTE {query}{nulls(STATEMENTS[query])}")
    store = open_postgres(url)
    await fill(store, 5000, label="x")
    await fill(store, 1000, label="y", prefix="other")
    classes = [each.class_id for each in await store.waiting_classes(limit=10)]
    end = {
        "status": "success",
        "offer": None,
        "exit_code": 0,
        "signal": None,
        "reason": None,
        "attempts_add": 0,
        "is_seen": None,
        "seen_owner": None,
        "seen_deadline": None,
        "now": None,
    }
    cases = [
        (Query.CLAIM_OLDEST, {**claim, "class_ids": json.dumps(classes)}),
        (Query.CLAIM_OLDEST, {**claim, "class_ids": json.dumps([1, 2, 3])}),
        (Query.CLAIM_JOB, {**claim, "job_id": "job-4000"}),
        (
            Query.REQUEUE_JOB,
            {"job_id": "job-4000", "agent_id": "a", "offer": 1, "reason": "", "attempts_add": 1, "attempts_max": 9},
        ),
        (Query.CLAIM_JOB, {**claim, "job_id": "job-4000"}),
        (Query.START_JOB, {**claim, "job_id": "job-4000", "offer": None}),
        (Query.FINISH_LONE_JOB, {**end, "job_id": "job-4000", "agent_id": "a", "from_statuses": '["running"]'}),
    ]
    for query, params in cases:
        values = ", ".join(literal(params[name]) for name in STATEMENTS[query].parameters)
        rows = await connection.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE {query}({values})")
        read = sum(
            scan["Actual Rows"] * scan["Actual Loops"] + scan.get("Rows Removed by Filter", 0)
            for scan in scans(json.loads(rows[0][0])[0]["Plan"])
        )
        assert read <= 12, (query, rows[0][0])
    job = await store.job(JobId("job-4000"))
    assert job is not None
    assert job.status is JobStatus.SUCCESS
    await connection.close()
    await store.close()


def literal(value: object) -> str:
    if value is None:
        return "NULL"
    return f"'{value}'" if isinstance(value, str) else str(value)


async def test_stays_consistent_under_a_mixed_load(store: Store) -> None:
    """Ends, returns, cancels and sweeps of the same runs at once: no deadlock reaches a caller, no rule is broken."""
    for run in range(6):
        firsts = [a_new_job(f"{run}-a{n}") for n in range(4)]
        seconds = [a_new_job(f"{run}-b{n}", needs=(firsts[n].id, firsts[(n + 1) % 4].id)) for n in range(4)]
        lone = [a_new_job(f"{run}-c{n}", expires_at=after(5)) for n in range(4)]
        await store.submit(a_new_run(id=RunId(f"run-{run}")), [*seconds, *lone, *firsts], now=after(0))
    (only,) = await store.waiting_classes(limit=10)

    async def work(number: int) -> None:
        while (job := await store.claim_oldest([only.class_id], a_claim(agent(number)), now=after(1))) is not None:
            if number % 3 == 0:
                await store.requeue_job(Offer(job.id, agent(number)), reason="no", attempts_max=3, now=after(1))
                continue
            await store.start_job(job.id, agent(number), now=after(1))
            status = JobStatus.FAILED if number % 4 == 0 else JobStatus.SUCCESS
            running = frozenset({JobStatus.RUNNING, JobStatus.CANCELLING})
            await store.finish_job(
                job.id, Outcome(status=status), agent_id=agent(number), from_statuses=running, now=after(2)
            )

    async def cancel(run: int) -> None:
        await store.cancel(RunId(f"run-{run}"), None, reason="", now=after(2))

    async def sweep() -> None:
        await store.mark_unroutable(only.class_id, now=after(1))
        await store.expire_queued(limit=3, now=after(6))
        await store.expire_unroutable(only.class_id, grace_ms=0, reason="", limit=2, now=after(2))
        await store.clear_unroutable(ClassId(only.class_id))

    await together([*(work(n) for n in range(10)), *(cancel(n) for n in range(2)), *(sweep() for _ in range(4))])
    await check_rules(store)
    left = await store.jobs(JobFilter(limit=1000))
    assert {job.status for job in left} & {JobStatus.SUCCESS, JobStatus.CANCELLED}
