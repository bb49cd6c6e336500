"""The tree of a YAML document: values that know where they stand.  Lines and columns count from 1."""

from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = bool | int | float | str | None


@dataclass(slots=True, eq=False)
class Scalar:
    line: int
    column: int
    value: Value
    text: str
    """As written, without quotes."""


@dataclass(slots=True, eq=False)
class Sequence:
    line: int
    column: int
    items: "list[Node]" = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Mapping:
    line: int
    column: int
    entries: "dict[str, Entry]" = field(default_factory=dict)
    """By key, in the order of the file."""


@dataclass(slots=True, eq=False)
class Entry:
    key: Scalar
    value: "Node"


Node: TypeAlias = Scalar | Sequence | Mapping


def describe(node: Node) -> str:
    """What a node is, for messages."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    value = node.value
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{shortened(value)}"'
    return f"the number {shortened(node.text)}"


def shortened(text: str) -> str:
    """Safe to print, and on one line."""
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:61])
    return shown if len(text) <= 60 else f"{shown[:57]}..."
