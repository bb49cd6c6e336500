"""Kinds of single values: how one is read from the file, named in messages, and put in a JSON schema.

The model names a kind in the annotation of each field (`Annotated[int, Whole(minimum=1)]`), so that the walker,
the reference page and the schema all say the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any, TypeAlias

from kici.config.nodes import Node, Scalar
from kici.config.problems import did_you_mean

Schema: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class For:
    """Mark of a field: the backend types on which its key has an effect."""

    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """Mark of a field: its key in the file, where that is not the field's name in camel case."""

    name: str


@dataclass(frozen=True, slots=True)
class Stated:
    """Mark of a field: the file must have the key although the model has a default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """Mark of a list: how many items it needs, and what becomes of them together."""

    minimum: int = 0
    then: Callable[[Any], Any] | None = None


class Refusal(Exception):
    """This node is no such value."""

    def __init__(self, hint: str = "") -> None:
        super().__init__(hint)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Flag:
    blank = False

    @property
    def words(self) -> str:
        return "true or false"

    def read(self, node: Node) -> bool:
        if isinstance(node, Scalar):
            if isinstance(node.value, bool):
                return node.value
            if node.text.lower() in {"yes", "on", "no", "off", "true", "false"}:
                meant = node.text.lower() in {"yes", "on", "true"}
                raise Refusal(f"write {str(meant).lower()}, without quotes")
        raise Refusal

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """An integer; `2.0` is one too, as it is in JSON."""

    minimum: int = 0
    maximum: int | None = None

    @property
    def blank(self) -> int:
        return self.minimum

    @property
    def words(self) -> str:
        if self.maximum is not None:
            return f"a whole number from {self.minimum} to {self.maximum}"
        return f"a whole number, {self.minimum} or more"

    def read(self, node: Node) -> int:
        value = _number(node)
        if isinstance(value, float):
            if not value.is_integer():
                raise Refusal
            value = int(value)
        if value < self.minimum or (self.maximum is not None and value > self.maximum):
            raise Refusal
        return value

    def schema(self) -> Schema:
        top = {} if self.maximum is None else {"maximum": self.maximum}
        return {"type": "integer", "minimum": self.minimum, **top}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    above: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    unit: str = ""

    @property
    def blank(self) -> float:
        return 1.0

    @property
    def words(self) -> str:
        low = f"above {self.above:g}" if self.above is not None else ""
        low = f"{self.minimum:g} or more" if self.minimum is not None else low
        high = f"at most {self.maximum:g}" if self.maximum is not None else ""
        return (
            "a number"
            + (f" of {self.unit}" if self.unit else "")
            + "".join(f", {part}" for part in (low, high) if part)
        )

    def read(self, node: Node) -> float:
        value = float(_number(node))
        if self.above is not None and value <= self.above:
            raise Refusal
        if self.minimum is not None and value < self.minimum:
            raise Refusal
        if self.maximum is not None and value > self.maximum:
            raise Refusal
        return value

    def schema(self) -> Schema:
        bounds = {"exclusiveMinimum": self.above, "minimum": self.minimum, "maximum": self.maximum}
        return {"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}}


def _number(node: Node) -> int | float:
    if not isinstance(node, Scalar) or isinstance(node.value, bool) or node.value is None:
        raise Refusal
    if isinstance(node.value, str):
        raise Refusal("write it without quotes" if node.text.replace(".", "", 1).isdecimal() else "")
    if not isfinite(node.value):
        raise Refusal
    return node.value


@dataclass(frozen=True, slots=True)
class Text:
    """Text in a small grammar.  `parse` raises `ValueError` with a hint."""

    words: str
    parse: Callable[[str], Any]  # the field's annotation says which type it makes; a test compares them
    pattern: str | None = None
    """For the schema: what `parse` accepts at least."""
    numbers: bool = False
    """Whether an unquoted number is read as its text."""
    can_be_empty: bool = False
    blank: Any = ""

    def read(self, node: Node) -> Any:
        if not isinstance(node, Scalar):
            raise Refusal
        value = node.value
        if self.numbers and isinstance(value, int) and not isinstance(value, bool):
            value = node.text
        if not isinstance(value, str):
            raise Refusal("" if value is None else f'write it in quotes: "{node.text[:60]}"')
        try:
            return self.parse(value)
        except ValueError as error:
            raise Refusal(str(error)) from None

    def schema(self) -> Schema:
        schema: Schema = {"type": ["string", "integer"] if self.numbers else "string"}
        if not self.can_be_empty:
            schema["minLength"] = 1
        if self.pattern is not None:
            schema["pattern"] = self.pattern
        return schema


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the words of an enum."""

    members: tuple[StrEnum, ...]

    @property
    def blank(self) -> StrEnum:
        return self.members[0]

    @property
    def words(self) -> str:
        *head, last = [str(member) for member in self.members]
        return f"{', '.join(head)} or {last}" if head else last

    def read(self, node: Node) -> StrEnum:
        value = node.value if isinstance(node, Scalar) else None
        if not isinstance(value, str):
            raise Refusal
        for member in self.members:
            if value == member.value:
                return member
        raise Refusal(did_you_mean(value, [member.value for member in self.members]))

    def schema(self) -> Schema:
        return {"enum": [member.value for member in self.members]}


@dataclass(frozen=True, slots=True)
class Exactly:
    """One fixed number."""

    number: int

    @property
    def blank(self) -> int:
        return self.number

    @property
    def words(self) -> str:
        return f"the number {self.number}"

    def read(self, node: Node) -> int:
        if _number(node) != self.number:
            raise Refusal
        return self.number

    def schema(self) -> Schema:
        return {"const": self.number}


Kind: TypeAlias = Flag | Whole | Number | Text | Choice | Exactly
