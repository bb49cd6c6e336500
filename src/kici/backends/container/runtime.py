"""The agent's runtime in a volume of the engine: filled once, marked last, mounted read-only into any image.

The volume is named after its content.  Filling it takes no image of ours and runs nothing: the archive is unpacked
into a container that is never started, of whatever image is at hand.  That container's name is the lock between
processes that share an engine; a lock whose owner died is broken after a while.
"""

import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final, Protocol

from kici.backends.container.flights import Flights
from kici.decide.container_plan import MANAGED, RUNTIME_PLACE, Injected
from kici.domain.container import ContainerFile, ContainerSpec
from kici.domain.errors import Conflict, DeterministicRefusal, KiciError, Retryable
from kici.kit.finish import finish
from kici.ports.clock import Clock
from kici.ports.engine import Engine

log = logging.getLogger(__name__)

MARKER: Final = ".complete"
FILL_SECONDS_MAX: Final = 180.0
LOCK_POLL_SECONDS: Final = 0.25
LOCK_SECONDS_MAX: Final = 120.0
"""A lock that is held longer was left by somebody who died."""
RUNTIME: Final = "kici-runtime"
"""Label of volumes and of the containers that fill them."""


class Archive(Protocol):
    """A runtime that is ready to be unpacked."""

    @property
    def version(self) -> str: ...

    @property
    def machine(self) -> str: ...

    @property
    def entrypoint(self) -> tuple[str, ...]: ...

    async def open(self) -> IO[bytes]:
        """The tar archive, made now if it was not needed before."""
        ...


FindArchive = Callable[[], Coroutine[Any, Any, Archive]]


@dataclass(frozen=True, slots=True)
class _Volume:
    name: str
    version: str

    @property
    def labels(self) -> Mapping[str, str]:
        return {MANAGED: "true", RUNTIME: self.version}


class Runtimes:
    """Of one engine."""

    def __init__(self, *, engine: Engine, flights: Flights, clock: Clock, find_archive: FindArchive) -> None:
        self._engine = engine
        self._flights = flights
        self._clock = clock
        self._find_archive = find_archive
        self._archive: Archive | None = None
        self._known: set[str] = set()

    async def ensure(self, image: str, on_progress: Callable[[str], None]) -> Injected:
        """The volume, complete.  `image`: any that the engine has, and of the processor that it runs.

        Raises `DeterministicRefusal` when this installation's runtime cannot serve there.
        """
        archive = self._archive
        if archive is None:
            archive = self._archive = await self._flights.run("archive", lambda _: self._fitting(), on_progress)
        volume = _Volume(f"{RUNTIME}-{archive.version}", archive.version)
        if volume.name not in self._known:
            try:
                await self._flights.run(volume.name, lambda tell: self._make(volume, archive, image, tell), on_progress)
            except KiciError:
                self._archive = None  # the installation may have changed: the next one looks what it is now
                raise
        return Injected(volume=volume.name, entrypoint=archive.entrypoint)

    async def remove_others(self) -> int:
        """Volumes of other versions that no container uses; how many.  Whoever needs one fills it again."""
        names = await self._engine.volumes({MANAGED: "true"})
        others = [name for name in names if name.startswith(f"{RUNTIME}-") and name not in self._known]
        return sum([await self._engine.remove_volume(name) for name in others])

    def forget(self) -> None:
        """Somebody may have removed the volume: look again next time."""
        self._known.clear()

    async def _fitting(self) -> Archive:
        """This installation's runtime, if the engine can run it."""
        archive = await self._find_archive()
        info = await self._engine.info()
        if info.system not in ("", "linux") or info.machine not in ("", archive.machine):
            raise DeterministicRefusal(
                f"the agent of this installation is for linux on {archive.machine}, the engine runs {info.system} on "
                f"{info.machine}; use images that carry their own agent (LABEL kici-agent=own)"
            )
        return archive

    async def _make(self, volume: _Volume, archive: Archive, image: str, tell: Callable[[str], None]) -> bool:
        work = self._fill(volume, archive, image, tell)
        # Not cut in half: a container that holds the lock would be left behind.
        await finish(work, seconds=FILL_SECONDS_MAX + LOCK_SECONDS_MAX, what=f"filling volume {volume.name}")
        self._known.add(volume.name)
        return True

    async def _fill(self, volume: _Volume, archive: Archive, image: str, tell: Callable[[str], None]) -> None:
        lock = await self._lock(volume, image)
        try:
            if not await self._is_complete(volume, lock):
                tell(f"filling the runtime volume {volume.name}, once for this engine")
                await self._unpack(volume, archive, lock)
        except BaseException:
            await self._unlock(lock)
            _ = await self._engine.remove_volume(volume.name)  # refused while somebody uses it, who then completed it
            raise
        await self._unlock(lock)

    async def _is_complete(self, volume: _Volume, lock: str) -> bool:
        marker = await self._engine.read(lock, f"{RUNTIME_PLACE}/{MARKER}", bytes_max=100)
        return marker is not None and marker.decode(errors="replace") == volume.version

    async def _unpack(self, volume: _Volume, archive: Archive, lock: str) -> None:
        with await archive.open() as tar:
            await self._engine.put_archive(lock, RUNTIME_PLACE, tar)
        path = f"{RUNTIME_PLACE}/{MARKER}".removeprefix("/")
        await self._engine.put(lock, (ContainerFile(path=path, mode=0o444, content=volume.version.encode()),))

    async def _lock(self, volume: _Volume, image: str) -> str:
        """The container through which the volume is filled; made by us, and by nobody else at a time."""
        name = f"{volume.name}-fill"
        spec = ContainerSpec(
            name=name,
            image=image,
            entrypoint=("/never-started",),
            labels=volume.labels,
            binds=(f"{volume.name}:{RUNTIME_PLACE}",),
            network="none",
        )
        await self._engine.create_volume(volume.name, volume.labels)
        started = self._clock.monotonic()
        while True:
            try:
                return await self._engine.create(spec)
            except Conflict:
                if self._clock.monotonic() - started > LOCK_SECONDS_MAX:
                    log.warning("runtime.lock_broken", extra={"kici": {"container": name}})
                    _ = await self._engine.remove(name)
                    started = self._clock.monotonic()
            await self._clock.sleep(LOCK_POLL_SECONDS)

    async def _unlock(self, lock: str) -> None:
        try:
            _ = await self._engine.remove(lock)
        except KiciError as error:
            raise Retryable(f"the container that fills the runtime volume could not be removed: {error}") from error
