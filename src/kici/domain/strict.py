"""Plain data (what JSON or YAML decodes to) read into msgspec types, with every fault reported at once.

msgspec stops at the first fault and lets unknown keys pass; people who write documents by hand are better
served by the whole list, each with its path and, for a misspelt key, the name that was probably meant.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

import msgspec

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

FAULTS_MAX: Final = 100
_BAD: Final = object()


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a document.  `path` starts at `$`, the whole of it."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


class Faulty(ValueError):
    """A document that cannot be used.  All that is wrong with it is in `faults`."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


def read(raw: object, kind: type[T]) -> T:
    """`raw` as a `kind`.  Raises `Faulty` with all faults."""
    value, faults = read_partly(raw, kind)
    if faults or value is None:
        raise Faulty(faults[:FAULTS_MAX])
    return value


def read_partly(raw: object, kind: type[T]) -> tuple[T | None, list[Fault]]:
    """What can be used of `raw`, and its faults: faulty fields have their defaults, unknown keys are left out.

    None where not even that much can be read.  Lets further rules look at the sound part of a faulty document.
    """
    faults: list[Fault] = []
    shape: Any = kind
    if _is_closed(shape):
        try:
            return msgspec.convert(raw, kind), faults  # most are sound, and this is twenty times as fast
        except msgspec.ValidationError:
            pass  # now the walk, for all that is wrong
    value = _read(raw, kind, "$", faults)
    return (None if value is _BAD else value), faults


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    by_folded = {_folded(each): each for each in known}
    found = difflib.get_close_matches(_folded(name), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def unknown(name: str, known: Iterable[str], *, what: str = "key") -> str:
    """The sentence that refuses a name and says what would have been understood."""
    names = sorted(known)
    guess = nearest(name, names)
    hint = f"did you mean {guess}?" if guess else f"known: {', '.join(names)}" if names else "none is known here"
    return f"unknown {what} {name[:80]!r}; {hint}"


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


@cache
def _is_closed(kind: Any) -> bool:
    """Whether every struct in it refuses unknown keys by itself."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind.__struct_config__.forbid_unknown_fields and all(
            _is_closed(field.type) for field in _fields(kind).values()
        )
    return all(_is_closed(part) for part in get_args(kind) if isinstance(part, type) or get_args(part))


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _read(raw: object, kind: Any, path: str, faults: list[Fault]) -> Any:
    shape = _shape(raw, kind)
    if isinstance(shape, type) and issubclass(shape, msgspec.Struct):
        return _struct(raw, shape, path, faults)
    if get_origin(shape) is dict:
        return _dict(raw, get_args(shape)[1], path, faults)
    if get_origin(shape) is list:
        return _list(raw, get_args(shape)[0], path, faults)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        faults.append(Fault(path, _sentence(str(error), raw)))
        return _BAD


def _shape(raw: object, kind: Any) -> Any:
    """The member of a union that the container `raw` can be read as; the type itself where nothing is to choose."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) not in (Union, UnionType):
        return kind if isinstance(raw, dict | list) and _fits(raw, kind) else None
    return next((member for member in get_args(kind) if _fits(raw, member)), None)


def _fits(raw: object, kind: Any) -> bool:
    if isinstance(raw, dict):
        return get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    return isinstance(raw, list) and get_origin(kind) is list


def _struct(raw: Any, kind: type[msgspec.Struct], path: str, faults: list[Fault]) -> Any:
    fields = _fields(kind)
    faults.extend(Fault(_join(path, str(key)), unknown(str(key), fields)) for key in raw if key not in fields)
    values: dict[str, Any] = {}
    complete = True
    for key, field in fields.items():
        if key in raw:
            values[field.name] = _read(raw[key], field.type, _join(path, key), faults)
        elif field.required:
            faults.append(Fault(path, f"{key} is missing"))
        complete = complete and not (field.required and values.get(field.name, _BAD) is _BAD)
    return kind(**{name: value for name, value in values.items() if value is not _BAD}) if complete else _BAD


def _dict(raw: Any, kind: Any, path: str, faults: list[Fault]) -> dict[str, Any]:
    strange = [key for key in raw if not isinstance(key, str)]
    faults.extend(Fault(path, f"expected names that are strings, found {_preview(key)}") for key in strange)
    read = {key: _read(value, kind, _join(path, str(key)), faults) for key, value in raw.items()}
    return {key: value for key, value in read.items() if value is not _BAD and key not in strange}


def _list(raw: Any, kind: Any, path: str, faults: list[Fault]) -> Any:
    read = [_read(value, kind, f"{path}[{index}]", faults) for index, value in enumerate(raw)]
    return _BAD if _BAD in read else read


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if key.replace("_", "").replace("-", "").isalnum() else f"{path}[{key[:80]!r}]"


_WORDS: Final = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_QUOTED: Final = re.compile(r"`([^`]*)`")


def _sentence(error: str, raw: object) -> str:
    """msgspec's wording of a type fault in ours, with the value that was found."""
    expected = error.partition(" - at `")[0].partition(", got ")[0]

    def words(quoted: re.Match[str]) -> str:
        members = [member for member in quoted[1].split(" | ") if member != "null" or quoted[1] == "null"]
        return " or ".join(_WORDS.get(member, member) for member in members)

    return f"{_QUOTED.sub(words, expected[:1].lower() + expected[1:])}, found {_preview(raw)}"


def _preview(raw: object) -> str:
    if isinstance(raw, dict):
        return "an object"
    if isinstance(raw, list):
        return "a list"
    if raw is None:
        return "null"
    if isinstance(raw, bool):
        return "true" if raw else "false"
    return repr(raw)[:60]


def read_texts(raw: Mapping[str, str], kind: type[S]) -> S:
    """Named texts (the parameters of a query) as a flat struct: texts become what its fields are.  Raises `Faulty`."""
    fields = _fields(kind)
    faults = [Fault(f"?{key}", unknown(key, fields, what="parameter")) for key in raw if key not in fields]
    values: dict[str, Any] = {}
    for key, field in fields.items():
        if key not in raw:
            continue
        try:
            values[field.name] = msgspec.convert(raw[key], field.type, strict=False)
        except msgspec.ValidationError as error:
            faults.append(Fault(f"?{key}", _sentence(str(error), raw[key])))
    if faults:
        raise Faulty(faults[:FAULTS_MAX])
    return kind(**values)
