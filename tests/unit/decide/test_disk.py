"""How full a disk may be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kici.decide import disk

GIB = 1024**3


@pytest.mark.parametrize(("free", "is_short"), [(2 * GIB, False), (GIB, False), (GIB - 1, True), (0, True)])
def test_a_gibibyte_is_enough(free: int, is_short: bool) -> None:
    assert disk.is_short(free) is is_short


@given(free=st.integers(0, 2**60), reaped=st.integers(0, 1000))
def test_a_verdict_is_about_what_is_free_in_the_end(free: int, reaped: int) -> None:
    verdict = disk.judge(free_bytes_after=free, reaped=reaped)
    assert (verdict.recovered, verdict.reaped) == (not disk.is_short(free), reaped)


def test_a_shortage_says_where_how_much_and_what_helps() -> None:
    told = disk.shortage("/srv", disk.judge(free_bytes_after=100 * 1024**2, reaped=3), "make room there")
    assert told == "only 100 MiB are free for /srv, 1.0 GiB are needed, and 3 leftovers were removed; make room there"
    assert "no leftovers" in disk.shortage("/srv", disk.judge(free_bytes_after=0), "make room")
