"""What the contract cases of a store share: a case, builders of situations, and rules that hold at all times.

Cases pass the time themselves, so that they mean the same on a real clock and in simulation.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from kici.domain.errors import KiciError
from kici.domain.ids import AgentId, InstanceId, Instant, JobId, RunId
from kici.domain.job import (
    HELD_BY_AGENT,
    STARTED,
    TERMINAL,
    Job,
    JobStatus,
    NewJob,
    Outcome,
    RunStatus,
)
from kici.ports.store import Claim, Finished, JobFilter, Store
from kici.testing.builders import HERE, a_new_job, a_new_run
from kici.testing.sim_clock import SIM_START

Case = Callable[[Store], Coroutine[Any, Any, None]]
T = TypeVar("T")

THERE: Final = InstanceId("instance-b")
ACK_MS: Final = 10_000
ALL: Final = 1000
EVERYTHING: Final = 1_000_000
RUNNING: Final = frozenset({JobStatus.RUNNING})
SUCCESS: Final = Outcome(status=JobStatus.SUCCESS, exit_code=0)
FAILURE: Final = Outcome(status=JobStatus.FAILED, exit_code=1, reason="exit code 1")


def shows(*statements: str) -> Callable[[Case], Case]:
    """Name the statements of the specification that a case shows."""

    def mark(case: Case) -> Case:
        case.__dict__["statements"] = statements
        return case

    return mark


def statements_of(case: Case) -> tuple[str, ...]:
    found: tuple[str, ...] = case.__dict__.get("statements", ())
    return found


def after(ms: int) -> Instant:
    """A moment `ms` after the beginning."""
    return Instant(SIM_START + ms)


def agent(number: int = 1) -> AgentId:
    return AgentId(f"scaler-bare-metal-{number:08x}")


def a_claim(agent_id: AgentId | None = None, instance_id: InstanceId = HERE, **fields: Any) -> Claim:
    return Claim(agent_id=agent_id or agent(), instance_id=instance_id, ack_ms=ACK_MS, **fields)


async def submit(store: Store, *jobs: NewJob, run: str = "", now: int = 0) -> list[Job]:
    """One run with these jobs; its id is that of the first job unless given."""
    made = await store.submit(a_new_run(id=RunId(run or f"run-of-{jobs[0].id}")), jobs, now=after(now))
    assert made.created
    return list(made.jobs)


async def queued(store: Store, *ids: str, now: int = 0, **fields: Any) -> list[Job]:
    """Queued jobs, each in a run of its own, oldest first."""
    return [(await submit(store, a_new_job(id, **fields), now=now))[0] for id in ids]


async def offered(store: Store, id: str, *, to: AgentId | None = None, by: InstanceId = HERE, now: int = 0) -> Job:
    """An existing queued job, offered to an agent."""
    return given(await store.claim_job(JobId(id), a_claim(to, by), now=after(now)))


async def started(store: Store, id: str, *, by: AgentId | None = None, now: int = 0) -> Job:
    """An existing queued job, started by an agent."""
    await offered(store, id, to=by, now=now)
    return given(await store.start_job(JobId(id), by or agent(), now=after(now)))


async def ended(store: Store, id: str, outcome: Outcome = SUCCESS, *, now: int = 0) -> Finished:
    """An existing queued job, run to its end."""
    await started(store, id, now=now)
    return given(await store.finish_job(JobId(id), outcome, from_statuses=RUNNING, now=after(now)))


async def job(store: Store, id: str) -> Job:
    return given(await store.job(JobId(id)))


async def status(store: Store, *ids: str) -> list[JobStatus]:
    return [(await job(store, id)).status for id in ids]


async def run_status(store: Store, run_id: str) -> RunStatus:
    return given(await store.run(RunId(run_id))).status


async def class_of(store: Store, id: str) -> int:
    return (await job(store, id)).class_id


def given(value: T | None) -> T:
    assert value is not None
    return value


def ids(jobs: Iterable[Job]) -> list[str]:
    return [each.id for each in jobs]


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


async def error_of(call: Awaitable[object]) -> BaseException | None:
    try:
        await call
    except (KiciError, AssertionError) as error:
        return error
    return None


async def check_rules(store: Store) -> None:
    """Hold the stored jobs and runs to what must be true of them at any time."""
    jobs = {each.id: each for each in await store.jobs(JobFilter(limit=EVERYTHING))}
    for each in jobs.values():
        _check_job(each, jobs)
    for run in await store.runs(before=None, limit=EVERYTHING):
        of_run = [each.status for each in jobs.values() if each.run_id == run.id]
        over = TERMINAL.issuperset(of_run)
        assert (run.finished_at is not None) == over, f"run {run.id} with {of_run}"
        assert (run.status in {RunStatus.RUNNING, RunStatus.CANCELLING}) != over, f"{run} with {of_run}"
        if run.status is not RunStatus.RUNNING:
            waiting = {JobStatus.PENDING, JobStatus.QUEUED, JobStatus.DISPATCHED}
            assert waiting.isdisjoint(of_run), f"run {run.id} is {run.status} with {of_run}"
        if run.status is RunStatus.SUCCESS:
            assert set(of_run) == {JobStatus.SUCCESS}, f"run {run.id} is a success with {of_run}"


def _check_job(each: Job, jobs: dict[JobId, Job]) -> None:
    needs = [jobs[need].status for need in each.needs]
    assert (each.finished_at is not None) == (each.status in TERMINAL), each
    if each.status is JobStatus.PENDING:
        assert not all(need is JobStatus.SUCCESS for need in needs), f"{each.id} waits for {needs}"
    if each.status in HELD_BY_AGENT | {JobStatus.QUEUED}:
        assert all(need is JobStatus.SUCCESS for need in needs), f"{each.id} waits not for {needs}"
    if each.status in HELD_BY_AGENT:
        assert None not in (each.agent_id, each.owner_instance_id, each.dispatched_at), each
    if each.status in {JobStatus.PENDING, JobStatus.QUEUED}:
        assert (each.agent_id, each.owner_instance_id, each.dispatched_at, each.scaler) == (None,) * 4, each
    if each.status in STARTED:
        assert each.started_at is not None, each
    assert (each.ack_deadline is not None) == (each.status is JobStatus.DISPATCHED), each
    if each.status not in {JobStatus.RECOVERING, JobStatus.CANCELLING}:
        assert each.recovery_deadline is None, each
