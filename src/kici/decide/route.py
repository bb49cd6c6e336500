"""The matcher: which label set of which scaler serves a demand.

A set passes when it offers every label that is asked for, offers none that is excluded, and every label of its
gate is asked for.  Of those that pass, the one with the fewest labels wins, the first one on ties: a plain job
must not take the GPU machine.  A demand without labels takes the first ungated set in the order of the
configuration.

The rules are compiled once per configuration into bit masks, one for each label, whose bits stand for the sets
in order of preference; a decision is a few ANDs and the lowest bit that is left.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from kici.decide.entries import Routable
from kici.domain.job import Demand
from kici.domain.labels import canonical
from kici.domain.verdict import NearMiss

MEMO_MAX: Final = 16_384
"""Remembered decisions.  A demand class is asked about again at every pass; ten times the classes that live at once."""
MEMO_MISS_MAX: Final = 1_024
NEAREST_MAX: Final = 5

Labels = frozenset[str]


class Router:
    """The compiled label sets of one configuration.  Immutable; a reload makes a new one."""

    def __init__(self, entries: Sequence[Routable]) -> None:
        """`entries` in the order of the configuration."""
        self._entries = tuple(entries)
        self._ranked = tuple(sorted(entries, key=lambda entry: len(entry.offers)))
        self._offering = _masks(entry.offers for entry in self._ranked)
        self._ungated = _mask([place for place, entry in enumerate(self._ranked) if not entry.gate])
        self._gated = _gate_masks([entry.gate for entry in self._ranked])
        self._first: Callable[[Labels, Labels], Routable | None] = lru_cache(MEMO_MAX)(self._find_first)
        self._nearest: Callable[[Labels, Labels], tuple[NearMiss, ...]] = lru_cache(MEMO_MISS_MAX)(self._find_nearest)

    @property
    def entries(self) -> tuple[Routable, ...]:
        return self._entries

    def match(self, demand: Demand) -> Routable | None:
        """The set that serves this demand best."""
        return self._first(demand.labels, demand.exclude)

    def candidates(self, demand: Demand) -> Iterator[Routable]:
        """Every set that passes, best first; `match` is the first of them."""
        return self._passing(frozenset(canonical(demand.labels)), frozenset(canonical(demand.exclude)))

    def explain_mismatch(self, demand: Demand) -> tuple[NearMiss, ...]:
        """The nearest set of each scaler that has none that passes: nearest first, at most `NEAREST_MAX`."""
        return self._nearest(demand.labels, demand.exclude)

    def _find_first(self, labels: Labels, exclude: Labels) -> Routable | None:
        return next(self._passing(frozenset(canonical(labels)), frozenset(canonical(exclude))), None)

    def _passing(self, labels: Labels, exclude: Labels) -> Iterator[Routable]:
        if not labels:
            yield from (entry for entry in self._entries if not entry.gate and exclude.isdisjoint(entry.offers))
            return
        yield from self._named(self._passing_mask(labels, exclude))

    def _passing_mask(self, labels: Labels, exclude: Labels) -> int:
        passing = -1
        for label in labels:
            passing &= self._offering.get(label, 0)
            if not passing:
                return 0
        passing &= self._admitting_mask(labels)
        for label in exclude:
            passing ^= passing & self._offering.get(label, 0)
        return passing

    def _admitting_mask(self, labels: Labels) -> int:
        """Sets whose gate these labels open."""
        admitting = self._ungated
        for label in labels:
            for gate, mask in self._gated.get(label, ()):
                if gate <= labels:
                    admitting |= mask
        return admitting

    def _named(self, mask: int) -> Iterator[Routable]:
        while mask:
            lowest = mask & -mask
            yield self._ranked[lowest.bit_length() - 1]
            mask ^= lowest

    def _find_nearest(self, labels: Labels, exclude: Labels) -> tuple[NearMiss, ...]:
        labels, exclude = frozenset(canonical(labels)), frozenset(canonical(exclude))
        everything = (1 << len(self._ranked)) - 1
        obstacles = [
            *(everything ^ self._offering.get(label, 0) for label in labels),
            *(self._offering.get(label, 0) for label in exclude),
            everything ^ self._admitting_mask(labels),
        ]
        planes = _tally(obstacles)
        found: list[NearMiss] = []
        seen: set[str] = set()
        for distance in range(len(obstacles) + 1):
            for entry in self._named(_with_tally(planes, distance, everything)):
                if entry.scaler not in seen:
                    seen.add(entry.scaler)
                    if distance:
                        found.append(_near_miss(entry, labels, exclude))
                    if len(found) == NEAREST_MAX:
                        return tuple(found)
        return tuple(found)


def _near_miss(entry: Routable, labels: Labels, exclude: Labels) -> NearMiss:
    return NearMiss(
        scaler=entry.scaler,
        label_set=entry.label_set,
        missing=tuple(sorted(labels - entry.offers)),
        excluded=tuple(sorted(exclude & entry.offers)),
        gate=tuple(sorted(entry.gate - labels)),
    )


def _masks(offers: Iterable[Labels]) -> dict[str, int]:
    places: dict[str, list[int]] = {}
    for place, labels in enumerate(offers):
        for label in labels:
            places.setdefault(label, []).append(place)
    return {label: _mask(found) for label, found in places.items()}


def _gate_masks(gates: Sequence[Labels]) -> dict[str, list[tuple[Labels, int]]]:
    """Sets by gate, each gate filed under its rarest label: a demand looks up only gates that it may open."""
    places: dict[Labels, list[int]] = {}
    for place, gate in enumerate(gates):
        if gate:
            places.setdefault(gate, []).append(place)
    uses: dict[str, int] = {}
    for gate in places:
        for label in gate:
            uses[label] = uses.get(label, 0) + 1
    filed: dict[str, list[tuple[Labels, int]]] = {}
    for gate, found in places.items():
        rarest = min(gate, key=lambda label: (uses[label], label))
        filed.setdefault(rarest, []).append((gate, _mask(found)))
    return filed


def _mask(places: Sequence[int]) -> int:
    """An integer with these bits set; `places` ascending."""
    if not places:
        return 0
    row = bytearray(places[-1] // 8 + 1)
    for place in places:
        row[place >> 3] |= 1 << (place & 7)
    return int.from_bytes(row, "little")


def _tally(masks: Iterable[int]) -> list[int]:
    """In how many of these masks each bit is set: the binary digits of the numbers, lowest first, one mask each."""
    planes: list[int] = []
    for mask in masks:
        carry = mask
        for digit, plane in enumerate(planes):
            planes[digit], carry = plane ^ carry, plane & carry
        if carry:
            planes.append(carry)
    return planes


def _with_tally(planes: Sequence[int], number: int, everything: int) -> int:
    """The bits whose number in a tally is this one."""
    if number >> len(planes):
        return 0
    chosen = everything
    for digit, plane in enumerate(planes):
        chosen &= plane if number >> digit & 1 else everything ^ plane
    return chosen
