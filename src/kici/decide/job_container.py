"""A job's own container on an agent's host: its description, its limits, and what its image is built from.

The agents' containers are `container_plan`'s.  Those stay open for the job that runs in them; these are closed: no
capabilities, no new privileges, few processes, limits in any case.  Nothing secret is in a description: command and
environment reach the job through its first process.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kici.decide.container_plan import AGENT, JOB, MANAGED, RUN, RUNTIME_PLACE, Injected
from kici.domain.container import ContainerFile, ContainerSpec
from kici.domain.resources import Amount

KIND: Final = "kici-job-container"
"""Label of all of them."""
BUILT: Final = "kici-built"
"""Label of images that were built for jobs."""
BUILT_NAME: Final = "kici-built"
WORKSPACE: Final = "/workspace"
"""Where the job starts; empty, and gone with the container."""
STARTER: Final = "kici.agent.inner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """How closed the containers of one agent are."""

    is_hardened: bool = True
    pids_max: int = 512
    default_limits: Amount
    """Of jobs that declare none."""
    is_root_read_only: bool = False
    """Then the work directory is in memory."""
    user: str | None = None
    """None: whom the image says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """One container to be made."""

    name: str
    image: str
    agent_id: str
    job_id: str
    run_id: str
    limits: Amount
    """What the job declares; a dimension of 0: nothing."""
    network: str
    sandbox: Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What an image is built from."""

    dockerfile: str
    context: Mapping[str, str] = field(repr=False)
    target: str | None = None
    args: Mapping[str, str] = field(default_factory=dict)


def limits_of(declared: Amount, default: Amount, *, cpu_count: int) -> Amount:
    """Each dimension as declared, else the default, which no small host may fail on."""
    cpus = declared.cpus or min(default.cpus, float(cpu_count))
    return Amount(cpus=cpus, memory_bytes=declared.memory_bytes or default.memory_bytes)


def plan_job_container(order: JobOrder, injected: Injected) -> ContainerSpec:
    """The container of one job, to be told over its input what to run."""
    sandbox = order.sandbox
    # Nobody can be given a folder of a volume below a root that is closed; what is in memory is everybody's.
    in_memory = (WORKSPACE,) if sandbox.is_root_read_only else ()
    return ContainerSpec(
        name=order.name,
        image=order.image,
        entrypoint=starter(injected),
        labels=labels_of(order),
        working_dir=WORKSPACE,
        user=sandbox.user,
        binds=(f"{injected.volume}:{RUNTIME_PLACE}:ro",),
        network=order.network,
        limits=order.limits,
        pids_max=sandbox.pids_max,
        log_bytes_max=0,
        scratch=() if in_memory else (WORKSPACE,),
        tmpfs=("/tmp", *in_memory),  # noqa: S108 (the container's own)
        is_hardened=sandbox.is_hardened,
        is_root_read_only=sandbox.is_root_read_only,
        reads_input=True,
        removes_itself=True,
    )


def starter(injected: Injected) -> tuple[str, ...]:
    """The runtime's interpreter with the program that waits for a job, in place of the agent."""
    return (*injected.entrypoint[:-1], STARTER)


def labels_of(order: JobOrder) -> dict[str, str]:
    """Without an owner or a scaler: no sweep of agents' containers may take it for one of them."""
    return {MANAGED: "true", KIND: "true", AGENT: order.agent_id, JOB: order.job_id, RUN: order.run_id}


def built_tag(recipe: Recipe) -> str:
    """The name of the image that a recipe makes: equal recipes make one image."""
    digest = hashlib.sha256()
    parts = [recipe.dockerfile, recipe.target or ""]
    for table in (recipe.context, recipe.args):
        parts.append(str(len(table)))
        for name in sorted(table):
            parts += [name, table[name]]
    for part in parts:
        data = part.encode()
        digest.update(b"%d:" % len(data) + data)
    return f"{BUILT_NAME}:{digest.hexdigest()[:32]}"


def recipe_files(recipe: Recipe) -> tuple[ContainerFile, ...]:
    """The files that go to the engine.  Raises `ValueError` when the Dockerfile is not among them."""
    if recipe.dockerfile not in recipe.context:
        held = ", ".join(sorted(recipe.context)[:10]) or "no file at all"
        raise ValueError(
            f"there is no {recipe.dockerfile} among the files of the build ({held}); "
            "give it, and what it copies, in container.context"
        )
    return tuple(
        ContainerFile(path=name, mode=0o755 if text.startswith("#!") else 0o644, content=text.encode())
        for name, text in sorted(recipe.context.items())
    )
