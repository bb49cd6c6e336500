"""The archive of the agent's runtime, made by a process of its own and kept in the data directory."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from kici.adapters.agent_runtime import RuntimeArchive, parse_report
from kici.domain.errors import DeterministicRefusal, Retryable
from kici.kit.version import VERSION
from kici.ports.processes import Processes

MAKE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class HostArchive:
    """Contract: `backends.container.runtime.Archive`."""

    known: RuntimeArchive
    machine: str
    processes: Processes

    @property
    def version(self) -> str:
        return self.known.version

    @property
    def entrypoint(self) -> tuple[str, ...]:
        return self.known.entrypoint

    async def open(self) -> IO[bytes]:
        made = await _ask(self.processes, self.known.tar.parent, "--write")
        if made.version != self.version:
            raise Retryable("this installation changed while its runtime was being made; try again")
        return made.tar.open("rb")


def installation() -> str:
    """Changes when what the runtime is made of may have changed; costs next to nothing to know."""
    package = Path(__file__).parents[1]
    times = [
        path.stat().st_mtime_ns for part in ("agent", "domain", "kit", "wire") for path in (package / part).iterdir()
    ]
    return f"{VERSION} {sys.version} {sys.executable} {max(times)} {len(times)}"


async def find_archive(processes: Processes, folder: Path) -> HostArchive:
    """This installation's runtime, which is written into the folder when it is opened.

    Raises `DeterministicRefusal` when this installation cannot be put into containers, `Retryable` when it took too
    long.
    """
    return HostArchive(await _ask(processes, folder), platform.machine(), processes)


async def _ask(processes: Processes, folder: Path, *options: str) -> RuntimeArchive:
    argv = (sys.executable, "-m", "kici.adapters.agent_runtime", str(folder), *options)
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    done = await processes.run(argv, env={**env, "LC_ALL": "C.UTF-8"}, timeout_seconds=MAKE_SECONDS)
    try:
        return parse_report(done.output, folder)
    except ValueError as error:
        why = done.output.strip()[-800:]
        raise DeterministicRefusal(
            f"the runtime for agents in containers cannot be made from this installation: {why}; "
            "use images that carry their own agent (LABEL kici-agent=own)"
        ) from error
