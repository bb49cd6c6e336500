"""One setting from the text of a variable or flag: how each type of field is read, and what it refuses."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from kici.config.problems import did_you_mean


@dataclass(frozen=True, slots=True)
class From:
    """Mark of a field: the smallest and largest number it takes."""

    minimum: int
    maximum: int | None = None


@dataclass(frozen=True, slots=True)
class Like:
    """Mark of a field: what its text must look like.  `check` raises `ValueError` with a hint."""

    words: str
    check: Callable[[str], str]


class Unfit(Exception):
    """The text is no such value."""

    def __init__(self, expected: str, hint: str = "") -> None:
        super().__init__(expected)
        self.expected, self.hint = expected, hint


def reader_of(hint: Any) -> Callable[[str], Any]:
    """What reads a field with this annotation; it raises `Unfit`."""
    if NoneType in get_args(hint):
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Annotated:
        mark = hint.__metadata__[0]
        return _number(mark) if isinstance(mark, From) else _text(mark)
    if hint is bool:
        return _flag
    if hint is str:
        return str
    if hint is Path:
        return _path
    return _choice(tuple(hint))


def _number(limits: From) -> Callable[[str], int]:
    top = "" if limits.maximum is None else f" and {limits.maximum} at most"

    def read(text: str) -> int:
        expected = f"a whole number, {limits.minimum} or more{top}"
        if not (text.isascii() and text.strip().isdecimal()) or len(text) > 18:
            raise Unfit(expected)
        value = int(text)
        if value < limits.minimum or (limits.maximum is not None and value > limits.maximum):
            raise Unfit(expected)
        return value

    return read


def _text(like: Like) -> Callable[[str], str]:
    def read(text: str) -> str:
        try:
            return like.check(text)
        except ValueError as error:
            raise Unfit(like.words, str(error)) from None

    return read


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise Unfit("a path", "nobody has that home folder") from None


def _flag(text: str) -> bool:
    value = {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower())
    if value is None:
        raise Unfit("true or false")
    return value


def _choice(members: tuple[StrEnum, ...]) -> Callable[[str], StrEnum]:
    def read(text: str) -> StrEnum:
        words = [member.value for member in members]
        if text.lower() not in words:
            raise Unfit(" or ".join(words), did_you_mean(text, words))
        return members[words.index(text.lower())]

    return read
