"""A job's own image on its way to a backend: references become values, and a job that can never start is ended.

The values live as long as the spawn: they are in no row, no log and no message.  Whether the one who submitted the
job may use those secrets was judged at submission.
"""

from dataclasses import dataclass
from typing import Final, assert_never

from kici.decide.registry_auth import BuiltContainer, ImageContainer, NoContainer, container_of
from kici.domain.errors import JobRefused
from kici.domain.ids import AgentId, InstanceId, JobId, ScalerName
from kici.domain.job import Job, JobStatus, Outcome
from kici.ports.backend import JobContainer
from kici.ports.store import Claim, JobStore
from kici.services.job_lifecycle import JobLifecycle
from kici.services.job_start import SecretSource, resolve_log_in

ACK_MS: Final = 60_000
"""How long a refused job may stay claimed if this coordinator dies between the two writes."""


class ContainerSpawn:
    def __init__(self, *, secrets: SecretSource) -> None:
        self._secrets = secrets

    async def resolve(self, job: Job, *, in_image: bool) -> JobContainer | None:
        """The image that an agent for this job is made of, with its log-in; None: an ordinary agent serves.

        An ordinary agent makes the job's container itself.  `in_image`: whether the scaler makes agents of jobs'
        images.  Raises `JobRefused` when a secret is missing or unreadable; `StoreDown`.
        """
        try:
            described = container_of(job.spec.image, job.spec.registry)
        except ValueError as error:
            raise JobRefused(f"job {job.name}: {error}") from error
        match described:
            case NoContainer() | BuiltContainer():
                return None
            case ImageContainer() if not in_image:
                return None
            case ImageContainer(image=image, log_in=log_in):
                if log_in is None:
                    return JobContainer(image=image)
                username, password = await resolve_log_in(self._secrets, job.org, log_in)
                return JobContainer(image=image, username=username, password=password, registry=log_in.server)
            case _:
                assert_never(described)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRefuser:
    """Ends a waiting job that no try can help."""

    store: JobStore
    lifecycle: JobLifecycle
    instance_id: InstanceId

    async def refuse(self, job_id: JobId, agent_id: AgentId, scaler: ScalerName, reason: str) -> bool:
        """Fail it with the reason, in the name of the agent that could not be made.  Whether it still waited."""
        claim = Claim(agent_id=agent_id, instance_id=self.instance_id, ack_ms=ACK_MS, scaler=scaler)
        if await self.store.claim_job(job_id, claim) is None:
            return False
        return await self.lifecycle.end(
            job_id,
            Outcome(status=JobStatus.FAILED, reason=reason),
            agent_id=agent_id,
            from_statuses=frozenset({JobStatus.DISPATCHED}),
        )
