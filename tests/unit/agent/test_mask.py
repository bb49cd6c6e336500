"""Secrets in output."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.agent.mask import Masker, needles_of


def shown(values: list[str], *blocks: bytes) -> bytes:
    masker = Masker(needles_of(values))
    return b"".join([masker.feed(block) for block in blocks]) + masker.finish()


@pytest.mark.spec("T3.8")
def test_a_secret_is_hidden_wherever_it_stands() -> None:
    assert shown(["hush"], b"hush a hush, b=hush\nhush") == b"*** a ***, b=***\n***"


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_secret_is_hidden_when_it_is_split_over_reads(cut: int) -> None:
    text = b"is hunter2 ok"
    assert shown(["hunter2"], text[:cut], text[cut:]) == b"is *** ok"


def test_what_may_become_a_secret_is_held_back_and_given_when_it_does_not() -> None:
    masker = Masker(needles_of(["hunter2"]))
    assert masker.feed(b"a hunt") == b"a "
    assert masker.feed(b"ing") == b"hunting"
    assert masker.feed(b"hunter") == b""
    assert masker.finish() == b"hunter"


def test_a_value_of_several_lines_is_hidden_line_by_line() -> None:
    key = "-----BEGIN-----\r\n  abcdef\nx\n"
    assert shown([key], b"  abcdef  x -----BEGIN-----") == b"  ***  x ***"


@pytest.mark.parametrize("value", ["", "a", "ab", "\n\n", " a "])
def test_very_short_values_are_left_alone(value: str) -> None:
    assert needles_of([value]) == ()
    assert shown([value], b"a ab b") == b"a ab b"


def test_the_longer_of_two_secrets_with_one_beginning_is_hidden_whole() -> None:
    assert shown(["abc", "abcdef"], b"abc", b"def abcd") == b"*** ***d"


def test_overlapping_secrets_leave_nothing_of_either() -> None:
    assert shown(["aab", "abxy"], b"aabxyz") == b"***z"
    assert shown(["aab", "abxy"], b"aab", b"x", b"yz") == b"***z"


def test_neighbours_are_hidden_one_by_one() -> None:
    assert shown(["abc", "def"], b"abcdefabc") == b"*********"


def test_bytes_that_are_no_text_pass_untouched() -> None:
    assert shown(["hush"], b"\xff\x00hush\xfe") == b"\xff\x00***\xfe"


def test_what_is_held_back_is_bounded_whatever_comes() -> None:
    masker = Masker(needles_of(["aaa"]))
    given_out = b"".join(masker.feed(b"a" * 1000) for _ in range(100))
    assert given_out == b"***"
    assert masker.finish() == b""


def by_definition(needles: tuple[bytes, ...], text: bytes) -> bytes:
    """Mark every byte of every occurrence; each run of overlapping ones becomes one mask."""
    spans = sorted(
        (start, start + len(needle))
        for needle in needles
        for start in range(len(text))
        if text.startswith(needle, start)
    )
    result, position = b"", 0
    for start, stop in spans:
        if start >= position:
            result += text[position:start] + b"***"
        position = max(position, stop)
    return result + text[position:]


LETTERS = st.text("ab", min_size=3, max_size=6)


@given(st.lists(LETTERS, max_size=3), st.lists(st.text("abc", max_size=8).map(str.encode), max_size=8))
def test_how_the_output_is_cut_into_reads_makes_no_difference(values: list[str], blocks: list[bytes]) -> None:
    assert shown(values, *blocks) == by_definition(needles_of(values), b"".join(blocks))
