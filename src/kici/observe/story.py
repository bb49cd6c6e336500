"""Stories: the last moves of each object, for a diagnosis and for the message of a broken invariant.

Kept in memory and bounded twice: so many moves for an object, so many objects; the object that was longest
without a move is forgotten first.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from kici.domain.ids import Instant

MOVES_MAX: Final = 20
OBJECTS_MAX: Final = 10_000
_WHAT_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class Told:
    """One move: when, and what happened and why, in a few words."""

    at: Instant
    what: str

    def __str__(self) -> str:
        return f"{datetime.fromtimestamp(self.at / 1000, UTC):%H:%M:%S.%f}"[:-3] + f" {self.what}"


class Stories:
    def __init__(self, *, moves_max: int = MOVES_MAX, objects_max: int = OBJECTS_MAX) -> None:
        self._moves_max = moves_max
        self._objects_max = objects_max
        self._stories: OrderedDict[str, deque[Told]] = OrderedDict()

    def tell(self, object_id: str, what: str, *, at: Instant) -> None:
        """Add a move to the story of an object (a job, an agent, a scaler)."""
        story = self._stories.get(object_id)
        if story is None:
            story = self._stories[object_id] = deque(maxlen=self._moves_max)
            if len(self._stories) > self._objects_max:
                self._stories.popitem(last=False)
        else:
            self._stories.move_to_end(object_id)
        story.append(Told(at, what[:_WHAT_MAX]))

    def story(self, object_id: str) -> tuple[Told, ...]:
        """Oldest first; empty for an object that nothing was told of."""
        return tuple(self._stories.get(object_id, ()))

    def text(self, object_id: str) -> str:
        """The story in lines, ready to end the message of a `Bug`."""
        lines = [f"  {told}" for told in self.story(object_id)]
        return "\n".join([f"story of {object_id}:", *(lines or ["  nothing is known"])])
