"""Each guard is worth something: with it taken away, a seed fails, and for the reason that the guard is there for."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from kici.decide.admit import Book
from kici.domain import knobs
from kici.domain.agent import AgentToken
from kici.domain.ids import AgentId, JobId
from kici.domain.job import Job
from kici.domain.spawn import Reservation, ScaleDownReason, Spawn
from kici.services.dispatcher import Dispatcher
from kici.services.job_lifecycle import JobLifecycle
from kici.services.launch_failures import LaunchFailures
from kici.services.machine_pools import MachinePools
from kici.services.recovery import Recovery
from kici.services.registry import ConnectedAgent
from kici.services.spawn_book import TrackedSpawn
from kici.services.spawner import Spawner
from kici.services.teardown import Teardown
from kici.services.warm_pool import WarmPoolManager
from kici.stores.query import Query
from kici.stores.spawns import Spawns
from kici.testing.sim.plan import Plan, draw
from kici.testing.sim.run import run_plan
from kici.testing.sim.world import World


def first_violation(plans: Iterable[Plan], prepare: Callable[[World], None] | None = None) -> str:
    """The first line of what is violated first in these plans; empty: nothing is."""
    for plan in plans:
        violation = run_plan(plan, prepare=prepare).violation
        if violation is not None:
            return violation.splitlines()[0]
    return ""


def plans(*seeds: int, odds: dict[str, float] | None = None, **fields: Any) -> list[Plan]:
    """Plans of these seeds that know no faults but the given ones."""
    return [
        replace(
            draw(seed),
            **{
                "every": {},
                "odds": odds or {},
                "coordinators": 1,
                "chaos_seconds": 60.0,
                "settle_seconds": 400.0,
                **fields,
            },
        )
        for seed in seeds
    ]


def test_the_slot_of_a_claim_in_doubt_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def frees(self: Dispatcher, agent: ConnectedAgent, slot: JobId) -> None:
        self._registry.take_back(agent, slot)

    monkeypatch.setattr(Dispatcher, "in_doubt", frees)
    assert first_violation(plans(*range(6), odds={"error-after": 0.1}, jobs=60)) in (
        "an agent was offered a job while it had another",
        "a machine was ended while its job ran",  # to free the second job that it was given
    )


def test_nothing_starts_before_running_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def starts_first(self: JobLifecycle, agent: ConnectedAgent, job_id: JobId) -> None:
        job = agent.jobs.get(job_id)
        if job is not None:
            await self.start_again(agent, job)
            await asyncio.sleep(1)
            await self._store.start_job(job_id, agent.agent_id)

    monkeypatch.setattr(JobLifecycle, "acknowledged", starts_first)
    assert "started before running was committed" in first_violation(plans(1))


def test_a_spawn_row_is_written_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def writes_nothing(
        self: Spawns, spawn: Spawn, reservation: Reservation, token: AgentToken | None, **_: object
    ) -> None:
        return None

    monkeypatch.setattr(Spawns, "insert_spawn", writes_nothing)
    assert "a machine was made without a row" in first_violation(plans(1))


def test_the_row_of_a_compute_goes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def destroys_nothing(self: Teardown, tracked: TrackedSpawn, reason: ScaleDownReason) -> None:
        return None

    monkeypatch.setattr(Teardown, "_destroy", destroys_nothing)
    assert "deleted while its compute lives" in first_violation(plans(*range(4), odds={"exit-lost": 1.0}))


def test_a_reservation_is_released_once(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Book.release
    held: dict[AgentId, Reservation] = {}

    def releases_again(self: Book, agent_id: AgentId) -> Reservation | None:
        released = release(self, agent_id)
        if released is not None:
            held[agent_id] = released
        elif agent_id in held:
            self._total = self._total.minus(held[agent_id].shape.requests)
        return released

    monkeypatch.setattr(Book, "release", releases_again)
    assert "reserved is" in first_violation(plans(*range(4), odds={"destroy-fails": 0.8}))


def test_a_reservation_is_taken_in_the_moment_of_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Spawner.start

    async def starts_later(self: Spawner, choice: Any, job: Job | None) -> Any:
        await asyncio.sleep(0.05)
        return await start(self, choice, job)

    monkeypatch.setattr(Spawner, "start", starts_later)
    assert "its cap is" in first_violation(plans(*range(6), jobs=60, agents_max=6))


def test_a_scaler_that_refuses_is_deferred_before_its_capacity_is_offered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defer = LaunchFailures.defer

    def defers_later(self: LaunchFailures, *args: Any) -> None:
        asyncio.get_running_loop().call_later(1.0, defer, self, *args)

    monkeypatch.setattr(LaunchFailures, "defer", defers_later)
    assert "before it may be again" in first_violation(plans(*range(6), odds={"refuses": 0.5}))


def test_a_pool_counts_what_is_being_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WarmPoolManager, "_in_flight", lambda *_: Counter())
    found = first_violation(plans(*range(6, 12), odds={"slow-boot": 1.0}, warm_agents=2, agents_max=20))
    assert "warm agents are being made" in found


def test_jobs_wait_for_their_agents_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def looks_at_none(self: Recovery, *_: object) -> None:
        return None

    monkeypatch.setattr(Recovery, "jobs", looks_at_none)
    kills = [replace(plan, every={"kill": 10.0, "death": 10.0}) for plan in plans(*range(6))]
    assert "after the last fault" in first_violation(kills)


def test_a_job_is_ended_by_the_agent_that_has_it() -> None:
    def forgets_who(world: World) -> None:
        for query in (Query.FINISH_LONE_JOB, Query.END_JOB):
            world.core.rewrite(query, "AND (:agent_id IS NULL OR agent_id = :agent_id)", "")

    lying = plans(*range(4), every={"lie": 1.0})
    assert first_violation(lying) == ""
    assert "its end is not what its agent reported" in first_violation(lying, forgets_who)


def test_a_job_is_claimed_while_it_waits() -> None:
    def takes_anyway(world: World) -> None:
        world.core.rewrite(Query.CLAIM_BOUND, "AND status = 'queued'", "AND status <> 'success'")

    assert "a job moved from running to dispatched" in first_violation(plans(*range(4), jobs=60), takes_anyway)


def test_one_spawn_serves_a_job() -> None:
    def serves_twice(world: World) -> None:
        conflict = "ON CONFLICT (bound_job_id) WHERE state IN ('booting', 'registered') DO NOTHING"
        world.core.rewrite(Query.INSERT_SPAWN, conflict, "")
        world.core.spoils = "DROP INDEX main.scaler_spawning_agents_serving;"

    assert "2 spawns serve one job" in first_violation(plans(*range(4), coordinators=3, jobs=60), serves_twice)


def test_a_spawn_that_settles_after_it_was_given_up_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, destroy = Teardown._stop_spawning, Teardown._destroy

    async def stops_settled(self: Teardown, tracked: TrackedSpawn) -> None:
        if tracked.is_settled:
            await stop(self, tracked)

    async def destroys_settled(self: Teardown, tracked: TrackedSpawn, reason: ScaleDownReason) -> None:
        if tracked.is_settled:
            await destroy(self, tracked, reason)

    monkeypatch.setattr(Teardown, "_stop_spawning", stops_settled)
    monkeypatch.setattr(Teardown, "_destroy", destroys_settled)
    impatient = {knobs.SCALER_SPAWN_TIMEOUT_MS.name: 30_000}
    slow = [
        replace(plan, every={"cancel-job": 3.0}, settings={**plan.settings, **impatient})
        for plan in plans(*range(4), odds={"slow-boot": 1.0})
    ]
    assert "a machine was made without a row" in first_violation(slow)


def test_a_machine_pool_is_reserved_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def bills_nobody(self: Spawner, *_: object) -> None:
        return None

    monkeypatch.setattr(Spawner, "_bill", bills_nobody)
    found = first_violation(plans(*range(4), coordinators=3, pool_cpus=5.0, warm_agents=0, jobs=60))
    assert "cpus of the machine pool, its cap is" in found


def test_what_an_agent_holds_of_a_machine_pool_is_given_back_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def keeps(self: MachinePools, pool: str | None, agent_id: AgentId) -> None:
        return None

    monkeypatch.setattr(MachinePools, "release", keeps)
    found = first_violation(plans(0, coordinators=2, pool_cpus=60.0, warm_agents=0))
    assert "rows of the machine pool and what there should be differ" in found
