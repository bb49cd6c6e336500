"""What a job document and a run file may contain.  These types are also the published schema.

They say which keys exist and of which type each value is; `document_rules` judges the values.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kici.domain.ids import DEFAULT_ORG

TEXT_MAX: Final = 200
TIMEOUT_SECONDS_MAX: Final = 366 * 24 * 3600

Seconds = Annotated[float, Meta(ge=0, le=TIMEOUT_SECONDS_MAX)]
Name = Annotated[str, Meta(max_length=TEXT_MAX)]


class _Document(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    pass


class AskDocument(_Document, frozen=True, kw_only=True):
    """An amount of cpus (cores, fractions allowed) and memory (such as `512m`, `2g`, `512Mi`)."""

    cpus: float | None = None
    memory: str | None = None


class ResourcesDocument(_Document, frozen=True, kw_only=True):
    """Either flat (`cpus`, `memory`: request and limit at once) or `requests` and `limits`."""

    cpus: float | None = None
    memory: str | None = None
    requests: AskDocument | None = None
    limits: AskDocument | None = None


class CredentialsDocument(_Document, frozen=True, kw_only=True):
    """Credentials of an image's registry.  `password` is always a reference `<context>:<key>` to a stored secret."""

    password: str
    username: str | None = None
    """A reference when it contains a colon, else the name itself; absent: `x-access-token`."""
    registry: str | None = None


class ContainerDocument(_Document, frozen=True, kw_only=True):
    """The job's own container: an image, or a Dockerfile that the agent builds one from."""

    image: str | None = None
    dockerfile: str | None = None
    """Path of the Dockerfile in `context`."""
    context: dict[str, str] = {}
    """The files that the image is built from: their text by their path."""
    target: str | None = None
    """Stage of the Dockerfile to stop at; absent: the last."""
    args: dict[str, str] = {}
    """Build arguments.  They show in the image: nothing secret belongs there."""
    credentials: CredentialsDocument | None = None


class SelectorDocument(_Document, frozen=True, kw_only=True):
    """Labels that the agent must carry, and labels that it must not carry."""

    labels: list[str] = []
    exclude: list[str] = []


class JobFields(_Document, frozen=True, kw_only=True):
    name: Name | None = None
    runs_on: list[str] | SelectorDocument | None = None
    """Absent: any agent whose gate is open."""
    run: str | None = None
    """A shell script.  Exactly one of `run` and `command`."""
    command: list[str] | None = None
    """An argument vector, run as it is."""
    env: dict[str, str] = {}
    resources: ResourcesDocument | None = None
    container: str | ContainerDocument | None = None
    timeout_seconds: Seconds | None = None
    """Longest running time."""
    queue_timeout_seconds: Seconds | None = None
    """Longest waiting time; 0: for ever; absent: the organisation's setting."""
    secrets: dict[str, str] = {}
    """Name in the job's environment -> `<context>:<key>`."""


class JobDocument(JobFields, frozen=True, kw_only=True):
    """One job, to be run on its own."""

    org: str = DEFAULT_ORG


class RunJobDocument(JobFields, frozen=True, kw_only=True):
    """One job of a run file."""

    needs: list[str] = []
    """Ids of jobs of the same file that must succeed first."""


class RunDocument(_Document, frozen=True, kw_only=True):
    """A run file: jobs by their ids, which may need each other."""

    jobs: dict[str, RunJobDocument]
    name: Name | None = None
    org: str = DEFAULT_ORG
