"""A job's own container as it is described to an engine, and what its image is built from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.decide.container_plan import Injected
from kici.decide.job_container import (
    JobOrder,
    Recipe,
    Sandbox,
    built_tag,
    limits_of,
    plan_job_container,
    recipe_files,
)
from kici.domain.container import ContainerSpec
from kici.domain.resources import NOTHING, Amount

DEFAULT = Amount(cpus=2.0, memory_bytes=2**31)
INJECTED = Injected(volume="kici-runtime-1", entrypoint=("/opt/kici/lib/ld.so", "python", "-m", "kici.apps.agent"))


def spec(**sandbox: object) -> ContainerSpec:
    order = JobOrder(
        name="kici-job-1",
        image="debian:12",
        agent_id="scaler-bare-metal-00000001",
        job_id="job-1",
        run_id="run-1",
        limits=Amount(cpus=0.5, memory_bytes=2**27),
        network="kici-jobs",
        sandbox=Sandbox(default_limits=DEFAULT, **sandbox),  # type: ignore[arg-type]  # one of its settings
    )
    return plan_job_container(order, INJECTED)


def test_it_is_closed_and_limited_and_ends_with_its_maker() -> None:
    made = spec()
    assert made.is_hardened
    assert made.removes_itself
    assert made.reads_input
    assert (made.limits, made.pids_max, made.log_bytes_max) == (Amount(cpus=0.5, memory_bytes=2**27), 512, 0)
    assert made.binds == ("kici-runtime-1:/opt/kici:ro",)
    assert made.network == "kici-jobs"


def test_what_it_runs_is_not_in_its_description() -> None:
    made = spec()
    assert made.entrypoint == ("/opt/kici/lib/ld.so", "python", "-m", "kici.agent.inner")
    assert made.env == {}


def test_no_sweep_of_agents_takes_it_for_one_of_theirs() -> None:
    """They look for an owner and a scaler."""
    assert spec().labels == {
        "kici-managed": "true",
        "kici-job-container": "true",
        "kici-agent-id": "scaler-bare-metal-00000001",
        "kici-bound-job-id": "job-1",
        "kici-run-id": "run-1",
    }


def test_a_closed_root_puts_the_work_directory_into_memory() -> None:
    assert (spec().scratch, spec().tmpfs) == (("/workspace",), ("/tmp",))
    closed = spec(is_root_read_only=True)
    assert (closed.is_root_read_only, closed.scratch, closed.tmpfs) == (True, (), ("/tmp", "/workspace"))


@pytest.mark.parametrize(
    ("declared", "cpu_count", "expected"),
    [
        (NOTHING, 8, DEFAULT),
        (NOTHING, 1, Amount(cpus=1.0, memory_bytes=2**31)),
        (Amount(cpus=4.0), 1, Amount(cpus=4.0, memory_bytes=2**31)),
        (Amount(memory_bytes=2**20), 8, Amount(cpus=2.0, memory_bytes=2**20)),
    ],
)
def test_every_container_has_limits(declared: Amount, cpu_count: int, expected: Amount) -> None:
    """Declared ones as they are; defaults never exceed a small host, which would refuse them."""
    assert limits_of(declared, DEFAULT, cpu_count=cpu_count) == expected


TEXTS = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3)
RECIPES = st.builds(
    Recipe,
    dockerfile=st.text(max_size=4),
    context=TEXTS,
    target=st.none() | st.text(min_size=1, max_size=3),
    args=TEXTS,
)


@given(RECIPES, RECIPES)
def test_recipes_share_an_image_only_if_they_are_equal(one: Recipe, other: Recipe) -> None:
    assert (built_tag(one) == built_tag(other)) == (one == other)


def test_files_of_a_build_are_what_they_say_they_are() -> None:
    files = recipe_files(Recipe(dockerfile="D", context={"run.sh": "#!/bin/sh\n", "D": "FROM a\n"}))
    assert [(file.path, file.mode, file.content) for file in files] == [
        ("D", 0o644, b"FROM a\n"),
        ("run.sh", 0o755, b"#!/bin/sh\n"),
    ]


def test_a_dockerfile_must_be_among_its_files() -> None:
    with pytest.raises(ValueError, match=r"there is no D among the files of the build \(no file at all\)"):
        _ = recipe_files(Recipe(dockerfile="D", context={}))
