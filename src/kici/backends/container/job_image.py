"""Images that are built for jobs: one build at a time of each recipe, whoever on this host wants it.

Whether there is anything to do is the engine's to know: it remembers every instruction's result.  So each job builds,
and all but the first are done at once.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final

from kici.decide import job_container as plan
from kici.decide.container_plan import MANAGED
from kici.domain.container import ContainerFile, RegistryAuth
from kici.domain.errors import KiciError, Permanent
from kici.domain.resources import Amount
from kici.ports.clock import Clock
from kici.ports.job_engine import BuildSpec, JobEngine, JobRecords

POLL_SECONDS: Final = 0.2
KEPT_HOURS: Final = 7 * 24
"""Built images that nobody uses are removed after that."""
LABELS: Final = {MANAGED: "true", plan.BUILT: "true"}

Tell = Callable[[str], None]
Pack = Callable[[Sequence[ContainerFile]], bytes]
"""Makes an archive of files."""


class JobImages:
    def __init__(self, *, engine: JobEngine, records: JobRecords, clock: Clock, pack: Pack) -> None:
        """`pack` makes an archive of files."""
        self._engine = engine
        self._records = records
        self._clock = clock
        self._pack = pack

    async def build(self, recipe: plan.Recipe, auth: RegistryAuth | None, limits: Amount, tell: Tell) -> str:
        """The name of the image.  Raises `EngineRefused` with the instruction that failed, `Permanent`."""
        tag = plan.built_tag(recipe)
        try:
            files = plan.recipe_files(recipe)
        except ValueError as error:
            raise Permanent(str(error)) from error
        spec = BuildSpec(
            tag=tag,
            tar=self._pack(files),
            dockerfile=recipe.dockerfile,
            target=recipe.target,
            args=recipe.args,
            labels=LABELS,
            limits=limits,
        )
        lock = await self._lock(tag, tell)
        try:
            tell(f"building the image from {recipe.dockerfile}")
            await self._engine.build(spec, auth, tell)
        finally:
            os.close(lock)
        return tag

    async def prune(self) -> None:
        """Forget what is old.  Best effort."""
        self._records.drop_old_locks(older_than_hours=KEPT_HOURS)
        try:
            await self._engine.prune_images(LABELS, older_than_hours=KEPT_HOURS)
        except KiciError:
            return

    async def _lock(self, tag: str, tell: Tell) -> int:
        has_told = False
        while (lock := self._records.take(tag.replace(":", "-"))) is None:
            if not has_told:
                has_told = True
                tell("another job is building this image; waiting for it")
            await self._clock.sleep(POLL_SECONDS)
        return lock
