"""Each guard is worth something: with it taken away, a seed fails, and for the reason that the guard is there for."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from kici.decide.admit import Book
from kici.domain.agent import AgentToken
from kici.domain.ids import AgentId, JobId
from kici.domain.job import Job
from kici.domain.spawn import Reservation, ScaleDownReason, Spawn
from kici.services.dispatcher import Dispatcher
from kici.services.job_lifecycle import JobLifecycle
from kici.services.launch_failures import LaunchFailures
from kici.services.recovery import Recovery
from kici.services.registry import ConnectedAgent
from kici.services.spawn_book import TrackedSpawn
from kici.services.spawner import Spawner
from kici.services.teardown import Teardown
from kici.services.warm_pool import WarmPoolManager
from kici.stores.spawns import Spawns
from kici.testing.sim.plan import Plan, draw
from kici.testing.sim.run import run_plan


def first_violation(plans: Iterable[Plan]) -> str:
    """The first line of what is violated first in these plans; empty: nothing is."""
    for plan in plans:
        violation = run_plan(plan).violation
        if violation is not None:
            return violation.splitlines()[0]
    return ""


def plans(*seeds: int, odds: dict[str, float] | None = None, **fields: Any) -> list[Plan]:
    """Plans of these seeds that know no faults but the given ones."""
    return [
        replace(
            draw(seed), every={}, odds=odds or {}, coordinators=1, chaos_seconds=60.0, settle_seconds=400.0, **fields
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
            self.tell_start(agent, job, {})
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
    monkeypatch.setattr(LaunchFailures, "defer", lambda *_: None)
    assert "before it may be again" in first_violation(plans(*range(6), odds={"refuses": 0.5}))


def test_a_pool_counts_what_is_being_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WarmPoolManager, "_in_flight", lambda *_: Counter())
    found = first_violation(plans(*range(6), odds={"slow-boot": 1.0}, warm_agents=2, agents_max=20))
    assert "warm agents are being made" in found


def test_jobs_wait_for_their_agents_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def looks_at_none(self: Recovery, *_: object) -> None:
        return None

    monkeypatch.setattr(Recovery, "jobs", looks_at_none)
    kills = [replace(plan, every={"kill": 10.0, "death": 10.0}) for plan in plans(*range(6))]
    assert "after the last fault" in first_violation(kills)
