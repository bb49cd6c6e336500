"""A container engine: what Docker and Podman have in common, as far as agents need it.

Every call may raise `EngineDown` (nobody answers, or too late).  Calls about one container raise `NotFound` when it
is not there.  Bounds of time are the adapter's; a caller that is cancelled leaves the engine's work undecided, so
calls that make something are awaited to their end (`kit.finish`).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import IO, Protocol

from kici.domain.container import ContainerFile, ContainerSpec, NetworkSpec, RegistryAuth
from kici.domain.errors import Permanent, Retryable


class EngineDown(Retryable):
    """The engine did not answer."""


class EngineRefused(Permanent):
    """The engine understood and will not do it: a program that is not in the image, a volume that it may not mount."""


class ImageRefused(Permanent):
    """A registry will not give the image: it has none of that name, or not for us."""


class EngineKind(StrEnum):
    DOCKER = "docker"
    PODMAN = "podman"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Where an engine listens."""

    url: str
    """`unix:///path` or `tcp://host:port`."""
    kind: EngineKind
    is_local: bool

    @property
    def socket(self) -> str | None:
        """Path of a local engine's socket."""
        return self.url.removeprefix("unix://") if self.is_local else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    version: str
    machine: str
    """Processor, as `uname -m` says it."""
    system: str
    """`linux`, unless somebody runs containers of another kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    id: str
    """Names the content, whatever the tag."""
    user: str = ""
    """As the image says it: empty, a number or a name, perhaps with a group."""
    machine: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerInfo:
    """One container, now."""

    id: str
    name: str
    labels: Mapping[str, str]
    is_running: bool
    is_paused: bool = False
    addresses: Mapping[str, str] = field(default_factory=dict)
    """IPv4 address in each network that it is connected to."""
    pid: int | None = None
    """Of its first process, as the engine's host counts them, while it runs; a listing does not tell."""
    exit_code: int | None = None
    """None while it was never started, or by a listing, which does not tell."""
    oom_killed: bool = False
    error: str = ""
    """What the engine says why it does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    """Something happened to a container."""

    action: str
    """`start`, `die`, `oom`, `destroy`, …"""
    container_id: str
    labels: Mapping[str, str]


OnProgress = Callable[[str], None]
Ready = Callable[[], Awaitable[None]]
"""Done once a container runs, before it is given anything."""


class Engine(Protocol):
    @property
    def address(self) -> EngineAddress: ...

    async def info(self) -> EngineInfo: ...

    async def folder(self) -> str | None:
        """Where it keeps images, containers and volumes on its host; None: it does not say."""
        ...

    async def image(self, name: str) -> ImageInfo | None:
        """None: it is not here."""
        ...

    async def pull(self, image: str, auth: RegistryAuth | None, on_progress: OnProgress) -> None:
        """Follow a pull to its end.

        Raises `ImageRefused` (no such image, or not for us) or `Retryable` (the registry cannot be reached).
        Messages never hold the password.
        """
        ...

    async def create(self, spec: ContainerSpec) -> str:
        """The id.  Raises `NotFound` without its image, `Conflict` for a taken name, `EngineRefused`."""
        ...

    async def put(self, container: str, files: Sequence[ContainerFile]) -> None:
        """Put files into a container that does not run yet, each folder before what is in it."""
        ...

    async def put_archive(self, container: str, folder: str, tar: bytes | IO[bytes]) -> None:
        """Unpack a whole archive below a folder of a container, into volumes as well."""
        ...

    async def read(self, container: str, path: str, *, bytes_max: int) -> bytes | None:
        """A small file of a container, running or not; None: there is none."""
        ...

    async def start(self, container: str, *, given: bytes = b"", ready: Ready | None = None) -> None:
        """`given`: its standard input, which no inspection or log shows.  It comes when `ready` has returned.

        Raises `EngineRefused` when its program cannot be started, and whatever `ready` raises: nothing is given then.
        """
        ...

    async def inspect(self, container: str) -> ContainerInfo | None:
        """By id or name; None: it is gone."""
        ...

    async def containers(self, labels: Mapping[str, str]) -> list[ContainerInfo]:
        """All that carry these labels, running or not."""
        ...

    async def stop(self, container: str, grace_seconds: int) -> None:
        """Ask, then force after the grace.  One that does not run, or is gone, is fine."""
        ...

    async def remove(self, container: str) -> bool:
        """By force, with its anonymous volumes.  Whether there was one."""
        ...

    async def logs(self, container: str, *, lines: int) -> list[str]:
        """Its last lines."""
        ...

    def follow(self, container: str, *, lines: int) -> AsyncIterator[str]:
        """Its last lines, then every new one, until it ends."""
        ...

    async def network(self, name: str) -> str | None:
        """Name of the interface on the host that is the bridge of exactly this network; None: there is none."""
        ...

    async def connect(self, container: str, network: str) -> None:
        """Have it in this network too, from now on.  Raises `EngineRefused`."""
        ...

    async def disconnect(self, container: str, network: str) -> None:
        """Have it in this network no more."""
        ...

    async def create_network(self, spec: NetworkSpec) -> None:
        """Raises `Conflict` when somebody else was faster, `EngineRefused` when the addresses are taken."""
        ...

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """One that is there already is fine."""
        ...

    async def remove_volume(self, name: str) -> bool:
        """False: it is in use, or gone."""
        ...

    async def volumes(self, labels: Mapping[str, str]) -> list[str]: ...

    def events(self, labels: Mapping[str, str]) -> AsyncIterator[EngineEvent | None]:
        """Of containers that carry these labels, until the engine goes.  First None: from here on none is missed."""
        ...

    async def close(self) -> None: ...


FindEngine = Callable[[], EngineAddress]
"""Where this scaler's engine is, looked for anew.  Raises `DeterministicRefusal` with everything that was tried."""
EngineAt = Callable[[EngineAddress], Engine]
"""The one client of an engine, shared by all scalers that use it."""
