"""Output on its way: offsets, acknowledgements, bounds."""

from kici.wire.messages import STDERR, STDOUT, LogChunkMessage
from kici.wire.outbox import PIECE_BYTES_MAX, PIECE_COST_BYTES, UNSENT_PIECES_MAX, Outbox

MIB = 1024 * 1024


def box(**options: int | bool) -> Outbox:
    return Outbox(**{"limit_bytes": 100 * MIB, **options})  # type: ignore[arg-type]  # a test's options


def sent(outbox: Outbox) -> list[tuple[int, int, bytes]]:
    return [(chunk.stream, chunk.offset, chunk.data) for chunk in outbox.take("j")]


def stream(chunks: list[LogChunkMessage], number: int) -> bytes:
    return b"".join(chunk.data for chunk in chunks if chunk.stream == number)


def test_bytes_keep_their_offsets_and_the_order_in_which_they_were_read() -> None:
    outbox = box()
    outbox.add(STDOUT, b"ab")
    outbox.add(STDERR, b"E")
    outbox.add(STDOUT, b"cd")
    outbox.add(STDOUT, b"ef")
    assert sent(outbox) == [(1, 0, b"ab"), (2, 0, b"E"), (1, 2, b"cdef")]
    assert sent(outbox) == []
    outbox.add(STDOUT, b"g")
    assert sent(outbox) == [(1, 6, b"g")]


def test_large_output_is_sent_in_pieces() -> None:
    outbox = box()
    outbox.add(STDOUT, b"x" * (PIECE_BYTES_MAX + 1))
    assert outbox.is_due
    assert [(chunk.offset, len(chunk.data)) for chunk in outbox.take("j")] == [
        (0, PIECE_BYTES_MAX),
        (PIECE_BYTES_MAX, 1),
    ]


def test_a_little_output_can_wait_but_many_small_pieces_cannot() -> None:
    outbox = box()
    for _ in range(UNSENT_PIECES_MAX // 2):
        outbox.add(STDOUT, b"o")
        outbox.add(STDERR, b"e")
    assert not outbox.is_due
    outbox.add(STDOUT, b"o")
    assert outbox.is_due


def test_what_is_not_acknowledged_is_sent_again_on_a_new_connection() -> None:
    outbox = box()
    outbox.add(STDOUT, b"abcdef")
    outbox.add(STDERR, b"EF")
    outbox.take("j")
    outbox.acknowledge(STDOUT, 2)
    outbox.rewind(stdout_offset=4, stderr_offset=0)
    assert sent(outbox) == [(1, 4, b"ef"), (2, 0, b"EF")]
    outbox.rewind(stdout_offset=6, stderr_offset=2)
    assert sent(outbox) == []


def test_a_stale_acknowledgement_changes_nothing() -> None:
    outbox = box()
    outbox.add(STDOUT, b"abcd")
    outbox.take("j")
    outbox.acknowledge(STDOUT, 3)
    outbox.acknowledge(STDOUT, 1)
    outbox.rewind(stdout_offset=0, stderr_offset=0)
    assert sent(outbox) == [(1, 3, b"d")]


def test_an_acknowledgement_of_unsent_bytes_does_not_lose_those_after_them() -> None:
    outbox = box()
    outbox.add(STDOUT, b"abcd")
    outbox.acknowledge(STDOUT, 2)
    outbox.add(STDOUT, b"ef")
    assert sent(outbox) == [(1, 2, b"cdef")]


def test_reading_pauses_when_the_window_is_full_and_goes_on_when_it_is_not() -> None:
    outbox = box(window_bytes=1000)
    outbox.add(STDOUT, b"x" * 900)
    assert not outbox.wants_more, "the piece itself costs something"
    outbox.take("j")
    outbox.acknowledge(STDOUT, 800)
    assert outbox.wants_more


def test_one_byte_pieces_fill_the_window_too() -> None:
    outbox = box(window_bytes=1000)
    for _ in range(1000 // PIECE_COST_BYTES // 2 + 1):
        outbox.add(STDOUT, b"o")
        outbox.add(STDERR, b"e")
    assert not outbox.wants_more


def test_dropping_leaves_a_marker_where_output_is_missing() -> None:
    outbox = box(window_bytes=100, drop=True)
    outbox.add(STDOUT, b"a" * 100)
    outbox.add(STDOUT, b"b\nb\nb")
    outbox.add(STDOUT, b"c" * 6 + b"\n")
    assert outbox.wants_more
    assert (outbox.dropped_bytes, outbox.dropped_lines) == (12, 3)
    outbox.take("j")
    outbox.acknowledge(STDOUT, 100)
    outbox.add(STDOUT, b"d")
    assert sent(outbox) == [(1, 100, b"\n[kici: 12 bytes of output dropped here]\nd")]


def test_a_gap_at_the_very_end_is_marked_as_well() -> None:
    outbox = box(window_bytes=100, drop=True)
    outbox.add(STDERR, b"a" * 100)
    outbox.add(STDERR, b"b")
    outbox.finish()
    outbox.finish()
    assert stream(outbox.take("j"), STDERR) == b"a" * 100 + b"\n[kici: 1 bytes of output dropped here]\n"


def test_output_over_the_limit_is_cut_with_one_notice() -> None:
    outbox = box(limit_bytes=5)
    outbox.add(STDOUT, b"abc")
    outbox.add(STDERR, b"de")
    outbox.add(STDERR, b"f\n")
    outbox.add(STDOUT, b"\ng")
    chunks = outbox.take("j")
    assert stream(chunks, STDOUT) == b"abc"
    assert stream(chunks, STDERR) == b"de\n[kici: output cut here, its limit is 5 bytes]\n"
    assert outbox.total_bytes(STDERR) == len(stream(chunks, STDERR))
    assert (outbox.dropped_bytes, outbox.dropped_lines) == (4, 2)


def test_output_of_exactly_the_limit_is_whole() -> None:
    outbox = box(limit_bytes=3)
    outbox.add(STDOUT, b"abc")
    outbox.finish()
    assert stream(outbox.take("j"), STDOUT) == b"abc"
