"""kit.backoff: delays that grow up to a limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.kit.backoff import exponential

positive = st.floats(min_value=0.001, max_value=1e6)


@pytest.mark.parametrize(
    ("attempt", "delay"), [(1, 0.5), (2, 1.0), (3, 2.0), (6, 16.0), (7, 20.0), (8, 20.0), (10**9, 20.0)]
)
def test_doubles_from_the_base_to_the_maximum(attempt: int, delay: float) -> None:
    assert exponential(attempt, base=0.5, maximum=20.0) == delay


@given(attempt=st.integers(1, 10**12), base=positive, factor=st.floats(1.1, 100), maximum=positive)
def test_stays_between_base_and_maximum_and_never_shrinks(
    attempt: int, base: float, factor: float, maximum: float
) -> None:
    delay = exponential(attempt, base=base, factor=factor, maximum=maximum)
    assert min(base, maximum) <= delay <= maximum
    assert exponential(attempt + 1, base=base, factor=factor, maximum=maximum) >= delay
