"""What an agent tells the program that runs its job in a container, and what it hears from it.

Both are on one socket between the two: the order as one JSON document behind its length, then single letters; in the
other direction at most one document, when the job could not be run.  The socket's end means that the agent is gone.
"""

from typing import Final

import msgspec

from kici.wire.messages import JobContainer

LENGTH_BYTES: Final = 8
ASK: Final = b"T"
"""Ask the job to end."""
END: Final = b"K"
"""End it now."""
FAILED: Final = 125
"""Exit code of the program when the job was not run; the document says why."""


class SandboxDescription(msgspec.Struct, frozen=True, kw_only=True):
    """How tightly an agent's job containers are closed."""

    hardened: bool = True
    """No capabilities, no new privileges."""
    pids_max: int = 512
    memory_bytes: int = 2 * 1024**3
    """For jobs that declare no limit."""
    cpus: float = 2.0
    """For jobs that declare no limit; never more than the host has."""
    isolated: bool | None = None
    """Rules of the packet filter.  None: where this host lets us set them."""
    root_read_only: bool = False
    user: str | None = None
    """None: whom the image says."""


class ContainerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One job in a container."""

    engine: str
    """Address of the engine: `unix:///path` or `tcp://host:port`."""
    name: str
    """Of the container; never used before."""
    agent_id: str
    job_id: str
    run_id: str
    folder: str
    """The agent's own folder for what outlives it: records of containers, the runtime's archive."""
    container: JobContainer
    command: list[str]
    env: dict[str, str]
    """What the job gets beside what the image says, secrets included."""
    sandbox: SandboxDescription

    def __repr__(self) -> str:
        return f"ContainerOrder({self.name!r})"


class ContainerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the job did not run, or was not run to its end."""

    reason: str
