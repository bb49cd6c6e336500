"""Walks a document along the model and reports every problem on the way, not only the first.

What cannot be read is replaced by its default or a blank, and its path is remembered as broken, so that the rules
that come afterwards judge everything else and say nothing about what was already reported.
"""

from collections.abc import Collection
from typing import Any, Final

from kici.config.kinds import Choice, Kind, Refusal, Text
from kici.config.model import FirecrackerNetwork, LabelSet, MachinePool, NetworkPolicy, ScalerEntry, ScalersConfig
from kici.config.nodes import Mapping, Node, Scalar, Sequence, describe, shortened
from kici.config.problems import PROBLEMS_MAX, Path, Problem, did_you_mean, path_text
from kici.config.shapes import KeyRule, ListOf, MapOf, Resources, Shape, Table, blank, table_of
from kici.domain.resources import Ask, ResourceRequest

PROBLEMS_COUNTED_MAX: Final = 9000
_BROKEN: Final = object()
_KEYS_SHOWN: Final = 4
_HOMES: Final = (LabelSet, ScalerEntry, ScalersConfig, NetworkPolicy, FirecrackerNetwork, MachinePool)
"""Where a misplaced key may belong, most likely first."""


class TooMany(Exception):
    """So many problems that the rest of the configuration is not looked at."""


class Report:
    """Problems of one configuration, and which of its paths they broke."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.dropped = 0
        self._broken: set[Path] = set()
        self._around: set[Path] = set()

    def is_full(self) -> bool:
        """Whether one more problem is only counted; asking counts it, and spares making it.

        Raises `TooMany` when it would not even be counted.
        """
        if len(self.problems) < PROBLEMS_MAX:
            return False
        if self.dropped == PROBLEMS_COUNTED_MAX:
            raise TooMany
        self.dropped += 1
        return True

    def add(self, problem: Problem) -> None:
        if not self.is_full():
            self.problems.append(problem)

    def mark_broken(self, path: Path) -> None:
        self._broken.add(path)
        for length in range(len(path)):
            self._around.add(path[:length])

    def is_sound(self, path: Path) -> bool:
        """Whether everything at, in and around this path was read."""
        if path in self._around:
            return False
        return not any(path[:length] in self._broken for length in range(len(path) + 1))


class Walker:
    """Reads the documents of one configuration into one report."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._file = ""
        self._before = 0

    def read(self, table: Table, root: Node, *, file: str, scalers_before: int = 0) -> Any:
        """The value that a document makes, or a blank.

        `scalers_before` is how many scalers earlier files have: paths are told from the file's own first scaler,
        and remembered as broken by the place among all.
        """
        self._file, self._before = file, scalers_before
        value = self._value(table, root, ())
        return blank(table) if value is _BROKEN else value

    def _value(self, shape: Shape, node: Node, path: Path) -> Any:  # its type is the annotation of the model
        match shape:
            case Table():
                return self._table(shape, node, path)
            case ListOf():
                return self._list(shape, node, path)
            case MapOf():
                return self._map(shape, node, path)
            case Resources():
                return self._resources(shape, node, path)
            case _:
                return self._leaf(shape, node, path)

    def _leaf(self, kind: Kind, node: Node, path: Path) -> Any:
        try:
            return kind.read(node)
        except Refusal as refusal:
            return self._mismatch(node, path, kind.words, refusal.hint)

    def _table(self, table: Table, node: Node, path: Path) -> Any:
        if not isinstance(node, Mapping):
            return self._mismatch(node, path, f"a mapping with {_some(table.keys)}")
        values: dict[str, Any] = {}
        for name, entry in node.entries.items():
            rule = table.keys.get(name)
            if rule is None:
                self._unknown(table, entry.key, path)
                continue
            value = self._entry(rule, entry.value, (*path, name))
            if value is not _BROKEN:
                values[rule.attribute] = value
        for rule in table.keys.values():
            if rule.required and rule.attribute not in values:
                values[rule.attribute] = blank(rule.shape)
                if rule.name not in node.entries:
                    self._missing(rule, node, path)
        return table.build(**values)

    def _entry(self, rule: KeyRule, node: Node, path: Path) -> Any:
        if isinstance(node, Scalar) and node.value is None:
            hint = "give it a value" if rule.required else "give it a value, or take the key out"
            return self._mismatch(node, path, _words(rule.shape), hint)
        return self._value(rule.shape, node, path)

    def _list(self, shape: ListOf, node: Node, path: Path) -> Any:
        if not isinstance(node, Sequence):
            return self._mismatch(node, path, f"a list of {_plural(shape.item)}")
        if len(node.items) < shape.items.minimum:
            return self._mismatch(node, path, f"at least {shape.items.minimum} of them", found="an empty list")
        first = self._before if path == ("scalers",) else 0
        read: list[Any] = []
        for index, item in enumerate(node.items, start=first):
            value = self._value(shape.item, item, (*path, index))
            read.append(blank(shape.item) if value is _BROKEN else value)
        return tuple(read) if shape.items.then is None else shape.items.then(tuple(read))

    def _map(self, shape: MapOf, node: Node, path: Path) -> Any:
        if not isinstance(node, Mapping):
            return self._mismatch(node, path, "a mapping of names to text")
        read: dict[Any, Any] = {}
        for name, entry in node.entries.items():
            key = self._leaf(shape.name, Scalar(entry.key.line, entry.key.column, name, name), (*path, name))
            value = self._leaf(shape.value, entry.value, (*path, name))
            if key is not _BROKEN and value is not _BROKEN:
                read[key] = value
        return read

    def _resources(self, shape: Resources, node: Node, path: Path) -> Any:
        if not isinstance(node, Mapping):
            return self._mismatch(node, path, "a mapping with cpus and memory, or requests and limits")
        if shape.nested.keys.keys() & node.entries.keys():
            return self._table(shape.nested, node, path)
        ask = self._table(shape.flat, node, path)
        assert isinstance(ask, Ask)
        return ResourceRequest(requests=ask, limits=ask)

    # --- what is wrong

    def _mismatch(self, node: Node, path: Path, expected: str, hint: str = "", found: str = "") -> Any:
        self._report.mark_broken(path)
        if not self._report.is_full():
            self._problem(node.line, node.column, path, found=found or describe(node), expected=expected, hint=hint)
        return _BROKEN

    def _missing(self, rule: KeyRule, node: Mapping, path: Path) -> None:
        place = (*path, rule.name)
        self._report.mark_broken(place)
        if self._report.is_full():
            return
        self._problem(
            node.line, node.column, place, found="nothing", expected=_words(rule.shape), hint="it is required"
        )

    def _unknown(self, table: Table, key: Scalar, path: Path) -> None:
        if (table.free_prefix is not None and key.text.startswith(table.free_prefix)) or self._report.is_full():
            return
        self._problem(
            key.line,
            key.column,
            (*path, shortened(key.text)),
            found="an unknown key",
            expected=f"a key of {table.title}",
            hint=_home_of(key.text, table) or did_you_mean(key.text, table.keys),
        )

    def _problem(self, line: int, column: int, path: Path, *, found: str, expected: str, hint: str) -> None:
        shown = path_text(local_path(path, self._before))
        self._report.add(
            Problem(file=self._file, line=line, column=column, path=shown, found=found, expected=expected, hint=hint)
        )


def local_path(path: Path, scalers_before: int) -> Path:
    """A path among all scalers, as it is in the file whose first scaler is number `scalers_before`."""
    if len(path) > 1 and path[0] == "scalers" and isinstance(path[1], int):
        return ("scalers", path[1] - scalers_before, *path[2:])
    return path


def _home_of(name: str, table: Table) -> str:
    """A hint for a key that exists, but elsewhere."""
    for model in _HOMES:
        home = table_of(model)
        if name in home.keys and home.title != table.title:
            where = "at the top level of the main file" if model is ScalersConfig else f"in {home.title}"
            return f"it belongs {where}"
    return ""


def _words(shape: Shape) -> str:
    match shape:
        case Table():
            return f"a mapping with {_some(shape.keys)}"
        case ListOf():
            return f"a list of {_plural(shape.item)}"
        case MapOf() | Resources():
            return "a mapping"
        case _:
            return shape.words


def _plural(shape: Shape) -> str:
    match shape:
        case Table():
            return "mappings"
        case Text() if shape.words.startswith("a ") and " " not in shape.words[2:]:
            return f"{shape.words[2:]}s"
        case Choice():
            return shape.words
        case _:
            return f"values, each {_words(shape)}"


def _some(keys: Collection[str]) -> str:
    shown = list(keys)[:_KEYS_SHOWN]
    return ", ".join(shown) + (", ..." if len(keys) > len(shown) else "")
