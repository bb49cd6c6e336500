import signal
from collections.abc import Iterator

import pytest

from kici.testing.served_surface import Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Commands that follow jobs install handlers; tests get theirs back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
