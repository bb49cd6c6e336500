"""Strict YAML: a file becomes a tree of values that know their line and column, or problems do.

Scalars follow the core schema of YAML 1.2: only `true` and `false` are booleans (`no` and `on` are text), `1:30`
and dates are text.  A key that occurs twice is a problem, and so are tags, merge keys and a second document.
Everything is bounded: size, depth, and what aliases may add; nothing here recurses.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    ScalarEvent,
)

from kici.config.nodes import Entry, Mapping, Node, Scalar, Sequence, Value, shortened
from kici.config.problems import PROBLEMS_MAX, Problem, path_text

FILE_BYTES_MAX: Final = 8 * 1024 * 1024
DEPTH_MAX: Final = 64
NODES_MAX: Final = 1_000_000
"""Keys and values of a document; the largest sensible file has a fifth of that."""
ALIASED_NODES_MAX: Final = 100_000
"""How many nodes aliases may add to a document in all."""
_NUMBER_CHARS_MAX: Final = 64
_NON_PRINTABLE: Final = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NUMBER_STARTS: Final = frozenset("+-.0123456789")
_INTEGER: Final = re.compile(r"[-+]?[0-9]+\Z")
_BASED: Final = re.compile(r"0(o[0-7]+|x[0-9a-fA-F]+)\Z")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL_FLOAT: Final = re.compile(r"([-+]?)\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")
_TEXT_TAGS: Final = frozenset({"!", "tag:yaml.org,2002:str"})
_COLLECTION_TAGS: Final = frozenset({"!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})


class _Unreadable(Exception):
    """Nothing after this place was read."""

    def __init__(self, line: int, column: int, found: str, expected: str) -> None:
        super().__init__(found)
        self.line, self.column, self.found, self.expected = line, column, found, expected


def parse(data: bytes, file: str) -> tuple[Node | None, list[Problem]]:
    """The root of the document and what is wrong with it as YAML.

    Without a root nothing could be read; there is a problem then, or the document is empty.
    """
    composer = _Composer(file)
    try:
        return composer.compose(_events(_decoded(data))), composer.problems
    except _Unreadable as error:
        composer.problem(error.line, error.column, "", found=error.found, expected=error.expected)
        return None, composer.problems


# --- bytes to events


def _decoded(data: bytes) -> str:
    if len(data) > FILE_BYTES_MAX:
        raise _Unreadable(1, 1, f"more than {FILE_BYTES_MAX} bytes", "a smaller file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _place(data[: error.start].decode("utf-8", errors="replace"))
        raise _Unreadable(line, column, f"the byte 0x{data[error.start]:02x}", "text in UTF-8") from None
    bad = _NON_PRINTABLE.search(text)
    if bad is not None:
        line, column = _place(text[: bad.start()])
        raise _Unreadable(line, column, f"the character U+{ord(bad[0]):04X}", "printable text")
    return text


def _place(before: str) -> tuple[int, int]:
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def _events(text: str) -> Iterator[Event]:
    try:
        yield from _raw_events(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        told = ", ".join(part for part in (error.context, error.problem) if part)
        raise _Unreadable(line, column, f"broken YAML ({told})", "well-formed YAML") from None
    except yaml.YAMLError as error:
        raise _Unreadable(1, 1, f"broken YAML ({error})", "well-formed YAML") from None


def _raw_events(text: str) -> Iterator[Event]:
    try:
        from yaml._yaml import CParser
    except ImportError:  # a PyYAML without libyaml: slower, same events
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
        return
    parser = CParser(text)
    while (event := parser.get_event()) is not None:
        yield event


# --- events to nodes


class _Marked(Protocol):
    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Open:
    """A collection whose end has not come yet."""

    node: Sequence | Mapping
    anchor: str | None
    key: Scalar | None = None
    nodes: int = 1
    """Nodes in it so far, counted through aliases."""
    height: int = 1


@dataclass(slots=True, eq=False)
class _Anchored:
    node: Node
    nodes: int
    height: int


class _Composer:
    def __init__(self, file: str) -> None:
        self.problems: list[Problem] = []
        self._file = file
        self._open: list[_Open] = []
        self._anchors: dict[str, _Anchored | None] = {}
        self._aliased = 0
        self._nodes = 0
        self._root: Node | None = None

    def problem(self, line: int, column: int, path: str, *, found: str, expected: str, hint: str = "") -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(
                Problem(file=self._file, line=line, column=column, path=path, found=found, expected=expected, hint=hint)
            )

    def compose(self, events: Iterator[Event]) -> Node | None:
        documents = 0
        for event in events:
            if isinstance(event, ScalarEvent):
                self._scalar(event)
            elif isinstance(event, CollectionStartEvent):
                self._start(event)
            elif isinstance(event, CollectionEndEvent):
                self._end()
            elif isinstance(event, AliasEvent):
                self._alias(event)
            elif isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _Unreadable(*_at(event), "a second document", "one document in each file")
        return self._root

    def _scalar(self, event: ScalarEvent) -> None:
        line, column = _at(event)
        if event.tag is not None and event.tag not in _TEXT_TAGS:
            self._refuse_tag(event.tag, line, column)
        value = _resolved(event.value) if event.implicit[0] else event.value
        node = Scalar(line, column, value, event.value)
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(node, 1, 1)
        self._add(node, 1, 1)

    def _start(self, event: CollectionStartEvent) -> None:
        line, column = _at(event)
        if event.tag is not None and event.tag not in _COLLECTION_TAGS:
            self._refuse_tag(event.tag, line, column)
        if len(self._open) >= DEPTH_MAX:
            raise _Unreadable(line, column, f"more than {DEPTH_MAX} levels", "a flatter file")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        node = Mapping(line, column) if isinstance(event, MappingStartEvent) else Sequence(line, column)
        self._open.append(_Open(node, event.anchor))

    def _end(self) -> None:
        done = self._open.pop()
        if done.anchor is not None:
            self._anchors[done.anchor] = _Anchored(done.node, done.nodes, done.height)
        self._add(done.node, done.nodes, done.height)

    def _alias(self, event: AliasEvent) -> None:
        line, column = _at(event)
        anchored = self._anchors.get(event.anchor or "")
        if anchored is None:
            raise _Unreadable(line, column, f"the alias *{event.anchor}", "an alias of a finished anchor before it")
        self._aliased += anchored.nodes
        if self._aliased > ALIASED_NODES_MAX or len(self._open) + anchored.height > DEPTH_MAX:
            raise _Unreadable(line, column, "aliases that make the file too large", "fewer aliases")
        self._add(anchored.node, anchored.nodes, anchored.height)

    def _add(self, node: Node, nodes: int, height: int) -> None:
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise _Unreadable(node.line, node.column, f"more than {NODES_MAX} values", "a smaller file")
        if not self._open:
            self._root = node
            return
        parent = self._open[-1]
        parent.nodes += nodes
        parent.height = max(parent.height, height + 1)
        if isinstance(parent.node, Sequence):
            parent.node.items.append(node)
        elif parent.key is None:
            if not isinstance(node, Scalar):
                raise _Unreadable(node.line, node.column, "a collection as a key", "text as a key")
            parent.key = node
        else:
            self._put(parent.node, parent.key, node)
            parent.key = None

    def _put(self, mapping: Mapping, key: Scalar, value: Node) -> None:
        known = mapping.entries.get(key.text)
        if known is not None:
            self.problem(
                key.line,
                key.column,
                self._path(),
                found=f'the key "{shortened(key.text)}" again',
                expected="each key once",
                hint=f"it is in line {known.key.line} too",
            )
        elif key.text == "<<":
            self.problem(
                key.line,
                key.column,
                self._path(),
                found="a merge key",
                expected="keys written out",
                hint="merge keys left YAML with version 1.2; an alias may stand for a whole value",
            )
        else:
            mapping.entries[key.text] = Entry(key, value)

    def _path(self) -> str:
        steps: list[str | int] = []
        for level in self._open:
            if isinstance(level.node, Sequence):
                steps.append(len(level.node.items))
            elif level.key is not None:
                steps.append(shortened(level.key.text))
        return path_text(tuple(steps))

    def _refuse_tag(self, tag: str, line: int, column: int) -> None:
        shown = tag.replace("tag:yaml.org,2002:", "!!")
        self.problem(line, column, self._path(), found=f"the tag {shortened(shown)}", expected="a value without a tag")


def _at(event: Event) -> tuple[int, int]:
    mark: _Marked | None = event.start_mark
    assert mark is not None, event
    return mark.line + 1, mark.column + 1


def _resolved(text: str) -> Value:
    """A plain scalar by the core schema."""
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if text[0] not in _NUMBER_STARTS or len(text) > _NUMBER_CHARS_MAX:
        return text
    if _INTEGER.match(text):
        return int(text)
    if _BASED.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    special = _SPECIAL_FLOAT.match(text)
    if special is not None:
        return float(f"{special[1] or ''}inf") if special[2] else float("nan")
    return text
