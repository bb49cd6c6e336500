"""Container backends of this host: which engine, which packet filter, which runtime.

Imported when a configuration has a container scaler, so that nobody else loads a client for engines.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from kici.adapters.agent_archive import find_archive
from kici.adapters.disk import free_bytes
from kici.adapters.docker_engine import DockerEngine
from kici.adapters.docker_engine_find import find_engine
from kici.adapters.nft import Nft
from kici.adapters.this_host import port_of, resolvers
from kici.backends.container.backend import ContainerBackend
from kici.backends.container.factory import make_backend, settings_of, socket_warnings
from kici.backends.container.house import ContainerTools, Houses
from kici.config.model import BackendType, ScalerEntry
from kici.decide.fit import DOCKER_LABEL
from kici.domain.errors import DeterministicRefusal
from kici.kit.supervise import Supervisor
from kici.ports.backend import OnExit
from kici.ports.clock import Clock
from kici.ports.engine import Engine, EngineAddress, FindEngine
from kici.ports.processes import Processes

log = logging.getLogger(__name__)

NFT_BY_SUDO: Final = ("sudo", "-n", "nft")
RUNTIME_FOLDER: Final = "runtime"
"""In the data directory: the archive of the agent's runtime."""


class Host(Protocol):
    """The coordinator that these backends belong to."""

    @property
    def supervisor(self) -> Supervisor: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def on_exit(self) -> OnExit: ...


class Containers:
    """All container backends of one coordinator."""

    def __init__(
        self, *, data_dir: Path, owner: str, environ: dict[str, str], processes: Processes, host: Host
    ) -> None:
        self._owner = owner
        self._environ = environ
        self._host = host
        self._tools = ContainerTools(
            engine_at=self._open,
            packets=Nft(),
            find_archive=partial(find_archive, processes, data_dir / RUNTIME_FOLDER),
            clock=host.clock,
            supervisor=host.supervisor,
            environment=environ,
            resolvers=resolvers,
            free_bytes=free_bytes,
            port_of=port_of,
        )
        self._houses = Houses(self._tools)
        self._houses_by_sudo = Houses(replace(self._tools, packets=Nft(NFT_BY_SUDO)))

    def build(self, entry: ScalerEntry) -> ContainerBackend:
        for warning in socket_warnings(entry):
            log.warning("scaler.privileged", extra={"kici": {"scaler": entry.name, "text": warning}})
        return make_backend(
            entry,
            owner=self._owner,
            find_engine=self._finder(entry),
            houses=self._houses_of(entry),
            tools=self._tools,
            on_exit=self._host.on_exit,
        )

    def apply(self, backend: ContainerBackend, entry: ScalerEntry) -> None:
        backend.configure(settings_of(entry, self._owner), self._finder(entry), self._houses_of(entry))

    def _houses_of(self, entry: ScalerEntry) -> Houses:
        return self._houses_by_sudo if entry.require_sudo else self._houses

    def _finder(self, entry: ScalerEntry) -> FindEngine:
        return partial(find_for, entry, self._environ)

    def _open(self, address: EngineAddress) -> Engine:
        engine = DockerEngine(address)
        self._host.supervisor.start(f"engine {address.url}", _keep(engine))
        return engine


def find_for(entry: ScalerEntry, environ: Mapping[str, str]) -> EngineAddress:
    """The engine of an entry.  Raises `DeterministicRefusal`."""
    try:
        return find_engine(runtime=entry.runtime.value, socket_path=entry.socket_path, host=entry.host, environ=environ)
    except DeterministicRefusal as error:
        if entry.type is not BackendType.BARE_METAL:
            raise
        raise DeterministicRefusal(
            f"scaler {entry.name}: its label sets have an image and no binaryPath, so its agents are containers, which "
            f"need an engine on this host (label {DOCKER_LABEL}); {error}"
        ) from error


async def _keep(engine: Engine) -> None:
    """Close the client when the program ends."""
    try:
        await asyncio.Event().wait()
    finally:
        await engine.close()
