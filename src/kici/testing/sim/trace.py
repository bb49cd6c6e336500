"""What happened in one run: a hash over all of it, the story of each object, counts, and what was violated.

Two runs with equal hashes did the same things at the same times in the same order.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from typing import Final

from kici.domain.ids import Instant
from kici.observe.story import Stories
from kici.testing.sim.life import CURRENT, is_dead
from kici.testing.sim_clock import SIM_START

MOVES_KEPT: Final = 60
WORLD: Final = "world"
"""The object whose story is that of kills, outages and everything else that concerns all."""
_OBJECT_FIELDS: Final = ("job_id", "agent_id")
_LOGGERS: Final = ("kici", "asyncio")


class Trace:
    def __init__(self, *, keeps_lines: bool = False) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.stories = Stories(moves_max=MOVES_KEPT)
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.violated = asyncio.Event()
        self.lines: list[str] = []
        """Everything, if `keeps_lines`."""
        self._keeps_lines = keeps_lines

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def tell(self, what: str, *objects: str) -> None:
        """Something happened to these objects."""
        now = asyncio.get_running_loop().time()
        self._hash.update(f"{now!r} {what} {objects}\n".encode())
        if self._keeps_lines:
            self.lines.append(f"{now:10.3f} {what}  {' '.join(objects)}".rstrip())
        at = Instant(SIM_START + round(now * 1000))
        for name in objects:
            self.stories.tell(name, what, at=at)

    def count(self, name: str) -> None:
        self.counts[name] += 1

    def violate(self, what: str, *objects: str) -> None:
        """An invariant is broken: keep what is known, and end the run."""
        if self.violations:
            return  # what follows from the first is noise
        self.tell(f"VIOLATED: {what}", *objects)
        stories = [self.stories.text(name) for name in dict.fromkeys((*objects, WORLD))]
        self.violations.append("\n".join([what, *stories]))
        self.violated.set()

    def check(self, holds: bool, what: str, *objects: str) -> None:  # noqa: FBT001 - reads as a sentence
        if not holds:
            self.violate(what, *objects)


class LogTap(logging.Handler):
    """Turns log events into stories while it is entered; a logged exception of a living program is a violation."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(logging.INFO)
        self._trace = trace
        self._before: list[tuple[logging.Logger, int, bool]] = []

    def __enter__(self) -> "LogTap":
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            self._before.append((logger, logger.level, logger.propagate))
            logger.addHandler(self)
            logger.setLevel(logging.INFO)
            logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        for logger, level, propagate in self._before:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate

    def emit(self, record: logging.LogRecord) -> None:
        if is_dead():
            return
        fields: dict[str, object] = getattr(record, "kici", {})
        objects = [str(fields[name]) for name in _OBJECT_FIELDS if fields.get(name) is not None]
        life = CURRENT.get()
        who = "" if life is None else f"{life.name}: "
        facts = " ".join(f"{name}={value}" for name, value in fields.items() if name not in _OBJECT_FIELDS)
        self._trace.tell(f"{who}{record.getMessage()} {facts}".rstrip(), *objects)
        if record.exc_info is not None or record.name == "asyncio":
            text = logging.Formatter().format(record)
            self._trace.violate(f"{who}an exception reached the log: {text}", *objects)
