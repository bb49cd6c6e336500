"""A hundred seeds: nothing that must hold is violated in any.  `make sim N=…` runs more."""

from collections import Counter

import pytest

from kici.testing.sim.run import run_seed

CHUNKS = 5
"""Run side by side where there are several workers."""
SEEDS = 20
"""Of each chunk: enough for every kind of fault below."""


@pytest.mark.spec("scaler 49.1", "scaler 49.2", "scaler 49.3")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_nothing_is_violated(chunk: int) -> None:
    seeds = range(chunk, CHUNKS * SEEDS, CHUNKS)
    counts: Counter[str] = Counter()
    for seed in seeds:
        report = run_seed(seed)
        assert report.failure is None, report.failure
        counts.update(report.counts)
    print(f"seeds {list(seeds)}: {dict(sorted(counts.items()))}")
    for what in (
        "end as reported",
        "coordinator killed",
        "machine died",
        "store error after commit",
        "job recovering",
        "scale-down delivered",
    ):
        assert counts[what] > 0, f"no {what!r} in {len(seeds)} seeds: this simulates less than it should"
