"""Log events: every name is one that something emits, and the list stays easy to read."""

import re
from pathlib import Path

from kici.observe.events import Event

SRC = Path(__file__).parents[2] / "src" / "kici"


def test_members_are_sorted() -> None:
    assert list(Event.__members__) == sorted(Event.__members__)


def test_values_are_unique_and_follow_their_names() -> None:
    values = [event.value for event in Event.__members__.values()]
    assert len(values) == len(set(values))
    assert [value.replace(".", "_").upper() for value in values] == list(Event.__members__)


def test_every_member_is_emitted_somewhere() -> None:
    texts = [path.read_text() for path in SRC.rglob("*.py") if path.relative_to(SRC).parts[0] != "testing"]
    used = {name for text in texts for name in re.findall(r"\bEvent\.([A-Z_]+)\b", text)}
    assert sorted(set(Event.__members__) - used) == []
