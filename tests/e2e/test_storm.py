"""A cluster in network namespaces: the short form of `make storm`, and a coordinator that loses the database."""

import time

import pytest

from kici.services.peers import LOOK_SECONDS
from kici.testing.programs import until
from kici.testing.storm import SHORT, run
from kici.testing.storm_stage import DATABASE, Stage

pytestmark = [pytest.mark.timeout(420), pytest.mark.engine("postgres", "namespaces")]


@pytest.mark.spec("D1", "D28", "T4.7", "T4.8", "T4.9")
def test_a_cluster_that_is_killed_and_cut_piece_by_piece_loses_nothing() -> None:
    report = run(SHORT)
    assert not report.violations, report.text()
    assert report.statuses == {"success": SHORT.jobs}


@pytest.mark.spec("D4", "D9")
def test_agents_of_a_coordinator_that_loses_the_database_are_with_the_other_within_a_minute() -> None:
    with Stage(coordinators=("c1", "c2"), workers=("w1",)) as stage:
        file = stage.folder / "go-on"
        script = f"while [ ! -e {file} ]; do sleep 0.2; done; echo whole"
        stage.submit("c1", {f"j{n}": {"runsOn": [("c1", "w1")[n % 2]], "run": script} for n in range(4)})
        running = ["running"] * 4
        until(lambda: [job.status for (job,) in stage.jobs().values()] == running, seconds=60, what="all jobs run")
        assert "c1" in stage.holders().values()
        time.sleep(2 * LOOK_SECONDS)  # by now it knows of the other: nobody is sent to one that nobody has seen
        stage.network.cut((DATABASE, "c1"))
        cut_at = time.monotonic()
        until(lambda: list(stage.holders().values()) == ["c2"] * 4, seconds=60, what="all agents are with the other")
        assert [job.status for (job,) in stage.jobs().values()] == running
        print(f"handed over {time.monotonic() - cut_at:.1f} s after the cut")
        stage.network.cut()
        file.touch()
        done = ["success"] * 4
        until(lambda: [job.status for (job,) in stage.jobs().values()] == done, seconds=60, what="all jobs succeed")
        assert stage.coordinators["c2"].output(next(iter(stage.jobs().values()))[0].id) == "whole\n"
        until(lambda: not any(stage.rows().values()), seconds=150, what="no row is left")
        assert stage.programs["c1"].is_clean()
        assert stage.programs["w1"].is_clean()
