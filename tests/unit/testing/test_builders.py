import inspect

import pytest

from kici.domain.resources import Amount
from kici.testing import builders


@pytest.mark.parametrize(
    "build",
    [build for name, build in inspect.getmembers(builders, inspect.isfunction) if name.startswith(("a_", "an_"))],
)
def test_every_builder_gives_a_valid_object_without_being_told_anything(build: object) -> None:
    assert callable(build)
    assert build() == build()


def test_a_test_states_what_matters_and_gets_the_rest() -> None:
    job = builders.a_running_job(exit_code=3)
    assert (job.exit_code, job.agent_id, job.started_at) == (3, builders.AGENT, job.dispatched_at)
    spawn = builders.a_spawn(shape=builders.a_shape(2, 1024), machine_pool="big")
    assert builders.a_reservation(spawn).shape.requests == Amount(cpus=2, memory_bytes=1024)
    assert builders.a_reservation(spawn).machine_pool == "big"
