"""Strict YAML: what scalars mean, where things stand, and what is refused."""

import math
import sys
from itertools import pairwise

import pytest

from kici.config import yaml_source
from kici.config.nodes import Mapping, Node, Scalar, Sequence, Value
from kici.config.problems import Problem
from kici.config.yaml_source import ALIASED_NODES_MAX, DEPTH_MAX, FILE_BYTES_MAX, parse

OTHERWISE_IN_OLDER_YAML = (
    *("no", "yes", "on", "off", "y", "N", "1:30", "190:20:30", "2026-11-29", "1_000", "0b1"),
    *("0x", "1e", "+", ".", "-.", ".e1", "9" * 80),
)


def root(text: str) -> Node:
    node, problems = parse(text.encode(), "f")
    assert problems == []
    assert node is not None
    return node


def refused(data: str | bytes) -> list[str]:
    _, problems = parse(data.encode() if isinstance(data, str) else data, "f")
    return [f"{one.line}:{one.column}: {one.path}: {one.found}" for one in problems]


def value(text: str) -> Value:
    node = root(text)
    assert isinstance(node, Scalar)
    return node.value


def plain(node: Node) -> object:
    match node:
        case Mapping():
            return {name: plain(entry.value) for name, entry in node.entries.items()}
        case Sequence():
            return [plain(item) for item in node.items]
        case Scalar():
            return node.value


@pytest.mark.parametrize("text", OTHERWISE_IN_OLDER_YAML)
def test_what_older_yaml_takes_for_something_else_is_text(text: str) -> None:
    assert value(text) == text


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("12", 12),
        ("-7", -7),
        ("+3", 3),
        ("010", 10),
        ("0o17", 15),
        ("0xfF", 255),
        ("1.5", 1.5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-1e3", -1000.0),
        ("-.inf", -math.inf),
        ("'12'", "12"),
        ('"true"', "true"),
        ("!!str 12", "12"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, meant: Value) -> None:
    found = value(text)
    assert found == meant
    assert type(found) is type(meant)


def test_not_a_number_is_a_number() -> None:
    found = value(".nan")
    assert isinstance(found, float)
    assert math.isnan(found)


def test_every_value_knows_its_line_and_column() -> None:
    node = root("a:\n  - x\n  - ä: {b: 1}\n")
    assert isinstance(node, Mapping)
    listed = node.entries["a"].value
    assert isinstance(listed, Sequence)
    inner = listed.items[1]
    assert isinstance(inner, Mapping)
    flow = inner.entries["ä"].value
    assert isinstance(flow, Mapping)
    places = [(one.line, one.column) for one in (node, listed, listed.items[0], inner, flow)]
    assert places == [(1, 1), (2, 3), (2, 5), (3, 5), (3, 8)]
    assert (flow.entries["b"].key.column, flow.entries["b"].value.column) == (9, 12)


def test_a_byte_order_mark_is_no_character() -> None:
    node, problems = parse(b"\xef\xbb\xbfa: 1", "f")
    assert problems == []
    assert node is not None
    assert plain(node) == {"a": 1}


def test_an_empty_document_is_no_problem_and_no_root() -> None:
    assert parse(b"", "f") == (None, [])
    assert parse(b"# nothing\n", "f") == (None, [])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: [1", "2:1"),
        ("a: 1\nb: c: d", "2:5"),
        ("\ta: 1", "1:1"),
        ("a: 'x", "1:6"),
        ("a: @x", "1:4"),
        ("%YAML 9.9\n---\na: 1", "1:1"),
    ],
)
def test_broken_yaml_is_one_problem_with_its_place(text: str, place: str) -> None:
    (found,) = refused(text)
    assert found.startswith(f"{place}: : broken YAML (")


def test_bytes_that_are_no_text_are_found() -> None:
    assert refused(b"a: 1\nb: \xff") == ["2:4: : the byte 0xff"]


def test_control_characters_are_found() -> None:
    assert refused("a: 1\nb: x\x01") == ["2:5: : the character U+0001"]


def test_a_key_that_occurs_twice_is_a_problem_at_its_second_place() -> None:
    node, problems = parse(b"a:\n- b: 1\n  c: 2\n  b: 3\n", "f")
    assert [(one.line, one.column, one.path) for one in problems] == [(4, 3, "a[0].b")]
    assert "line 2" in problems[0].hint
    assert node is not None
    assert plain(node) == {"a": [{"b": 1, "c": 2}]}


def test_several_duplicates_are_several_problems() -> None:
    assert [one.split(": ")[0] for one in refused("a: 1\na: 2\na: 3")] == ["2:1", "3:1"]


def test_merge_keys_are_refused() -> None:
    assert refused("x: &x {a: 1}\ny:\n  <<: *x\n") == ["3:3: y.<<: a merge key"]


@pytest.mark.parametrize("text", ["a: !!int 3", "a: !own 3", "a: !!set {b}", "a: !!python/object:os.system {}"])
def test_tags_are_refused(text: str) -> None:
    (found,) = refused(text)
    assert found.startswith("1:4: a: the tag !")


def test_a_second_document_is_refused() -> None:
    assert refused("a: 1\n---\nb: 2\n") == ["2:1: : a second document"]


def test_a_collection_is_no_key() -> None:
    assert refused("? [a]\n: 1\n") == ["1:3: : a collection as a key"]


def test_aliases_stand_for_whole_values() -> None:
    assert plain(root("a: &x {b: [1]}\nc: *x\nd: [*x]")) == {"a": {"b": [1]}, "c": {"b": [1]}, "d": [{"b": [1]}]}


def test_an_anchor_may_be_given_again_and_the_last_one_counts() -> None:
    assert plain(root("a: &x 1\nb: &x 2\nc: *x")) == {"a": 1, "b": 2, "c": 2}


@pytest.mark.parametrize("text", ["a: *gone", "a: &a [*a]", "a: &a {b: *a}"])
def test_an_alias_needs_a_finished_anchor(text: str) -> None:
    (found,) = refused(text)
    assert "the alias *" in found


def test_laughs_are_few() -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{new}: &a{new} [{', '.join([f'*a{old}'] * 10)}]" for old, new in pairwise(range(30))]
    (found,) = refused("\n".join(lines))
    assert found.endswith("aliases that make the file too large")
    assert int(found.split(":")[0]) < 8


def test_many_small_aliases_are_fine() -> None:
    node = root("a: &a [x, y]\nb: [" + ", ".join(["*a"] * (ALIASED_NODES_MAX // 3)) + "]")
    assert isinstance(node, Mapping)


def test_depth_is_bounded_with_and_without_aliases() -> None:
    assert isinstance(root("[" * DEPTH_MAX + "]" * DEPTH_MAX), Sequence)
    assert "more than 64 levels" in refused("[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1))[0]
    deep = "[" * 40 + "]" * 40
    assert "too large" in refused(f"a: &a {deep}\nb: {'[' * 30}*a{']' * 30}")[0]


def test_a_million_brackets_cost_nothing() -> None:
    assert len(refused("[" * 1_000_000)) == 1


def test_a_file_of_too_many_values_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_source, "NODES_MAX", 5)
    assert isinstance(root("[1, 2, 3, 4]"), Sequence)
    assert refused("[1, 2, 3, 4, 5, 6]") == ["1:17: : more than 5 values"]


def test_a_huge_file_is_not_read() -> None:
    assert refused(b"a" * (FILE_BYTES_MAX + 1)) == [f"1:1: : more than {FILE_BYTES_MAX} bytes"]


@pytest.mark.parametrize("text", ["a: &x [1, 'b']\nc: *x\n", "a: 1\na: 2\n", "a: [1", "x: {y: no, z: 0x1F}"])
def test_it_reads_the_same_without_the_c_library(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> tuple[object, list[str]]:
        node, problems = parse(text.encode(), "f")
        return None if node is None else plain(node), [one.path for one in problems]

    fast = outcome()
    monkeypatch.setitem(sys.modules, "yaml._yaml", None)
    assert outcome() == fast


def test_a_problem_reads_as_one_line() -> None:
    problem = Problem(file="f.yaml", line=3, column=7, path="a.b", found="x", expected="y", hint="did you mean z?")
    assert str(problem) == "f.yaml:3:7: a.b: found x, expected y (did you mean z?)"
    assert str(Problem(file="f", line=1, column=1, path="", found="x", expected="y")) == "f:1:1: found x, expected y"
