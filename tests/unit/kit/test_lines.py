"""Lines from hostile output: whole characters, bounded lines, bounded queues."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.kit.lines import LINE_MAX, QUEUE_MAX, LineBuffer, follow
from kici.testing.virtual_time import virtual


def lines_of(buffer: LineBuffer) -> list[str]:
    found = []
    while (line := buffer.take()) is not None:
        found.append(line)
    return found


def split(*blocks: bytes) -> list[str]:
    buffer = LineBuffer()
    for block in blocks:
        buffer.feed(block)
    buffer.finish()
    return lines_of(buffer)


@pytest.mark.spec("scaler 39.4.3")
def test_a_character_split_over_two_blocks_stays_whole() -> None:
    euro = "€".encode()
    assert split(b"a" + euro[:1], euro[1:] + b"b\n") == ["a€b"]


@pytest.mark.spec("scaler 39.4.4")
def test_a_long_line_is_cut_with_a_mark() -> None:
    (line, after) = split(b"x" * 70_000 + b"\nafter\n")
    assert line == "x" * LINE_MAX + " [truncated]"
    assert after == "after"


def test_an_endless_line_is_given_at_once_and_its_rest_thrown_away() -> None:
    buffer = LineBuffer()
    buffer.feed(b"x" * (LINE_MAX + 1))
    assert lines_of(buffer) == ["x" * LINE_MAX + " [truncated]"]
    for _ in range(10):
        buffer.feed(b"y" * LINE_MAX)
    assert lines_of(buffer) == []
    buffer.feed(b"\nnext\n")
    assert lines_of(buffer) == ["next"]


@pytest.mark.spec("scaler 39.4.5")
def test_when_nobody_takes_them_the_oldest_lines_go_and_one_mark_says_so() -> None:
    buffer = LineBuffer()
    for number in range(15_000):
        buffer.feed(f"{number}\n".encode())
    first, *rest = lines_of(buffer)
    assert first == "[dropped 5001 lines]"
    assert len(rest) == QUEUE_MAX - 1
    assert rest[-1] == "14999"
    for number in range(QUEUE_MAX + 1):
        buffer.feed(f"{number}\n".encode())
    assert buffer.take() == "[dropped 5003 lines]", "of all that ever went"


@given(st.lists(st.text(alphabet="aé€😀\r", max_size=5), max_size=8), st.lists(st.integers(0, 60), max_size=6))
def test_blocks_do_not_matter(lines: list[str], cuts: list[int]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    blocks = [data[start:end] for start, end in pairwise(edges)]
    assert split(*blocks) == [line.removesuffix("\r") for line in lines if line.removesuffix("\r")]


@pytest.mark.spec("scaler 39.4.6")
@virtual
async def test_follows_until_it_is_over_and_gives_the_unfinished_end() -> None:
    content, over = bytearray(), False
    found: list[str] = []

    async def reader() -> None:
        async for line in follow(
            lambda offset, count: bytes(content[offset : offset + count]),
            lambda: len(content),
            sleep=asyncio.sleep,
            is_over=lambda: over,
        ):
            found.append(line)  # noqa: PERF401  # looked at while it grows

    task = asyncio.create_task(reader())
    content += b"one\ntw"
    await asyncio.sleep(1)
    assert found == ["one"]
    content += b"o\n"
    await asyncio.sleep(1)
    assert found == ["one", "two"]
    content[:] = b"cut\n"
    await asyncio.sleep(1)
    assert found == ["one", "two", "cut"]
    content += b"half"
    over = True
    await task
    assert found == ["one", "two", "cut", "half"]
