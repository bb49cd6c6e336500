"""The runtime for containers of jobs, remembered from one job to the next: each is another process.

To know the runtime's version means to read the whole installation, and to know that its volume is complete means to
ask an engine for a container.  Both take longer than most jobs' containers.  What is remembered may be wrong when
somebody removed the volume; a start that fails for that is made again after a proper look.
"""

from collections.abc import Callable

import msgspec

from kici.backends.container.runtime import Runtimes
from kici.decide.container_plan import Injected
from kici.ports.job_engine import JobRecords


class JobRuntime:
    def __init__(self, *, runtimes: Runtimes, records: JobRecords, engine: str, installation: str) -> None:
        """`engine`: its address.  `installation`: changes with what a runtime is made of."""
        self._runtimes = runtimes
        self._records = records
        self._key = f"runtime {engine} {installation}"

    async def ensure(self, image: str, on_progress: Callable[[str], None]) -> Injected:
        """Raises what `Runtimes.ensure` raises."""
        remembered = self._records.recall(self._key)
        if remembered is not None:
            return msgspec.json.decode(remembered, type=Injected)
        found = await self._runtimes.ensure(image, on_progress)
        self._records.remember(self._key, msgspec.json.encode(found))
        return found

    def forget(self) -> None:
        """Look next time."""
        self._records.remember(self._key, None)
