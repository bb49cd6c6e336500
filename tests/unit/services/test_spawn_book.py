"""What is under way: which spawn serves which job, and until when."""

import pytest

from kici.decide.admit import ScalerCaps
from kici.domain.ids import AgentId, Instant, JobId
from kici.domain.spawn import SpawnState
from kici.services.scaler_runtime import ScalerRuntime
from kici.services.spawn_book import SpawnBook, TrackedSpawn
from kici.testing.builders import SCALER, a_spawn
from kici.testing.fake_backend import FakeBackend, FakeMachines
from kici.testing.sim_clock import SIM_START, SimClock

JOB = JobId("job-1")


def tracked(agent: str = "scaler-bare-metal-00000001", job_id: JobId | None = JOB, **fields: object) -> TrackedSpawn:
    backend = FakeBackend(scaler=SCALER, machines=FakeMachines(), clock=SimClock(), on_exit=lambda agent_id, how: None)
    runtime = ScalerRuntime(
        name=SCALER, backend=backend, caps=ScalerCaps(scaler=SCALER, agents_max=4), orchestrator_url="ws://here/ws"
    )
    spawn = a_spawn(agent_id=AgentId(agent), bound_job_id=job_id, **fields)
    return TrackedSpawn(spawn=spawn, runtime=runtime)


def test_a_spawn_serves_its_job_until_it_ends() -> None:
    book, spawn = SpawnBook(), tracked()
    book.add(spawn)
    assert book.serving(JOB) is spawn
    book.registered(spawn, SIM_START)
    assert book.serving(JOB) is spawn
    book.ending(spawn, "shutdown")
    assert book.serving(JOB) is None
    assert book.get(spawn.agent_id) is spawn
    book.remove(spawn)
    assert book.get(spawn.agent_id) is None


def test_a_warm_spawn_serves_no_job() -> None:
    book, spawn = SpawnBook(), tracked(job_id=None)
    book.add(spawn)
    assert book.serving(JOB) is None
    assert list(book) == [spawn]


@pytest.mark.spec("D3")
def test_the_end_of_an_older_spawn_leaves_the_newer_one_serving() -> None:
    book, older, newer = SpawnBook(), tracked(), tracked("scaler-bare-metal-00000002")
    book.add(older)
    book.ending(older, "spawn-timeout")
    book.add(newer)
    book.ending(older, "spawn-timeout")
    book.remove(older)
    assert book.serving(JOB) is newer


def test_a_spawn_that_was_ending_before_the_restart_serves_nothing() -> None:
    book, spawn = SpawnBook(), tracked(state=SpawnState.ENDING)
    book.add(spawn)
    assert book.serving(JOB) is None
    assert not spawn.is_booting


def test_registration_ends_booting_and_counts_as_settled() -> None:
    book, spawn = SpawnBook(), tracked()
    book.add(spawn)
    assert spawn.is_booting
    book.registered(spawn, Instant(SIM_START + 5))
    assert not spawn.is_booting
    assert spawn.is_settled
    assert spawn.spawn.registered_at == SIM_START + 5


def test_one_that_is_being_ended_is_not_booting_though_its_row_says_so() -> None:
    spawn = tracked()
    spawn.is_ending = True
    assert not spawn.is_booting


def test_one_that_is_being_ended_serves_nobody() -> None:
    book, spawn = SpawnBook(), tracked()
    book.add(spawn)
    spawn.is_ending = True
    assert book.serving(JOB) is None


def test_removing_twice_or_something_else_of_the_same_id_changes_nothing() -> None:
    book, spawn, other = SpawnBook(), tracked(), tracked()
    book.add(spawn)
    book.remove(other)
    assert book.get(spawn.agent_id) is spawn
    book.remove(spawn)
    book.remove(spawn)
    assert len(book) == 0
