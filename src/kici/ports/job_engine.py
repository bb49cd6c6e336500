"""What a container of a job asks of an engine beyond what an agent's does: to be talked to, and to be built."""

from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from kici.domain.container import RegistryAuth
from kici.domain.resources import NOTHING, Amount
from kici.ports.engine import Engine, OnProgress


class Attached(Protocol):
    """The three streams of a running container."""

    async def write(self, data: bytes) -> None:
        """To its standard input."""
        ...

    async def read(self) -> tuple[int, bytes] | None:
        """The next output, with its stream: 1 or 2.  None: there is no more.  Reading late holds the writer up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """An image to be built."""

    tag: str
    tar: bytes = field(repr=False)
    """The files that it is built from."""
    dockerfile: str
    """Path in them."""
    target: str | None = None
    args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Amount = NOTHING


class JobEngine(Engine, Protocol):
    """Calls raise what those of `Engine` raise."""

    def attached(self, container: str) -> AbstractAsyncContextManager[Attached]:
        """Attach to a container, best before it starts.  Its input ends with the block."""
        ...

    def exit_code(self, container: str) -> AbstractAsyncContextManager[Awaitable[int]]:
        """To be entered before it starts; what it gives is awaited for the exit code."""
        ...

    async def signal(self, container: str, name: str) -> None:
        """Send a signal to its first process.  One that does not run, or is gone, is fine."""
        ...

    async def build(self, spec: BuildSpec, auth: RegistryAuth | None, on_output: OnProgress) -> None:
        """Build an image.  Raises `EngineRefused` with the instruction that failed, and why."""
        ...

    async def prune_images(self, labels: Mapping[str, str], *, older_than_hours: int) -> None:
        """Remove images with these labels that nobody uses and that were made longer ago."""
        ...


class JobRecords(Protocol):
    """What this user's agents have made on engines, for whoever must clear up after one that died."""

    def held(self, container: str, engine: str) -> AbstractContextManager[None]:
        """Answer for a container as long as the block runs, from before it exists."""
        ...

    def stale(self) -> AbstractContextManager[list[tuple[str, str]]]:
        """Containers that nobody answers for, with their engines.  They are ours until the block ends."""
        ...

    def forget(self, container: str) -> None:
        """It is gone."""
        ...

    def recall(self, key: str) -> bytes | None:
        """What was last remembered under this key, by whatever process."""
        ...

    def remember(self, key: str, value: bytes | None) -> None:
        """None: nothing any more.  Best effort."""
        ...

    def take(self, name: str) -> int | None:
        """A lock of this name, as a handle to be closed; None: another process has it."""
        ...

    def drop_old_locks(self, *, older_than_hours: int) -> None:
        """Those that nobody has and nobody had for so long."""
        ...
