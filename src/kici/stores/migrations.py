"""Numbered schema changes: which files there are.  Engines apply them, each in a transaction under a lock.

`NNNN_expand_what.sql` adds, `NNNN_contract_what.sql` takes away; both dialects have the same numbers, and a file is
never edited once released.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"(\d{4})_((?:expand|contract)_\w+)\.sql\Z")
BOOTSTRAP: Final = "bootstrap.sql"


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    number: int
    name: str
    script: str


def migrations(folder: Path) -> list[Migration]:
    """Migrations of a dialect in order.  Raises `ValueError` for a file that is none."""
    found = []
    for path in sorted(folder.glob("*.sql")):
        if path.name == BOOTSTRAP:
            continue
        match = _NAME.match(path.name)
        if match is None:
            raise ValueError(f"{path} is not named NNNN_expand_what.sql or NNNN_contract_what.sql")
        found.append(Migration(number=int(match[1]), name=match[2], script=path.read_text(encoding="utf-8")))
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"migrations in {folder} are not numbered 1, 2, 3, ...")
    return found


def bootstrap(folder: Path) -> str:
    """What creates the table of applied migrations."""
    return (folder / BOOTSTRAP).read_text(encoding="utf-8")
