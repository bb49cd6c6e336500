"""Running seeds: one with everything that it did, or many for what is wrong with any of them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kici.observe.story import Stories
from kici.testing.sim.plan import Plan, draw
from kici.testing.sim.world import World
from kici.testing.virtual_time import SimStuck, run_virtual

LIMIT_SECONDS: Final = 3 * 3600.0
REPLAY: Final = "make sim SEED={seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How one run went."""

    plan: Plan
    digest: str
    """Equal for equal runs."""
    violation: str | None
    """What was violated first, with the stories of the objects involved."""
    counts: Counter[str]
    """What happened how often."""
    virtual_seconds: float
    cpu_seconds: float
    stories: Stories
    lines: list[str]
    """Everything that happened, if it was asked for."""

    @property
    def failure(self) -> str | None:
        """For people: the seed, what is wrong, and how to see it again."""
        if self.violation is None:
            return None
        seed = self.plan.seed
        return f"seed {seed}: {self.violation}\nreplay: {REPLAY.format(seed=seed)}"


def run_seed(seed: int, *, keeps_lines: bool = False) -> Report:
    """Run the world of a seed to its end."""
    return run_plan(draw(seed), keeps_lines=keeps_lines)


def run_plan(plan: Plan, *, keeps_lines: bool = False, prepare: Callable[[World], None] | None = None) -> Report:
    """Run the world of a plan to its end.  `prepare` may change it before anything happens."""
    begun = time.process_time()
    made: list[World] = []
    ended: list[float] = []

    async def main() -> None:
        world = World(plan, keeps_lines=keeps_lines)
        made.append(world)
        if prepare is not None:
            prepare(world)
        try:
            await world.run()
        finally:
            ended.append(asyncio.get_running_loop().time())

    violations: list[str] = []
    try:
        run_virtual(main, limit_seconds=LIMIT_SECONDS)
    except SimStuck as error:
        violations.append(str(error))
    (world,) = made
    world.core.close()  # its functions hold the world, and no collector of garbage sees them
    violations = [*world.trace.violations, *violations]
    return Report(
        plan=plan,
        digest=world.trace.digest,
        violation=violations[0] if violations else None,
        counts=world.trace.counts,
        virtual_seconds=ended[0] if ended else 0.0,
        cpu_seconds=time.process_time() - begun,
        stories=world.trace.stories,
        lines=world.trace.lines,
    )
