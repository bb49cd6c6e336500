"""Images on an engine: there already, or pulled, once for all who wait for the same one."""

import logging
from collections.abc import Callable
from typing import Final

from kici.backends.container.flights import Flights
from kici.domain.container import RegistryAuth
from kici.domain.errors import DeterministicRefusal, Retryable
from kici.ports.clock import Clock
from kici.ports.engine import Engine, EngineDown, ImageInfo

log = logging.getLogger(__name__)

TRIES: Final = 3
TRY_SECONDS: Final = 2.0
TRY_FACTOR: Final = 4.0
ALWAYS: Final = "Always"
NEVER: Final = "Never"
IF_NOT_PRESENT: Final = "IfNotPresent"


class Images:
    def __init__(self, *, engine: Engine, flights: Flights, clock: Clock) -> None:
        self._engine = engine
        self._flights = flights
        self._clock = clock

    async def ensure(
        self, image: str, *, policy: str, auth: RegistryAuth | None, on_progress: Callable[[str], None]
    ) -> ImageInfo:
        """The image, by its policy.

        Raises `ImageRefused`, `Retryable` (registry or engine out of reach), `DeterministicRefusal` (may not be
        pulled, and is not there).
        """
        if policy != ALWAYS:
            found = await self._engine.image(image)
            if found is not None:
                return found
            if policy == NEVER:
                raise DeterministicRefusal(
                    f"image {image} is not on the engine and imagePullPolicy is Never; put it there, or allow the pull"
                )
        await self._flights.run(("pull", image, auth), lambda tell: self._pull(image, auth, tell), on_progress)
        found = await self._engine.image(image)
        if found is None:
            raise Retryable(f"image {image} was pulled and is not on the engine: somebody removed it")
        return found

    async def _pull(self, image: str, auth: RegistryAuth | None, tell: Callable[[str], None]) -> bool:
        for attempt in range(1, TRIES + 1):
            try:
                await self._engine.pull(image, auth, tell)
            except EngineDown:
                raise
            except Retryable as error:
                if attempt == TRIES:
                    raise
                log.info("image.pull_retried", extra={"kici": {"image": image, "error": str(error)}})
                await self._clock.sleep(TRY_SECONDS * TRY_FACTOR ** (attempt - 1))
            else:
                return True
        return False
