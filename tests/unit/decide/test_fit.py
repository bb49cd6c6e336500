import pytest

from kici.decide.fit import (
    BUILD_LABEL,
    DOCKER_LABEL,
    JOB_IMAGE_LABEL,
    PODMAN_LABEL,
    AgentShape,
    Misfit,
    MisfitKind,
    class_fits,
)
from kici.domain.job import Demand
from kici.domain.resources import Amount, Ask, ResourceRequest, Shape

GIB = 1 << 30


def shape(  # a builder
    *labels: str,
    gate: tuple[str, ...] = (),
    job_image: bool = False,
    warm_with: Shape | None = None,
) -> AgentShape:
    return AgentShape(
        labels=frozenset(("linux", *labels)),
        gate=frozenset(gate),
        job_image=job_image,
        prespawned=warm_with is not None,
        resources=warm_with,
    )


def ask(
    *labels: str,
    exclude: tuple[str, ...] = (),
    image: str | None = None,
    resources: ResourceRequest | None = None,
) -> Demand:
    return Demand(
        labels=frozenset(labels),
        exclude=frozenset(exclude),
        image=image,
        resources=resources or ResourceRequest(),
    )


def limited(*, cpus: float | None = None, memory: str | None = None) -> ResourceRequest:
    return ResourceRequest(limits=Ask(cpus=cpus, memory=memory))


def kind(misfit: Misfit | None) -> MisfitKind | None:
    return None if misfit is None else misfit.kind


def test_an_agent_must_have_every_label_and_none_that_is_excluded() -> None:
    assert class_fits(shape("gpu"), ask("linux", "gpu")) is None
    assert class_fits(shape(), ask("linux", "gpu", "big")) == Misfit(
        kind=MisfitKind.LABELS_MISSING, words=("big", "gpu")
    )
    assert class_fits(shape("spot"), ask("linux", exclude=("spot",))) == Misfit(
        kind=MisfitKind.LABELS_EXCLUDED, words=("spot",)
    )


@pytest.mark.spec("T1.3")
def test_a_gated_agent_takes_only_jobs_that_name_its_gate() -> None:
    gated = shape("gpu", gate=("gpu",))
    assert kind(class_fits(gated, ask("linux"))) is MisfitKind.GATE_CLOSED
    assert kind(class_fits(gated, ask())) is MisfitKind.GATE_CLOSED
    assert class_fits(gated, ask("gpu")) is None


@pytest.mark.spec("scaler 18.13")
def test_an_agent_inside_a_jobs_image_takes_no_other_job() -> None:
    assert kind(class_fits(shape(job_image=True), ask())) is MisfitKind.OTHER_JOBS_IMAGE
    assert kind(class_fits(shape(JOB_IMAGE_LABEL), ask())) is MisfitKind.OTHER_JOBS_IMAGE


@pytest.mark.spec("scaler 18.14.13")
def test_a_job_with_an_image_needs_a_container_runtime() -> None:
    assert kind(class_fits(shape(), ask(image="python:3.12"))) is MisfitKind.NO_CONTAINER_RUNTIME
    assert class_fits(shape(PODMAN_LABEL), ask(image="python:3.12")) is None
    assert class_fits(shape(DOCKER_LABEL), ask(image="python:3.12")) is None


def test_a_job_whose_image_is_built_needs_an_agent_that_builds() -> None:
    demand = ask(image="dockerfile:ci/Dockerfile")
    assert kind(class_fits(shape(DOCKER_LABEL), demand)) is MisfitKind.NO_CONTAINER_BUILD
    assert class_fits(shape(DOCKER_LABEL, BUILD_LABEL), demand) is None


@pytest.mark.spec("scaler 18.14.12")
def test_a_warm_agent_must_have_exactly_the_declared_limits() -> None:
    four = Shape(requests=Amount(cpus=4), limits=Amount(cpus=4))
    assert kind(class_fits(shape(warm_with=four), ask(resources=limited(cpus=2)))) is MisfitKind.OTHER_RESOURCES
    assert class_fits(shape(warm_with=four), ask(resources=limited(cpus=4))) is None
    assert class_fits(shape(warm_with=four), ask()) is None


def test_a_warm_agent_without_limits_does_not_run_a_job_that_asks_to_be_limited() -> None:
    assert kind(class_fits(shape(warm_with=Shape()), ask(resources=limited(cpus=2)))) is MisfitKind.OTHER_RESOURCES


def test_a_declared_side_stands_for_the_other_one_too() -> None:
    """An agent made for a job that requests one cpu would be limited to one."""
    has = Shape(requests=Amount(cpus=1), limits=Amount(cpus=4))
    misfit = class_fits(shape(warm_with=has), ask(resources=ResourceRequest(requests=Ask(cpus=1))))
    assert misfit == Misfit(kind=MisfitKind.OTHER_RESOURCES, words=("limits.cpus",))


def test_each_differing_field_is_named() -> None:
    has = Shape(requests=Amount(cpus=1, memory_bytes=GIB), limits=Amount(cpus=2, memory_bytes=GIB))
    asked = ResourceRequest(requests=Ask(cpus=1, memory="2g"), limits=Ask(cpus=1, memory="1g"))
    misfit = class_fits(shape(warm_with=has), ask(resources=asked))
    assert misfit is not None
    assert misfit.words == ("requests.memory", "limits.cpus")


def test_a_memory_string_that_cannot_be_read_rules_nothing_out() -> None:
    assert class_fits(shape(warm_with=Shape()), ask(resources=limited(memory="4Q"))) is None


def test_agents_of_unknown_resources_and_static_ones_fit_every_shape() -> None:
    unknown = AgentShape(labels=frozenset({"linux"}), prespawned=True, resources=None)
    static = AgentShape(labels=frozenset({"linux"}), resources=Shape(limits=Amount(cpus=1)))
    assert class_fits(unknown, ask(resources=limited(cpus=2))) is None
    assert class_fits(static, ask(resources=limited(cpus=2))) is None


@pytest.mark.parametrize("of", MisfitKind)
def test_every_misfit_says_why(of: MisfitKind) -> None:
    assert Misfit(kind=of, words=("gpu",)).reason
