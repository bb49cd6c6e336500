"""The archive of the agent's runtime, made by a process of its own and kept in the data directory."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from kici.adapters.agent_runtime import RuntimeArchive, parse_report
from kici.domain.errors import DeterministicRefusal
from kici.ports.processes import Processes

MAKE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class HostArchive:
    """Contract: `backends.container.runtime.Archive`."""

    made: RuntimeArchive
    machine: str

    @property
    def version(self) -> str:
        return self.made.version

    @property
    def entrypoint(self) -> tuple[str, ...]:
        return self.made.entrypoint

    def open(self) -> IO[bytes]:
        return self.made.tar.open("rb")


async def make_archive(processes: Processes, folder: Path) -> HostArchive:
    """Raises `DeterministicRefusal` when this installation cannot be put into containers, `Retryable` when it took too
    long."""
    argv = (sys.executable, "-m", "kici.adapters.agent_runtime", str(folder))
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C.UTF-8"}
    done = await processes.run(argv, env=env, timeout_seconds=MAKE_SECONDS)
    try:
        made = parse_report(done.output, folder)
    except ValueError as error:
        why = done.output.strip()[-800:]
        raise DeterministicRefusal(
            f"the runtime for agents in containers cannot be made from this installation: {why}; "
            "use images that carry their own agent (LABEL kici-agent=own)"
        ) from error
    return HostArchive(made, platform.machine())
