"""A seed does the same things at the same times in every process."""

import os
import subprocess
import sys

import pytest

from kici.testing.sim.run import run_seed

DIGEST = "import sys; from kici.testing.sim.run import run_seed; print(run_seed(int(sys.argv[1])).digest)"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [7, 18, 283])
def test_equal_seeds_leave_equal_traces_in_separate_processes(seed: int) -> None:
    digests = {run_seed(seed).digest}
    for hash_seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            [sys.executable, "-c", DIGEST, str(seed)], env=environ, capture_output=True, text=True, check=True
        )
        digests.add(ran.stdout.strip())
    assert len(digests) == 1


def test_other_seeds_leave_other_traces() -> None:
    assert run_seed(1).digest != run_seed(2).digest
