"""Secrets in a step's output become `***`, also when one is split over several reads.

Values of several lines are hidden line by line, since that is how programs print them.  Values shorter than three
bytes are left alone: hiding every `1` hides nothing and makes the output unreadable.  Bytes that may be the start
of a secret are held back until it is clear; they are never more than the longest secret.
"""

from collections.abc import Iterable
from typing import Final

MASK: Final = b"***"
BYTES_MIN: Final = 3


def needles_of(values: Iterable[str]) -> tuple[bytes, ...]:
    """The byte strings to hide: lines of the values, longest first."""
    lines = {line.strip() for value in values for line in value.encode().splitlines()}
    return tuple(sorted((line for line in lines if len(line) >= BYTES_MIN), key=lambda line: (-len(line), line)))


class Masker:
    """One stream."""

    def __init__(self, needles: tuple[bytes, ...]) -> None:
        self._needles = needles
        self._tail = b""
        self._covered = 0  # of the tail, this many bytes are already hidden by a mask that was given out

    def feed(self, data: bytes) -> bytes:
        """What may be shown now."""
        if not self._needles:
            return data
        return self._mask(self._tail + data, is_last=False)

    def finish(self) -> bytes:
        """What was held back: the stream is over."""
        return self._mask(self._tail, is_last=True)

    def _mask(self, text: bytes, *, is_last: bool) -> bytes:
        end = len(text) if is_last else self._undecided(text)
        shown: list[bytes] = []
        position = self._covered
        for start, stop in self._hidden(text):
            if start >= end:
                break
            if start >= position:  # else it only prolongs what is hidden already
                shown += (text[position:start], MASK)
            position = max(position, stop)
        if position < end:
            shown.append(text[position:end])
        self._tail = text[end:]
        self._covered = max(0, position - end)
        return b"".join(shown)

    def _hidden(self, text: bytes) -> list[tuple[int, int]]:
        """Where secrets are, in order of their start; they may overlap."""
        found = []
        for needle in self._needles:
            start = text.find(needle)
            while start >= 0:
                found.append((start, start + len(needle)))
                start = text.find(needle, start + 1)
        return sorted(found)

    def _undecided(self, text: bytes) -> int:
        """The first position from which on the text may turn out to be a secret."""
        earliest = len(text)
        for needle in self._needles:
            start = text.find(needle[:1], max(0, len(text) - len(needle) + 1))
            while 0 <= start < earliest:
                if needle.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(needle[:1], start + 1)
        return earliest
