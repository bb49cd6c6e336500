"""One seed for a bug that it showed: each of these failed when the bug was put back."""

import pytest

from kici.testing.sim.run import run_seed

SEEDS = {
    "a job that named a host was drained by an agent of another": 0,
    "a grace ran out while its coordinator stood still": 96,
    "nobody told the maker of an agent that the agent was lost after a restart": 283,
    "a worker waited for a start that nobody would call off any more": 2076,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("bug", "seed"), SEEDS.items())
def test_stays_mended(bug: str, seed: int) -> None:
    failure = run_seed(seed).failure
    assert failure is None, f"{bug}: {failure}"
