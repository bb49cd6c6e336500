"""Fit: whether a connected agent may run a job.

Labels, excludes and the gate are judged for every agent.  What follows from how an agent was made is judged too:
one that lives in another job's image takes no other job, a job with its own container needs a container runtime,
and an agent that was not made for this job must have exactly the resources that the job declares.  Exactly,
not at least: a job that asks to be limited to two cpus must not run unlimited on four.

`class_fits` knows no single job and no single agent, so its answer may be remembered for each pair of agent
shape and demand class.  The job that an agent was made for is not judged here: registration gives it to its agent.

Every agent reports its container runtimes by itself, so a missing runtime label means that there is none.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from kici.domain.job import Demand
from kici.domain.resources import Amount, Ask, ResourceRequest, Shape, parse_memory

DOCKER_LABEL: Final = "kici:runtime:docker"
PODMAN_LABEL: Final = "kici:runtime:podman"
BUILD_LABEL: Final = "kici:runtime:container-build"
JOB_IMAGE_LABEL: Final = "kici:runtime:job-image"
DOCKERFILE_PREFIX: Final = "dockerfile:"
"""Of a demand's image that has to be built first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """All of an agent that decides which demands it can serve.  Agents of equal shape are interchangeable."""

    labels: frozenset[str]
    gate: frozenset[str] = frozenset()
    job_image: bool = False
    """It runs inside the image of the job that it was made for."""
    prespawned: bool = False
    """Judged by its resources: made without a job (warm), or its own job is over or gone and it takes others."""
    resources: Shape | None = None
    """What it was started with; None: not known, and then not judged."""


class MisfitKind(StrEnum):
    LABELS_MISSING = "labels-missing"
    LABELS_EXCLUDED = "labels-excluded"
    GATE_CLOSED = "gate-closed"
    OTHER_JOBS_IMAGE = "other-jobs-image"
    NO_CONTAINER_RUNTIME = "no-container-runtime"
    NO_CONTAINER_BUILD = "no-container-build"
    OTHER_RESOURCES = "other-resources"


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """What rules an agent out."""

    kind: MisfitKind
    words: tuple[str, ...] = ()
    """The labels or resources in question."""

    @property
    def reason(self) -> str:
        """Follows "the agent does not fit:"."""
        words = ", ".join(self.words)
        match self.kind:
            case MisfitKind.LABELS_MISSING:
                return f"it lacks {words}"
            case MisfitKind.LABELS_EXCLUDED:
                return f"the job excludes {words}"
            case MisfitKind.GATE_CLOSED:
                return f"it only takes jobs that name {words}"
            case MisfitKind.OTHER_JOBS_IMAGE:
                return "it runs inside the image of another job"
            case MisfitKind.NO_CONTAINER_RUNTIME:
                return "the job runs in a container and the agent's host has neither docker nor podman"
            case MisfitKind.NO_CONTAINER_BUILD:
                return "the job's container is built first and the agent's host cannot build images"
            case MisfitKind.OTHER_RESOURCES:
                return f"it was started with other resources than the job declares ({words})"
            case _:
                assert_never(self.kind)


def class_fits(shape: AgentShape, demand: Demand) -> Misfit | None:
    """None: an agent of this shape, not made for the job in question, can run jobs of this demand."""
    return _offers(shape, demand) or _can_run(shape, demand)


def _offers(shape: AgentShape, demand: Demand) -> Misfit | None:
    if missing := demand.labels - shape.labels:
        return _misfit(MisfitKind.LABELS_MISSING, missing)
    if excluded := demand.exclude & shape.labels:
        return _misfit(MisfitKind.LABELS_EXCLUDED, excluded)
    if unnamed := shape.gate - demand.labels:
        return _misfit(MisfitKind.GATE_CLOSED, unnamed)
    return None


def _can_run(shape: AgentShape, demand: Demand) -> Misfit | None:
    if shape.job_image or JOB_IMAGE_LABEL in shape.labels:
        return Misfit(kind=MisfitKind.OTHER_JOBS_IMAGE)
    lack = lacks_for_container(shape, demand.image)
    if lack is not None:
        return lack
    if shape.prespawned and shape.resources is not None:
        differing = differing_resources(shape.resources, demand.resources)
        if differing:
            return Misfit(kind=MisfitKind.OTHER_RESOURCES, words=differing)
    return None


def lacks_for_container(shape: AgentShape, image: str | None) -> Misfit | None:
    """What an agent that lives in no job's image lacks to make a container of this one."""
    if image is None:
        return None
    if shape.labels.isdisjoint((DOCKER_LABEL, PODMAN_LABEL)):
        return Misfit(kind=MisfitKind.NO_CONTAINER_RUNTIME)
    if image.startswith(DOCKERFILE_PREFIX) and BUILD_LABEL not in shape.labels:
        return Misfit(kind=MisfitKind.NO_CONTAINER_BUILD)
    return None


def container_cure(image: str | None) -> str:
    """What to do about that; follows the misfit's reason."""
    if image is not None and image.startswith(DOCKERFILE_PREFIX):
        return (
            "name labels of process agents on a host with a container engine, which build images "
            "(a bare-metal scaler makes such agents, a container scaler does not), or build the image yourself and "
            "name it as the container's `image`"
        )
    return "name labels of agents that have one, or of a container scaler"


def differing_resources(agent: Shape, declared: ResourceRequest) -> tuple[str, ...]:
    """The declared fields that are not equal to what the agent was started with.

    Declared counts after mirroring, as it would if an agent were made for the job.  A memory string that cannot be
    read rules nothing out: the spawn that it would need says what is wrong with it.
    """
    asked = declared.mirrored()
    return (*_differing("requests", agent.requests, asked.requests), *_differing("limits", agent.limits, asked.limits))


def _differing(side: str, has: Amount, asked: Ask) -> list[str]:
    found = []
    if asked.cpus is not None and asked.cpus != has.cpus:
        found.append(f"{side}.cpus")
    if asked.memory is not None:
        try:
            if parse_memory(asked.memory) != has.memory_bytes:
                found.append(f"{side}.memory")
        except ValueError:
            pass
    return found


def _misfit(kind: MisfitKind, labels: frozenset[str]) -> Misfit:
    return Misfit(kind=kind, words=tuple(sorted(labels)))
