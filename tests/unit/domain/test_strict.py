from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from kici.domain.strict import FAULTS_MAX, Fault, Faulty, nearest, read, read_partly, read_texts, unknown


class Inner(msgspec.Struct, rename="camel"):
    how_many: Annotated[int, Meta(ge=1)]


class Outer(msgspec.Struct, rename="camel"):
    inner: Inner
    many: dict[str, Inner] = {}
    either: list[str] | Inner | None = None
    flag: bool = False


def test_good_data_is_read() -> None:
    value = read({"inner": {"howMany": 2}, "many": {"a": {"howMany": 1}}, "either": ["x"]}, Outer)
    assert value == Outer(inner=Inner(how_many=2), many={"a": Inner(how_many=1)}, either=["x"])


def test_every_fault_has_its_path() -> None:
    raw = {"inner": {"howmany": 1}, "many": {"a": {"howMany": 0}, "b c": 5}, "either": [1], "flag": "yes"}
    with pytest.raises(Faulty) as caught:
        read(raw, Outer)
    assert [fault.path for fault in caught.value.faults] == [
        "$.inner.howmany",
        "$.inner",
        "$.many.a.howMany",
        "$.many['b c']",
        "$.either[0]",
        "$.flag",
    ]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"howMany": "1"}, "expected a whole number, found '1'"),
        ({"howMany": True}, "expected a whole number, found true"),
        ({"howMany": None}, "expected a whole number, found null"),
        ({"howMany": 0}, "expected a whole number >= 1, found 0"),
        ({"howMany": []}, "expected a whole number, found a list"),
        ([], "expected an object, found a list"),
    ],
)
def test_a_fault_says_what_was_expected_and_found(raw: object, words: str) -> None:
    with pytest.raises(Faulty) as caught:
        read(raw, Inner)
    assert caught.value.faults[0].message == words


def test_the_sound_part_of_faulty_data_can_be_looked_at() -> None:
    value, faults = read_partly({"inner": {"howMany": 3}, "flag": "yes", "extra": 1}, Outer)
    assert value == Outer(inner=Inner(how_many=3))
    assert {fault.path for fault in faults} == {"$.flag", "$.extra"}
    assert read_partly({"inner": 1}, Outer)[0] is None


def test_keys_that_are_no_strings_are_faults() -> None:
    with pytest.raises(Faulty, match="names that are strings"):
        read({1: {"howMany": 1}}, dict[str, Inner])


def test_faults_are_bounded() -> None:
    with pytest.raises(Faulty) as caught:
        read({str(number): 0 for number in range(500)}, dict[str, Inner])
    assert len(caught.value.faults) == FAULTS_MAX


def test_texts_become_what_the_fields_are() -> None:
    assert read_texts({"howMany": "7"}, Inner) == Inner(how_many=7)
    with pytest.raises(Faulty) as caught:
        read_texts({"howMany": "x", "howmany": "1"}, Inner)
    assert [fault.path for fault in caught.value.faults] == ["?howmany", "?howMany"]


def test_the_nearest_name_ignores_case_and_separators() -> None:
    assert nearest("time_out", ["timeoutSeconds", "timeout"]) == "timeout"
    assert nearest("zzz", ["timeout"]) is None
    assert unknown("zzz", ["b", "a"]) == "unknown key 'zzz'; known: a, b"
    assert str(Fault("$.a", "bad")) == "$.a: bad"
