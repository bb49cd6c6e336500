"""What is wrong with a configuration, and what is merely unwise: each with its place in the file."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the root of a file."""

PROBLEMS_MAX: Final = 1000
"""More than this are counted, not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that makes the configuration invalid.  Lines and columns count from 1."""

    file: str
    line: int
    column: int
    path: str
    """Such as `scalers[0].labelSets[1].image`; empty for the file as a whole."""
    found: str
    expected: str
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}: "
        path = f"{self.path}: " if self.path else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{path}found {self.found}, expected {self.expected}{hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something valid that probably does not do what its author wants."""

    file: str
    line: int
    column: int
    path: str
    text: str

    def __str__(self) -> str:
        path = f"{self.path}: " if self.path else ""
        return f"{self.file}:{self.line}:{self.column}: {path}{self.text}"


def path_text(path: Path) -> str:
    parts: list[str] = []
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        else:
            parts.append(f".{step}" if parts else step)
    return "".join(parts)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that names the known name that was probably meant; empty where none is near."""
    from kici.domain.strict import nearest  # only a mistake needs it, and the environment is read at every start

    match = nearest(name[:100], known)
    return f"did you mean {match}?" if match else ""
