"""At least a hundred seeds, and more while the time for them lasts: nothing that must hold is violated in any."""

import time
from collections import Counter

import pytest

from kici.testing.sim.run import run_seed

CHUNKS = 10
"""Run side by side where there are several workers."""
SEEDS_MIN = 10
SEEDS_MAX = 40
SECONDS = 2.5
"""Processor time for each chunk."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_is_violated(chunk: int) -> None:
    begun = time.process_time()
    seeds: list[int] = []
    counts: Counter[str] = Counter()
    while len(seeds) < SEEDS_MIN or (time.process_time() - begun < SECONDS and len(seeds) < SEEDS_MAX):
        seeds.append(chunk + CHUNKS * len(seeds))
        report = run_seed(seeds[-1])
        assert report.failure is None, report.failure
        counts.update(report.counts)
    print(f"seeds {seeds}: {dict(sorted(counts.items()))}")
    for what in ("end as reported", "coordinator killed", "machine died", "store error after commit", "job recovering"):
        assert counts[what] > 0, f"no {what!r} in {len(seeds)} seeds: this simulates less than it should"
