"""What a job's container comes to: nothing, an image to be an agent's, or one that the agent builds first.

Three answers, and they are kept apart: whoever sees no container must not take it for one without a log-in.
Only references are dealt with here; `services.container_spawn` trades them for values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kici.domain.container import registry_of
from kici.domain.document_rules import DOCKERFILE_PREFIX, REGISTRY_USER
from kici.domain.secret import SecretRef, parse_secret_ref


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIn:
    """How to log in at a registry, the secret parts by reference."""

    server: str
    password: SecretRef
    username: str | SecretRef = REGISTRY_USER

    @property
    def references(self) -> tuple[SecretRef, ...]:
        return (self.password,) if isinstance(self.username, str) else (self.username, self.password)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoContainer:
    """The job runs wherever an agent is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageContainer:
    """The job runs in an image that exists."""

    image: str
    log_in: LogIn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltContainer:
    """The job runs in an image that its agent builds: there is nothing that an agent could be made of."""

    dockerfile: str
    log_in: LogIn | None = None


JobsContainer = NoContainer | ImageContainer | BuiltContainer


def is_ready(image: str | None) -> bool:
    """Whether a job's image exists, so that its agent can live in it."""
    return image is not None and not image.startswith(DOCKERFILE_PREFIX)


def container_of(image: str | None, credentials: Mapping[str, str]) -> JobsContainer:
    """What the image and the credentials of a job's description mean.

    Raises `ValueError` for credentials without a password, with one that is no reference, or without a registry
    where no image names one.  A value is never part of the message: it may be a secret in the wrong place.
    """
    if image is None:
        return NoContainer()
    if image.startswith(DOCKERFILE_PREFIX):
        log_in = _log_in(credentials, registry=None)
        return BuiltContainer(dockerfile=image.removeprefix(DOCKERFILE_PREFIX), log_in=log_in)
    return ImageContainer(image=image, log_in=_log_in(credentials, registry=registry_of(image)))


def _log_in(credentials: Mapping[str, str], *, registry: str | None) -> LogIn | None:
    if not credentials:
        return None
    server = credentials.get("registry") or registry
    if server is None:
        raise ValueError("container.credentials.registry is missing: a Dockerfile names no registry to log in to")
    if "password" not in credentials:
        raise ValueError("container.credentials.password is missing; give it as a reference <context>:<key>")
    name = credentials.get("username") or REGISTRY_USER
    return LogIn(
        server=server,
        password=_reference(credentials["password"], "password"),
        username=_reference(name, "username") if ":" in name else name,
    )


def _reference(text: str, what: str) -> SecretRef:
    try:
        return parse_secret_ref(text)
    except ValueError:
        raise ValueError(f"container.credentials.{what} is no reference <context>:<key> to a stored secret") from None
