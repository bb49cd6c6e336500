"""The demo, as a newcomer runs it."""

import subprocess
import sys
import tempfile
from pathlib import Path

from kici.testing.programs import environment


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("kici-demo-*"))


def test_the_demo_ends_well_and_leaves_nothing() -> None:
    before = folders()
    done = subprocess.run(
        [sys.executable, "-m", "kici", "demo"],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 jobs ended as they should" in done.stdout
    assert "kici explain job-" in done.stdout
    assert folders() <= before
