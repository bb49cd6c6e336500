"""A variable that is documented and does nothing costs an evening: each one has to be read somewhere."""

import re
from dataclasses import fields
from pathlib import Path

from kici.config import environment
from kici.config.environment import CoordinatorSettings

SOURCE = Path(environment.__file__).parents[1]


def test_every_setting_of_a_coordinator_is_read_by_somebody() -> None:
    others = [path for path in SOURCE.rglob("*.py") if path != Path(environment.__file__)]
    words = {word for path in others for word in re.findall(r"[a-z_]+", path.read_text(encoding="utf-8"))}
    assert [field.name for field in fields(CoordinatorSettings) if field.name not in words] == []
