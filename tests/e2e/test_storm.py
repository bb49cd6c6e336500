"""The short form of `make storm`: a cluster in network namespaces, its parts killed and cut off from each other."""

import pytest

from kici.testing.storm import SHORT, run


@pytest.mark.timeout(420)
@pytest.mark.engine("postgres", "namespaces")
@pytest.mark.spec("D1", "D28", "T4.7", "T4.8", "T4.9")
def test_a_cluster_that_is_killed_and_cut_piece_by_piece_loses_nothing() -> None:
    report = run(SHORT)
    assert not report.violations, report.text()
    assert report.statuses == {"success": SHORT.jobs}
