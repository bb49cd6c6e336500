"""What an agent is told when it may start a job: references become values, for this one message.

The values are in no row and no log.  Whether the one who submitted the job may use those secrets was judged at
submission.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, assert_never

from kici.decide.fit import AgentShape, container_cure, lacks_for_container
from kici.decide.registry_auth import BuiltContainer, ImageContainer, LogIn, NoContainer, container_of
from kici.domain.errors import JobRefused, KiciError, StoreDown
from kici.domain.ids import OrgId
from kici.domain.job import Job
from kici.domain.resources import NOTHING, Amount, amount
from kici.domain.secret import SecretRef, parse_secret_ref
from kici.wire.messages import JobContainer, JobStart


class SecretSource(Protocol):
    async def resolve(self, org: OrgId, refs: Iterable[SecretRef]) -> dict[SecretRef, str]:
        """All or none.  Raises a `KiciError` that names the reference, never the value."""
        ...


class JobStarts:
    def __init__(self, *, secrets: SecretSource, log_bytes_max: int | None) -> None:
        """`log_bytes_max`: output kept of a job, both streams together; None: the agent's default."""
        self._secrets = secrets
        self._log_bytes_max = log_bytes_max

    async def message(self, job: Job, shape: AgentShape) -> JobStart:
        """For an agent of this shape.

        Raises `JobRefused` when the job asks for what this agent cannot give it, another `KiciError` when a secret
        cannot be had, `StoreDown`.
        """
        spec = job.spec
        refs = {name: parse_secret_ref(text) for name, text in spec.secrets.items()}
        values = await self._secrets.resolve(job.org, refs.values()) if refs else {}
        return JobStart(
            job_id=job.id,
            run_id=job.run_id,
            name=job.name,
            command=list(spec.command),
            env=spec.env,
            secrets={name: values[ref] for name, ref in refs.items()},
            timeout_ms=spec.timeout_ms,
            max_log_bytes=self._log_bytes_max,
            container=None if shape.job_image else await self._container(job, shape),
        )

    async def _container(self, job: Job, shape: AgentShape) -> JobContainer | None:
        spec = job.spec
        misfit = lacks_for_container(shape, spec.image)
        if misfit is not None:
            raise JobRefused(f"{misfit.reason}; {container_cure(spec.image)}")
        try:
            described = container_of(spec.image, spec.registry)
        except ValueError as error:
            raise JobRefused(f"job {job.name}: {error}") from error
        match described:
            case NoContainer():
                return None
            case ImageContainer(image=image, log_in=log_in):
                place: dict[str, str] = {"image": image}
            case BuiltContainer(dockerfile=dockerfile, log_in=log_in):
                place = {"dockerfile": dockerfile}
            case _:
                assert_never(described)
        username, password = (None, None) if log_in is None else await resolve_log_in(self._secrets, job.org, log_in)
        limits = limits_for(job, shape)
        return JobContainer(
            **place,
            context=spec.build.context,
            target=spec.build.target,
            args=spec.build.args,
            username=username,
            password=password,
            registry=None if log_in is None else log_in.server,
            cpus=limits.cpus,
            memory_bytes=limits.memory_bytes,
        )


def limits_for(job: Job, shape: AgentShape) -> Amount:
    """What the job declares, field by field, else what its agent was started with; 0: neither."""
    try:
        declared = amount(job.demand.resources.mirrored().limits)
    except ValueError as error:
        raise JobRefused(f"job {job.name}: {error}") from error
    given = NOTHING if shape.resources is None else shape.resources.limits
    return Amount(cpus=declared.cpus or given.cpus, memory_bytes=declared.memory_bytes or given.memory_bytes)


async def resolve_log_in(secrets: SecretSource, org: OrgId, log_in: LogIn) -> tuple[str, str]:
    """User name and password.  Raises `JobRefused` when a secret is missing or unreadable, `StoreDown`."""
    try:
        values: Mapping[SecretRef, str] = await secrets.resolve(org, log_in.references)
    except StoreDown:
        raise
    except KiciError as error:
        raise JobRefused(f"the log-in at registry {log_in.server} is not there: {error}") from error
    name = log_in.username
    return name if isinstance(name, str) else values[name], values[log_in.password]
