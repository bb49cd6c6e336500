"""The model as a structure to walk: which keys a mapping may have, and what each of them holds.

Compiled once from the annotations of `kici.config.model`; the reader, the JSON schema and the reference page all
go by it, so that no rule is written twice.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeAlias, Union, get_args, get_origin, get_type_hints

from kici.config import grammar
from kici.config.kinds import Choice, Exactly, Flag, For, Items, Key, Kind, Number, Stated, Text, Whole
from kici.config.model import (
    MEMORY_PATTERN,
    BackendType,
    Defaults,
    FirecrackerNetwork,
    LabelSet,
    MachinePool,
    ScalerEntry,
    ScalersConfig,
)
from kici.domain.platform import Arch, Os, Platform
from kici.domain.resources import MEMORY_GRAMMAR, Ask, ResourceRequest

_KINDS: Final = (Flag, Whole, Number, Text, Choice, Exactly)


@dataclass(frozen=True, slots=True)
class ListOf:
    item: "Shape"
    items: Items


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping with free keys."""

    name: Kind
    value: Kind


@dataclass(frozen=True, slots=True)
class KeyRule:
    name: str
    """In the file."""
    attribute: str
    """In the model."""
    shape: "Shape"
    required: bool
    default: Any
    applies: tuple[str, ...]
    """Backend types on which it has an effect."""


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping with known keys."""

    title: str
    keys: Mapping[str, KeyRule]
    build: Callable[..., Any]
    free_prefix: str | None = None
    """Keys with this prefix are the author's own, and ignored."""


@dataclass(frozen=True, slots=True)
class Resources:
    """`{requests, limits}`, each `{cpus, memory}`; or `{cpus, memory}` alone, which means both."""

    nested: Table
    flat: Table


Shape: TypeAlias = Kind | ListOf | MapOf | Table | Resources

TITLES: Final[dict[type, str]] = {
    ScalersConfig: "the top level",
    ScalerEntry: "scalers[]",
    LabelSet: "labelSets[]",
    MachinePool: "machinePools[]",
    Defaults: "defaults",
    FirecrackerNetwork: "firecracker",
}
ALL_TYPES: Final = tuple(member.value for member in BackendType)


@cache
def table_of(model: type) -> Table:
    """The mapping that makes a model class."""
    hints = get_type_hints(model, include_extras=True)
    rules = [_rule(field, hints[field.name]) for field in dataclasses.fields(model)]
    return Table(
        title=TITLES.get(model, _camel(model.__name__[:1].lower() + model.__name__[1:])),
        keys={rule.name: rule for rule in rules},
        build=model,
        free_prefix="x-" if model is ScalersConfig else None,
    )


@cache
def file_of_directory() -> Table:
    """A file of `scalers.d`: scalers, and nothing else."""
    main = table_of(ScalersConfig)
    version = dataclasses.replace(main.keys["version"], required=False)
    return dataclasses.replace(
        main, title="a file of the scalers directory", keys={"version": version, "scalers": main.keys["scalers"]}
    )


def blank(shape: Shape) -> Any:
    """A stand-in for a value that could not be read, so that the rest of the file can still be judged."""
    match shape:
        case Table():
            return shape.build(**{rule.attribute: blank(rule.shape) for rule in shape.keys.values() if rule.required})
        case Resources():
            return ResourceRequest()
        case ListOf():
            return ()
        case MapOf():
            return {}
        case _:
            return shape.blank


def _rule(field: "dataclasses.Field[Any]", hint: Any) -> KeyRule:
    _, marks = _peeled(hint)
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return KeyRule(
        name=next((mark.name for mark in marks if isinstance(mark, Key)), _camel(field.name)),
        attribute=field.name,
        shape=_shape(hint),
        required=not has_default or any(isinstance(mark, Stated) for mark in marks),
        default=None if field.default is dataclasses.MISSING else field.default,
        applies=next((mark.types for mark in marks if isinstance(mark, For)), ALL_TYPES),
    )


def _peeled(hint: Any) -> tuple[Any, list[Any]]:
    """The type inside `Annotated` and `... | None`, and every mark around it, outermost first."""
    marks: list[Any] = []
    while True:
        if get_origin(hint) is Annotated:
            marks.extend(hint.__metadata__)
            hint = get_args(hint)[0]
        elif get_origin(hint) in {Union, UnionType}:
            hint = next(part for part in get_args(hint) if part is not NoneType)
        else:
            return hint, marks


def _shape(hint: Any) -> Shape:
    bare, marks = _peeled(hint)
    kind = next((mark for mark in marks if isinstance(mark, _KINDS)), None)
    if kind is not None:
        return kind
    if get_origin(bare) is tuple:
        items = next((mark for mark in marks if isinstance(mark, Items)), Items())
        return ListOf(_shape(get_args(bare)[0]), items)
    if bare in _BY_TYPE:
        return _BY_TYPE[bare]
    if isinstance(bare, type) and issubclass(bare, StrEnum):
        return Choice(tuple(bare))
    assert isinstance(bare, type), f"no rule for the annotation {hint}"
    return table_of(bare)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)


def _plain_table(title: str, build: Callable[..., Any], *, required: bool, **shapes: Shape) -> Table:
    rules = {
        name: KeyRule(name=name, attribute=name, shape=shape, required=required, default=None, applies=ALL_TYPES)
        for name, shape in shapes.items()
    }
    return Table(title, rules, build)


_ASK: Final = _plain_table(
    "resources",
    Ask,
    required=False,
    cpus=Number(above=0, maximum=256, unit="cpus"),
    memory=Text(f"memory: {MEMORY_GRAMMAR}", grammar.memory_text, pattern=MEMORY_PATTERN),
)
_BY_TYPE: Final[dict[Any, Shape]] = {
    bool: Flag(),
    Mapping[str, str]: MapOf(
        Text("a variable name", grammar.variable_name), Text("text", grammar.variable_value, can_be_empty=True)
    ),
    Platform: _plain_table("platform", Platform, required=True, os=Choice(tuple(Os)), arch=Choice(tuple(Arch))),
    ResourceRequest: Resources(
        _plain_table("resources", ResourceRequest, required=False, requests=_ASK, limits=_ASK), _ASK
    ),
}
