"""Containers as this software asks an engine for them: nouns only, free of any engine's spelling."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kici.domain.resources import NOTHING, Amount

DOCKER_HUB: Final = "docker.io"
PIDS_MAX: Final = 4096
"""Processes of one agent's container."""
LOG_BYTES_MAX: Final = 8 * 1024 * 1024
"""Output of an agent program that its engine keeps.  Jobs' output does not go there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryAuth:
    """A log-in at one registry.  Never shown."""

    username: str
    password: str = field(repr=False)
    server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """One container to be created."""

    name: str
    image: str
    entrypoint: tuple[str, ...] | None = None
    """None: what the image says, command included."""
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    working_dir: str | None = None
    user: str | None = None
    binds: tuple[str, ...] = ()
    """`<path or volume>:<path inside>[:<options>]`."""
    network: str | None = None
    """None: the engine's default network."""
    extra_hosts: tuple[str, ...] = ()
    limits: Amount = NOTHING
    """A dimension of 0 is unlimited."""
    pids_max: int = PIDS_MAX
    log_bytes_max: int = LOG_BYTES_MAX
    """Output that the engine keeps; 0: none of it."""
    scratch: tuple[str, ...] = ()
    """Empty volumes that are removed with the container, by their path inside."""
    tmpfs: tuple[str, ...] = ()
    """Folders in memory."""
    is_hardened: bool = False
    """No capabilities, and no way to get any."""
    is_root_read_only: bool = False
    removes_itself: bool = False
    """The engine removes it when it ends, with its scratch volumes."""
    reads_input: bool = False
    """Whether its program has a standard input: what it is given when it is started, and then the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFile:
    """A file or folder to be put into a container."""

    path: str
    """From the root of the container, without a leading slash."""
    mode: int
    uid: int = 0
    gid: int = 0
    content: bytes | None = field(default=None, repr=False)
    """None: a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """A bridge of its own for agents."""

    name: str
    subnet: str | None
    """None: the engine chooses, and `gateway` does not count."""
    gateway: str = ""
    bridge: str
    """Name of the network interface on the host."""
    keeps_members_apart: bool = False
    """Containers on it cannot reach each other."""
    labels: Mapping[str, str] = field(default_factory=dict)


def registry_of(image: str) -> str:
    """The registry that an image reference names; the public one where it names none."""
    first, slash, _ = image.partition("/")
    is_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    return first if is_host else DOCKER_HUB


def with_tag(image: str) -> str:
    """The reference with a tag or digest: `latest` where it has neither."""
    last = image.rpartition("/")[2]
    return image if ":" in last or "@" in image else f"{image}:latest"
