"""Programs for tests from the outside: each test has a data directory of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kici.testing.programs import CoordinatorProgram


@pytest.fixture
def kici(tmp_path: Path) -> Iterator[CoordinatorProgram]:
    with CoordinatorProgram(tmp_path / "data") as program:
        yield program
