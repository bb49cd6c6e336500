"""A job's output on its way to the coordinator: bytes at offsets, kept until they are acknowledged.

Pieces of both streams stay in the order in which they were read, so that they arrive interleaved as they were
written.  What is kept is bounded by a window; who fills the box asks `wants_more` before reading on.  With `drop`
it may go on reading: what does not fit is counted, and a marker stands in the stream where it is missing.
"""

from typing import Final

from kici.wire.messages import STDERR, STDOUT, LogChunkMessage, StreamNumber

WINDOW_BYTES: Final = 1024 * 1024
PIECE_BYTES_MAX: Final = 64 * 1024
PIECE_COST_BYTES: Final = 128
"""What a piece counts in the window beside its bytes: a million one-byte pieces would not be small."""
UNSENT_PIECES_MAX: Final = 64


class _Piece:
    __slots__ = ("data", "offset", "stream")

    def __init__(self, stream: StreamNumber, offset: int, data: bytearray) -> None:
        self.stream: StreamNumber = stream
        self.offset = offset
        self.data = data

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class Outbox:
    """Output of one job.  `limit_bytes` bounds what is ever accepted; the rest is cut with a notice."""

    def __init__(self, *, limit_bytes: int, window_bytes: int = WINDOW_BYTES, drop: bool = False) -> None:
        self._room = limit_bytes
        self._limit_bytes = limit_bytes
        self._is_cut = False
        self._window_bytes = window_bytes
        self._drop = drop
        self._pieces: list[_Piece] = []
        self._sent = 0  # this many pieces, from the first, were sent on the present connection
        self._held_bytes = 0
        self._ends: dict[StreamNumber, int] = {STDOUT: 0, STDERR: 0}
        self._missing: dict[StreamNumber, int] = {STDOUT: 0, STDERR: 0}  # dropped and not marked yet
        self.dropped_bytes = 0
        """Everything that was read and will never be sent."""
        self.dropped_lines = 0

    @property
    def wants_more(self) -> bool:
        """Whether more should be read from the step."""
        return self._drop or self._held_bytes < self._window_bytes

    @property
    def is_due(self) -> bool:
        """Enough is waiting that sending should not wait for a timer."""
        unsent = len(self._pieces) - self._sent
        return unsent > UNSENT_PIECES_MAX or (unsent > 0 and len(self._pieces[self._sent].data) >= PIECE_BYTES_MAX)

    @property
    def has_unsent(self) -> bool:
        return self._sent < len(self._pieces)

    def total_bytes(self, stream: StreamNumber) -> int:
        """Length of the stream so far, as the coordinator will see it."""
        return self._ends[stream]

    def add(self, stream: StreamNumber, data: bytes) -> None:
        """Take what was read from the step."""
        if self._drop and self._held_bytes >= self._window_bytes:
            self._missing[stream] += len(data)
            self.dropped_bytes += len(data)
            self.dropped_lines += data.count(b"\n")
            return
        self._mark_missing(stream)
        taken = data[: self._room]
        self._room -= len(taken)
        self._append(stream, taken)
        if len(taken) < len(data):
            self.dropped_bytes += len(data) - len(taken)
            self.dropped_lines += data.count(b"\n", len(taken))
            self._cut(stream)

    def finish(self) -> None:
        """No more will be added: mark what is missing at the end."""
        for stream in (STDOUT, STDERR):
            self._mark_missing(stream)

    def take(self, job_id: str) -> list[LogChunkMessage]:
        """Everything not sent on this connection yet; it counts as sent from now on."""
        unsent = self._pieces[self._sent :]
        self._sent = len(self._pieces)
        return [
            LogChunkMessage(job_id=job_id, stream=piece.stream, offset=piece.offset, data=bytes(piece.data))
            for piece in unsent
        ]

    def acknowledge(self, stream: StreamNumber, offset: int) -> None:
        """Everything of the stream before `offset` is stored: let it go."""
        kept: list[_Piece] = []
        sent = 0
        for number, piece in enumerate(self._pieces):
            if piece.stream == stream and piece.offset < offset:
                if piece.end <= offset:
                    self._held_bytes -= len(piece.data) + PIECE_COST_BYTES
                    continue
                self._held_bytes -= offset - piece.offset
                del piece.data[: offset - piece.offset]
                piece.offset = offset
            kept.append(piece)
            sent += number < self._sent
        self._pieces = kept
        self._sent = sent

    def rewind(self, *, stdout_offset: int, stderr_offset: int) -> None:
        """A new connection: everything from these offsets on is to be sent again."""
        self.acknowledge(STDOUT, stdout_offset)
        self.acknowledge(STDERR, stderr_offset)
        self._sent = 0

    def _mark_missing(self, stream: StreamNumber) -> None:
        if self._missing[stream]:
            self._append(stream, b"\n[kici: %d bytes of output dropped here]\n" % self._missing[stream])
            self._missing[stream] = 0

    def _cut(self, stream: StreamNumber) -> None:
        if not self._is_cut:
            self._is_cut = True
            self._append(stream, b"\n[kici: output cut here, its limit is %d bytes]\n" % self._limit_bytes)

    def _append(self, stream: StreamNumber, data: bytes) -> None:
        start = 0
        if self.has_unsent:
            last = self._pieces[-1]
            if last.stream == stream:
                start = max(0, min(len(data), PIECE_BYTES_MAX - len(last.data)))
                last.data += data[:start]
        while start < len(data):
            part = bytearray(data[start : start + PIECE_BYTES_MAX])
            self._pieces.append(_Piece(stream, self._ends[stream] + start, part))
            self._held_bytes += PIECE_COST_BYTES
            start += len(part)
        self._ends[stream] += len(data)
        self._held_bytes += len(data)
