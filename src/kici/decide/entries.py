"""Routable label sets: what each scaler offers, demands and carries, one value for each label set.

Made once for each configuration, from the entry and the host.  Retiring scalers are left out, which is how a
removed scaler stops taking work the moment that a reload commits.  Everything that a spawn needs to know of
its set is here, so that no later step looks a set up by index.
"""

from dataclasses import dataclass

from kici.domain.ids import ScalerName
from kici.domain.resources import UNDECLARED, ResourceRequest, Shape, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Routable:
    """One label set of one scaler."""

    scaler: ScalerName
    backend_type: str
    set_index: int
    label_set: tuple[str, ...]
    """Declared labels, in the order of the file."""
    offers: frozenset[str]
    """What a job may ask for: declared, os and arch, taints, and the `kici:` labels of agent, scaler and roles."""
    agent_labels: tuple[str, ...]
    """What an agent of this set carries, and what its token is bound to."""
    gate: frozenset[str]
    """What a job must ask for."""
    taints: tuple[str, ...] = ()
    """Platform tokens; the agent carries them, and a warm pool must count with them."""
    roles: tuple[str, ...] | None = None
    """None: all roles."""
    resources: ResourceRequest = UNDECLARED
    """Of the set."""
    defaults: ResourceRequest = UNDECLARED
    """Of the whole configuration."""
    runs_job_image: bool = False
    """An agent for a job with its own image is started inside that image."""

    def shape(self, job: ResourceRequest = UNDECLARED) -> Shape:
        """Resources of an agent of this set for a job.  Raises `ValueError` for a memory string that cannot be read."""
        return resolve(job, self.resources, self.defaults)
