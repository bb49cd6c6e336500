"""What an agent is told of a job when it may start it: where to run it, with which values."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.services.test_container_spawn import Secrets

from kici.decide.fit import BUILD_LABEL, DOCKER_LABEL, AgentShape
from kici.domain.errors import JobRefused, NotFound
from kici.domain.job import Job, JobBuild
from kici.domain.resources import Amount, Ask, ResourceRequest, Shape
from kici.services.job_start import JobStarts
from kici.testing.builders import a_job
from kici.wire.messages import JobContainer, JobStart

PLAIN = AgentShape(labels=frozenset({"linux"}))
WITH_ENGINE = AgentShape(labels=frozenset({"linux", DOCKER_LABEL, BUILD_LABEL}))


def of(**spec: Any) -> Job:
    job = a_job()
    return replace(job, spec=replace(job.spec, **spec))


async def told(job: Job, shape: AgentShape = WITH_ENGINE, **secrets: str) -> JobStart:
    return await JobStarts(secrets=Secrets(**secrets), log_bytes_max=77).message(job, shape)


async def container(job: Job, shape: AgentShape = WITH_ENGINE, **secrets: str) -> JobContainer:
    found = (await told(job, shape, **secrets)).container
    assert found is not None
    return found


async def test_secrets_become_values_and_the_rest_is_as_it_was_asked() -> None:
    job = of(env={"A": "1"}, secrets={"TOKEN": "registry:token"}, timeout_ms=5000)
    message = await told(job, PLAIN, token="hunter2")
    assert (message.job_id, message.command, message.env) == (job.id, list(job.spec.command), {"A": "1"})
    assert (message.secrets, message.timeout_ms, message.max_log_bytes) == ({"TOKEN": "hunter2"}, 5000, 77)
    assert message.container is None


async def test_a_secret_that_is_missing_is_named() -> None:
    with pytest.raises(NotFound, match="registry:token"):
        _ = await told(of(secrets={"TOKEN": "registry:token"}))


async def test_an_image_comes_with_its_log_in() -> None:
    found = await container(
        of(image="ghcr.io/a/b:1", registry={"username": "robot", "password": "registry:token"}), token="hunter2"
    )
    assert (found.image, found.username, found.password, found.registry) == (
        "ghcr.io/a/b:1",
        "robot",
        "hunter2",
        "ghcr.io",
    )
    assert "hunter2" not in repr(found)
    assert (await container(of(image="debian"))).registry is None


async def test_a_dockerfile_comes_with_what_it_is_built_from() -> None:
    build = JobBuild(context={"D": "FROM scratch"}, target="test", args={"A": "1"})
    found = await container(of(image="dockerfile:D", build=build))
    assert (found.image, found.dockerfile, found.context) == (None, "D", {"D": "FROM scratch"})
    assert (found.target, found.args) == ("test", {"A": "1"})


async def test_an_agent_in_the_jobs_image_makes_no_container() -> None:
    assert (await told(of(image="debian"), replace(PLAIN, job_image=True))).container is None


@pytest.mark.parametrize(
    ("image", "labels", "reason"),
    [
        ("debian", (), "neither docker nor podman; name labels of agents that have one, or of a container scaler"),
        ("dockerfile:D", (), "neither docker nor podman; name labels of process agents .* or build the image yourself"),
        ("dockerfile:D", (DOCKER_LABEL,), "cannot build images; name labels of process agents"),
    ],
)
async def test_an_agent_that_cannot_make_the_container_is_no_place_for_the_job(
    image: str, labels: tuple[str, ...], reason: str
) -> None:
    """Also one that was made for it, and an older one that would run it outside."""
    with pytest.raises(JobRefused, match=reason):
        _ = await told(of(image=image), AgentShape(labels=frozenset({"linux", *labels})))


@pytest.mark.parametrize(
    ("declared", "given", "expected"),
    [
        (Ask(cpus=0.5, memory="64m"), Amount(cpus=4, memory_bytes=1000), (0.5, 64 * 2**20)),
        (Ask(cpus=0.5), Amount(cpus=4, memory_bytes=1000), (0.5, 1000)),
        (Ask(), Amount(), (0, 0)),
    ],
)
async def test_its_limits_are_the_jobs_else_its_agents(
    declared: Ask, given: Amount, expected: tuple[float, int]
) -> None:
    job = of(image="debian")
    job = replace(job, demand=replace(job.demand, resources=ResourceRequest(limits=declared)))
    found = await container(job, replace(WITH_ENGINE, resources=Shape(limits=given)))
    assert (found.cpus, found.memory_bytes) == expected
